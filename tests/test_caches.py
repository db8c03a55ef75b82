"""Does a cache give back what it was given, through everything that can happen to it?

A state machine does to each kind of cache whatever its protocol allows, in any order, and holds it against plain
dictionaries from position to row. Rows are serial numbers spelled over heads and channels, so a row that is misplaced,
lost, stale or from another row of the batch is seen, and equality is exact. After each step the machine looks at *all*
that the next token would be shown.
"""

from __future__ import annotations

import contextlib
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from minikv import ConcatCache, KVCache, RollingCache, attention
from minikv.caches import all_or_none
from minikv.caches.contiguous import AHEAD, ContiguousCache
from minikv.rope import rope_tables, rotate
from strategies import WINDOWS, chunkings
from support import assert_same, host

HEADS_AND_WIDTHS = (
    (2, 3),
    (1, 2),
)  # of the two arrays of rows: all sizes different, so that no axis passes for another
PADDING, PROBE = 900, 901

KINDS: dict[str, Any] = {
    "ConcatCache": ConcatCache,
    "KVCache": KVCache,
    "KVCache-of-12": lambda: KVCache(capacity=12),
    "ContiguousCache": ContiguousCache,
    "ContiguousCache-of-12": lambda: ContiguousCache(capacity=12),
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
    ahead = np.broadcast_to((pos == AHEAD)[:, None, :, None], rows[0].shape)
    assert (rows[0][ahead] == 0).all(), "a slot that no token has reached holds something"
    for b in range(len(pos)):
        places = np.flatnonzero((pos[b] >= 0) & (pos[b] < AHEAD))
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
        with contextlib.suppress(ValueError):  # and so is the one that was returned, if it can be written to at all
            out[0][...] = 55
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
        first_new = [
            min((p for p in row if p >= 0), default=length) for row, length in zip(pos, self.lengths(), strict=True)
        ]
        given = [dict(row) for row in self.given] or [{} for _ in pos]
        for b, row in enumerate(pos):
            given[b] |= {int(p): int(s) for p, s in zip(row, serials[b], strict=True) if p >= 0}
        self.slots += pos.shape[1]
        self.check_seen(self.put(self.cache, pos, serials), given, first_new)
        self.given = given
        self.peak = max(self.peak, max(self.lengths()))

    @rule(
        data=st.data(),
        wrong=st.sampled_from(["repeat", "backwards", "batch", "width", "heads", "dtype", "count", "pos"]),
    )
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
        """A step marks every cache, extends some, perhaps in several pieces, and goes back."""
        mark = self.cache.mark()
        pos, serials = self.plan(data, self.lengths())
        if self.capacity is None or self.slots + pos.shape[1] <= self.capacity:
            probes = np.where(serials == PADDING, PADDING, PROBE)
            cut = data.draw(st.integers(0, pos.shape[1]))
            for piece in (slice(0, cut), slice(cut, None)):
                if pos[:, piece].size:
                    self.put(self.cache, pos[:, piece], probes[:, piece])
        self.cache.restore(mark)
        self.cache.release()

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


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_a_ring_goes_back_where_nothing_that_it_needs_is_lost_and_nowhere_else(window):
    """Once a token is lost it goes back by one, if that leaves it any, or to nothing."""
    for seen in range(1, 3 * window + 2):
        for length in range(seen):
            cache = RollingCache(window)
            for position in range(seen):
                cache.extend([[position]], *spelled(np.array([[position]])))
            if seen <= window or length == 0 or (length == seen - 1 and window > 1):
                cache.truncate(length)
                pos, *rows = cache.extend([[length]], *spelled(np.array([[length]])))
                shown = as_dicts(pos, rows)[0]
                assert {p: p for p in range(max(0, length + 1 - window), length + 1)}.items() <= shown.items()
            else:
                with pytest.raises(ValueError, match="forgotten"):
                    cache.truncate(length)


@pytest.mark.parametrize("capacity", [None, 9])
def test_slots_in_the_future_hold_zeros_whatever_stood_there(capacity):
    """Nobody masks them for what they hold: attention multiplies by what a later token will see."""

    def step(*positions: int) -> np.ndarray:
        pos, row, _ = cache.extend([positions], *spelled(np.full((1, len(positions)), np.nan)))
        assert pos.shape[1] == row.shape[2] == cache._rows[0].shape[2]
        assert (row[0, 0, pos[0] == AHEAD] == 0).all() and np.isnan(row[0, 0, pos[0] < AHEAD]).all()
        return pos[0, pos[0] < AHEAD]

    cache = ContiguousCache(capacity)
    assert step(0, 1, 2, 3, 4).tolist() == [0, 1, 2, 3, 4]
    assert step(5).tolist() == [0, 1, 2, 3, 4, 5]
    cache.truncate(2)
    assert step(2).tolist() == [0, 1, 2]
    mark = cache.mark()
    step(3, 4, 5)
    cache.restore(mark)
    assert step(3).tolist() == [0, 1, 2, 3]
    assert cache.copy().extend([[4]], *spelled(np.ones((1, 1))))[0][0, :5].tolist() == [0, 1, 2, 3, 4]


# Two exact probes, through every cache.

STORAGES: dict[str, Any] = {
    "ConcatCache": lambda window, length: ConcatCache(),
    "KVCache": lambda window, length: KVCache(),
    "KVCache of fixed capacity": lambda window, length: KVCache(capacity=length),
    "RollingCache": lambda window, length: RollingCache(window),
    "RollingCache with room to spare": lambda window, length: RollingCache(window + 2),
}


def steps_of(chunks: list[int]) -> list[np.ndarray]:
    """Positions [1, T] of each step."""
    ends = np.cumsum(chunks)
    return [np.arange(end - size, end)[None] for end, size in zip(ends, chunks, strict=True)]


def who_sees_whom(backend: Any, cache: Any, steps: list[np.ndarray], window: int | None, **options: Any) -> np.ndarray:
    """Read the effective mask back out: with q = 0 and one-hot values each output is 1/n on exactly the n keys seen."""
    length = int(max(pos.max() for pos in steps)) + 1
    seen = np.zeros((length, length))
    for pos in steps:
        rows = np.zeros((1, 1, pos.shape[1], 2)), np.eye(length)[pos[0]][None, None]
        k_pos, k, v = cache.extend(pos, *map(backend.asarray, rows))
        seen[pos[0]] = host(
            attention(backend.asarray(rows[0]), k, v, q_pos=pos, k_pos=k_pos, window=window, **options)
        )[0, 0]
    return seen


@given(
    storage=st.sampled_from(sorted(STORAGES)), window=WINDOWS, block_size=st.sampled_from([None, 1, 2]), data=st.data()
)
def test_visibility_through_every_cache(backend, storage, window, block_size, data):
    length = data.draw(st.integers(1, 3 * window + 2))
    chunks = data.draw(chunkings(length, window))
    seen = who_sees_whom(backend, STORAGES[storage](window, length), steps_of(chunks), window, block_size=block_size)
    expected = np.zeros((length, length))
    for t in range(length):
        first = max(0, t - window + 1)
        expected[t, first : t + 1] = 1 / (t + 1 - first)
    if block_size is None:
        assert np.array_equal(seen, expected)
    else:  # a row merged from tiles is a sum of shares, each rounded
        assert np.array_equal(seen > 0, expected > 0) and np.abs(seen - expected).max() < 1e-15


@given(storage=st.sampled_from(sorted(STORAGES)), window=WINDOWS, data=st.data())
def test_position_through_every_cache(backend, storage, window, data):
    """A head of width 2 with one frequency f scores token i against token j with cos((i - j) f)."""
    frequency, length = 0.1, data.draw(st.integers(1, 3 * window + 2))
    cache = STORAGES[storage](window, length)
    for pos in steps_of(data.draw(chunkings(length, window))):
        cos, sin = rope_tables(pos, np.array([frequency]))
        ones = np.zeros((1, 1, pos.shape[1], 2))
        ones[..., 0] = 1
        rotated = rotate(*map(backend.asarray, (ones, cos, sin)))
        k_pos, k, v = cache.extend(pos, rotated, backend.asarray(np.eye(length)[pos[0]][None, None]))
        weights = host(attention(rotated, k, v, q_pos=pos, k_pos=k_pos, window=window, scale=1.0))[0, 0]
        for t, i in enumerate(pos[0]):
            distance = np.arange(min(i + 1, window))
            scores = np.log(weights[t, i - distance]) - np.log(weights[t, i])
            assert np.abs(scores - (np.cos(distance * frequency) - 1)).max() < 1e-14


# Faults that real projects shipped.


@pytest.mark.parametrize("kind", ["ConcatCache", "KVCache", "RollingCache"])
@pytest.mark.parametrize("chunks", [[16], [7, 9], [1, 15], [15, 1], [5, 5, 6], [1] * 16, [3, 3, 3, 3, 4]])
def test_mask_is_not_square_over_the_new_tokens_only(backend, kind, chunks):
    seen = who_sees_whom(backend, STORAGES[kind](16, 16), steps_of(chunks), None)
    assert np.array_equal(seen > 0, np.tril(np.ones((16, 16), bool)))


def test_oldest_key_is_not_dropped_by_the_step_that_only_fills_the_buffer(backend):
    seen = who_sees_whom(backend, RollingCache(8), steps_of([7, 1, 1]), 8)
    assert seen[7, 0] > 0 and seen[8, 0] == 0 and seen[8, 1] > 0


def test_first_rows_of_a_chunk_keep_what_they_see(backend):
    seen = who_sees_whom(backend, RollingCache(4), steps_of([6, 6]), 4)
    assert np.flatnonzero(seen[6]).tolist() == [3, 4, 5, 6]
    assert np.flatnonzero(seen[7]).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_chunk_of_any_size_overwrites_nothing_that_it_needs(backend, window):
    length = 4 * window + 3
    for chunk in range(1, length + 1):
        chunks = [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])
        seen = who_sees_whom(backend, RollingCache(window), steps_of(chunks), window)
        assert [int((row > 0).sum()) for row in seen] == [min(t + 1, window) for t in range(length)]


