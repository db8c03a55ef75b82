"""What does a model's step promise besides its logits?"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from minikv import ConcatCache, KVCache, Model, ModelConfig, RollingCache, random_model, truncate_all
from minikv.config import weight_shapes
from support import assert_close, assert_same, expected_logits, host, make_model, make_weights

SMALL: dict[str, Any] = {
    "vocab_size": 10,
    "d_model": 12,
    "n_layers": 3,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 8,
    "d_ff": 6,
    "tied_embeddings": False,
}
MIXED = ModelConfig(**SMALL, window=4, layer_pattern="LG")
LATENT = ModelConfig(
    **SMALL, kv_lora_rank=5, q_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=3, n_experts=4,
    n_experts_per_token=2, expert_d_ff=4, n_shared_experts=1, n_dense_layers=1,
)  # fmt: skip
TEXT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(params=[MIXED, LATENT], ids=["mixed", "latent"])
def model(request, backend):
    return make_model(request.param, make_weights(request.param, 3), backend)


def snapshot(caches: list[Any], model: Model) -> list[Any]:
    """All that can be seen of caches: lengths, bytes, and the logits of going on or one token back, bit for bit."""
    batch = len(caches[0].lengths) or 1
    twins = [cache.copy() for cache in caches]
    going_on = [host(model.step([[2, 7]] * batch, twins)), host(model.step([[5]] * batch, twins))]
    if caches[0].length:
        with contextlib.suppress(ValueError):  # a ring that is full may be unable to go back
            twins = [cache.copy() for cache in caches]
            truncate_all(twins, caches[0].length - 1)
            going_on.append(host(model.step([[3]] * batch, twins)))
    return [[(c.length, np.asarray(c.lengths).tolist(), c.nbytes, c.nbytes_used) for c in caches], *going_on]


def assert_unchanged(before: list[Any], after: list[Any]) -> None:
    assert before[0] == after[0]
    for a, b in zip(before[1:], after[1:], strict=True):
        assert_same(a, b)


def test_only_the_last_logits_are_computed_when_asked_for(model):
    whole = host(model.step([TEXT]))
    caches = model.new_caches()
    for last in (1, 3, 8):
        got = host(model.step([TEXT], last=last))
        assert got.shape == (1, last, 10)
        assert_close(got, whole[:, -last:], "float64")
    model.step([TEXT], caches, last=1)
    assert {cache.length for cache in caches} == {8}, "the caches take in every token"


def test_no_caches_means_empty_ones_and_leaves_nothing_behind(model):
    first = host(model.step([TEXT]))
    assert_same(model.step([TEXT], model.new_caches()), first)
    assert_same(model.step([TEXT]), first)


@pytest.mark.parametrize(
    "kind, expected",
    [
        (None, [RollingCache, KVCache, RollingCache]),
        ("kv", [KVCache] * 3),
        ("concat", [ConcatCache] * 3),
        (lambda: KVCache(capacity=9), [KVCache] * 3),
    ],
)
def test_each_layer_gets_the_kind_of_cache_it_needs(backend, kind, expected):
    model = make_model(MIXED, make_weights(MIXED, 0), backend)
    caches = model.new_caches(kind)
    assert [type(cache) for cache in caches] == expected
    assert len({id(cache) for cache in caches}) == 3
    if kind is None:
        assert [getattr(cache, "window", None) for cache in caches] == [4, None, 4]


def test_tokens_stand_where_they_are_whichever_kind_layer_0_is(backend):
    """Layer 0 has forgotten most of the text; token 9 stands at position 9 all the same."""
    for pattern in ("LG", "GL", "LLG"):
        config = ModelConfig(**SMALL, window=4, layer_pattern=pattern)
        model = make_model(config, make_weights(config, 4), backend)
        caches = model.new_caches()
        model.step([TEXT[:5]], caches)
        for token in [*TEXT[5:], 1, 1, 1]:
            model.step([[token]], caches)
        implied = host(model.step([[7]], [c.copy() for c in caches]))
        assert_same(model.step([[7]], [c.copy() for c in caches], [[11]]), implied)
        assert {cache.length for cache in caches} == {11}


def test_positions_handed_in_stay_as_they_are(model):
    pos = np.array([[0, 1, -1, 2]])
    tokens = np.array([[1, 2, 3, 4]])
    caches = model.new_caches()
    model.step(tokens, caches, pos)
    assert pos.tolist() == [[0, 1, -1, 2]] and tokens.tolist() == [[1, 2, 3, 4]]
    before = snapshot(caches, model)
    pos += 40
    tokens += 1
    assert_unchanged(before, snapshot(caches, model))


class Failure(Exception):
    """Something that no code of the package raises or expects."""


@pytest.mark.parametrize("exception", [Failure, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["cache", "attention", "feed_forward", "cache afterwards"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("tokens", [[[5]], [[5, 6, 7, 8, 9]]])
def test_a_step_that_fails_in_any_layer_advances_no_cache(model, exception, where, layer, tokens, monkeypatch):
    caches = model.new_caches()
    model.step([TEXT], caches)
    model.step([[4]], caches)
    before = snapshot(caches, model)

    def fail(*args: Any) -> None:
        raise exception

    with monkeypatch.context() as patch:
        if where == "cache":
            patch.setattr(caches[layer], "extend", fail)
        elif where == "cache afterwards":
            extend = caches[layer].extend
            patch.setattr(caches[layer], "extend", lambda *args: (extend(*args), fail()))
        else:
            patch.setattr(model.layers[layer], where, fail)
        with pytest.raises(exception):
            model.step(tokens, caches)
    assert_unchanged(before, snapshot(caches, model))


def test_a_first_step_that_fails_leaves_empty_caches(model, monkeypatch):
    caches = model.new_caches()
    with monkeypatch.context() as patch:
        patch.setattr(model.layers[-1], "feed_forward", lambda x: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model.step([TEXT] * 2, caches)
    assert {cache.length for cache in caches} == {0} and sum(cache.nbytes_used for cache in caches) == 0
    assert_same(model.step([TEXT], caches), host(model.step([TEXT])))  # another batch size than the one that failed


def test_angles_are_computed_once_a_step(model, monkeypatch):
    import minikv.model

    calls, tables = [], minikv.model.rope_tables
    monkeypatch.setattr(minikv.model, "rope_tables", lambda *args: calls.append(1) or tables(*args))
    model.step([TEXT])
    assert len(calls) <= 2, "once per kind of layer, not once per layer"


def test_a_random_model_is_the_same_on_every_backend_and_no_other(backend):
    for config in (MIXED, LATENT):
        here, there = random_model(config, seed=5, backend=backend), random_model(config, seed=5)
        assert set(here.weights) == set(weight_shapes(config))
        for name, weight in there.weights.items():
            assert_same(here.weights[name], weight)
            assert np.ptp(weight) > 0, f"{name} is a constant, which no test would miss"
        assert not np.array_equal(random_model(config, seed=6).weights["embed"], there.weights["embed"])
        narrow = random_model(config, seed=5, backend=backend, dtype="float64")
        assert_close(here.step([TEXT]), host(narrow.step([TEXT])).astype("float32"), "float32", tolerance=1000)


def test_moving_a_model_keeps_its_numbers(backend):
    there = random_model(MIXED, seed=1, dtype="float64")
    here = there.to(backend)
    for name, weight in there.weights.items():
        assert_same(here.weights[name], weight)
    narrow = here.to(backend, dtype="float32")
    assert host(narrow.step([TEXT])).dtype == "float32"
    for name, weight in there.weights.items():
        assert_same(narrow.weights[name], weight.astype("float32"))
    assert_same(here.to("numpy").step([TEXT]), there.step([TEXT]))


def test_keys_in_the_cache_are_normed_and_rotated_once(backend):
    """What a cache gives back for an old token is, bit for bit, what it gave back the step before."""
    config = replace(MIXED, qk_norm=True, window=None, layer_pattern=None)
    model = make_model(config, make_weights(config, 3), backend)
    caches, seen = model.new_caches(), []
    extend = caches[1].extend

    def watched(*args: Any) -> Any:
        out = extend(*args)
        seen.append([host(x).copy() for x in out])
        return out

    caches[1].extend = watched
    for part in (TEXT[:3], TEXT[3:4], TEXT[4:]):
        model.step([part], caches)
    for earlier, later in pairwise(seen):
        for old, new in zip(earlier[1:], later[1:], strict=True):
            assert np.array_equal(new[:, :, : old.shape[2]], old)
    assert [pos.shape[1] for pos, *_ in seen] == [3, 4, 8]


def test_rollback_is_exact_in_every_layer_or_refused_before_any_changes(model):
    """The rolling layers have forgotten what a shorter text would look at; the full layers have not."""
    caches = model.new_caches()
    model.step([TEXT], caches)
    model.step([[1]], caches)
    before = snapshot(caches, model)
    if model.config is MIXED:
        for order in (caches, caches[::-1]):
            with pytest.raises(ValueError, match=r"\b2\b.*\b4\b"):
                truncate_all(order, 2)
            assert_unchanged(before, snapshot(caches, model))
    with pytest.raises(ValueError, match=r"10.*9"):
        truncate_all(caches, 10)
    assert_unchanged(before, snapshot(caches, model))
    fresh = model.new_caches()
    model.step([TEXT[:3]], fresh)
    truncate_all(fresh, 1)
    assert {cache.length for cache in fresh} == {1}
    assert_close(host(model.step([[4]], fresh))[0, 0], host(model.step([[TEXT[0], 4]]))[0, 1], "float64")


def test_steps_never_write_into_the_weights(backend):
    """Weights that cannot be written to: the core makes new arrays, and caches alone write in place."""
    if backend.name != "numpy":
        pytest.skip("only NumPy's arrays can be made read-only")
    for config in (MIXED, LATENT):
        weights = make_weights(config, 3)
        for weight in weights.values():
            weight.flags.writeable = False
        caches = (model := Model(config, weights)).new_caches()
        for part in (TEXT[:5], TEXT[5:6], TEXT[6:]):
            model.step([part], caches)


def test_numbers_of_numpy_in_a_configuration_widen_nothing(backend):
    plain = {"embed_scale": 3.5, "attn_scale": 0.25, "attn_softcap": 3.0, "final_softcap": 2.0, "swiglu_limit": 0.5}
    config = ModelConfig(**SMALL, **plain)
    kinds = {int: np.int64, float: np.float64, bool: bool}
    same = ModelConfig(**{name: kinds[type(value)](value) for name, value in {**SMALL, **plain}.items()})
    assert same == config and {type(v) for v in same.to_dict().values()} <= {int, float, bool, str, type(None)}
    weights = make_weights(config, 3, "float32")
    logits = [host(make_model(c, weights, backend).step([TEXT])) for c in (config, same)]
    assert logits[1].dtype == "float32" and np.array_equal(*logits)


def test_float32_weights_stay_float32_all_the_way(model, backend):
    config = model.config
    weights = make_weights(config, 3, "float32")
    small, caches = make_model(config, weights, backend), model.new_caches()
    (want,), scale = expected_logits(config, weights, [TEXT])
    assert_close(host(small.step([TEXT], caches))[0], want, "float32", scale=scale)
    per_token = sum(heads * width * 4 for heads, width in config.cache_rows)
    kept = [min(len(TEXT), window or 99) for window in config.windows]
    assert [cache.nbytes_used for cache in caches] == [n * per_token for n in kept], "4 bytes a number, nothing widened"


@pytest.mark.parametrize("length", [1, 3, 4, 5, 40])
def test_bytes_in_use_are_the_formula(model, length):
    caches = model.new_caches()
    model.step([[1] * length] * 2, caches)
    per_token = sum(heads * width * 8 for heads, width in model.config.cache_rows)
    kept = [min(length, window or length) for window in model.config.windows]
    assert [cache.nbytes_used for cache in caches] == [2 * n * per_token for n in kept]


def test_float16_models_are_finite_and_near(backend):
    if backend.name == "strict":
        pytest.skip("the array standard has no float16")
    for config in (MIXED, LATENT):
        weights = make_weights(config, 3, "float16")
        (want,), _ = expected_logits(config, weights, [TEXT])
        caches = (model := make_model(config, weights, backend)).new_caches()
        got = np.concatenate([host(model.step([part], caches)) for part in (TEXT[:5], TEXT[5:6], TEXT[6:])], axis=1)
        # Products in between are rounded to 11 bits, layer after layer; near means that, not 32 eps of one product.
        assert got.dtype == "float16" and np.isfinite(got).all()
        assert np.abs(got[0] - want).max() < 0.05 * np.abs(want).max()
