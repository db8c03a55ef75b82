"""Does a cache give back what it was given, through everything that can happen to it?

A state machine does to each kind of cache whatever its protocol allows, in any order, and holds it against plain Python
lists of (position, row). Rows are serial numbers spelled over heads and channels, so a row that is misplaced, lost, stale
or from another row of the batch is seen, and equality is exact. After each step the machine looks at *all* that the next
token would be shown.
"""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from minikv import ConcatCache, KVCache, RollingCache, attention
from support import assert_same, host

HEADS_AND_WIDTHS = ((2, 3), (1, 2))  # of the two arrays of rows: all sizes different, so that no axis passes for another
PADDING, PROBE = 900, 901

KINDS: dict[str, Any] = {
    "ConcatCache": ConcatCache,
    "KVCache": KVCache,
    "KVCache-of-12": lambda: KVCache(capacity=12),
    "RollingCache-of-1": lambda: RollingCache(1),
    "RollingCache-of-2": lambda: RollingCache(2),
    "RollingCache-of-5": lambda: RollingCache(5),
}


def spelled(serials: np.ndarray) -> list[np.ndarray]:
    """Write serial numbers [B, T] into rows: [B, heads, T, width], each number exact in float32."""
    rows = []
    for i, (heads, width) in enumerate(HEADS_AND_WIDTHS):
        place = 10 * np.arange(heads)[:, None, None] + np.arange(width) + 100 * i
        rows.append((1000.0 * serials[:, None, :, None] + place).astype("float32"))
    return rows


def as_dicts(pos: np.ndarray, rows: list[Any]) -> list[dict[int, int]]:
    """Read back, per row of the batch, position -> serial number; every channel must agree on it."""
    rows = [host(x) for x in rows]
    assert isinstance(pos, np.ndarray) and pos.dtype.kind == "i", "positions belong to the host"
    assert [x.shape for x in rows] == [(len(pos), h, pos.shape[1], w) for h, w in HEADS_AND_WIDTHS]
    found: list[dict[int, int]] = []
    for b in range(len(pos)):
        places = np.flatnonzero(pos[b] >= 0)
        serials = np.round(rows[0][b, 0, places, 0] / 1000).astype(int)[None]
        for x, y in zip(spelled(serials), rows, strict=True):
            assert np.array_equal(x[0], y[b][:, places]), "a row was torn apart"
        kept = dict(zip(pos[b, places].tolist(), serials[0].tolist(), strict=True))
        assert len(kept) == len(places), f"a position is there twice: {pos[b]}"
        found.append(kept)
    hidden = np.broadcast_to((pos < 0)[:, None, :, None], rows[0].shape)
    assert np.isfinite(rows[0][hidden]).all(), "an empty row holds what nobody wrote; attention would multiply by it"
    return found