def test_second_prompt_lands_right_in_a_rotated_ring(backend):
    def fed(chunks):
        cache = RollingCache(8)
        for pos in steps_of(chunks):
            out = cache.extend(pos, *map(backend.asarray, spelled(pos)))
        out = cache.extend([[sum(chunks)]], *map(backend.asarray, spelled(np.array([[sum(chunks)]]))))
        return as_dicts(out[0], list(out[1:]))

    turns = [5, *[1] * 6, 4, *[1] * 7, 12]
    assert fed(turns) == fed([1] * sum(turns)) == fed([sum(turns)]) == [{p: p for p in range(27, 35)}]


def test_padding_takes_no_room_in_a_rolling_window(backend):
    cache = RollingCache(4)
    pos = np.array([[-1] * 6 + [0, 1, 2], list(range(9))])
    cache.extend(pos, *map(backend.asarray, spelled(np.where(pos < 0, PADDING, pos))))
    out = cache.extend([[3], [9]], *map(backend.asarray, spelled(np.array([[3], [9]]))))
    assert as_dicts(out[0], list(out[1:])) == [{p: p for p in range(4)}, {p: p for p in range(6, 10)}]


@pytest.mark.parametrize("kind", KINDS)
def test_positions_returned_are_nobodys_alias(backend, kind):
    cache = KINDS[kind]()
    mine = np.array([[0, 1, 2]])
    out = cache.extend(mine, *map(backend.asarray, spelled(mine)))
    snapshot, before = out[0], out[0].copy()
    mine += 100
    cache.extend([[3]], *map(backend.asarray, spelled(np.array([[3]]))))
    cache.truncate(cache.length)
    assert np.array_equal(snapshot, before)


