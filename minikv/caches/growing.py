"""How are all keys and values kept without copying them at every step? In a buffer that is larger than the text.

When it is full it doubles, so that n appends copy fewer than 2n rows in all; or its capacity is fixed and the token
beyond it is refused. Forgetting is not this file's matter: see `rolling.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, namespace, whole
from .base import Cache, joined


class KVCache(Cache):
    """Remember every row in a buffer that doubles when it is full; or, given `capacity`, hold that many tokens and no
    more.

    Rows are written once and never moved except when the buffer doubles. What stands in the buffer beyond the rows in
    use is never handed out. Padding takes room like a token. Raises ValueError for a capacity below 1, and on the token
    beyond it.

    >>> cache = KVCache(capacity=4)
    >>> pos, k = cache.extend([[0, 1, 2]], np.ones((1, 1, 3, 8), dtype=np.float32))
    >>> pos, k.shape, cache.length, cache.nbytes, cache.nbytes_used
    (array([[0, 1, 2]]), (1, 1, 3, 8), 3, 128, 96)
    """

    def __init__(self, capacity: int | None = None) -> None:
        super().__init__()
        self.capacity = None if capacity is None else whole(capacity, "capacity")

    def _store(self, pos: np.ndarray, rows: tuple[Array, ...]) -> tuple[Any, ...]:
        start, end = self._pos.shape[1], self._pos.shape[1] + pos.shape[1]
        if self.capacity is not None and end > self.capacity:
            raise ValueError(
                f"capacity {self.capacity} cannot hold {end} tokens: {start} stored and {pos.shape[1]} new"
            )
        if not self._rows or end > self._rows[0].shape[2]:
            self._grow(self.capacity or max(end, 2 * start), rows)
        for buffer, new in zip(self._rows, rows, strict=True):
            buffer[:, :, start:end, :] = new
        self._pos = joined(self._pos, pos)
        return self._pos, *(buffer[:, :, :end, :] for buffer in self._rows)

    def _grow(self, slots: int, like: tuple[Array, ...]) -> None:
        xp, count = namespace(*like), self._pos.shape[1]
        buffers = tuple(xp.empty((*new.shape[:2], slots, new.shape[3]), dtype=new.dtype) for new in like)
        for buffer, old in zip(buffers, self._rows, strict=False):  # the first time there is nothing to copy
            buffer[:, :, :count, :] = old[:, :, :count, :]
        self._rows = buffers
