"""The theorem.

For every model, every way of splitting the same tokens into steps, every batch they stand in and every cache that can
hold them: the logits are the same as when everything is computed at once. What "computed at once" gives, the oracle
says.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from minikv import ConcatCache, KVCache, ModelConfig, RollingCache, gqa, mla
from minikv.caches import ContiguousCache
from strategies import SEEDS, configs, feeds
from support import Feed, assert_close, assert_same, expected_logits, host, make_model, make_weights, run

CACHES: dict[str, Any] = {
    "of each layer's kind": lambda config, room: None,
    "concat": lambda config, room: [ConcatCache() for _ in config.windows],
    "kv": lambda config, room: [KVCache() for _ in config.windows],
    "kv of fixed capacity": lambda config, room: [KVCache(capacity=room) for _ in config.windows],
    "contiguous": lambda config, room: [ContiguousCache() for _ in config.windows],
    "rolling with room to spare": lambda config, room: [
        ConcatCache() if window is None else RollingCache(window + i) for i, window in enumerate(config.windows)
    ],
}


def new_caches(model: Any, kind: str, feed: Feed) -> Any:
    room = sum(pos.shape[1] for pos in feed.steps)
    return CACHES[kind](model.config, room) or model.new_caches()


@given(
    config=configs(),
    kind=st.sampled_from(sorted(CACHES)),
    block_size=st.sampled_from([64, 1, 2]),
    seed=SEEDS,
    data=st.data(),
)
def test_the_theorem(backend, dtype, config, kind, block_size, seed, data):
    feed = data.draw(feeds(config.vocab_size, config.window))
    weights = make_weights(config, seed, dtype)
    expected = expected_logits(config, weights, feed.texts)
    assume(expected is not None)
    logits, scale = expected
    model = make_model(config, weights, backend)
    with patch.object(gqa, "BLOCK_SIZE", block_size), patch.object(mla, "BLOCK_SIZE", block_size):
        found = run(model, new_caches(model, kind, feed), feed)
    for got, want in zip(found, logits, strict=True):
        assert_close(got, want, dtype, scale=scale)


# Named instances, where real projects went wrong.

W, TEXT = 4, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3]
SPLITS = [[16], [7, 9], [1, 15], [15, 1], [5, 5, 6], [5, 1, 1, 1, 1, 7], [1] * 16]
SPLITS += [[size] * (16 // size) + [16 % size] * (16 % size > 0) for size in (W - 1, W, W + 1, 2 * W, 2 * W + 1)]
GEOMETRIES = {
    "grouped": {"n_heads": 4, "n_kv_heads": 2},
    "latent": {
        "n_heads": 2,
        "n_kv_heads": 2,
        "kv_lora_rank": 5,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
    },
}


def named_config(geometry: str, **fields: Any) -> ModelConfig:
    return ModelConfig(
        **{"vocab_size": 10, "d_model": 12, "n_layers": 3, "head_dim": 8, "d_ff": 6} | GEOMETRIES[geometry] | fields
    )


def one_row(chunks: list[int], text: list[int] = TEXT) -> Feed:
    ends = np.cumsum(chunks)
    return Feed(
        [text], [np.arange(end - size, end)[None] for end, size in zip(ends, chunks, strict=True)], explicit=False
    )


@pytest.mark.parametrize("geometry", GEOMETRIES)
@pytest.mark.parametrize("pattern", ["G", "L", "LG", "GL", "LLG"])
def test_every_way_to_split_a_text(backend, geometry, pattern):
    """One layer's length or mask must not stand for all, nor may a second prompt find another mask than the first."""
    config = named_config(geometry, window=W, layer_pattern=pattern)
    weights = make_weights(config, 7)
    (want,), scale = expected_logits(config, weights, [TEXT])
    model = make_model(config, weights, backend)
    for chunks in SPLITS:
        assert_close(run(model, model.new_caches(), one_row(chunks))[0], want, "float64", scale=scale)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_rows_of_a_padded_batch_equal_their_solo_runs(backend, geometry):
    """Lengths 3, 5 and 1 in one batch, then decoding on: pads and neighbours change nothing."""
    config = named_config(geometry, window=W, layer_pattern="LG")
    weights = make_weights(config, 8)
    texts = [TEXT[:6], TEXT[3:11], TEXT[8:12]]
    logits, scale = expected_logits(config, weights, texts)
    model = make_model(config, weights, backend)
    prompts = np.array([[-1, -1, 0, 1, 2], [0, 1, 2, 3, 4], [-1, -1, -1, -1, 0]])
    outcomes = []
    for pad in (0, 9, -100):
        feed = Feed(texts, [prompts], pad_token=pad)
        caches = model.new_caches()
        first = host(model.step(feed.tokens(prompts), caches, prompts))
        ends = [3, 5, 1]
        last = [first[b, -1] for b in range(3)]
        for step in range(3):
            for b in range(3):
                assert_close(last[b], logits[b][ends[b] + step - 1], "float64", scale=scale)
            out = host(model.step([[texts[b][ends[b] + step]] for b in range(3)], caches))
            last = [out[b, 0] for b in range(3)]
        outcomes.append(np.stack(last))
    assert_same(outcomes[0], outcomes[1])
    assert_same(outcomes[0], outcomes[2])