@pytest.mark.parametrize("kind", ["ConcatCache", "KVCache", "RollingCache"])
def test_old_rows_are_bit_identical_from_step_to_step(backend, kind):
    cache, rng = STORAGES[kind](20, 20), np.random.default_rng(0)
    given = [rng.standard_normal((1, heads, 20, width)) for heads, width in HEADS_AND_WIDTHS]
    for pos in steps_of([3, 1, 1, 8, 1, 6]):
        k_pos, *rows = cache.extend(pos, *(backend.asarray(np.ascontiguousarray(x[:, :, pos[0]])) for x in given))
        order = np.argsort(k_pos[0])
        assert k_pos[0, order].tolist() == list(range(pos.max() + 1))
        for row, x in zip(rows, given, strict=True):
            assert np.array_equal(host(row)[:, :, order], x[:, :, : pos.max() + 1])


@pytest.mark.parametrize("kind", KINDS)
def test_reordering_takes_everything_along(backend, kind):
    cache = KINDS[kind]()
    pos = np.array([[0, 1, 2], [-1, 0, 1]])
    serials = np.array([[10, 11, 12], [PADDING, 20, 21]])
    cache.extend(pos, *map(backend.asarray, spelled(serials)))
    cache.reorder([1, 0, 1])
    assert np.asarray(cache.lengths).tolist() == [2, 3, 2]
    out = cache.extend([[2], [3], [2]], *map(backend.asarray, spelled(np.array([[30], [31], [32]]))))
    first, second = {0: 20, 1: 21}, {0: 10, 1: 11, 2: 12}
    window = getattr(cache, "window", None) or 99
    expected = [first | {2: 30}, second | {3: 31}, first | {2: 32}]
    for found, wanted in zip(as_dicts(out[0], list(out[1:])), expected, strict=True):
        newest = max(wanted)
        assert found == {p: s for p, s in wanted.items() if p > newest - window}


