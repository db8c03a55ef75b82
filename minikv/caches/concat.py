"""How does a textbook store keys and values? By concatenating the new ones behind the old ones.

Every step copies everything stored so far: n tokens one at a time copy n²/2 rows. `growing.py` shows the cure.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..backend import Array, namespace
from .base import Cache, joined


class ConcatCache(Cache):
    """Remember every row, in arrays exactly as long as the text, made anew at each step."""

    def _store(self, pos: np.ndarray, rows: tuple[Array, ...]) -> tuple[Any, ...]:
        xp = namespace(*rows)
        parts = (
            [[old, new] for old, new in zip(self._rows, rows, strict=True)] if self._rows else [[new] for new in rows]
        )
        self._rows = tuple(xp.concat(part, axis=2) for part in parts)
        self._pos = joined(self._pos, pos)
        return self._pos, *self._rows

    def _keep_below(self, length: int) -> None:
        super()._keep_below(length)
        # Copies, since a slice would keep the longer array alive behind the shorter one.
        count = self._pos.shape[1]
        self._rows = tuple(namespace(row).asarray(row[:, :, :count, :], copy=True) for row in self._rows)
