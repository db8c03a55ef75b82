"""What are the small functions every layer is made of: softmax, norms, activations, a linear map?

They know nothing of heads, positions or caches. Half-precision input is computed in float32 where a sum or an
exponential would lose too much, and rounded back once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from .backend import Array, namespace

FEW_ROWS = 32  # up to here w xᵀ is quicker than x wᵀ (docs/speed.md)


def linear(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """Multiply by a weight matrix stored `[out, in]`: y = x weightᵀ + bias. x [..., in] -> [..., out].

    A stack of matrices [..., out, in] takes a stack of rows [..., rows, in].
    """
    if weight.ndim > 2:
        y = rows_times(x, weight)
    else:  # all rows in one product, whatever the batch, so that the weights are read once
        rows = namespace(x).reshape(x, (-1, x.shape[-1]))
        y = reshaped(rows_times(rows, weight), (*x.shape[:-1], weight.shape[0]))
    return y if bias is None else y + bias


def rows_times(x: Array, w: Array) -> Array:
    """Multiply every row of x with every row of w: x wᵀ, x [..., R, D] and w [..., S, D] -> [..., R, S].

    w is the large one, weights or keys, and lies in memory row by row. When x has few rows, w is taken as it lies:
    turning it around costs more than the product then, and some libraries would make a copy of it.
    """
    xp, (R, D) = namespace(x, w), x.shape[-2:]
    if R > FEW_ROWS or (R == 1 and w.ndim == 2):  # a matrix and one row: a vector's product, whichever way round
        return xp.matmul(x, xp.matrix_transpose(w))
    if R < 4:  # a product with a vector for each: they stream w, and from the second row on out of a cache
        return xp.matmul(w[..., None, :, :], xp.reshape(x, (*x.shape[:-2], R, D, 1)))[..., 0]
    return xp.matrix_transpose(xp.matmul(w, xp.matrix_transpose(x)))


def reshaped(x: Array, shape: tuple[int, ...]) -> Array:
    """Reshape to a contiguous array, whatever lay where before: the passes over it to come are quicker then."""
    xp = namespace(x)
    return xp.reshape(xp.reshape(x, (-1,)), shape)


def widen(x: Array) -> Array:
    """Return half-precision arrays as float32, others as they are."""
    xp = namespace(x)
    return x if x.dtype in (xp.float32, xp.float64) else xp.astype(x, xp.float32)


def softmax(x: Array, axis: int = -1) -> Array:
    """Turn scores into weights that sum to 1: exp(x - max) / Σ exp(x - max) along `axis`.

    A row in which everything is -inf has nothing to weigh: its weights are all 0, not NaN.
    """
    xp = namespace(x)
    peak = finite_or_zero(xp.max(x, axis=axis, keepdims=True))
    weights = xp.exp(x - peak)
    total = xp.sum(weights, axis=axis, keepdims=True)
    return weights / xp.where(total == 0, 1.0, total)


def finite_or_zero(peak: Array) -> Array:
    """Replace -inf, the maximum of an empty set, by 0, so that subtracting it leaves -inf and not NaN."""
    return namespace(peak).where(peak == -math.inf, 0.0, peak)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Scale vectors to unit root mean square: x / √(mean(x²) + eps) · weight, over the last axis.

    arXiv 1910.07467, equation 4, with the eps of all implementations inside the root.
    """
    return _norm(widen(x), weight, eps, x.dtype)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Centre and scale vectors: (x - mean(x)) / √(variance(x) + eps) · weight + bias, over the last axis.

    arXiv 1607.06450, equation 3; the variance divides by the width, not by the width less one.
    """
    xp = namespace(x, weight, bias)
    wide = widen(x)
    return _norm(wide - xp.sum(wide, axis=-1, keepdims=True) / x.shape[-1], weight, eps, x.dtype, bias)


def _norm(wide: Array, weight: Array, eps: float, dtype: Any, bias: Array | None = None) -> Array:
    xp = namespace(wide)
    mean = xp.sum(wide * wide, axis=-1, keepdims=True) / wide.shape[-1]
    y = wide / xp.sqrt(mean + eps) * weight
    y = y if bias is None else y + bias
    return y if y.dtype == dtype else xp.astype(y, dtype)


def soft_cap(x: Array, cap: float | None) -> Array:
    """Squash values smoothly into (-cap, cap): cap · tanh(x / cap). Without a cap, x itself (arXiv 2408.00118, section
    2)."""
    return x if cap is None else cap * namespace(x).tanh(x / cap)


def sigmoid(x: Array) -> Array:
    """Compute 1 / (1 + exp(-x)), as (tanh(x/2) + 1) / 2, which overflows nowhere."""
    return 0.5 * (namespace(x).tanh(0.5 * x) + 1.0)


def silu(x: Array) -> Array:
    """Compute x · sigmoid(x), as x/2 + x/2 · tanh(x/2) (arXiv 1702.03118, equation 5)."""
    half = 0.5 * x
    y = namespace(x).tanh(half)
    y *= half
    y += half
    return y


def gelu_tanh(x: Array) -> Array:
    """Compute the tanh form of GELU: x/2 · (1 + tanh(√(2/π) (x + 0.044715 x³))) (arXiv 1606.08415, section 2)."""
    xp, wide = namespace(x), widen(x)  # in 16 bits x³ overflows from 41 on
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return xp.astype(0.5 * wide * (1.0 + xp.tanh(inner)), x.dtype, copy=False)


def gelu(x: Array) -> Array:
    """Compute x · Φ(x) = x/2 · (1 + erf(x/√2)), Φ the normal distribution function (arXiv 1606.08415, section 2)."""
    wide = widen(x)
    return namespace(x).astype(0.5 * wide * (1.0 + erf(wide / math.sqrt(2))), x.dtype, copy=False)


def erf(x: Array) -> Array:
    """Compute the error function, which the array standard lacks: (2/π) ∫₀^∞ exp(-t²) sin(2xt)/t dt.

    The midpoint rule with step h converges faster than any power of h here: its error is erfc(π/h - |x|), under 1e-16
    with h = 1/4 where |x| <= 6, and beyond that erf is ±1 in float64. The terms past t = 6 are smaller still.
    """
    xp, step = namespace(x), 0.25
    x = xp.clip(x, -6.0, 6.0)
    total = xp.zeros_like(x)
    for i in range(24):
        t = (i + 0.5) * step
        total = total + (2 * step / math.pi * math.exp(-t * t) / t) * xp.sin(2 * t * x)
    return total


def relu(x: Array) -> Array:
    """Compute max(x, 0)."""
    return namespace(x).clip(x, 0.0, math.inf)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu}