def test_rollback_behind_a_forgotten_window_is_refused(backend):
    cache = RollingCache(8)
    for pos in steps_of([1] * 20):
        cache.extend(pos, *map(backend.asarray, spelled(pos)))
    with pytest.raises(ValueError, match=r"\b4\b.*\b8\b"):
        cache.truncate(4)
    assert cache.length == 20
    out = cache.extend([[20]], *map(backend.asarray, spelled(np.array([[20]]))))
    assert as_dicts(out[0], list(out[1:])) == [{p: p for p in range(13, 21)}]


@pytest.mark.parametrize("kind", ["ConcatCache", "KVCache", "KVCache-of-12", "RollingCache-of-5"])
def test_truncate_to_nothing_and_beyond(backend, kind):
    cache = KINDS[kind]()
    cache.extend([[0, 1, 2]], *map(backend.asarray, spelled(np.array([[0, 1, 2]]))))
    with pytest.raises(ValueError, match=r"\b7\b.*\b3\b"):
        cache.truncate(7)
    cache.truncate(2)
    assert cache.length == 2
    cache.truncate(0)
    assert cache.length == 0
    out = cache.extend([[0]], *map(backend.asarray, spelled(np.array([[5]]))))
    assert as_dicts(out[0], list(out[1:])) == [{0: 5}]


