"""Do rewritten checkpoints compute the same function where that is possible, and the nearest one elsewhere?"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikv import Model, ModelConfig
from minikv.config import weight_shapes
from minikv.convert import to_grouped, to_latent, to_mla
from minikv.model import rope_of_windows
from minikv.rope import rope_frequencies
from strategies import SEEDS, configs, feeds
from support import assert_close, assert_same, host, make_model, make_weights, run

# A full decomposition writes every weight anew, in another basis: rounded once more, and by sums over all channels.
# Worst of 4500 drawn models of up to three layers: 580.
NEW_BASIS = 1024

YARN = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
}
KINDS: dict[str, dict[str, Any]] = {
    "all channels rotate": {},
    "interleaved pairs": {"rope_interleaved": True},
    "some channels rotate": {"rotary_dim": 4},
    "some interleaved pairs rotate": {"rotary_dim": 4, "rope_interleaved": True},
    "learned positions": {"rope_theta": None},
    "learned positions and a left-over block": {"rope_theta": None, "rope_scaling": YARN},
    "YaRN with DeepSeek's factors": {"rope_scaling": YARN},
    "two bases": {"rope_scaling": YARN, "rope_local_theta": 50.0, "window": 3, "layer_pattern": "LG"},
    "sinks, caps and a scale": {"attn_sinks": True, "attn_softcap": 2.0, "attn_scale": 0.3, "o_bias": True},
    "one key/value head": {"n_kv_heads": 1},
    "no groups": {"n_heads": 3},
}


def geometry(**fields: Any) -> ModelConfig:
    """Six query heads over three key/value heads whose width is not d_model / heads."""
    common = {"n_layers": 2, "n_heads": 6, "n_kv_heads": 3, "head_dim": 6, "d_ff": 10, "max_positions": 64}
    return ModelConfig(**({"vocab_size": 11, "d_model": 16} | common | fields))


def in_backend(weights: dict[str, np.ndarray], backend: Any) -> dict[str, Any]:
    return {name: backend.asarray(w) for name, w in weights.items()}


def logits(config: ModelConfig, weights: dict[str, Any], form: str | None = None) -> np.ndarray:
    """Run two texts in steps of several sizes, prefill and decode among them."""
    model, texts = Model(config, weights), np.random.default_rng(7).integers(config.vocab_size, size=(2, 12))
    for layer in model.layers:
        layer.attention.form = form
    caches = model.new_caches()
    return np.concatenate([host(model.step(part, caches)) for part in np.split(texts, [5, 6, 7, 11], axis=1)], axis=1)


# Fewer key/value heads


def head_rows(config: ModelConfig, part: str, head: int) -> slice:
    """Find a key or value head in the rows of `qkv`: all queries first, then all keys, then all values."""
    first = config.n_heads + head + (config.n_kv_heads if part == "value" else 0)
    return slice(first * config.head_dim, (first + 1) * config.head_dim)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("old", "new"), [(8, 8), (8, 4), (8, 1), (4, 2), (2, 1)])
@pytest.mark.parametrize("how", ["mean", "first"])
def test_heads_are_merged_with_their_neighbours(backend, how, old, new, bias):
    config = geometry(n_heads=8, n_kv_heads=old, qkv_bias=bias)
    weights = make_weights(config, 1)
    small, merged = to_grouped(config, in_backend(weights, backend), new, how)
    assert small == dataclasses.replace(config, n_kv_heads=new)
    for name in [f"layers.{layer}.{leaf}" for layer in range(2) for leaf in ("qkv", "qkv_bias")[: 1 + bias]]:
        before, after = weights[name], host(merged[name])
        assert_same(after[: 8 * 6], before[: 8 * 6])  # the queries
        for part in ("key", "value"):
            for j in range(new):
                group = [before[head_rows(config, part, j * (old // new) + i)] for i in range(old // new)]
                expected = group[0] if how == "first" else sum(group) / len(group)
                assert_close(after[head_rows(small, part, j)], expected, tolerance=4)


@pytest.mark.parametrize("how", ["mean", "first", "random"])
def test_every_query_head_reads_the_head_that_its_own_went_into(how):
    """The small model computes what the large one does with each head replaced by the one it went into."""
    config = geometry(n_heads=8, n_kv_heads=8, qkv_bias=True, qk_norm=True)
    weights = make_weights(config, 2)
    small, merged = to_grouped(config, weights, 2, how)
    replaced = dict(weights)
    for name in weights:
        if name.endswith(("qkv", "qkv_bias")):
            replaced[name] = weights[name].copy()
            for part in ("key", "value"):
                for head in range(8):
                    replaced[name][head_rows(config, part, head)] = merged[name][head_rows(small, part, head // 4)]
    assert_close(logits(small, merged), logits(config, replaced))


def test_a_random_head_is_one_of_its_group_key_and_value_together():
    config = geometry(n_layers=8, n_heads=6, n_kv_heads=6, qkv_bias=True)
    weights = make_weights(config, 3)
    small, merged = to_grouped(config, weights, 2, "random", seed=5)

    def is_head(name: str, part: str, head: int, j: int) -> bool:
        return np.array_equal(merged[name][head_rows(small, part, j)], weights[name][head_rows(config, part, head)])

    chosen = []
    for layer in range(8):
        places = [(f"layers.{layer}.{leaf}", part) for leaf in ("qkv", "qkv_bias") for part in ("key", "value")]
        for j in range(2):
            group = range(3 * j, 3 * j + 3)
            (head,) = [head for head in group if all(is_head(name, part, head, j) for name, part in places)]
            chosen.append(head)
    assert set(chosen) == set(range(6))  # no head is left out in 16 draws: layers do not all choose alike
    again = to_grouped(config, weights, 2, "random", seed=5)[1]
    other = to_grouped(config, weights, 2, "random", seed=6)[1]
    assert all(np.array_equal(again[name], merged[name]) for name in merged)
    assert any(not np.array_equal(other[name], merged[name]) for name in merged)


@pytest.mark.parametrize("how", ["mean", "first", "random"])
def test_merging_equal_heads_changes_nothing(backend, how):
    config = geometry(n_heads=6, n_kv_heads=6, qkv_bias=True, qk_norm=True, attn_sinks=True)
    weights = make_weights(config, 4)
    for name in weights:
        if name.endswith(("qkv", "qkv_bias")):
            for part in ("key", "value"):
                for head in range(6):
                    weights[name][head_rows(config, part, head)] = weights[name][head_rows(config, part, head // 3 * 3)]
    assert_close(logits(*to_grouped(config, in_backend(weights, backend), 2, how)), logits(config, weights))


@pytest.mark.parametrize("how", ["mean", "first", "random"])
def test_as_many_heads_as_before_are_the_same_heads(how):
    config = geometry(qkv_bias=True)
    weights = make_weights(config, 5)
    same, kept = to_grouped(config, weights, 3, how)
    assert same == config and kept.keys() == weights.keys()
    for name, w in weights.items():
        assert_same(kept[name], w)


def test_means_of_means_are_means():
    config = geometry(n_heads=8, n_kv_heads=8)
    weights = make_weights(config, 6)
    at_once = to_grouped(config, weights, 2)[1]
    for name, w in to_grouped(*to_grouped(config, weights, 4), 2)[1].items():
        assert_close(w, at_once[name])


def test_nothing_is_changed_in_place_and_the_rest_is_shared():
    config = geometry()
    weights = make_weights(config, 7)
    before = {name: w.copy() for name, w in weights.items()}
    for rewritten in (to_grouped(config, weights, 1)[1], to_mla(config, weights)[1], to_latent(config, weights, 2)[1]):
        assert rewritten["layers.1.o"] is weights["layers.1.o"] and rewritten["embed"] is weights["embed"]
        for name, w in weights.items():
            assert_same(w, before[name])


# Latent attention, exactly


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("kind", KINDS)
def test_latent_attention_computes_the_same(backend, kind, form):
    config = geometry(**KINDS[kind])
    weights = make_weights(config, 8)
    latent, rewritten = to_mla(config, in_backend(weights, backend))
    assert latent.is_mla
    assert_close(logits(latent, rewritten, form), logits(config, weights), "float64")


@given(
    config=configs(latent=False, max_layers=2),
    seed=SEEDS,
    form=st.sampled_from(["absorbed", "expanded", None]),
    kind=st.sampled_from([None, "concat", "kv"]),
    data=st.data(),
)
def test_latent_attention_computes_the_same_in_as_many_bytes(backend, config, seed, form, kind, data):
    config = dataclasses.replace(config, qkv_bias=False, qk_norm=False, n_experts=0)
    feed = data.draw(feeds(config.vocab_size, config.window))
    weights = make_weights(config, seed)
    grouped = make_model(config, weights, backend)
    latent = Model(*to_mla(config, grouped.weights))
    for layer in latent.layers:
        layer.attention.form = form
    caches, latent_caches = grouped.new_caches(kind), latent.new_caches(kind)
    expected = run(grouped, caches, feed)
    for got, want in zip(run(latent, latent_caches, feed), expected, strict=True):
        assert_close(got, want, "float64")
    assert [cache.nbytes for cache in latent_caches] == [cache.nbytes for cache in caches]


@pytest.mark.parametrize(
    ("kind", "widths"),
    [
        ("all channels rotate", (18, 0, 18)),
        ("some channels rotate", (24, 2, 12)),
        ("learned positions", (36, 6, 0)),
    ],
)
def test_what_rotates_is_the_rotary_key_and_the_rest_is_the_latent(kind, widths):
    config = geometry(**KINDS[kind])
    latent, _ = to_mla(config, make_weights(config, 9))
    assert (latent.kv_lora_rank, latent.qk_nope_head_dim, latent.qk_rope_head_dim) == widths


def test_the_type_of_the_weights_is_kept(backend, dtype):
    config = geometry(rotary_dim=4)
    weights = in_backend(make_weights(config, 10, dtype), backend)
    for rewritten in (to_grouped(config, weights, 1), to_mla(config, weights), to_latent(config, weights, 5)[:2]):
        for name, shape in weight_shapes(rewritten[0]).items():
            assert host(rewritten[1][name]).dtype == dtype and rewritten[1][name].shape == shape, name


# A smaller latent


def linear_keys_and_values(config: ModelConfig, qkv: np.ndarray) -> np.ndarray:
    """Stack the rows of all key heads that do not rotate, and of all value heads."""
    rotating = 0 if config.rope_theta is None else config.rotary_dim or config.head_dim
    keys = [qkv[head_rows(config, "key", head)][rotating:] for head in range(config.n_kv_heads)]
    values = [qkv[head_rows(config, "value", head)] for head in range(config.n_kv_heads)]
    return np.concatenate(keys + values)


@pytest.mark.parametrize("kind", KINDS)
def test_at_full_rank_nothing_is_lost(backend, kind):
    config = geometry(**KINDS[kind])
    weights = make_weights(config, 11)
    rank = min(to_mla(config, weights)[0].kv_lora_rank or 0, config.d_model)
    small, rewritten, errors = to_latent(config, in_backend(weights, backend), rank)
    assert errors == (0.0, 0.0)
    assert_close(logits(small, rewritten), logits(config, weights), tolerance=NEW_BASIS)


@pytest.mark.parametrize("rank", [1, 3, 7, 15])
@pytest.mark.parametrize("kind", ["all channels rotate", "some channels rotate", "learned positions", "no groups"])
def test_the_error_is_that_of_the_nearest_matrix_of_its_rank(backend, kind, rank):
    config = geometry(**KINDS[kind])
    weights = make_weights(config, 12)
    small, rewritten, errors = to_latent(config, in_backend(weights, backend), rank)
    P, V, r = small.qk_nope_head_dim, small.v_head_dim, small.qk_rope_head_dim
    for layer, error in enumerate(errors):
        wanted = linear_keys_and_values(config, weights[f"layers.{layer}.qkv"])
        sizes = np.linalg.svd(wanted, compute_uv=False)
        assert error == pytest.approx(np.sqrt(sum(sizes[rank:] ** 2) / sum(sizes**2)), rel=1e-12)
        # And it is what the new weights really differ by: query head n's keys and values are those of head n // G.
        down, up = host(rewritten[f"layers.{layer}.kv_a"]), host(rewritten[f"layers.{layer}.kv_b"])
        assert down.shape == (rank + r, config.d_model)
        parts = np.split(wanted, [config.n_kv_heads * P])
        squares = 0.0
        for n in range(config.n_heads):
            k = n * config.n_kv_heads // config.n_heads
            head = np.concatenate([parts[0][k * P : (k + 1) * P], parts[1][k * V : (k + 1) * V]])
            squares += ((up[n * (P + V) : (n + 1) * (P + V)] @ down[:rank] - head) ** 2).sum()
        group = config.n_heads // config.n_kv_heads
        assert error == pytest.approx(np.sqrt(squares / (group * (wanted**2).sum())), rel=1e-9)


@pytest.mark.parametrize("kind", ["all channels rotate", "some channels rotate", "learned positions"])
def test_what_needs_few_numbers_is_remembered_in_few(kind):
    """Keys and values that span five directions only are the same function from a latent of five numbers."""
    config = geometry(**KINDS[kind])
    weights = make_weights(config, 13)
    rotating = 0 if config.rope_theta is None else config.rotary_dim or config.head_dim
    rng = np.random.default_rng(14)
    for layer in range(2):
        qkv, directions = weights[f"layers.{layer}.qkv"], rng.standard_normal((5, 16)) / 4
        for head in range(3):
            qkv[head_rows(config, "key", head)][rotating:] = rng.standard_normal((6 - rotating, 5)) @ directions
            qkv[head_rows(config, "value", head)] = rng.standard_normal((6, 5)) @ directions
    small, rewritten, errors = to_latent(config, weights, 5)
    assert max(errors) < 1e-14
    assert_close(logits(small, rewritten), logits(config, weights), tolerance=NEW_BASIS)
    model = Model(small, rewritten)
    caches = model.new_caches("concat")
    model.step([[1, 2, 3]], caches)
    grouped = Model(config, weights)
    grouped_caches = grouped.new_caches("concat")
    grouped.step([[1, 2, 3]], grouped_caches)
    saved = 3 * 8 * (2 * 3 * 6 - (5 + 3 * rotating))  # three tokens in float64
    assert [a.nbytes - b.nbytes for a, b in zip(grouped_caches, caches, strict=True)] == [saved, saved]


def test_what_rotates_and_the_queries_stay_as_they_are():
    latent, weights = to_mla(geometry(rotary_dim=4), make_weights(geometry(rotary_dim=4), 15))
    small, rewritten, _ = to_latent(latent, weights, 4)
    assert small == dataclasses.replace(latent, kv_lora_rank=4)
    assert_same(rewritten["layers.0.q"], weights["layers.0.q"])
    assert_same(rewritten["layers.0.kv_a"][4:], weights["layers.0.kv_a"][latent.kv_lora_rank :])


def test_shrinking_in_two_steps_ends_where_one_does():
    config = geometry(rotary_dim=4)
    weights = make_weights(config, 16)
    at_once = logits(*to_latent(config, weights, 6)[:2])
    between = to_latent(config, weights, 11)[:2]
    assert_close(logits(*to_latent(*between, 6)[:2]), at_once, tolerance=NEW_BASIS)


def test_weights_of_nothing_have_no_error():
    config = geometry(n_layers=1, rope_theta=None)
    weights = make_weights(config, 17) | {"layers.0.qkv": np.zeros((72, 16))}
    assert to_latent(config, weights, 2)[2] == (0.0,)


# What the configuration can say now


def test_a_rotary_key_of_several_heads_starts_its_frequencies_over():
    latent = {"kv_lora_rank": 5, "qk_rope_head_dim": 12, "v_head_dim": 4, "window": 3, "layer_pattern": "LG"}
    config = geometry(**latent, n_rope_heads=3, rope_scaling=YARN, rope_local_theta=50.0)
    full, local = rope_frequencies(4, 10000.0, YARN), rope_frequencies(4, 50.0)
    assert full[1] != local[1]
    for window, (frequencies, factor) in ((None, full), (3, local)):
        found = rope_of_windows(config)[window]
        assert found[1] == factor
        assert_same(found[0], np.array([*frequencies, *frequencies, *frequencies]))


def test_a_latent_without_norm_has_no_norm_weight():
    latent = {"kv_lora_rank": 5, "qk_rope_head_dim": 4, "v_head_dim": 4}
    assert "layers.0.kv_a_norm" in weight_shapes(geometry(**latent))
    assert "layers.0.kv_a_norm" not in weight_shapes(geometry(**latent, latent_norm=False))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"qk_rope_head_dim": 12, "n_rope_heads": 5}, "qk_rope_head_dim 12 cannot hold 5"),
        ({"qk_rope_head_dim": 12, "n_rope_heads": 0}, "qk_rope_head_dim 12 cannot hold 0"),
        ({"qk_rope_head_dim": 9, "n_rope_heads": 3}, "must be even.* got 3"),
        ({"qk_nope_head_dim": 4, "qk_rope_head_dim": 0}, r"at least 1, got 5, 4 and 4 \+ 0"),
        ({"qk_rope_head_dim": 0, "rope_theta": None}, r"at least 0, got 5, 4 and 0 \+ 0"),
        ({"qk_nope_head_dim": -2, "qk_rope_head_dim": 4}, r"got 5, 4 and -2 \+ 4"),
        ({"qk_rope_head_dim": 4, "v_head_dim": 0}, r"got 5, 0 and 0 \+ 4"),
        ({"qk_rope_head_dim": 4, "kv_lora_rank": 0}, r"got 0, 4 and 0 \+ 4"),
    ],
)
def test_widths_that_make_no_latent_attention_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        geometry(**({"kv_lora_rank": 5, "v_head_dim": 4} | fields))


# Wrong calls


def refuse(words: str, function: Any, config: ModelConfig, *arguments: Any, weights: Any = None) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        function(config, make_weights(config, 18) if weights is None else weights, *arguments)
    assert "\n" not in str(caught.value)


def test_wrong_calls_say_what_is_wrong():
    config = geometry()
    latent, latent_weights = to_mla(config, make_weights(config, 18))
    for count in (2, 0, -1, 6, True, 1.0):
        refuse(f"3 key/value heads cannot be merged into n_kv_heads={count}", to_grouped, config, count)
    refuse("unknown how 'median': known are mean, first, random", to_grouped, config, 1, "median")
    for rank in (0, 17, -1, 2.0, True):
        refuse(f"rank must be within 1..16, .* got {rank}", to_latent, config, rank)
    refuse("rank must be within 1..10, .* got 11", to_latent, geometry(d_model=10), 11)
    refuse(
        "to_mla needs .* without biases and norms, got qkv_bias=True and qk_norm=False", to_mla, geometry(qkv_bias=True)
    )
    refuse("to_mla needs .* got qkv_bias=False and qk_norm=True", to_latent, geometry(qk_norm=True), 3)
    refuse("to_grouped needs keys .* got a latent of rank 18", to_grouped, latent, 1, weights=latent_weights)
    refuse("to_mla needs keys .* got a latent of rank 18", to_mla, latent, weights=latent_weights)
    normed = dataclasses.replace(latent, latent_norm=True)
    refuse("to_latent needs .* got latent_norm=True", to_latent, normed, 3)
    refuse("every layer, got layer_pattern 'GS'", to_mla, geometry(layer_pattern="GS"))
    refuse(
        "weight 'layers.0.o' must have shape",
        to_mla,
        config,
        weights=make_weights(config, 18) | {"layers.0.o": np.zeros(3)},
    )
