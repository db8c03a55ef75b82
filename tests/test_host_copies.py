"""Does a step ever ask the device for something?

A copy to the host, or a question about a data array's truth, makes a GPU wait. On a CPU nothing waits, so this forbids
every way in which an array of the strict library can become something else, and then runs steps of every kind of layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import array_api_strict
import numpy as np
import pytest

from minikv import Backend, ConcatCache, KVCache, ModelConfig, generate, random_model
from test_model import LATENT, MIXED, SMALL, TEXT

STRICT = Backend("strict", array_api_strict)
ARRAY = type(array_api_strict.ones(1))
WAYS_OUT = (
    *("__array__", "__buffer__", "__dlpack__", "__bool__", "__int__", "__float__", "__complex__", "__index__"),
    *("__iter__", "__len__", "__contains__", "__repr__", "__str__", "__format__", "tolist", "item"),
)

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CHOOSY = {"router": "sigmoid", "router_correction": True, "group_score": "top2", "norm_top_k": True}
TRIMMINGS = {"qkv_bias": True, "o_bias": True, "post_norms": True, "embed_scale": 3.0, "activation": "gelu_tanh"}
GPT2 = {"rope_theta": None, "max_positions": 40, "norm": "layer", "activation": "gelu", "gated": False, "o_bias": True}
EVERYTHING = {
    "grouped, windows and sinks": replace(MIXED, attn_sinks=True, attn_softcap=3.0, final_softcap=5.0, qk_norm=True),
    "latent, experts": LATENT,
    "latent, windows": replace(LATENT, window=3, layer_pattern="LG", attn_sinks=True),
    "learned positions": ModelConfig(**SMALL | GPT2),
    "grouped experts": replace(LATENT, **CHOOSY, n_expert_groups=2, swiglu_limit=1.0, n_experts_per_token=1),
    "everything else": ModelConfig(**SMALL | TRIMMINGS, rope_interleaved=True, rotary_dim=4, rope_scaling=YARN),
}


class LeftTheDevice(AssertionError):
    pass


@contextmanager
def nothing_leaves() -> Iterator[None]:
    """Make every way out of a data array raise."""

    def forbidden(name: str) -> Callable[..., Any]:
        def raise_it(*args: Any, **kwargs: Any) -> Any:
            raise LeftTheDevice(f"{name} of a data array was called inside a step")

        return raise_it

    with pytest.MonkeyPatch.context() as patch:
        for name in WAYS_OUT:
            patch.setattr(ARRAY, name, forbidden(name), raising=False)
        yield


def steps(config: ModelConfig, kind: Any, watch: Callable[..., Any] | None = None) -> None:
    """Prefill, decode, a second prompt, ragged rows, and more decoding, all under watch."""
    model = random_model(config, seed=1, backend=STRICT)
    if watch is not None:
        feed_forward = model.layers[1].feed_forward
        model.layers[1].feed_forward = lambda x: feed_forward(watch(x))
    caches = model.new_caches(kind)
    with nothing_leaves():
        model.step([TEXT, TEXT], caches, last=1)
        model.step([[3], [4]], caches, last=1)
        model.step([TEXT, TEXT], caches)
        model.step([[1, 2, 3], [1, 2, 3]], caches, np.array([[17, 18, -1], [-1, -1, 17]]))
        model.step([[5], [6]], caches)
        model.step([TEXT])


@pytest.mark.parametrize(
    "kind", [None, "concat", "kv", lambda: KVCache(capacity=30)], ids=["own", "concat", "kv", "fixed"]
)
@pytest.mark.parametrize("name", EVERYTHING)
def test_nothing_inside_a_step_leaves_the_device(name, kind):
    steps(EVERYTHING[name], kind)


def test_nothing_leaves_when_attention_goes_tile_by_tile(monkeypatch):
    from minikv import gqa, mla

    for module in (gqa, mla):
        monkeypatch.setattr(module, "BLOCK_SIZE", 3)
    for config in EVERYTHING.values():
        steps(config, None)


CREPT_IN: dict[str, Callable[[Any], Any]] = {
    "a truth value": lambda x: x if array_api_strict.max(x) > 0 else 2 * x,
    "a test for NaN": lambda x: x if not array_api_strict.any(array_api_strict.isnan(x)) else 2 * x,
    "a number": lambda x: x * float(x[0, 0, 0]),
    "an integer": lambda x: x + int(x[0, 0, 0]),
    "an index": lambda x: x[: array_api_strict.argmax(x[:, 0, 0]) + 2, ...],
    "a copy": lambda x: array_api_strict.asarray(np.asarray(x)),
    "NumPy's arithmetic": lambda x: array_api_strict.asarray(np.exp(x)),
    "a loop": lambda x: array_api_strict.stack(list(x)),
    "a message": lambda x: x if str(x) else 2 * x,
}


@pytest.mark.parametrize("name", CREPT_IN)
def test_what_creeps_in_is_noticed(name):
    with pytest.raises((LeftTheDevice, TypeError)):
        steps(MIXED, None, CREPT_IN[name])


def test_the_watch_itself_changes_nothing():
    steps(MIXED, None, lambda x: x)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_k": 4, "top_p": 0.9, "seed": 0}])
def test_generation_copies_once_a_token(options, monkeypatch):
    """The chosen token is the one thing that a decode step brings to the host."""
    model = random_model(replace(MIXED), seed=1, backend=STRICT)
    copies, to_numpy, ways = [], Backend.to_numpy, {}
    for name in WAYS_OUT:
        if hasattr(ARRAY, name):
            ways[name] = getattr(ARRAY, name)

    def watched(self: Backend, x: Any) -> np.ndarray:
        copies.append(x.shape)
        with pytest.MonkeyPatch.context() as inside:
            for name, way in ways.items():
                inside.setattr(ARRAY, name, way)
            return to_numpy(self, x)

    monkeypatch.setattr(Backend, "to_numpy", watched)
    with nothing_leaves():
        ids = generate(model, TEXT, 6, prefill_chunk=3, **options).ids
    assert len(copies) == len(ids) == 6


def test_caches_keep_data_on_the_device():
    x = array_api_strict.ones((2, 1, 3, 4))
    for cache in (ConcatCache(), KVCache()):
        with nothing_leaves():
            cache.extend([[0, 1, 2], [0, 1, -1]], x)
            cache.truncate(2)
            cache.reorder([1, 0])
            cache.copy().extend([[2, 3, 4], [2, 3, 4]], x)
            assert cache.nbytes_used and cache.nbytes and cache.length == 2