@pytest.mark.parametrize("kind", ["ConcatCache", "KVCache", "KVCache-of-12", "RollingCache-of-5"])
def test_trimmed_tokens_never_come_back(backend, kind):
    cache, other = KINDS[kind](), KINDS[kind]()
    tail = [np.full_like(x, np.nan) for x in spelled(np.array([[2, 3]]))]
    cache.extend([[0, 1]], *map(backend.asarray, spelled(np.array([[0, 1]]))))
    cache.extend([[2, 3]], *map(backend.asarray, tail))
    cache.truncate(2)
    other.extend([[0, 1]], *map(backend.asarray, spelled(np.array([[0, 1]]))))
    for step in ([[2]], [[3, 4, 5]], [[6]]):
        a, b = (c.extend(step, *map(backend.asarray, spelled(np.array(step)))) for c in (cache, other))
        assert as_dicts(a[0], list(a[1:])) == as_dicts(b[0], list(b[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_after_reset_a_cache_is_as_new(backend, kind):
    used, fresh = KINDS[kind](), KINDS[kind]()
    for pos in steps_of([3, 1, 4]):
        used.extend(pos, *map(backend.asarray, spelled(pos)))
    used.reset()
    assert (used.length, used.nbytes, used.nbytes_used) == (0, 0, 0) == (fresh.length, fresh.nbytes, fresh.nbytes_used)
    wider = [np.ones((3, 4, 2, 5)), np.ones((3, 4, 2, 5))]  # another batch, width and type: nothing of the old is left
    for step in ([[0, 1]] * 3, [[2, 3]] * 3):
        a, b = (c.extend(step, *map(backend.asarray, wider)) for c in (used, fresh))
        assert np.array_equal(a[0], b[0]) and used.nbytes == fresh.nbytes
        for x, y in zip(a[1:], b[1:], strict=True):
            assert_same(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_used_three_times_never_changes(backend, kind):
    prefix = KINDS[kind]()
    prefix.extend([[0, 1, 2, 3]], *map(backend.asarray, spelled(np.arange(4)[None])))
    first = None
    for start in (10, 20, 30):
        turn = prefix.copy()
        serials = np.arange(start, start + 3)[None]
        turn.extend([[4, 5, 6]], *map(backend.asarray, spelled(serials)))
        turn.extend([[7]], *map(backend.asarray, spelled(serials[:, :1])))
        out = prefix.copy().extend([[4]], *map(backend.asarray, spelled(np.array([[PROBE]]))))
        found = as_dicts(out[0], list(out[1:]))
        assert prefix.length == 4 and found == (first or found)
        first = found


def test_writing_past_capacity_is_refused(backend):
    cache = KVCache(capacity=4)
    cache.extend([[0, 1, 2, 3]], *map(backend.asarray, spelled(np.arange(4)[None])))
    with pytest.raises(ValueError, match=r"\b4\b.*\b5\b"):
        cache.extend([[4]], *map(backend.asarray, spelled(np.array([[4]]))))
    assert cache.length == 4
    cache.truncate(3)
    out = cache.extend([[3]], *map(backend.asarray, spelled(np.array([[9]]))))
    assert as_dicts(out[0], list(out[1:])) == [{0: 0, 1: 1, 2: 2, 3: 9}]


@pytest.mark.parametrize("kind", KINDS)
def test_an_all_zero_key_still_counts(backend, kind):
    cache, zeros = KINDS[kind](), np.zeros((1, 1, 1, 2))
    for p in range(4):
        k_pos, k, v = cache.extend([[p]], *map(backend.asarray, (zeros, zeros + p)))
    out = attention(backend.asarray(zeros), k, v, q_pos=np.array([[3]]), k_pos=k_pos)
    kept = min(4, getattr(cache, "window", None) or 4)
    assert host(out)[0, 0, 0, 0] == np.arange(4 - kept, 4).mean()


@pytest.mark.parametrize("wrong", [0, -2])
def test_sizes_below_one_are_refused(wrong):
    with pytest.raises(ValueError, match=f"window.*{wrong}"):
        RollingCache(wrong)
    with pytest.raises(ValueError, match=f"capacity.*{wrong}"):
        KVCache(capacity=wrong)


# Memory.


def test_appending_copies_an_amortised_constant():
    """Bytes copied by growth over n appends: buffers that were replaced, each copied once."""
    cache, row, copied, stored = KVCache(), np.ones((1, 2, 1, 8), "float32"), 0, 0
    for p in range(1000):
        used, owned = cache.nbytes_used, cache.nbytes
        cache.extend([[p]], row)
        stored += row.nbytes
        copied += row.nbytes + (used if cache.nbytes != owned else 0)
        assert cache.nbytes <= 2 * stored
    assert copied <= 3 * stored


def test_a_truncated_concatenation_keeps_no_larger_array_alive(backend):
    cache, row = ConcatCache(), np.ones((1, 2, 100, 8), "float32")
    cache.extend(np.arange(100)[None], backend.asarray(row))
    cache.truncate(1)
    _, rows = cache.extend([[1]], backend.asarray(row[:, :, :1]))
    assert cache.nbytes == cache.nbytes_used == 2 * row.nbytes // 100
    if backend.name == "numpy":
        assert rows.base is None or rows.base.nbytes == rows.nbytes


def test_a_step_of_a_few_tokens_copies_no_whole_ring():
    cache, row = RollingCache(4096), np.ones((1, 2, 3, 64), "float32")
    cache.extend([[0, 1, 2]], row)
    tracemalloc.start()
    for start in range(3, 30, 3):
        cache.extend([range(start, start + 3)], row)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4096 * row.nbytes / 3 / 10, "a small part of the ring"


@pytest.mark.parametrize("make", [lambda: KVCache(capacity=1200), lambda: RollingCache(16)])
def test_memory_of_a_preallocated_cache_is_flat(make):
    cache, row = make(), np.ones((1, 2, 1, 64), "float32")
    for p in range(200):
        cache.extend([[p]], row, row)
    tracemalloc.start()
    base, _ = tracemalloc.get_traced_memory()
    for p in range(200, 1200):
        cache.extend([[p]], row, row)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    owned = cache.nbytes
    assert peak - base < 1200 * row.nbytes / 4, "a small part of what was appended"
    assert cache.nbytes == owned


def test_a_rolling_cache_that_has_forgotten_much_can_still_forget_everything(backend):
    """An empty history misses nothing, so a truncation to 0 is exact after any wrap, and what follows starts afresh."""
    rows = backend.asarray(np.arange(12.0).reshape(1, 1, 12, 1))
    cache = RollingCache(4)
    cache.extend([list(range(12))], rows)
    with pytest.raises(ValueError, match="cannot truncate to length 5"):
        cache.truncate(5)
    cache.truncate(0)
    assert cache.length == 0
    pos, _ = cache.extend([[0, 1]], rows[:, :, :2, :])
    assert sorted(pos[pos >= 0].tolist()) == [0, 1]
    cache.truncate(1)
    assert cache.length == 1


@pytest.mark.parametrize("positions", [(100, 101), range(4, 14)], ids=["with a gap", "more than twice around"])
def test_a_failed_step_of_many_pieces_is_undone_in_the_ring(backend, positions):
    """A piece writes over what the one before it wrote, or over what that one has forgotten by its position alone."""
    cache = RollingCache(4)
    cache.extend([[0, 1, 2, 3]], *map(backend.asarray, spelled(np.arange(4)[None])))
    mark = cache.mark()
    for p in positions:
        cache.extend([[p]], *map(backend.asarray, spelled(np.array([[PROBE]]))))
    cache.restore(mark)
    cache.release()
    out = cache.extend([[4]], *map(backend.asarray, spelled(np.array([[4]]))))
    assert as_dicts(out[0], list(out[1:])) == [{p: p for p in range(1, 5)}]


def test_an_interrupt_while_a_failed_step_is_undone_comes_after_it():
    interrupts = [KeyboardInterrupt]

    class Interrupted(KVCache):
        def restore(self, mark: dict[str, Any]) -> None:
            super().restore(mark)
            if interrupts:
                raise interrupts.pop()

    caches = [Interrupted(), RollingCache(2), KVCache()]
    with pytest.raises(KeyboardInterrupt), all_or_none(caches):
        for cache in caches:
            cache.extend([[0, 1]], *spelled(np.array([[0, 1]])))
        raise ValueError
    assert [cache.length for cache in caches] == [0, 0, 0]