@pytest.mark.parametrize("kind", ["concat", "kv", None])
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_a_rolled_back_text_goes_on_as_if_the_tail_had_never_been(backend, geometry, kind):
    config = named_config(geometry, window=W if kind else None, layer_pattern="LG" if kind else None)
    weights = make_weights(config, 9)
    other = [*TEXT[:5], 0, 8, 8]
    (want,), scale = expected_logits(config, weights, [other])
    model = make_model(config, weights, backend)
    caches = model.new_caches(kind)
    model.step([TEXT[:9]], caches)
    for cache in caches:
        cache.truncate(5)
    got = [host(model.step([part], caches)) for part in (other[5:7], other[7:])]
    assert_close(np.concatenate(got, axis=1)[0], want[5:], "float64", scale=scale)


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_reordered_rows_go_on_as_the_rows_they_were(backend, geometry):
    config = named_config(geometry, window=W, layer_pattern="LG")
    weights = make_weights(config, 10)
    texts = [TEXT[:7], TEXT[5:12]]
    model = make_model(config, weights, backend)
    caches = model.new_caches()
    model.step(texts, caches)
    for cache in caches:
        cache.reorder([1, 0, 1])
    grown = [texts[1] + [2], texts[0] + [4], texts[1] + [6]]
    logits, scale = expected_logits(config, weights, grown)
    out = host(model.step([[2], [4], [6]], caches))
    assert_close(out[:, 0], np.stack([rows[-1] for rows in logits]), "float64", scale=scale)


def test_a_prefix_continued_three_times(backend):
    config = named_config("grouped", window=W, layer_pattern="LG")
    weights = make_weights(config, 11)
    model = make_model(config, weights, backend)
    prefix = model.new_caches()
    model.step([TEXT[:6]], prefix)
    texts = [[*TEXT[:6], *tail] for tail in ([1, 2, 3], [7, 7, 7], [1, 2, 3])]
    logits, scale = expected_logits(config, weights, texts)
    for text, want in zip(texts, logits, strict=True):
        caches = [cache.copy() for cache in prefix]
        got = [host(model.step([text[i : i + 1]], caches))[0, 0] for i in range(6, 9)]
        assert_close(np.stack(got), want[6:], "float64", scale=scale)


def test_capacity_changes_nothing(backend):
    """Results do not depend on the room behind the rows in use, whatever stands there."""
    config = named_config("grouped")
    model = make_model(config, make_weights(config, 12), backend)
    outcomes = [
        run(model, [KVCache(capacity=room) for _ in model.layers], one_row([5, 1, 1, 9]))[0] for room in (16, 17, 300)
    ]
    for outcome in outcomes[1:]:
        assert_same(outcome, outcomes[0])
