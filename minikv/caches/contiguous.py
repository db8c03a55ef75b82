"""How is a cache read without copies where products want contiguous arrays? By handing out the buffer whole.

CuPy multiplies stacks of matrices only from contiguous memory, and copies what is not: a slice of a longer buffer,
all keys and values at every step. Reading some slots in vain moves less: a copy reads, writes, and reads once more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array
from .base import joined
from .growing import KVCache

AHEAD = np.iinfo(np.int64).max  # the position of a slot that no token has reached: no query looks so far


class ContiguousCache(KVCache):
    """Remember every row as a KVCache does, and hand out its buffers whole.

    Slots not in use hold zeros and stand at position AHEAD, in the future of every query. To keep it so, truncating
    (and undoing a failed step) makes a copy of the rows that stay.

    >>> cache = ContiguousCache(capacity=4)
    >>> pos, k = cache.extend([[0, 1]], np.ones((1, 1, 2, 8), dtype=np.float32))
    >>> k.shape, (pos == AHEAD).astype(int)
    ((1, 1, 4, 8), array([[0, 0, 1, 1]]))
    """

    def restore(self, mark: dict[str, Any]) -> None:
        """Go back to the state at `mark`, with zeros again where rows came in since."""
        super().restore(mark)
        self._renew()

    def _store(self, pos: np.ndarray, rows: tuple[Array, ...]) -> tuple[Any, ...]:
        pos, *_ = super()._store(pos, rows)
        batch, used = pos.shape
        return joined(pos, np.full((batch, self._rows[0].shape[2] - used), AHEAD)), *self._rows

    def _grow(self, slots: int, like: tuple[Array, ...]) -> None:
        super()._grow(slots, like)
        for buffer in self._rows:
            buffer[:, :, self._pos.shape[1] :, :] = 0.0

    def _keep_below(self, length: int) -> None:
        super()._keep_below(length)
        self._renew()

    def _renew(self) -> None:
        if self._rows:
            self._grow(self._rows[0].shape[2], self._rows)
