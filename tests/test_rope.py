"""Does position enter as the papers say, in both pair layouts, far out and in narrow types?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from minikv import Model, ModelConfig
from minikv.rope import rope_frequencies, rope_tables, rotate
from strategies import ROPE_SCALINGS, SEEDS
from support import assert_close, expected_logits, host, make_model, make_weights, normal


@given(width=st.sampled_from([2, 4, 6, 64]), base=st.sampled_from([100.0, 1e4, 5e5]), scaling=ROPE_SCALINGS)
def test_frequencies(width, base, scaling):
    found, factor = rope_frequencies(width, base, scaling)
    expected, stretch = oracle.frequencies(width, base, scaling)
    assert factor == pytest.approx(stretch, rel=1e-15)
    assert_close(found / np.array(expected), np.ones(width // 2), "float64")


@given(
    seed=SEEDS,
    rotary=st.sampled_from([2, 4, 8]),
    interleaved=st.booleans(),
    scaling=ROPE_SCALINGS,
    positions=st.lists(st.integers(0, 20000), min_size=2, max_size=2),
)
def test_rotation(backend, dtype, seed, rotary, interleaved, scaling, positions):
    x = normal(seed, 1, 3, 2, 8).astype(dtype)
    frequencies, factor = rope_frequencies(rotary, 1e4, scaling)
    cos, sin = (a.astype(dtype) for a in rope_tables(np.array([positions]), frequencies, factor))
    got = rotate(*map(backend.asarray, (x, cos, sin)), interleaved=interleaved)
    freqs, stretch = oracle.frequencies(rotary, 1e4, scaling)
    want = np.array(
        [
            [
                [oracle.rotate(x[0, h, t], p, freqs, stretch, interleaved) for t, p in enumerate(positions)]
                for h in range(3)
            ]
        ]
    )
    # The angle itself is position · frequency in float64: its rounding grows with the position.
    far = 1 + max(positions) * np.finfo(np.float64).eps / np.finfo(dtype).eps
    assert_close(got, want, dtype, scale=np.abs(want).max() * far)
    assert np.array_equal(host(got)[..., rotary:], x[..., rotary:])


@given(seed=SEEDS, distance=st.integers(0, 50), start=st.integers(0, 4000), interleaved=st.booleans())
def test_scores_depend_on_the_distance_only(backend, seed, distance, start, interleaved):
    q, k = normal(seed, 8), normal(seed + 1, 8)
    frequencies, _ = rope_frequencies(8, 1e4)

    def score(i: int, j: int) -> float:
        rows = []
        for x, p in ((q, i), (k, j)):
            cos, sin = rope_tables(np.array([[p]]), frequencies)
            arrays = map(backend.asarray, (x[None, None, None], cos, sin))
            rows.append(host(rotate(*arrays, interleaved=interleaved)).ravel())
        return float(rows[0] @ rows[1])

    assert score(start + distance, start) == pytest.approx(score(distance, 0), abs=1e-11)


# Faults that real projects shipped.


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("position", [257, 2049, 15962])
def test_angles_are_not_computed_in_the_types_of_the_weights(backend, dtype, position, monkeypatch):
    if backend.name == "strict" and dtype == "float16":
        pytest.skip("the array standard has no float16")
    config = ModelConfig(vocab_size=5, d_model=16, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=16, d_ff=4)
    model = make_model(config, make_weights(config, 0, dtype), backend)
    seen = []
    layer = model.layers[0]
    attend = layer.attention
    monkeypatch.setattr(
        layer, "attention", lambda x, pos, rotary, cache: seen.extend(rotary) or attend(x, pos, rotary, cache)
    )
    model.step([[1]], pos=[[position]])
    angles = [position * 1e4 ** (-2 * i / 16) for i in range(8)]
    for table, exact in zip(seen, (np.cos(angles), np.sin(angles)), strict=True):
        # Rounded once: half a unit in the last place of each entry (a float64 angle has its own last bit to add).
        error = np.abs(host(table).ravel().astype(np.float64) - exact)
        assert host(table).dtype == dtype
        assert (error <= 0.501 * np.spacing(np.abs(exact).astype(dtype)).astype(np.float64) + 1e-11).all()


def test_partial_width_is_not_the_head_width(backend):
    x = normal(0, 1, 1, 1, 8)
    frequencies, _ = rope_frequencies(4, 1e4)
    assert frequencies.tolist() == pytest.approx([1, 1e4**-0.5])
    cos, sin = rope_tables(np.array([[7]]), frequencies)
    got = host(rotate(*map(backend.asarray, (x, cos, sin))))
    assert np.array_equal(got[..., 4:], x[..., 4:]) and not (got[..., :4] == x[..., :4]).any()


LLAMA3 = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_llama3_scaling_is_read_under_both_names(key):
    frequencies, factor = rope_frequencies(64, 5e5, LLAMA3 | {key: "llama3"})
    ratio = 5e5 ** (-np.arange(32) / 32) / frequencies
    kept, divided = np.isclose(ratio, 1, rtol=1e-12), np.isclose(ratio, 32, rtol=1e-12)
    assert (kept.sum(), (~kept & ~divided).sum(), divided.sum()) == (15, 3, 14) and factor == 1
    assert kept[:15].all() and divided[18:].all()


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "su", "Llama3"])
def test_unknown_scaling_is_refused_by_name(kind):
    with pytest.raises(ValueError, match=kind) as caught:
        rope_frequencies(8, 1e4, {"rope_type": kind, "factor": 2.0})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("missing", sorted(LLAMA3))
def test_a_missing_number_is_named(missing):
    scaling = {key: value for key, value in LLAMA3.items() if key != missing} | {"rope_type": "llama3"}
    with pytest.raises(ValueError, match=f"{missing}.*None"):
        rope_frequencies(8, 1e4, scaling)


def far_config(**fields: object) -> ModelConfig:
    return ModelConfig(
        vocab_size=9, d_model=12, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=6, window=1000, **fields
    )


def logits_far_out(model: Model, tokens: list[int], positions: list[int]) -> np.ndarray:
    return host(model.step([tokens], pos=[positions]))[0]


@pytest.mark.parametrize("pattern", ["LG", "GL"])
def test_local_layers_have_their_own_base_and_no_scaling(backend, pattern):
    config = far_config(
        layer_pattern=pattern,
        rope_theta=1e6,
        rope_local_theta=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    weights, tokens, positions = make_weights(config, 1), [3, 1, 4, 1, 5], [0, 1, 2, 3, 800]
    (want,), scale = expected_logits(config, weights, [tokens], positions)
    assert_close(logits_far_out(make_model(config, weights, backend), tokens, positions), want, "float64", scale=scale)
    shared = far_config(layer_pattern=pattern, rope_theta=1e6, rope_scaling=config.rope_scaling)
    other = logits_far_out(make_model(shared, weights, backend), tokens, positions)
    assert np.abs(other - want).max() > 0.01, "this text does not tell the two bases apart"


def test_positions_far_out_are_exact(backend, dtype):
    config = far_config(layer_pattern="G", rope_theta=1e4)
    weights, tokens = make_weights(config, 2, dtype), [3, 1, 4, 1, 5]
    for start in (257, 2049, 15962, 1_000_000):
        positions = [start, start + 1, start + 5, start + 200, start + 201]
        (want,), scale = expected_logits(config, weights, [tokens], positions)
        got = logits_far_out(make_model(config, weights, backend), tokens, positions)
        # An angle in float64 is off by about start · eps(float64), and only then rounded.
        assert_close(got, want, dtype, scale=scale * (1 + start * np.finfo(float).eps / np.finfo(dtype).eps))
