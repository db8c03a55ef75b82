"""Who may see whom? Masks written out: for a mask, the expected value is the explanation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikv import visible


def drawn(mask: np.ndarray) -> list[str]:
    """One string per query: # where it sees the key, . where not."""
    assert mask.dtype == bool
    return ["".join("#" if seen else "." for seen in row) for row in mask]


def rows(*positions: int) -> np.ndarray:
    return np.array([positions])


def test_causal_square():
    assert drawn(visible(rows(0, 1, 2), rows(0, 1, 2))[0]) == [
        "#..",
        "##.",
        "###",
    ]


def test_new_tokens_see_what_is_remembered():
    assert drawn(visible(rows(3, 4), rows(0, 1, 2, 3, 4))[0]) == [
        "####.",
        "#####",
    ]


def test_window_counts_the_token_itself():
    assert drawn(visible(rows(0, 1, 2, 3, 4), rows(0, 1, 2, 3, 4), window=3)[0]) == [
        "#....",
        "##...",
        "###..",
        ".###.",
        "..###",
    ]


def test_window_of_one_is_the_token_itself():
    assert drawn(visible(rows(0, 1, 2), rows(0, 1, 2), window=1)[0]) == ["#..", ".#.", "..#"]


def test_stored_order_is_nothing():
    assert drawn(visible(rows(6, 7), rows(4, 5, 6, 7, 3), window=4)[0]) == [
        "###.#",
        "####.",
    ]


def test_empty_rows_are_seen_by_no_one_and_padding_sees_nothing():
    assert drawn(visible(rows(-1, 2), rows(-1, 0, -1, 1, 2))[0]) == [
        ".....",
        ".#.##",
    ]


def test_each_row_of_a_batch_has_its_own_positions():
    mask = visible(np.array([[2], [0]]), np.array([[0, 1, 2], [0, -1, -1]]))
    assert drawn(mask[0]) == ["###"] and drawn(mask[1]) == ["#.."]


@given(
    st.lists(st.integers(-1, 9), min_size=1, max_size=6),
    st.lists(st.integers(-1, 9), min_size=1, max_size=6),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_the_rule_itself(q_pos, k_pos, window):
    mask = visible(rows(*q_pos), rows(*k_pos), window)[0]
    for t, q in enumerate(q_pos):
        for s, k in enumerate(k_pos):
            assert mask[t, s] == (0 <= k <= q and (window is None or k in range(q - window + 1, q + 1)))


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_below_one_is_refused(window):
    with pytest.raises(ValueError, match=rf"window.*{window}"):
        visible(rows(0), rows(0), window)
