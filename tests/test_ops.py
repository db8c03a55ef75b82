"""Are the small functions their formulas, at the edges too?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from minikv import ops
from strategies import SEEDS
from support import assert_close, host, normal

EXTREMES = np.array([-1e4, -90.0, -20.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 20.0, 90.0, 1e4])


@pytest.mark.parametrize("name", sorted(oracle.ACTIVATIONS))
def test_activations(backend, dtype, name):
    for x in (3 * normal(0, 200), EXTREMES):
        x = x.astype(dtype)
        assert_close(
            ops.ACTIVATIONS[name](backend.asarray(x)), np.array([oracle.ACTIVATIONS[name](float(a)) for a in x]), dtype
        )


@pytest.mark.parametrize("name", sorted(oracle.ACTIVATIONS))
def test_activations_of_float16(backend, name):
    """Each value to its own last bits, and no overflow on the way."""
    if backend.name == "strict":
        pytest.skip("the array standard has no float16")
    x = np.linspace(-300, 300, 1201).astype("float16")
    want = np.array([oracle.ACTIVATIONS[name](float(a)) for a in x])
    error = np.abs(host(ops.ACTIVATIONS[name](backend.asarray(x))) - want)
    assert (error <= 4 * np.finfo("float16").eps * np.maximum(np.abs(want), 1)).all()


def test_error_function_to_the_last_bits(backend):
    x = np.linspace(-7, 7, 2001)
    import math

    assert np.abs(host(ops.erf(backend.asarray(x))) - [math.erf(a) for a in x]).max() < 1e-15


@given(seed=SEEDS, width=st.integers(1, 40), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_norms(backend, dtype, seed, width, scale):
    x, weight, bias = (
        f * normal(seed + i, *s) for i, (f, s) in enumerate([(scale, (2, 3, width)), (1, (width,)), (1, (width,))])
    )
    x, weight, bias = (a.astype(dtype) for a in (x, weight, bias))
    wide = [a.astype(np.float64) for a in (x, weight, bias)]
    rms = [[oracle.rms_norm(v, wide[1], 1e-5) for v in rows] for rows in wide[0]]
    assert_close(ops.rms_norm(*map(backend.asarray, (x, weight)), 1e-5), np.array(rms), dtype)
    layer = np.array([[oracle.layer_norm(v, wide[1], wide[2], 1e-5) for v in rows] for rows in wide[0]])
    # Taking the mean away cancels: what is left carries the rounding of what was there.
    cancelled = np.abs(wide[1]).max() * np.abs(x).max() / max(np.sqrt(wide[0].var(-1) + 1e-5).min(), 1e-30)
    assert_close(
        ops.layer_norm(*map(backend.asarray, (x, weight, bias)), 1e-5),
        layer,
        dtype,
        scale=max(np.abs(layer).max(), cancelled),
    )


def test_norms_of_float16_are_computed_wider(backend):
    if backend.name == "strict":
        pytest.skip("the array standard has no float16")
    x = np.full((1, 1, 4), 300.0, "float16")  # 300² is beyond float16
    assert host(ops.rms_norm(*map(backend.asarray, (x, np.ones(4, "float16"))), 1e-5)).tolist() == [[[1.0] * 4]]


def test_softmax_sums_to_one_and_an_empty_row_to_nothing(backend, dtype):
    x = np.array([[0.0, np.log(3)], [-np.inf, 5], [-np.inf, -np.inf], [1e4, 1e4]], dtype)
    want = np.array([[0.25, 0.75], [0, 1], [0, 0], [0.5, 0.5]])
    assert_close(ops.softmax(backend.asarray(x)), want, dtype)
    assert_close(ops.softmax(backend.asarray(np.ascontiguousarray(x.T)), axis=0), want.T, dtype)


def test_linear_multiplies_by_rows_out(backend, dtype):
    x, weight, bias = (normal(i, *shape).astype(dtype) for i, shape in enumerate([(2, 3, 5), (4, 5), (4,)]))
    want = np.array([[[row @ v for row in weight] for v in rows] for rows in x.astype(np.float64)])
    assert_close(ops.linear(*map(backend.asarray, (x, weight))), want, dtype)
    assert_close(ops.linear(*map(backend.asarray, (x, weight, bias))), want + bias, dtype)


def test_soft_cap(backend, dtype):
    x = np.array([-1e4, -1.0, 0.0, 0.5, 1e4], dtype)
    assert_close(ops.soft_cap(backend.asarray(x), 2.0), 2 * np.tanh(x.astype(np.float64) / 2), dtype)
    assert np.array_equal(host(ops.soft_cap(backend.asarray(x), None)), x)


def test_python_constants_never_widen(backend):
    """A NumPy scalar among the constants would turn float32 into float64."""
    x = backend.asarray(np.ones((1, 2, 4), "float32"))
    weight = backend.asarray(np.ones(4, "float32"))
    results = [ops.softmax(x), ops.rms_norm(x, weight, 1e-5), ops.layer_norm(x, weight, weight, 1e-5)]
    results += [ops.soft_cap(x, 3.0), *(f(x) for f in ops.ACTIVATIONS.values())]
    assert {str(host(y).dtype) for y in results} == {"float32"}


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, ops.FEW_ROWS - 1, ops.FEW_ROWS, ops.FEW_ROWS + 1])
@pytest.mark.parametrize(("left", "right"), [((), ()), ((2, 1), (3,)), ((), (3,)), ((2, 3), (2, 3))])
def test_any_number_of_rows_meets_every_row_of_the_weights(backend, dtype, rows, left, right):
    """How many rows there are decides how the product is taken, and nothing else."""
    x, weight = normal(0, *left, rows, 6).astype(dtype), normal(1, *right, 5, 6).astype(dtype)
    want = np.einsum("...rd,...sd->...rs", x.astype(np.float64), weight.astype(np.float64))
    assert_close(ops.linear(*map(backend.asarray, (x, weight))), want, dtype)