class CacheMachine(RuleBasedStateMachine):
    """One cache, and for each row of its batch a plain dictionary position -> serial of all that it was ever given."""

    def __init__(self, backend: Any, kind: str) -> None:
        super().__init__()
        self.backend, self.make = backend, KINDS[kind]
        self.cache = self.make()
        self.window = getattr(self.cache, "window", None)
        self.capacity = getattr(self.cache, "capacity", None)
        self.serial = 0
        self.batch = 1
        self.fresh()

    def fresh(self) -> None:
        self.given: list[dict[int, int]] = []  # empty until the first rows come
        self.forgotten_some = False
        self.slots = 0  # columns fed since the last reset or truncation: padding takes room in a fixed capacity
        self.peak = 0

    def lengths(self) -> list[int]:
        return [max(row, default=-1) + 1 for row in self.given] or [0] * self.batch

    def put(self, cache: Any, pos: np.ndarray, serials: np.ndarray) -> list[dict[int, int]]:
        before = pos.copy()
        out = cache.extend(pos, *map(self.backend.asarray, spelled(serials)))
        assert np.array_equal(pos, before)
        pos[...] = 77  # the caller's array is the caller's
        seen = as_dicts(out[0], list(out[1:]))
        try:
            out[0][...] = 55  # and so is the one that was returned, if it can be written to at all
        except ValueError:
            pass
        return seen

    def check_seen(self, seen: list[dict[int, int]], given: list[dict[int, int]], first_new: list[int]) -> None:
        for b, (shown, all_given, first) in enumerate(zip(seen, given, first_new, strict=True)):
            assert shown.items() <= all_given.items(), f"row {b} was shown what it was not given: {shown}"
            needed = {p for p in all_given if self.window is None or p > first - self.window}
            assert needed <= shown.keys(), f"row {b} needs {sorted(needed)}, was shown {sorted(shown)}"

    def plan(self, data: st.DataObject, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Draw one step: per row some tokens, padding around them, now and then a gap in the positions."""
        width = data.draw(st.one_of(st.integers(1, 3), st.integers(1, 2 * (self.window or 4) + 2)), label="width")
        pos = np.full((len(lengths), width), -1)
        for b, length in enumerate(lengths):
            if data.draw(st.booleans(), label="ragged"):
                places = sorted(data.draw(st.sets(st.integers(0, width - 1)), label="places"))
            else:
                places = list(range(width))
            start = length + (2 if data.draw(st.integers(0, 9), label="gap") == 9 else 0)
            pos[b, places] = np.arange(start, start + len(places))
        count = int((pos >= 0).sum())
        serials = np.full(pos.shape, PADDING)
        serials[pos >= 0] = np.arange(self.serial, self.serial + count) % PADDING
        self.serial += count
        return pos, serials

    @initialize(batch=st.integers(1, 3))
    def choose_batch(self, batch: int) -> None:
        self.batch = batch

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        pos, serials = self.plan(data, self.lengths())
        if self.capacity is not None and self.slots + pos.shape[1] > self.capacity:
            with pytest.raises(ValueError, match=rf"{self.capacity}.*{self.slots + pos.shape[1]}"):
                self.put(self.cache, pos, serials)
            return
        first_new = [min((p for p in row if p >= 0), default=length) for row, length in zip(pos, self.lengths(), strict=True)]
        given = [dict(row) for row in self.given] or [{} for _ in pos]
        for b, row in enumerate(pos):
            given[b] |= {int(p): int(s) for p, s in zip(row, serials[b], strict=True) if p >= 0}
        self.slots += pos.shape[1]
        self.check_seen(self.put(self.cache, pos, serials), given, first_new)
        self.given = given
        self.peak = max(self.peak, max(self.lengths()))

    @rule(data=st.data(), wrong=st.sampled_from(["repeat", "backwards", "batch", "width", "heads", "dtype", "count", "pos"]))
    def refused(self, data: st.DataObject, wrong: str) -> None:
        if not self.given and wrong in ("batch", "width", "heads", "dtype", "count"):
            return
        lengths = self.lengths()
        batch = len(lengths) + (wrong == "batch")
        pos = np.tile(np.array([100, 101]), (batch, 1))
        rows = spelled(np.full(pos.shape, 999))
        if wrong == "repeat":
            pos[-1] = [100, 100]
        elif wrong == "backwards":
            pos[-1] = [lengths[-1] - 1, 100] if lengths[-1] else [3, 2]
        elif wrong == "width":
            rows[1] = rows[1][..., :1]
        elif wrong == "heads":
            rows[0] = rows[0][:, :1]
        elif wrong == "dtype":
            rows[1] = rows[1].astype("float64")
        elif wrong == "count":
            rows = rows[:1]
        elif wrong == "pos":
            pos = pos[:, :1]
        with pytest.raises((ValueError, TypeError)) as caught:
            self.cache.extend(pos, *map(self.backend.asarray, rows))
        assert "\n" not in str(caught.value)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, max(self.lengths())))
        try:
            self.cache.truncate(length)
        except ValueError as refusal:
            # Only a cache that forgets may refuse, and only when the text has outgrown its window.
            assert self.window is not None and self.peak > self.window and length < max(self.lengths()), refusal
            return
        self.given = [{p: s for p, s in row.items() if p < length} for row in self.given]
        if self.capacity is not None:
            # Whether padding in front of the cut still takes room is the storage's matter: count again from there.
            self.slots = self.cache.nbytes and self.used_slots()

    def used_slots(self) -> int:
        """Columns in use: what a copy can still take tells."""
        free = 0
        while free < self.capacity:
            twin = self.cache.copy()
            pos = np.tile(np.arange(100, 101 + free), (len(self.given), 1))
            try:
                twin.extend(pos, *map(self.backend.asarray, spelled(np.full(pos.shape, PROBE))))
            except ValueError:
                break
            free += 1
        return self.capacity - free

    @rule(beyond=st.integers(1, 3))
    def truncate_beyond(self, beyond: int) -> None:
        length = max(self.lengths())
        with pytest.raises(ValueError, match=rf"{length + beyond}.*{length}"):
            self.cache.truncate(length + beyond)
        with pytest.raises(ValueError, match="-1"):
            self.cache.truncate(-1)

    @rule(batch=st.integers(1, 3))
    def reset(self, batch: int) -> None:
        self.cache.reset()
        self.batch = batch
        self.fresh()
        assert self.cache.nbytes == self.make().nbytes and self.cache.length == 0

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        twin = self.cache.copy()
        assert type(twin) is type(self.cache)
        if data.draw(st.booleans(), label="go on with the copy"):
            twin, self.cache = self.cache, twin
        pos = np.full((len(self.given), 3), -1)
        for b, length in enumerate(self.lengths()):
            pos[b] = np.arange(length, length + 3)
        if self.capacity is None or self.slots + 3 <= self.capacity:
            self.put(twin, pos, np.full(pos.shape, PROBE))
        twin.reset()

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        order = data.draw(st.lists(st.integers(0, len(self.given) - 1), min_size=1, max_size=3))
        self.cache.reorder(order)
        self.given = [dict(self.given[b]) for b in order]

    @precondition(lambda self: self.given)
    @rule(wrong=st.sampled_from([[-1], [3], [0, 7], [], [0.5]]))
    def reorder_refused(self, wrong: list[Any]) -> None:
        with pytest.raises((ValueError, TypeError)):
            self.cache.reorder(wrong)

    @precondition(lambda self: self.given)
    @rule(data=st.data())
    def step_that_fails(self, data: st.DataObject) -> None:
        """A step marks every cache, extends some, and goes back."""
        mark = self.cache.mark()
        pos, serials = self.plan(data, self.lengths())
        if self.capacity is None or self.slots + pos.shape[1] <= self.capacity:
            self.put(self.cache, pos, np.where(serials == PADDING, PADDING, PROBE))
        self.cache.restore(mark)

    @invariant()
    def lengths_agree(self) -> None:
        assert self.cache.length == max(self.lengths())
        if self.given:
            assert np.asarray(self.cache.lengths).tolist() == self.lengths()

    @invariant()
    def the_next_token_sees_what_it_should(self) -> None:
        if not self.given or (self.capacity is not None and self.slots == self.capacity):
            return
        lengths = self.lengths()
        pos = np.array(lengths)[:, None]
        given = [row | {length: PROBE} for row, length in zip(self.given, lengths, strict=True)]
        self.check_seen(self.put(self.cache.copy(), pos, np.full(pos.shape, PROBE)), given, lengths)

    @invariant()
    def bytes_add_up(self) -> None:
        per_token = sum(heads * width * 4 for heads, width in HEADS_AND_WIDTHS)
        assert 0 <= self.cache.nbytes_used <= self.cache.nbytes
        if not self.given:
            return
        tokens = sum(map(len, self.given))
        if self.window is None:
            assert self.cache.nbytes_used >= tokens * per_token
        else:
            assert self.cache.nbytes <= self.window * len(self.given) * per_token, "memory is constant"


@pytest.mark.parametrize("kind", KINDS)
def test_any_life_of_a_cache(backend, kind):
    steps = 20 if settings().max_examples <= 100 else 50
    run_state_machine_as_test(lambda: CacheMachine(backend, kind), settings=settings(stateful_step_count=steps))
