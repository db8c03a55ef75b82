"""Which keys may a query look at?

One rule answers for causal and windowed attention, for texts fed in pieces, padded or ragged, and for caches that store
their rows in any order, because every row carries its absolute position. Positions live on the host, so that deciding
to skip a tile never waits for a device. What is done with the answer is `attention.py`'s matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .backend import as_positions, whole


def visible(q_pos: Any, k_pos: Any, window: int | None = None) -> np.ndarray:
    """Say which keys each query sees: a NumPy array of bool [B, T, S], true where visible.

    visible = (k_pos >= 0) & (0 <= q_pos - k_pos) & (q_pos - k_pos < window)

    Positions are integers [T] and [S], or [B, T] and [B, S]; -1 marks a row that is empty or padding. A window of W
    shows W keys, the query's own included. Raises ValueError for a window below 1, TypeError for positions that are not
    integers.

    >>> visible([2, 3], [0, 1, 2, 3], window=3).astype(int)
    array([[[1, 1, 1, 0],
            [0, 1, 1, 1]]])
    """
    check_window(window)
    q, k = as_positions(q_pos, "q_pos")[:, :, None], as_positions(k_pos, "k_pos")[:, None, :]
    seen = (k >= 0) & (q >= k)
    return seen if window is None else seen & (q - k < window)


def in_sight(q_pos: np.ndarray, k_pos: np.ndarray, tile: slice, window: int | None = None) -> slice:
    """Narrow a tile of the keys to the range outside which no query sees any: positions [B, T] and [B, S] -> a slice.

    A single query that sees most of a tile keeps it whole: masking the rest costs less than the copy that some
    libraries make of a slice.

    >>> in_sight(np.array([[4, 5]]), np.arange(100)[None], slice(0, 50), window=3)
    slice(2, 6, None)
    """
    queries, keys = q_pos[q_pos >= 0], k_pos[:, tile]
    if not queries.size:
        return slice(0, 0)
    near = (keys >= 0) & (keys <= queries.max())
    if window is not None:
        near &= keys > int(queries.min()) - window  # of Python, whose numbers have no end
    columns = np.flatnonzero(near.any(axis=0))
    if not columns.size:
        return slice(0, 0)
    if q_pos.shape[1] == 1 and 2 * (columns[-1] + 1 - columns[0]) > keys.shape[1]:
        return tile
    return slice(tile.start + int(columns[0]), tile.start + int(columns[-1]) + 1)


def sees_everything(q_pos: np.ndarray, k_pos: np.ndarray, window: int | None = None) -> bool:
    """Say that every query of a tile sees all of its keys, in every row of the batch."""
    oldest = k_pos.min()
    return bool(oldest >= 0 and k_pos.max() <= q_pos.min() and (window is None or q_pos.max() - oldest < window))


def check_window(window: int | None) -> None:
    """Raise ValueError for a window that shows no key at all, TypeError for one that is no number of keys."""
    if window is not None:
        whole(window, "window")
