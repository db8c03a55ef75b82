"""Is attention the formula, whatever the heads, windows, tiles and stored order?"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import oracle
from minikv import attention, merge_attention
from strategies import SEEDS, WINDOWS, head_counts
from support import assert_close, assert_same, host, normal

# A tile has 8 times as many keys as queries: with up to 20 keys, blocks of 1 and 2 make several tiles of them.
BLOCKS = st.sampled_from([None, 1, 1, 2, 3, 5])


@st.composite
def problems(draw):
    """Sizes and options of one call, T beyond S included."""
    n_heads, n_kv_heads = draw(head_counts())
    n_keys = draw(st.one_of(st.integers(1, 9), st.integers(9, 20)))
    sizes = {
        "batch": draw(st.integers(1, 2)),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "n_queries": draw(st.one_of(st.just(1), st.just(n_keys), st.integers(1, n_keys + 2))),
        "n_keys": n_keys,
        "width": draw(st.sampled_from([2, 3, 8])),
        "value_width": draw(st.sampled_from([1, 4])),
        "seed": draw(SEEDS),
    }
    options = {
        "window": draw(st.one_of(st.none(), WINDOWS)),
        "scale": draw(st.one_of(st.none(), st.just(0.7))),
        "softcap": draw(st.one_of(st.none(), st.just(1.5))),
    }
    return sizes, options, draw(st.booleans()), draw(BLOCKS)


def arrays(batch, n_heads, n_kv_heads, n_queries, n_keys, width, value_width, seed, dtype):
    q = 2 * normal(seed, batch, n_heads, n_queries, width)
    k = normal(seed + 1, batch, n_kv_heads, n_keys, width)
    v = normal(seed + 2, batch, n_kv_heads, n_keys, value_width)
    return tuple(x.astype(dtype) for x in (q, k, v, 2 * normal(seed + 3, n_heads)))


def expected(q, k, v, sinks=None, **options):
    results = [
        oracle.attention(*(x.astype(np.float64) for x in one), sinks=sinks, **options)
        for one in zip(q, k, v, strict=True)
    ]
    return np.array([out for out, _ in results]), np.array([lse for _, lse in results])


def assert_attention(got, q, k, v, sinks=None, **options):
    """Hold an output to the formula. Values of either sign may cancel: the unit is what is summed, not what is left."""
    want, _ = expected(q, k, v, sinks, **options)
    terms, _ = expected(q, k, np.abs(v), sinks, **options)
    assert_close(got, want, str(v.dtype), scale=terms.max())


@given(problem=problems())
def test_equals_the_formula(backend, dtype, problem):
    sizes, options, with_sinks, block_size = problem
    q, k, v, sinks = arrays(**sizes, dtype=dtype)
    got = attention(
        *map(backend.asarray, (q, k, v)),
        sinks=backend.asarray(sinks) if with_sinks else None,
        block_size=block_size,
        **options,
    )
    assert_attention(got, q, k, v, sinks if with_sinks else None, **options)


@given(problem=problems())
def test_log_sum_exp(backend, dtype, problem):
    sizes, options, with_sinks, block_size = problem
    q, k, v, sinks = arrays(**sizes, dtype=dtype)
    out, lse = attention(
        *map(backend.asarray, (q, k, v)),
        sinks=backend.asarray(sinks) if with_sinks else None,
        block_size=block_size,
        return_lse=True,
        **options,
    )
    _, want_lse = expected(q, k, v, **options)
    assert_attention(out, q, k, v, sinks if with_sinks else None, **options)
    if with_sinks:
        want_lse = np.logaddexp(want_lse, sinks.astype(np.float64)[None, :, None])
    lse = host(lse)
    assert lse.dtype == dtype, "something inside was computed wider than the data"
    assert np.array_equal(np.isneginf(lse), np.isneginf(want_lse))
    seen = np.isfinite(want_lse)
    # The log-sum-exp of scores near s carries their rounding, so the unit is the largest score and not the result.
    scores = np.abs(q).max() * np.abs(k).max() * q.shape[-1]
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= 32 * np.finfo(dtype).eps * max(scores, 1)


@given(problem=problems(), order_seed=SEEDS)
def test_stored_order_and_empty_rows_change_nothing(backend, dtype, problem, order_seed):
    sizes, options, with_sinks, block_size = problem
    q, k, v, sinks = arrays(**sizes, dtype=dtype)
    rng, empty = np.random.default_rng(order_seed), 2
    q_pos = np.tile(np.arange(q.shape[2]) + k.shape[2] - q.shape[2], (len(q), 1))
    q_pos[q_pos < 0] = -1
    k_pos = np.zeros((len(q), k.shape[2] + empty), dtype=np.int64)
    stored = [np.full((*x.shape[:2], x.shape[2] + empty, x.shape[3]), np.nan, dtype) for x in (k, v)]
    for b in range(len(q)):
        order = rng.permutation(k.shape[2] + empty)
        k_pos[b] = np.where(order < k.shape[2], order, -1)
        for x, y in zip((k, v), stored, strict=True):
            y[b][:, order < k.shape[2]] = x[b][:, order[order < k.shape[2]]]
    got = attention(
        backend.asarray(q),
        *map(backend.asarray, stored),
        q_pos=q_pos,
        k_pos=k_pos,
        sinks=backend.asarray(sinks) if with_sinks else None,
        block_size=block_size,
        **options,
    )
    assert_attention(got, q, k, v, sinks if with_sinks else None, **options)


@given(problem=problems(), parts_seed=SEEDS, n_parts=st.integers(1, 4))
def test_partial_results_merge(backend, dtype, problem, parts_seed, n_parts):
    sizes, options, _, block_size = problem
    q, k, v, _ = arrays(**sizes, dtype=dtype)
    _, want_lse = expected(q, k, v, **options)
    part = np.random.default_rng(parts_seed).integers(n_parts, size=k.shape[2])
    assume(len(set(part)) == n_parts)
    q_pos = np.arange(q.shape[2]) + k.shape[2] - q.shape[2]
    outs, lses = [], []
    for p in range(n_parts):
        keys = np.flatnonzero(part == p)
        out, lse = attention(
            *map(backend.asarray, (q, np.ascontiguousarray(k[:, :, keys]), np.ascontiguousarray(v[:, :, keys]))),
            q_pos=q_pos,
            k_pos=keys,
            block_size=block_size,
            return_lse=True,
            **options,
        )
        outs.append(out)
        lses.append(lse)
    for order in (slice(None), slice(None, None, -1)):
        out, lse = merge_attention(outs[order], lses[order])
        assert_attention(out, q, k, v, **options)
        assert np.array_equal(np.isneginf(host(lse)), np.isneginf(want_lse))


# Faults that real projects shipped.


def one_head(backend, values, n_queries, dtype="float64", **options):
    """Weights are equal (q = 0), so each output is the mean of the values seen."""
    v = np.array(values, dtype).reshape(1, 1, -1, 1)
    q, k = np.zeros((1, 1, n_queries, 2), dtype), np.ones((1, 1, v.shape[2], 2), dtype)
    return attention(*map(backend.asarray, (q, k, v)), **options)


def means(backend, values, n_queries, **options):
    return host(one_head(backend, values, n_queries, **options))[0, 0, :, 0].tolist()


@pytest.mark.parametrize("block_size", [None, 1, 2, 3])
def test_causal_triangle_is_anchored_at_the_end(backend, block_size):
    assert means(backend, [0, 1, 2, 3, 4], 1, block_size=block_size) == pytest.approx([2.0])
    assert means(backend, [0, 1, 2, 3, 4], 2, block_size=block_size) == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("block_size", [None, 1, 2, 3])
def test_more_queries_than_keys(backend, block_size):
    out, lse = one_head(backend, [3, 5], 5, block_size=block_size, return_lse=True)
    assert host(out)[0, 0, :, 0].tolist() == [0, 0, 0, 3, 4]
    assert host(lse)[0, 0].tolist() == pytest.approx([-np.inf, -np.inf, -np.inf, 0, np.log(2)])


@pytest.mark.parametrize("block_size", [None, 2])
def test_no_query_sees_anything(backend, block_size):
    hidden = {"q_pos": np.array([0]), "k_pos": np.array([5, 6, -1]), "block_size": block_size}
    out, lse = one_head(backend, [3, 5, 7], 1, return_lse=True, **hidden)
    assert host(out).item() == 0 and host(lse).item() == -np.inf


def test_float16_with_padding_stays_finite_and_right(backend):
    if backend.name == "strict":
        pytest.skip("the array standard has no float16")
    q, k, v = (8 * normal(seed, 2, 2, 5, 16) for seed in range(3))
    q, k, v = (x.astype("float16") for x in (q, k, v))
    k_pos = np.array([[0, 1, 2, 3, 4], [-1, -1, 0, 1, 2]])
    got = attention(*map(backend.asarray, (q, k, v)), q_pos=k_pos, k_pos=k_pos)
    want, _ = expected(q, k, v)
    padded, _ = expected(q[1:, :, 2:], k[1:, :, 2:], v[1:, :, 2:])
    want[1] = np.pad(padded[0], ((0, 0), (2, 0), (0, 0)))
    # Computed in float32 and rounded once at the end: half a unit of float16, not 32.
    assert_close(got, want, "float16", tolerance=0.51)


def test_soft_cap_comes_before_the_mask(backend):
    q, k = np.array([[[[1.0, 0.0]]]]), np.array([[[[0.0, 0.0], [9.0, 9.0]]]])
    v = np.array([[[[1.0, 0.0], [0.0, 1.0]]]])
    out = attention(
        *map(backend.asarray, (q, k, v)), softcap=1.0, q_pos=np.array([0]), k_pos=np.array([0, 1]), scale=1.0
    )
    assert host(out).ravel().tolist() == [1, 0]


@pytest.mark.parametrize("block_size", [None, 1, 3, 4])
def test_window_holds_as_many_keys_as_it_says(backend, block_size):
    values = np.eye(10).reshape(1, 1, 10, 10)
    zeros = np.zeros((1, 1, 10, 2))
    out = attention(*map(backend.asarray, (zeros, zeros, values)), window=4, block_size=block_size)
    assert (host(out)[0, 0] > 0).sum(-1).tolist() == [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]
    last = attention(*map(backend.asarray, (zeros[:, :, -1:], zeros, values)), window=4, block_size=block_size)
    assert host(last)[0, 0, 0].tolist() == [0] * 6 + [0.25] * 4


def test_window_of_one_returns_the_values_and_a_wide_one_changes_nothing(backend, dtype):
    q, k, v, _ = arrays(2, 4, 2, 5, 5, 8, 3, 0, dtype)
    q, k, v = map(backend.asarray, (q, k, v))
    assert_same(attention(q, k, v, window=1), np.repeat(host(v), 2, axis=1))
    for window in (5, 2**62, 2**70):
        for block_size in (None, 2):
            assert_same(
                attention(q, k, v, window=window, block_size=block_size), attention(q, k, v, block_size=block_size)
            )


@pytest.mark.parametrize("block_size", [None, 1])
def test_window_holds_for_a_single_query(backend, block_size):
    assert means(backend, range(12), 1, window=4, block_size=block_size) == pytest.approx([9.5])


@pytest.mark.parametrize("block_size", [None, 1])
@pytest.mark.parametrize(
    "scores, sink, weights",
    [
        ([100.0, 100.0], 0.0, [0.5, 0.5]),
        ([-5.0, -5.0], 0.0, [1 / (2 + np.exp(5))] * 2),  # 0.0066
        ([-200.0, -200.0], 100.0, [0.0, 0.0]),
        ([1.0, 1.0], -np.inf, [0.5, 0.5]),
        ([0.0, 0.0], 0.0, [1 / 3, 1 / 3]),
    ],
)
def test_sink_is_inside_the_running_maximum(backend, block_size, scores, sink, weights):
    q, k = np.ones((1, 1, 1, 1)), np.array(scores).reshape(1, 1, 2, 1)
    out = attention(
        *map(backend.asarray, (q, k, np.eye(2)[None, None])),
        sinks=backend.asarray(np.array([sink])),
        scale=1.0,
        block_size=block_size,
    )
    assert host(out).ravel().tolist() == pytest.approx(weights, rel=1e-5, abs=1e-30)


@pytest.mark.parametrize("sink", [2.0, -np.inf])
@pytest.mark.parametrize("block_size", [None, 1])
def test_sink_alone_gives_zero(backend, block_size, sink):
    hidden = {"q_pos": np.array([0]), "k_pos": np.array([3, 4]), "block_size": block_size}
    assert means(backend, [3, 5], 1, sinks=backend.asarray(np.array([sink])), **hidden) == [0]


def test_each_query_head_has_its_own_sink(backend):
    q, k, v = np.zeros((1, 4, 1, 2)), np.zeros((1, 2, 1, 2)), np.ones((1, 2, 1, 1))
    sinks = np.log([1.0, 2.0, 3.0, 4.0])
    out = attention(*map(backend.asarray, (q, k, v)), sinks=backend.asarray(sinks))
    assert host(out).ravel().tolist() == pytest.approx([1 / 2, 1 / 3, 1 / 4, 1 / 5])


def test_merging_empty_results(backend, dtype):
    out, lse = (normal(seed, *shape).astype(dtype) for seed, shape in ((0, (1, 2, 3, 4)), (1, (1, 2, 3))))
    full = backend.asarray(out), backend.asarray(lse)
    empty = backend.asarray(np.zeros_like(out)), backend.asarray(np.full_like(lse, -np.inf))
    for parts in ([empty, empty], [empty]):
        merged, total = merge_attention(*map(list, zip(*parts, strict=True)))
        assert not host(merged).any() and np.isneginf(host(total)).all()
    for parts in ([full, empty], [empty, full], [empty, full, empty]):
        merged, total = merge_attention(*map(list, zip(*parts, strict=True)))
        assert_same(merged, out)
        assert_same(total, lse)


def test_numbers_of_numpy_and_wide_sinks_never_widen(backend):
    q, k, v, sinks = arrays(1, 4, 2, 3, 3, 8, 2, 0, "float32")
    options = {"scale": 0.7, "softcap": 1.5, "return_lse": True}
    want = attention(*map(backend.asarray, (q, k, v)), sinks=backend.asarray(sinks), **options)
    options |= {"scale": np.float64(0.7), "softcap": np.float64(1.5)}
    wide = backend.asarray(sinks.astype("float64"))
    for a, b in zip(attention(*map(backend.asarray, (q, k, v)), sinks=wide, **options), want, strict=True):
        assert_same(a, b)


def test_merging_keeps_the_type_of_the_parts(backend):
    if backend.name == "strict":
        pytest.skip("the array standard has no float16")
    q, k, v, _ = (backend.asarray(x) for x in arrays(1, 2, 2, 3, 3, 4, 2, 0, "float16"))
    out, lse = attention(q, k, v, return_lse=True)
    assert [str(x.dtype) for x in merge_attention([out, out], [lse, lse])] == ["float16", "float32"]


def test_scale_is_the_one_given(backend):
    q, k, v = np.array([[[[12.0, 0.0]]]]), np.array([[[[12.0, 0.0], [0.0, 0.0]]]]), np.eye(2)[None, None]
    out = attention(*map(backend.asarray, (q, k, v)), scale=144**-0.5, q_pos=np.array([1]))
    assert host(out).ravel().tolist() == pytest.approx([1 / (1 + np.exp(-12)), 1 / (1 + np.exp(12))])


@pytest.mark.parametrize("n_heads, n_kv_heads", [(4, 2), (6, 2), (6, 3), (8, 2)])
def test_heads_of_a_group_stand_side_by_side(backend, n_heads, n_kv_heads):
    group = n_heads // n_kv_heads
    values = 10.0 * np.arange(1, n_kv_heads + 1)
    q, k = np.zeros((1, n_heads, 1, 2)), np.zeros((1, n_kv_heads, 1, 2))
    out = attention(*map(backend.asarray, (q, k, values.reshape(1, -1, 1, 1))))
    assert host(out).ravel().tolist() == [10.0 * (n // group + 1) for n in range(n_heads)]


# What tiles are for.


@given(st.integers(1, 8), SEEDS)
def test_hidden_tiles_are_never_computed(backend, block, seed):
    q, k, v, _ = arrays(1, 2, 1, block, 5 * block, 4, 4, seed, "float64")
    in_sight = 2 * block  # the window reaches block - 1 keys behind the first query
    want = host(attention(*map(backend.asarray, (q, k[:, :, -in_sight:], v[:, :, -in_sight:])), window=block))
    k[:, :, :-in_sight], v[:, :, :-in_sight] = np.nan, np.nan  # multiplying one by zero would show
    got = attention(*map(backend.asarray, (q, k, v)), window=block, block_size=block)
    assert_close(got, want)


def test_memory_of_a_blockwise_prefill_grows_with_the_text_and_not_its_square():
    def peak(length: int) -> int:
        q, k, v, _ = arrays(1, 2, 1, length, length, 8, 8, 0, "float32")
        tracemalloc.start()
        attention(q, k, v, block_size=64)
        _, highest = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return highest

    short, long = peak(512), peak(2048)
    assert long <= 4.5 * short
    assert long < 2048 * 2048 * 4 / 2, "half of one head's score matrix"


# Wrong arguments.


def shapes(q, k, v):
    return [np.zeros(shape, "float32") for shape in (q, k, v)]


@pytest.mark.parametrize(
    "q, k, v, options, message",
    [
        ((1, 8, 1, 2), (1, 3, 1, 2), (1, 3, 1, 2), {}, "8 query heads cannot share 3 key/value heads"),
        ((1, 2, 1, 4), (1, 2, 1, 2), (1, 2, 1, 2), {}, "4.*2|2.*4"),
        ((1, 2, 1, 2), (1, 2, 5, 2), (1, 2, 4, 2), {}, "5.*4|4.*5"),
        ((2, 2, 1, 2), (3, 2, 1, 2), (3, 2, 1, 2), {}, "2.*3|3.*2"),
        ((1, 4, 1, 2), (1, 2, 1, 2), (1, 1, 1, 2), {}, "2.*1|1.*2"),
        ((1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2), {"window": 0}, "window.*0"),
        ((1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2), {"window": -7}, "window.*-7"),
        ((1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2), {"block_size": 0}, "block_size.*0"),
        ((1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2), {"softcap": 0.0}, "softcap.*0.0"),
        ((1, 2, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2), {"softcap": float("inf")}, "softcap.*inf"),
        ((1, 2, 1, 2), (1, 2, 5, 2), (1, 2, 5, 2), {"k_pos": np.arange(4)}, "k_pos.*(4.*5|5.*4)"),
        ((1, 2, 3, 2), (1, 2, 5, 2), (1, 2, 5, 2), {"q_pos": np.arange(2)}, "q_pos.*(2.*3|3.*2)"),
    ],
)
def test_wrong_arguments_are_refused(backend, q, k, v, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        attention(*map(backend.asarray, shapes(q, k, v)), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex128"])
def test_whole_numbers_are_refused_and_not_cut_off(backend, dtype):
    q, k, v = (backend.asarray(x.astype(dtype)) for x in shapes((1, 1, 2, 1), (1, 1, 5, 1), (1, 1, 5, 1)))
    with pytest.raises(TypeError, match=dtype):
        attention(q, k, v)


def test_partial_results_that_do_not_fit_are_refused(backend):
    out, lse = backend.asarray(np.zeros((1, 2, 3, 4), "float32")), backend.asarray(np.zeros((1, 2, 3), "float32"))
    for outs, lses in (([out, out[:, :, :1, :]], [lse, lse[:, :, :1]]), ([out, out], [lse, lse[:, :, :1]])):
        with pytest.raises(ValueError, match=r"\(1, 2, 3, 4\).*\(1, 2, 1\)"):
            merge_attention(outs, lses)


def test_sinks_of_the_wrong_count_are_refused(backend):
    q, k, v = map(backend.asarray, shapes((1, 4, 1, 2), (1, 2, 1, 2), (1, 2, 1, 2)))
    with pytest.raises(ValueError, match=r"sinks.*(2.*4|4.*2)"):
        attention(q, k, v, sinks=backend.asarray(np.zeros(2, "float32")))
