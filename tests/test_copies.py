"""Which operands of its products would CuPy copy, though nobody asked?

CuPy's `matmul` makes every operand of a product of *stacks* contiguous first; a product of two matrices takes them
transposed or not, but contiguous either way (`matmul`, `tensordot_core` and `_mat_to_cublas_contiguous` in its
_routines_linalg.pyx). The rule needs no device: here it is applied to the products of NumPy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from minikv import KVCache, Model, ModelConfig, mla, random_model
from minikv import model as model_
from test_host_copies import EVERYTHING
from test_model import SMALL, TEXT

STACKS = {
    **EVERYTHING,
    "plain": ModelConfig(**SMALL),
    "one key/value head": replace(ModelConfig(**SMALL), n_kv_heads=1),
}


@pytest.fixture
def like_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the package believe that NumPy copies slices."""
    monkeypatch.setattr(mla, "copies_slices", lambda array: True)
    monkeypatch.setattr(model_, "copies_slices", lambda array: True)


@contextmanager
def copied() -> Iterator[list[np.ndarray]]:
    """Collect the operands that CuPy would copy."""
    found: list[np.ndarray] = []
    matmul = np.matmul

    def watched(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        stacks = max(a.ndim, b.ndim) > 2
        for x in (a, b):
            if not (x.flags.c_contiguous or (x.flags.f_contiguous and not stacks)):
                found.append(x)
        return matmul(a, b)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "matmul", watched)
        yield found


def kept(model: Model, caches: list[Any]) -> list[np.ndarray]:
    """All that stays from step to step: weights, and the rows of caches."""
    return [*model.weights.values(), *(rows for cache in caches for rows in cache._rows)]


def decode(model: Model, kind: Any, batch: int) -> int:
    """Prefill, then bytes that CuPy would copy of weights and caches in three steps of decode behind a full window."""
    caches = model.new_caches(kind)
    for _ in range(3):
        model.step([TEXT] * batch, caches, last=1)
    with copied() as found:
        for _ in range(3):
            model.step([[5]] * batch, caches, last=1)
    stays = kept(model, caches)
    return sum(x.nbytes for x in found if any(np.shares_memory(x, y) for y in stays))


@pytest.mark.parametrize("batch", [1, 2, 5])
@pytest.mark.parametrize("name", STACKS)
def test_decode_copies_neither_weights_nor_caches(name: str, batch: int, like_cupy: None) -> None:
    config = STACKS[name]
    assert decode(random_model(config, seed=1), None, batch) == 0


@pytest.mark.parametrize("name", ["plain", "latent, experts"])
def test_the_rule_finds_the_copies_of_a_sliced_cache(name: str) -> None:
    model = random_model(STACKS[name], seed=1)
    sliced = decode(model, KVCache, 2)
    heads = sum(heads * width for heads, width in model.config.cache_rows) * 8
    assert sliced >= heads * model.config.n_layers * 2 * 3 * len(TEXT)
