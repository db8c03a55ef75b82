"""How does a query turn the keys and values in sight into an output?

Scaled dot-product attention over grouped heads, whole or in blocks. It does not know where keys come from (`caches/`),
how they were made (`gqa.py`, `mla.py`) or who may see whom (`mask.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .backend import Array, as_positions, namespace, whole
from .mask import check_window, in_sight, sees_everything, visible
from .ops import FEW_ROWS, finite_or_zero, reshaped, rows_times, soft_cap, widen

BLOCK_SIZE = 64  # what the layers use: a tile of scores then fits a core's cache (docs/speed.md)


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    q_pos: Any = None,
    k_pos: Any = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    block_size: int | None = None,
    return_lse: bool = False,
) -> Any:
    """Mix the values of the visible keys, weighted by how well they answer the query.

    out[b, n, t] = Σ_s w_s v[b, n // G, s],  w = softmax over visible s of softcap(scale · q[b, n, t] · k[b, n // G, s])

    q [B, N, T, H], k [B, K, S, H], v [B, K, S, V] -> out [B, N, T, V]. G = N / K query heads share a key/value head:
    K = N is multi-head, K = 1 multi-query attention (arXiv 1706.03762, section 3.2; 1911.02150; 2305.13245).

    - `q_pos`, `k_pos`: host integers [T], [S] or [B, T], [B, S]; -1 is a padding row. By default the keys stand at
      0..S-1 and the queries are the last T of them. Rows may be stored in any order.
    - `window`: keys in sight, the query's own included; None: all. `scale`: 1/√H by default.
    - `softcap`: scores become softcap · tanh(score / softcap), before hidden keys are taken out (arXiv 2408.00118).
    - `sinks` [N]: one more logit per query head in the denominator, with no value behind it.
    - `block_size`: compute in tiles of so many queries and 8 times as many keys, more when there are fewer queries and
      all when there is one (arXiv 2205.14135): memory grows with T · block_size instead of T · S. Hidden tiles are
      never computed, and tiles seen whole are never masked.
    - `return_lse`: also return log Σ exp(score) [B, N, T] (sinks included), which `merge_attention` needs.

    A query that sees nothing gives exactly 0, with log-sum-exp -inf. Half-precision input is computed in float32; out
    has q's type. Raises ValueError for shapes that do not fit, TypeError for arrays of different libraries or types, or
    of integers.
    """
    xp = namespace(q, k, v, sinks)
    _check_shapes(q, k, v, sinks)
    check_window(window)
    block_size = None if block_size is None else whole(block_size, "block_size")
    (B, N, T, H), S = q.shape, k.shape[2]
    q_pos = _positions(q_pos, "q_pos", np.arange(S - T, S), B, T)
    k_pos = _positions(k_pos, "k_pos", np.arange(S), B, S)
    # Python's floats: a NumPy scalar would widen float32 to float64.
    scale = H**-0.5 if scale is None else float(scale)
    softcap = None if softcap is None else float(softcap)
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"softcap must be positive and finite, or None, got {softcap}")

    rows = T if block_size is None else block_size
    columns = S if block_size is None or T == 1 else 8 * block_size * max(1, block_size // max(T, 1))

    def attend_rows(t: slice) -> tuple[Array, Array]:
        tiles = (in_sight(q_pos[:, t], k_pos, s, window) for s in _tiles(S, columns))
        parts = [
            _attend_tile(q[:, :, t, :], k[:, :, s, :], v[:, :, s, :], q_pos[:, t], k_pos[:, s], window, scale, softcap)
            for s in tiles
            if s.start < s.stop
        ] or [_nothing(q[:, :, t, :], v)]
        if sinks is not None:  # a sink is one more part, whose score is given and whose value is 0
            out, lse = parts[0]
            sink = xp.reshape(xp.astype(sinks, lse.dtype, copy=False), (1, N, 1))
            parts.append((xp.zeros_like(out), xp.broadcast_to(sink, lse.shape)))
        return parts[0] if len(parts) == 1 else merge_attention(*zip(*parts, strict=True))

    outs, lses = zip(*(attend_rows(t) for t in _tiles(T, rows)), strict=True)
    out = xp.astype(outs[0] if len(outs) == 1 else xp.concat(outs, axis=2), q.dtype, copy=False)
    if not return_lse:
        return out
    return out, lses[0] if len(lses) == 1 else xp.concat(lses, axis=2)


def _tiles(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, max(length, 1), max(size, 1)))


def _attend_tile(
    q: Array,
    k: Array,
    v: Array,
    q_pos: np.ndarray,
    k_pos: np.ndarray,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[Array, Array]:
    """Attend from all queries of a tile to all of its keys: (out [B, N, T, V], lse [B, N, T]), in float32 or wider."""
    xp = namespace(q, k, v)
    q, k, v = widen(q) * scale, widen(k), widen(v)
    (B, N, T, H), (K, S) = q.shape, k.shape[1:3]
    # The G query heads of a group are rows of one product with their key/value head: nothing is repeated.
    rows = xp.reshape(q, (B, K, (N // K) * T, H))
    R = rows.shape[2]
    if 1 < R < FEW_ROWS:  # rows in fours, which matrix libraries are made for (docs/speed.md)
        rows = xp.concat([rows, xp.zeros_like(rows[:, :, : -R % 4, :])], axis=2)
    scores = soft_cap(reshaped(rows_times(rows, k)[:, :, :R, :], (B, N, T, S)), softcap)
    all_seen = sees_everything(q_pos, k_pos, window)
    if (k_pos < 0).any():  # an empty row may hold anything, and 0 · NaN is NaN
        v = xp.where(xp.asarray(k_pos >= 0)[:, None, :, None], v, 0.0)
    if not all_seen:
        seen = xp.asarray(visible(q_pos, k_pos, window)[:, None])  # [B, 1, T, S]
        scores = xp.where(seen, scores, -math.inf)
    peak = xp.max(scores, axis=-1, keepdims=True)
    if not all_seen:
        peak = finite_or_zero(peak)
    scores -= peak  # into memory that is at hand, which is quicker than into new (docs/speed.md)
    weights = xp.exp(scores)
    total = xp.sum(weights, axis=-1, keepdims=True)  # [B, N, T, 1]
    out = xp.reshape(xp.matmul(xp.reshape(weights, (B, K, (N // K) * T, S)), v), (B, N, T, v.shape[-1]))
    if all_seen:
        return out / total, (peak + xp.log(total))[..., 0]
    empty = total == 0
    total = xp.where(empty, 1.0, total)
    return out / total, xp.where(empty, -math.inf, peak + xp.log(total))[..., 0]


def _nothing(q: Array, v: Array) -> tuple[Array, Array]:
    """Return what queries get that see no key: out 0 and log-sum-exp -inf."""
    xp = namespace(q, v)
    lse = xp.zeros_like(widen(q)[..., 0])
    return xp.broadcast_to(lse[..., None], (*q.shape[:3], v.shape[-1])), lse - math.inf


def merge_attention(outs: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Combine attention over disjoint sets of keys into attention over all of them.

    lse = log Σ_i exp(lses_i),  out = Σ_i exp(lses_i - lse) outs_i

    outs_i [..., V], lses_i [...]: what `attention(..., return_lse=True)` gave for each set. The order does not matter,
    and a set in which a query saw nothing (lse -inf) changes nothing. arXiv 2205.14135, section 3.1.

    The result has the outs' type. Raises ValueError when the lists are empty or of different lengths, or when shapes
    differ.
    """
    if len(outs) != len(lses) or not outs:
        raise ValueError(
            f"merge_attention needs as many outs as lses and at least one, got {len(outs)} and {len(lses)}"
        )
    xp = namespace(*outs, *lses)
    for out, lse in zip(outs, lses, strict=True):
        if out.shape != outs[0].shape or lse.shape != out.shape[:-1]:
            raise ValueError(
                f"outs [..., V] and lses [...] must have one shape, got {outs[0].shape}, {out.shape} and {lse.shape}"
            )
    peak = lses[0]
    for lse in lses[1:]:
        peak = xp.maximum(peak, lse)
    peak = finite_or_zero(peak)
    shares = [xp.exp(lse - peak) for lse in lses]
    total = sum(shares[1:], shares[0])
    empty = total == 0
    total = xp.where(empty, 1.0, total)
    mixed = [out * (share / total)[..., None] for out, share in zip(outs, shares, strict=True)]
    out = xp.astype(sum(mixed[1:], mixed[0]), outs[0].dtype, copy=False)
    return out, xp.where(empty, -math.inf, peak + xp.log(total))


def merge_heads(out: Array) -> Array:
    """Lay the heads' outputs of each token side by side: [B, N, T, V] -> [B, T, N V]."""
    xp = namespace(out)
    B, N, T, V = out.shape
    return xp.reshape(xp.permute_dims(out, (0, 2, 1, 3)), (B, T, N * V))


def _check_shapes(q: Array, k: Array, v: Array, sinks: Array | None) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if array.ndim != 4:
            raise ValueError(f"{name} must have axes [batch, heads, time, width], got shape {array.shape}")
        if array.dtype != q.dtype:
            raise TypeError(f"q and {name} must have one type, got {q.dtype} and {array.dtype}")
    if not namespace(q).isdtype(q.dtype, "real floating"):
        raise TypeError(f"q, k and v must be floating-point, got {q.dtype}")
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q and k must have one batch size, got {q.shape[0]} and {k.shape[0]}")
    if q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must have one head width, got {q.shape[3]} and {k.shape[3]}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(f"k and v must have one batch, heads and time, got {k.shape[:3]} and {v.shape[:3]}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"{q.shape[1]} query heads cannot share {k.shape[1]} key/value heads")
    if sinks is not None and sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must have one logit per query head, {q.shape[1]}, got shape {sinks.shape}")


def _positions(pos: Any, name: str, default: np.ndarray, batch: int, count: int) -> np.ndarray:
    pos = as_positions(default if pos is None else pos, name)
    if pos.shape[1] != count or pos.shape[0] not in (1, batch):
        raise ValueError(f"{name} must have shape {(count,)} or {(batch, count)}, got {pos.shape}")
    return pos
