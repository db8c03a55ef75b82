"""How is memory kept constant when a layer sees only the last W tokens? In a ring of W rows.

The token at position p stands in slot p mod W, so the token that it overwrites, p - W, is one that no later query sees.
Attention does not care that the rows are out of order, because each carries its position.

    W = 4     slots after     1 token    [0 . . .]
                              4 tokens   [0 1 2 3]
                              5 tokens   [4 1 2 3]
                             10 tokens   [8 9 6 7]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..backend import Array, namespace, whole
from .base import Cache, drop_from, frozen, joined, used_columns


class RollingCache(Cache):
    """Remember the last `window` tokens of each row of the batch, in memory that never grows.

    A step of several tokens gets back the ring as it was *and* all the new rows, because its first queries still see
    what its last ones push out. Padding takes no slot: ragged rows each keep their own last `window` tokens. Raises
    ValueError for a window below 1.

    >>> cache = RollingCache(window=4)
    >>> for p in range(10):
    ...     pos, k = cache.extend([[p]], np.full((1, 1, 1, 1), float(p)))
    >>> pos, k[0, 0, :, 0]
    (array([[8, 9, 6, 7]]), array([8., 9., 6., 7.]))
    """

    def __init__(self, window: int) -> None:
        super().__init__()
        self.window: int = whole(window, "window")
        # The largest position that each row of the batch has forgotten; -1: none.
        self._lost = np.empty(0, dtype=np.int64)
        # What was written over since mark(), for restore(): (which ring, where, the rows that stood there).
        self._overwritten: list[tuple[int, Any, Array]] | None = None

    def _store(self, pos: np.ndarray, rows: tuple[Array, ...]) -> tuple[Any, ...]:
        xp, (batch, time) = namespace(*rows), pos.shape
        if not self._rows:
            self._rows = tuple(xp.zeros((*new.shape[:2], self.window, new.shape[3]), dtype=new.dtype) for new in rows)
            self._pos = frozen(np.full((batch, self.window), -1, dtype=np.int64))
            self._lost = np.full(batch, -1, dtype=np.int64)
        lone = time == 1  # such a token sees nothing of what it writes over
        seen: tuple[Any, ...] = ()
        if not lone:
            used = used_columns(self._pos)
            seen = tuple(
                xp.concat([ring[:, :, :used, :], new], axis=2) for ring, new in zip(self._rows, rows, strict=True)
            )
            seen = (joined(self._pos[:, :used], pos), *seen)
        both = joined(self._pos, pos)
        oldest = both.max(axis=1, keepdims=True, initial=-1) - self.window + 1  # of the positions that stay
        self._lost = np.maximum(self._lost, np.where(both < oldest, both, -1).max(axis=1, initial=-1))
        ring_pos = np.where(self._pos < oldest, -1, self._pos)
        for b, s, t in _moves(pos, (pos >= 0) & (pos >= oldest), self.window):
            for i, (ring, new) in enumerate(zip(self._rows, rows, strict=True)):
                if self._overwritten is not None:
                    self._overwritten.append((i, (b, slice(None), s), xp.asarray(ring[b, :, s, :], copy=True)))
                ring[b, :, s, :] = new[b, :, t, :]
            ring_pos[b, s] = pos[b, t]
        self._pos = frozen(ring_pos)
        if lone:
            used = used_columns(self._pos)
            seen = (frozen(self._pos[:, :used]), *(ring[:, :, :used, :] for ring in self._rows))
        return seen

    def mark(self) -> dict[str, Any]:
        """Begin to keep what is written over; a cache without rows has nothing to lose."""
        self._overwritten = [] if self._rows else None
        return super().mark()

    def restore(self, mark: dict[str, Any]) -> None:
        """Put it back, the newest first, and go back to the state at `mark`."""
        for i, where, rows in reversed(mark["_overwritten"] or []):
            self._rows[i][(*where, slice(None))] = rows
        super().restore(mark)

    def release(self) -> None:
        """Let go of it."""
        self._overwritten = None

    def _keep_below(self, length: int) -> None:
        pos = drop_from(self._pos, length)
        lengths = pos.max(axis=1, initial=-1) + 1
        if not length:  # an empty history misses nothing
            self._lost = np.full_like(self._lost, -1)
        if (self._lost > np.maximum(lengths - self.window, -1)).any():  # -1: nothing is lost
            raise ValueError(
                f"cannot truncate to length {length}: through a window of {self.window} it sees tokens up to "
                f"{self._lost.max()}, which are forgotten"
            )
        self._pos = pos

    def _reorder(self, index: np.ndarray) -> None:
        super()._reorder(index)
        self._lost = self._lost[index]


def _moves(pos: np.ndarray, kept: np.ndarray, window: int) -> Iterator[tuple[slice, slice, slice]]:
    """Cut the writes of kept positions [B, T] into their slots into (batch, slots, times), each a run of neighbours.

    >>> for batch, slots, times in _moves(np.array([[6, 7, 8, 9]]), np.array([[True] * 4]), window=4):
    ...     print(slots.start, slots.stop, times.start, times.stop)
    2 4 0 2
    0 2 2 4
    """
    alike = bool((pos == pos[:1]).all())  # rows at the same positions move together
    for b in [slice(0, len(pos))] if alike else [slice(i, i + 1) for i in range(len(pos))]:
        times = kept[b.start].nonzero()[0]
        slots = pos[b.start, times] % window
        breaks = ((np.diff(times) != 1) | (np.diff(slots) != 1)).nonzero()[0] + 1
        for first, last in zip([0, *breaks], [*breaks, len(times)], strict=True):
            if last > first:
                s, t = int(slots[first]), int(times[first])
                yield b, slice(s, s + int(last - first)), slice(t, t + int(last - first))
