"""What does every cache promise, whatever its storage?

Rows go in with their positions and come back out with them, old and new. A cache does not know what its rows mean: keys
and values, a latent, anything with axes [batch, heads, time, width]. Who may look at which row is `mask.py`'s matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy as shallow_copy
from typing import Any

import numpy as np

from ..backend import Array, as_integers, as_positions, itemsize, namespace, whole


class Cache:
    """Remember rows of tokens, each with its absolute position.

    A subclass decides how rows are stored: it implements `_store` over `_rows`, its buffers [B, heads, slots, width],
    and `_pos`, the host integers [B, slots] of what stands in the slots in use (-1: nothing). Only rows are written in
    place: whoever holds `_pos` holds a snapshot. Until the first `extend` there is no batch size and no buffer.
    """

    window: int | None = None  # a storage that forgets says how many of the newest positions it keeps

    def __init__(self) -> None:
        self._rows: tuple[Array, ...]
        self._pos: np.ndarray
        self.reset()

    def extend(self, pos: Any, *rows: Array) -> tuple[Any, ...]:
        """Take in new rows and return `(pos, *rows)`: everything, old and new, that the new tokens may need to look at.

        pos: host integers [B, T], rising along each row of the batch from where it ended; -1 marks padding. rows:
        arrays [B, heads, T, width] of one type. Returned: pos [B, S] (-1: empty or padding; beyond every query's: a
        slot that no token has reached, which holds zeros) and rows [B, heads, S, width], views of the storage where
        that saves a copy and therefore good until the next call; pos is a read-only snapshot.

        Raises ValueError or TypeError, before anything has changed, when positions repeat or go backwards, or when rows
        differ from the stored ones in number, batch, heads, width, type or library.
        """
        pos = self._checked(pos, rows)
        return self._store(pos, rows)

    @property
    def lengths(self) -> np.ndarray:
        """Count the tokens seen by each row of the batch: one more than its largest position [B]."""
        return self._pos.max(axis=1, initial=-1) + 1

    @property
    def length(self) -> int:
        """Count the tokens seen by the longest row of the batch; 0 when nothing has been."""
        return int(self.lengths.max(initial=0))

    @property
    def nbytes(self) -> int:
        """Count the bytes of the row buffers owned, in use or not (not the positions, a few host bytes a token)."""
        return sum(math.prod(rows.shape) * itemsize(rows) for rows in self._rows)

    @property
    def nbytes_used(self) -> int:
        """Count the bytes of the rows that hold a token."""
        tokens = int((self._pos >= 0).sum())
        return tokens * sum(rows.shape[1] * rows.shape[3] * itemsize(rows) for rows in self._rows)

    def truncate(self, length: int) -> None:
        """Forget every token at position `length` and after, exactly as if it had never come.

        Raises ValueError, and changes nothing, when `length` is negative or beyond what was seen, or when the shorter
        history needs rows that are no longer there.
        """
        if not 0 <= whole(length, "length", least=None) <= self.length:
            raise ValueError(f"cannot truncate to length {length}: the cache has seen {self.length} tokens")
        if length < self.length:
            self._keep_below(length)

    def reset(self) -> None:
        """Forget everything, the batch size included: the cache is as new."""
        self._rows, self._pos = (), np.empty((0, 0), dtype=np.int64)

    def copy(self) -> Cache:
        """Return an independent cache with the same contents: extending one does not change the other."""
        twin = shallow_copy(self)  # all but the rows is replaced, never written in place
        twin._rows = tuple(namespace(row).asarray(row, copy=True) for row in self._rows)
        return twin

    def reorder(self, rows: Sequence[int] | np.ndarray) -> None:
        """Let row i of the batch go on from what row `rows[i]` has seen (beam search; dropping or repeating sequences).

        Everything that belongs to a row follows, and the batch size becomes len(rows). Raises ValueError for a row that
        is not there, TypeError when they are not integers.
        """
        index, batch = as_integers(rows, "rows"), self._pos.shape[0]
        if not batch:
            raise ValueError("nothing to reorder: the cache has seen no batch")
        if index.ndim != 1:
            raise ValueError(f"rows must be a list of integers, got shape {index.shape}")
        if not index.size or index.min() < 0 or index.max() >= batch:
            raise ValueError(f"rows must be within 0..{batch - 1} and at least one, got {index.tolist()}")
        self._reorder(index)

    def mark(self) -> dict[str, Any]:
        """Remember the present state, at next to no cost, for `restore` after any number of extends or one truncate."""
        return dict(vars(self))

    def restore(self, mark: dict[str, Any]) -> None:
        """Go back to the state at `mark`, contents included."""
        vars(self).update(mark)

    def release(self) -> None:
        """Let go of what was kept for `restore` alone."""

    def _store(self, pos: np.ndarray, rows: tuple[Array, ...]) -> tuple[Any, ...]:
        raise NotImplementedError

    def _keep_below(self, length: int) -> None:
        pos = drop_from(self._pos, length)
        self._pos = frozen(pos[:, : used_columns(pos)])

    def _reorder(self, index: np.ndarray) -> None:
        self._rows = tuple(_take_batch(row, index) for row in self._rows)
        self._pos = frozen(self._pos[index])

    def _checked(self, pos: Any, rows: tuple[Array, ...]) -> np.ndarray:
        if not rows:
            raise ValueError("extend needs at least one array of rows, got none")
        namespace(*rows, *self._rows)
        if self._rows and len(rows) != len(self._rows):
            raise ValueError(f"the cache holds {len(self._rows)} arrays of rows, got {len(rows)}")
        for i, new in enumerate(rows):
            if new.ndim != 4:
                raise ValueError(f"rows {i} must have axes [batch, heads, time, width], got shape {new.shape}")
            if (new.shape[0], new.shape[2]) != (rows[0].shape[0], rows[0].shape[2]):
                raise ValueError(
                    f"rows 0 and {i} must have one batch and time, got shapes {rows[0].shape} and {new.shape}"
                )
            if self._rows:
                old = self._rows[i]
                for axis, name in ((0, "batch"), (1, "heads"), (3, "width")):
                    if new.shape[axis] != old.shape[axis]:
                        raise ValueError(
                            f"rows {i}: the cache holds {name} {old.shape[axis]}, got {name} {new.shape[axis]}"
                        )
                if new.dtype != old.dtype:
                    raise TypeError(f"rows {i}: the cache holds type {old.dtype}, got {new.dtype}")
        pos = as_positions(pos, "pos")
        batch, _, time, _ = rows[0].shape
        if pos.shape != (batch, time):
            raise ValueError(f"pos must have shape {(batch, time)} as the rows have, got {pos.shape}")
        seen = self.lengths if self._rows else np.zeros(batch, dtype=np.int64)
        check_rising(pos, seen)
        return pos


def check_rising(pos: np.ndarray, seen: np.ndarray) -> None:
    """Raise ValueError unless the positions of every row [B, T] rise from what it has seen [B]; -1 (padding) is passed
    over."""
    if (pos >= seen[:, None]).all() and (pos[:, 1:] > pos[:, :-1]).all():
        return
    before = np.maximum.accumulate(np.concatenate([seen[:, None] - 1, pos], axis=1), axis=1)[:, :-1]
    wrong = ((pos <= before) & (pos >= 0)) | (pos < -1)
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(
            f"positions must rise along each row (-1: padding): pos[{row}, {column}] is {pos[row, column]} "
            f"after {before[row, column]}"
        )


@contextmanager
def all_or_none(caches: Sequence[Cache]) -> Iterator[None]:
    """Let every cache keep what it takes in within the block or, when the block raises, none of them."""
    marks = [cache.mark() for cache in caches]

    def restore() -> None:
        for cache, mark in zip(caches, marks, strict=True):
            cache.restore(mark)

    try:
        yield
    except BaseException:  # an interrupt from the keyboard must not leave half a step behind either
        to_the_end(restore)
        raise
    finally:
        for cache in caches:
            cache.release()


def to_the_end(action: Callable[[], Any]) -> None:
    """Do what must not be left half done and may be done twice; an interrupt from the keyboard is raised after it."""
    try:
        action()
    except KeyboardInterrupt:
        to_the_end(action)
        raise


def truncate_all(caches: Sequence[Cache], length: int) -> None:
    """Let every layer's cache forget the tokens from position `length` on; when one has to refuse, none changes.

    Raises ValueError as `Cache.truncate` does.
    """
    with all_or_none(caches):
        for cache in caches:
            cache.truncate(length)


def _take_batch(rows: Array, index: np.ndarray) -> Array:
    xp = namespace(rows)
    return xp.take(rows, xp.asarray(index), axis=0)


def joined(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return positions [B, S] and [B, T] behind one another, as a new array that nobody can change."""
    return frozen(np.concatenate([old, new], axis=1) if old.size else new.copy())


def drop_from(pos: np.ndarray, length: int) -> np.ndarray:
    """Return positions with those at `length` and after replaced by -1."""
    return frozen(np.where(pos >= length, -1, pos))


def used_columns(pos: np.ndarray) -> int:
    """Count the columns of positions [B, S] up to the last one that holds a token in any row."""
    return int(np.flatnonzero((pos >= 0).any(axis=0)).max(initial=-1)) + 1


def frozen(pos: np.ndarray) -> np.ndarray:
    """Make positions read-only, so that they can be handed out without a copy."""
    pos.flags.writeable = False
    return pos
