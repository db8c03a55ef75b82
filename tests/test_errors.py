"""Does every wrong argument get one line that names it, and leave everything as it was?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import minikv
from minikv import KVCache, Model, ModelConfig, RollingCache, attention, generate, get_backend, random_model
from support import host, make_model, make_weights
from test_model import LATENT, MIXED, SMALL, TEXT, assert_unchanged, snapshot


def refusal(call: Any, *parts: str, kind: Any = (ValueError, TypeError)) -> None:
    """Demand an error of one line in which every part stands."""
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and len(message) < 200, message
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"


@pytest.fixture(params=[MIXED, LATENT], ids=["mixed", "latent"])
def warm(request, backend):
    """A model and caches that have seen a text twice as long as the window."""
    model = make_model(request.param, make_weights(request.param, 3), backend)
    caches = model.new_caches()
    model.step([TEXT, TEXT[::-1]], caches)
    return model, caches


WRONG_STEPS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "token id as large as the vocabulary": ([[1, 10], [1, 2]], None, ("10", "token")),
    "token id far outside": ([[1, 2], [10**12, 2]], None, (str(10**12), "10")),
    "negative token id": ([[1, 2], [-1, 2]], None, ("-1", "10")),
    "tokens that are not integers": ([[1.0, 2.0], [1.0, 2.0]], None, ("tokens", "float64")),
    "tokens without a batch": ([1, 2], None, ("tokens", "(2,)")),
    "no tokens": ([[], []], None, ("tokens", "(2, 0)")),
    "positions that go backwards": ([[1, 2], [1, 2]], [[8, 9], [7, 8]], ("7", "pos")),
    "positions that repeat": ([[1, 2], [1, 2]], [[8, 9], [8, 8]], ("8", "pos")),
    "positions that fall in a row": ([[1, 2], [1, 2]], [[8, 9], [9, 8]], ("8", "9", "pos")),
    "a position below -1": ([[1, 2], [1, 2]], [[8, 9], [8, -2]], ("-2", "pos")),
    "positions of another shape": ([[1, 2], [1, 2]], [[8], [8]], ("pos", "(2, 2)", "(2, 1)")),
    "positions that are not integers": ([[1, 2], [1, 2]], [[8.0, 9.0], [8.0, 9.0]], ("pos", "float64")),
    "another batch": ([[1, 2]], None, ("batch", "2", "1")),
    "another batch with positions": ([[1, 2]] * 3, [[8, 9]] * 3, ("batch", "2", "3")),
}


@pytest.mark.parametrize("name", WRONG_STEPS)
def test_wrong_step(warm, name):
    model, caches = warm
    tokens, pos, parts = WRONG_STEPS[name]
    before = snapshot(caches, model)
    refusal(lambda: model.step(tokens, caches, pos), *parts)
    assert_unchanged(before, snapshot(caches, model))


@pytest.mark.parametrize("last", [0, -1, 3])
def test_wrong_count_of_last_logits(warm, last):
    model, caches = warm
    before = snapshot(caches, model)
    refusal(lambda: model.step([[1, 2], [1, 2]], caches, last=last), "last", str(last), "2")
    assert_unchanged(before, snapshot(caches, model))


def test_wrong_caches(warm, backend):
    model, caches = warm
    before = snapshot(caches, model)
    refusal(lambda: model.step([[1], [1]], caches[:2]), "3 layers", "2")
    refusal(lambda: model.step([[1], [1]], [caches[0], caches[1], model.new_caches()[2]]), "layer 2", "8", "0")
    short = [RollingCache(3), *caches[1:]]
    refusal(lambda: model.step([[1], [1]], short), "layer 0", "3")
    refusal(lambda: model.new_caches("ring"), "ring", "concat")
    assert_unchanged(before, snapshot(caches, model))


def test_caches_of_another_model(backend):
    """Widths, heads, types and libraries that differ from what the cache holds, found in the last layer only."""
    model = make_model(MIXED, make_weights(MIXED, 0), backend)
    caches = model.new_caches()
    model.step([TEXT], caches)
    before = snapshot(caches, model)
    for change, parts in (({"head_dim": 6}, ("8", "6")), ({"n_kv_heads": 4}, ("2", "4"))):
        config = ModelConfig(**SMALL | change, window=4, layer_pattern="LG")
        other = make_model(config, make_weights(config, 0), backend)
        refusal(lambda other=other: other.step([[1]], caches), *parts)
    narrow = make_model(MIXED, make_weights(MIXED, 0, "float32"), backend)
    refusal(lambda: narrow.step([[1]], caches), "float64", "float32")
    if backend.name != "numpy":
        refusal(lambda: random_model(MIXED, dtype="float64").step([[1]], caches), "numpy", backend.xp.__name__)
    assert_unchanged(before, snapshot(caches, model))


@pytest.mark.parametrize("config", [MIXED, LATENT], ids=["mixed", "latent"])
@pytest.mark.parametrize("small", [0, 1, 2])
def test_capacity_exceeded_in_any_layer(backend, config, small):
    model = make_model(config, make_weights(config, 0), backend)
    caches = [KVCache(capacity=9 if layer == small else None) for layer in range(3)]
    model.step([TEXT], caches)
    lengths = [(cache.length, cache.nbytes_used) for cache in caches]
    copies = [cache.copy() for cache in caches]
    refusal(lambda: model.step([[1, 2]], caches), "capacity 9", "10")
    assert [(cache.length, cache.nbytes_used) for cache in caches] == lengths
    assert np.array_equal(host(model.step([[7]], caches)), host(model.step([[7]], copies)))


def test_learned_positions_run_out(backend):
    config = ModelConfig(**SMALL, rope_theta=None, max_positions=9)
    model = make_model(config, make_weights(config, 0), backend)
    caches = model.new_caches()
    model.step([TEXT], caches)
    before = [cache.length for cache in caches]
    refusal(lambda: model.step([[1, 1]], caches), "9")
    refusal(lambda: model.step([[1]], caches, [[2**40]]), str(2**40), "9")
    assert [cache.length for cache in caches] == before
    model.step([[1]], caches)


@pytest.mark.parametrize(
    "fields, parts",
    [
        ({"n_heads": 8, "n_kv_heads": 3}, ("8 query heads cannot share 3 key/value heads",)),
        ({"window": 0}, ("window", "0")),
        ({"window": -5}, ("window", "-5")),
        ({"window": 2.5}, ("window", "2.5")),
        ({"layer_pattern": "LG"}, ("layer_pattern", "LG", "window")),
        ({"layer_pattern": "LX", "window": 4}, ("layer_pattern", "LX")),
        ({"activation": "swish"}, ("activation", "swish", "silu")),
        ({"norm": "batch"}, ("norm", "batch", "rms")),
        ({"n_layers": 0}, ("n_layers", "0")),
        ({"rotary_dim": 3}, ("rotary", "3")),
        ({"rotary_dim": 10}, ("rotary", "10", "8")),
        ({"kv_lora_rank": 4}, ("latent", "kv_lora_rank", "v_head_dim")),
        ({"n_experts": 4, "n_experts_per_token": 5}, ("n_experts_per_token", "4", "5")),
        ({"rope_theta": None}, ("max_positions", "None")),
        ({"d_ff": None}, ("d_ff", "None")),
        ({"rotary_dim": 4.0}, ("rotary_dim", "4.0")),
        ({"kv_lora_rank": "4"}, ("kv_lora_rank", "'4'")),
        ({"n_experts": True}, ("n_experts", "True")),
        ({"attn_softcap": 0.0}, ("attn_softcap", "0.0")),
        ({"final_softcap": -30.0}, ("final_softcap", "-30.0")),
        ({"norm_eps": float("nan")}, ("norm_eps", "nan")),
        ({"embed_scale": None}, ("embed_scale", "None")),
        ({"rope_theta": -5}, ("rope_theta", "-5")),
        ({"rope_local_theta": "1e4"}, ("rope_local_theta", "1e4")),
        ({"qkv_bias": "no"}, ("qkv_bias", "no")),
        ({"rope_scaling": "linear"}, ("rope_scaling", "linear")),
        ({"layer_pattern": ["L", "G"], "window": 4}, ("layer_pattern", "['L', 'G']")),
    ],
)
def test_wrong_configuration(fields, parts):
    refusal(lambda: ModelConfig(**SMALL | fields), *parts)


def test_wrong_fields_of_a_configuration():
    refusal(lambda: ModelConfig.from_dict(MIXED.to_dict() | {"n_head": 4}), "n_head", "n_heads")
    refusal(lambda: ModelConfig.from_dict({"vocab_size": 4}), "d_model")


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "warp"])
def test_unknown_rope_type(backend, kind):
    config = ModelConfig(**SMALL, rope_scaling={"rope_type": kind, "factor": 2.0})
    refusal(lambda: make_model(config, make_weights(config, 0), backend), kind)


def test_wrong_weights(backend):
    weights = {name: backend.asarray(w) for name, w in make_weights(MIXED, 0).items()}
    name = "layers.1.qkv"
    refusal(lambda: Model(MIXED, {n: w for n, w in weights.items() if n != name}), name, "(64, 12)")
    refusal(lambda: Model(MIXED, weights | {"layers.3.qkv": weights[name]}), "layers.3.qkv")
    refusal(lambda: Model(MIXED, weights | {name: weights["embed"]}), name, "(64, 12)", "(10, 12)")
    narrow = backend.asarray(make_weights(MIXED, 0)[name].astype("float32"))
    refusal(lambda: Model(MIXED, weights | {name: narrow}), name, "float32", "float64")
    refusal(lambda: random_model(MIXED, backend=backend, dtype="int32"), "embed", "int32")
    if backend.name != "numpy":
        refusal(lambda: Model(MIXED, weights | {name: make_weights(MIXED, 0)[name]}), "numpy")


@pytest.mark.parametrize("kind", ["C", "S"])
def test_layers_that_the_stack_does_not_run(kind):
    config = ModelConfig(**SMALL, window=4, layer_pattern="G" + kind)
    refusal(lambda: random_model(config), "layer 1", kind)


@pytest.mark.parametrize(
    "prompt, options, parts",
    [
        ([], {}, ("prompt", "(0,)")),
        ([[1, 2]], {}, ("prompt", "(1, 2)")),
        ([1], {"max_new_tokens": -1}, ("max_new_tokens", "-1")),
        ([1], {"temperature": -0.5}, ("temperature", "-0.5")),
        ([1], {"temperature": float("nan")}, ("temperature", "nan")),
        ([1], {"top_p": 0.0}, ("top_p", "0.0", "(0, 1]")),
        ([1], {"top_p": 1.01}, ("top_p", "1.01", "(0, 1]")),
        ([1], {"top_p": float("nan")}, ("top_p", "nan")),
        ([1], {"top_k": 0}, ("top_k", "0")),
        ([1], {"prefill_chunk": 0}, ("prefill_chunk", "0")),
        ([1, 10], {}, ("10", "token")),
        ([1, -1], {}, ("-1", "token")),
        ([1.5], {}, ("float64",)),
        ([[1], [1, 2]], {}, ("prompt_ids", "length")),
        ([1], {"max_new_tokens": 2.5}, ("max_new_tokens", "2.5")),
        ([1], {"prefill_chunk": "2"}, ("prefill_chunk", "'2'")),
        ([1], {"top_k": 2.5}, ("top_k", "2.5")),
        ([1], {"seed": -1}, ("seed", "-1", "0")),
        ([1], {"stop_ids": 3}, ("stop_ids", "3")),
        ([1], {"stop_ids": None}, ("stop_ids", "None")),
    ],
)
def test_wrong_generation(backend, prompt, options, parts):
    model = random_model(MIXED, backend=backend)
    called = []
    refusal(lambda: generate(model, prompt, **{"max_new_tokens": 3} | options, on_token=called.append), *parts)
    assert not called


@pytest.mark.parametrize("count", [2.5, 4.0, "4", [4]])
def test_counts_that_are_no_whole_numbers(warm, count):
    model, caches = warm
    before = snapshot(caches, model)
    ones = np.ones((1, 1, 1, 2))
    refusal(lambda: KVCache(count), "capacity", repr(count))
    refusal(lambda: RollingCache(count), "window", repr(count))
    refusal(lambda: minikv.visible([0], [0], window=count), "window", repr(count))
    refusal(lambda: attention(ones, ones, ones, window=count), "window", repr(count))
    refusal(lambda: attention(ones, ones, ones, block_size=count), "block_size", repr(count))
    refusal(lambda: caches[0].truncate(count), "length", repr(count))
    refusal(lambda: model.step([[1], [1]], caches, last=count), "last", repr(count))
    assert_unchanged(before, snapshot(caches, model))
    refusal(lambda: RollingCache(None), "window", "None")


def test_lists_that_are_no_arrays_of_integers(warm):
    model, caches = warm
    before = snapshot(caches, model)
    refusal(lambda: model.step([[1, 2], [3]], caches), "tokens", "length")
    refusal(lambda: model.step([[1, 2], [3, 4]], caches, [[18, 19], [18]]), "pos", "length")
    refusal(lambda: minikv.visible([[0, 1], [0]], [0]), "q_pos", "length")
    refusal(lambda: caches[0].reorder([[0], [0, 1]]), "rows", "length")
    refusal(lambda: KVCache().reorder([0]), "no batch")
    beyond = np.array([[18], [2**64 - 1]], dtype=np.uint64)  # as int64 it would be -1: padding
    refusal(lambda: model.step([[1], [1]], caches, beyond), "pos", str(2**64 - 1), "2^63")
    assert_unchanged(before, snapshot(caches, model))


def test_unknown_dtype():
    refusal(lambda: random_model(MIXED, dtype="flaot32"), "dtype", "flaot32")
    refusal(lambda: random_model(MIXED).to("numpy", "half-precision"), "dtype", "half-precision")


def test_unknown_backend():
    refusal(lambda: get_backend("torch"), "torch", "numpy", "cupy")
    refusal(lambda: random_model(MIXED, backend="jax"), "jax", "numpy")


def test_arrays_of_two_libraries(backend):
    if backend.name == "numpy":
        pytest.skip("one library alone cannot be mixed")
    mine, other = backend.asarray(np.ones((1, 1, 1, 2))), np.ones((1, 1, 1, 2))
    refusal(lambda: attention(mine, other, other), "numpy", backend.xp.__name__, kind=TypeError)
    cache = KVCache()
    cache.extend([[0]], mine)
    refusal(lambda: cache.extend([[1]], other), "numpy", backend.xp.__name__, kind=TypeError)
    assert cache.length == 1


def test_an_error_names_the_public_function_or_argument_only():
    """No message may be empty or speak of what the caller cannot see."""
    for call in (lambda: minikv.visible([0], [0], 0), lambda: minikv.merge_attention([], [])):
        with pytest.raises(ValueError) as caught:
            call()
        assert str(caught.value) and "self." not in str(caught.value)
