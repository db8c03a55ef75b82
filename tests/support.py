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


def assert_close(
    actual: Any,
    expected: np.ndarray,
    dtype: str | None = None,
    tolerance: float = TOLERANCE,
    scale: float | None = None,
) -> None:
    """Demand |actual - expected| <= tolerance · eps(dtype) · scale, max|expected| by default, and everything finite."""
    actual = host(actual)
    if dtype is not None:
        assert actual.dtype == dtype, f"computed in {actual.dtype}, expected {dtype}"
    assert actual.shape == np.shape(expected), f"shape {actual.shape}, expected {np.shape(expected)}"
    if actual.size == 0:
        return
    assert np.isfinite(actual).all(), "not everything is finite"
    scale = np.abs(expected).max() if scale is None else scale
    allowed = tolerance * np.finfo(actual.dtype).eps * scale
    error = np.abs(actual.astype(np.float64) - expected).max()
    assert error <= allowed, f"off by {error:.3g}, {allowed:.3g} is allowed"


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
    config: ModelConfig,
    weights: dict[str, np.ndarray],
    texts: list[list[int]],
    positions: list[int] | None = None,
) -> tuple[list[np.ndarray], float] | None:
    """Ask the oracle for the logits of every text, and for the scale of what rounding does to them.

    A stack of norms magnifies roundings where a vector happens to be small, and no arithmetic can help that. So the
    scale is max|logits| or, where it is larger, how much the logits change per relative change of the weights.
    (Measured over 3,000 drawn models, float32 and float64: the worst error is 90 eps · max|logits|, but 4.3 eps of this
    scale.)

    None when an expert was chosen by a margin so small that rounding decides: no tolerance is right for its outcome.
    """
    model = oracle.Model(config.to_dict(), weights)
    logits = [model.logits(text, positions) for text in texts]
    if min(model.margins, default=1.0) < 1e-4:
        return None
    change, rng = 1e-7, np.random.default_rng(0)
    nudged = {name: w * (1 + change * rng.choice([-1, 1], w.shape)) for name, w in model.weights.items()}
    others = [oracle.Model(config.to_dict(), nudged).logits(text, positions) for text in texts]
    magnified = max(np.abs(a - b).max() for a, b in zip(logits, others, strict=True)) / change
    return logits, max(magnified, *(np.abs(a).max() for a in logits))


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


def run(model: minikv.Model, caches: list[Any] | None, feed: Feed, step: Any = minikv.Model.step) -> list[np.ndarray]:
    """Feed every step; returns each text's logits [its length, vocab], whatever batch and steps they came in."""
    vocab = model.config.vocab_size
    found = [np.full((len(text), vocab), np.nan) for text in feed.texts]
    out: np.ndarray = np.zeros(0)
    for pos in feed.steps:
        out = host(step(model, feed.tokens(pos), caches, pos if feed.explicit else None))
        for b, row in enumerate(pos):
            for t, p in enumerate(row):
                if p >= 0:
                    found[b][p] = out[b, t]
    return [rows.astype(out.dtype) for rows in found]
