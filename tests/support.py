"""What do the tests share: the tolerance, arrays filled from a seed, ways to feed a text to a model?

The structures that Hypothesis draws are in `strategies.py`, the expected numbers in `oracle.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import minikv
import oracle
from minikv.config import ModelConfig, weight_shapes

TOLERANCE = 32  # times eps · max|expected|: what rounding alone may do, with room; a fault does far more


def host(x: Any) -> np.ndarray:
    """Bring an array of any library to NumPy, for comparison."""
    if isinstance(x, np.ndarray):
        return x
    return x.get() if hasattr(x, "get") else np.asarray(x)


def assert_close(actual: Any, expected: np.ndarray, dtype: str | None = None, tolerance: float = TOLERANCE) -> None:
    """Demand |actual - expected| <= tolerance · eps(dtype) · max|expected|, and everything finite."""
    actual = host(actual)
    if dtype is not None:
        assert actual.dtype == dtype, f"computed in {actual.dtype}, expected {dtype}"
    assert actual.shape == np.shape(expected), f"shape {actual.shape}, expected {np.shape(expected)}"
    if actual.size == 0:
        return
    assert np.isfinite(actual).all(), "not everything is finite"
    unit = np.finfo(actual.dtype).eps * max(np.abs(expected).max(), np.finfo(np.float32).tiny)
    error = np.abs(actual.astype(np.float64) - expected).max() / unit
    assert error <= tolerance, f"off by {error:.3g} eps · max|expected|, {tolerance} are allowed"


def assert_same(actual: Any, expected: Any) -> None:
    """Demand equal bits, shape and dtype."""
    actual, expected = host(actual), host(expected)
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert np.array_equal(actual, expected)


def normal(seed: int, *shape: int) -> np.ndarray:
    """Fill a float64 array from a seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def make_weights(config: ModelConfig, seed: int, dtype: str = "float64") -> dict[str, np.ndarray]:
    """Draw weights in which every part of the model shows: norms, biases and sinks far from their initial values."""
    rng, weights = np.random.default_rng(seed), {}
    for name, shape in weight_shapes(config).items():
        x = rng.standard_normal(shape)
        if name.endswith("_bias"):
            x = 0.5 * x
        elif name.endswith("norm"):
            x = 1 + 0.4 * x
        elif name.endswith(("sinks", "router_correction")):
            x = 0.3 * x
        elif name not in ("embed", "positions"):
            x = x / np.sqrt(shape[-1])
            if name.endswith(("qkv", ".q", "q_b", "kv_b", "router")):
                x = 2 * x  # attention and routing that prefer something
        weights[name] = x.astype(dtype)
    return weights


def make_model(config: ModelConfig, weights: dict[str, np.ndarray], backend: Any) -> minikv.Model:
    """Build a model of these weights in one array library."""
    return minikv.Model(config, {name: backend.asarray(w) for name, w in weights.items()})


def expected_logits(
    config: ModelConfig, weights: dict[str, np.ndarray], texts: list[list[int]], least_margin: float = 0.0
) -> list[np.ndarray] | None:
    """Ask the oracle for every text; None when an expert was chosen by less than `least_margin` somewhere.

    Such a choice is a coin toss of rounding, and no tolerance is right for its outcome.
    """
    model = oracle.Model(config.to_dict(), weights)
    logits = [model.logits(text) for text in texts]
    return None if min(model.margins, default=1.0) < least_margin else logits


@dataclass
class Feed:
    """A batch of texts and the steps that feed it: per step the positions [B, T], -1 where a row is only padding."""

    texts: list[list[int]]
    steps: list[np.ndarray]
    explicit: bool = True  # whether the positions are passed to `step`, or left to its default
    pad_token: int = 0

    def tokens(self, pos: np.ndarray) -> np.ndarray:
        """Token ids [B, T] of one step."""
        rows = [[text[p] if p >= 0 else self.pad_token for p in row] for text, row in zip(self.texts, pos, strict=True)]
        return np.array(rows, dtype=np.int64)


def run(model: minikv.Model, caches: list[Any] | None, feed: Feed) -> list[np.ndarray]:
    """Feed every step; returns each text's logits [its length, vocab], whatever batch and steps they came in."""
    vocab = model.config.vocab_size
    found = [np.full((len(text), vocab), np.nan) for text in feed.texts]
    out: np.ndarray = np.zeros(0)
    for pos in feed.steps:
        out = host(model.step(feed.tokens(pos), caches, pos if feed.explicit else None))
        for b, row in enumerate(pos):
            for t, p in enumerate(row):
                if p >= 0:
                    found[b][p] = out[b, t]
    return [rows.astype(out.dtype) for rows in found]
