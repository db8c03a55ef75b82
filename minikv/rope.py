"""How does a position get into queries and keys: by which angles, and how are they applied?

Angles are computed on the host in float64, once per step, and rounded once to the data's type: position times
frequency in 16 or 32 bits is wrong long before the context ends. Which layers use which table is `model.py`'s matter.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .backend import Array, namespace


def rope_frequencies(rotary_dim: int, theta: float, scaling: dict[str, Any] | None = None) -> tuple[np.ndarray, float]:
    """Return the angle per position of every channel pair, float64 [rotary_dim / 2], and the factor on the tables.

    frequency_i = theta^(-2i / rotary_dim) (arXiv 2104.09864, section 3.2.2), then scaled as `scaling` says, a block
    with Hugging Face's keys whose kind stands under "rope_type" or "type":

    - "default": not at all; "linear": divided by `factor` (arXiv 2306.15595).
    - "llama3": pairs that turn less than `low_freq_factor` times within `original_max_position_embeddings` are divided
      by `factor`, those that turn more than `high_freq_factor` times are kept, those between are blended.
    - "yarn" (arXiv 2309.00071, section 3.2 and 3.4): blended between `beta_slow` and `beta_fast` turns, linearly in the
      pair's index, and the tables are multiplied by a factor that sharpens attention.

    Raises ValueError for an unknown kind or a missing key. "dynamic" is refused: its base depends on the length, so
    keys already in a cache would have been rotated by another base than the query.
    """
    frequencies = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    scaling, kind = scaling or {}, _kind(scaling)
    if kind == "default":
        return frequencies, 1.0
    if kind not in ("linear", "llama3", "yarn"):
        why = ": cached keys would keep the base of a shorter text" if kind == "dynamic" else ""
        raise ValueError(f"rope type {kind!r} is not supported{why}; known are default, linear, llama3 and yarn")
    factor = _positive(scaling, kind, "factor")
    if kind == "linear":
        return frequencies / factor, 1.0
    original = _positive(scaling, kind, "original_max_position_embeddings")
    turns = original * frequencies / (2 * math.pi)  # of each pair within the length that the model was trained on
    if kind == "llama3":
        low, high = _positive(scaling, kind, "low_freq_factor"), _positive(scaling, kind, "high_freq_factor")
        if low >= high:
            raise ValueError(f"rope type 'llama3' needs low_freq_factor below high_freq_factor, got {low} and {high}")
        keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (keep + (1 - keep) / factor), 1.0
    if theta <= 1:
        raise ValueError(f"rope type 'yarn' needs a base above 1, got {theta}")
    for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"):
        if scaling.get(key):
            _positive(scaling, kind, key)
    fast, slow = scaling.get("beta_fast") or 32, scaling.get("beta_slow") or 1
    # The pairs i, as real numbers, that turn that often: turns(i) = original / 2π · theta^(-2i / rotary_dim).
    first, last = (rotary_dim * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta)) for n in (fast, slow))
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    keep = 1 - np.clip((np.arange(rotary_dim // 2) - first) / max(last - first, 0.001), 0.0, 1.0)
    return frequencies * (keep + (1 - keep) / factor), _yarn_table_factor(scaling, factor)


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """Return 0.1 · mscale · ln(factor) + 1, YaRN's sharpening of attention (arXiv 2309.00071, equation 22); 1 up to
    factor 1."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def yarn_score_factor(scaling: dict[str, Any] | None) -> float:
    """Return the factor on attention scores by which YaRN sharpens all channels when `mscale_all_dim` says so.

    It stands for a factor `yarn_mscale` on queries and on keys: squared on the scores. (What sharpens the rotary
    channels alone is in the tables.) So DeepSeek's released code; the papers do not mention it.
    """
    if scaling is None or _kind(scaling) != "yarn" or not scaling.get("mscale_all_dim"):
        return 1.0
    return yarn_mscale(_positive(scaling, "yarn", "factor"), scaling["mscale_all_dim"]) ** 2


def _kind(scaling: dict[str, Any] | None) -> str:
    return (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))


def _yarn_table_factor(scaling: dict[str, Any], factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        # DeepSeek: mscale_all_dim sharpens all channels through the score scale (mla.py); the tables carry the rest.
        return yarn_mscale(factor, scaling["mscale"]) / yarn_mscale(factor, scaling["mscale_all_dim"])
    return yarn_mscale(factor)


def _positive(scaling: dict[str, Any], kind: str, key: str) -> float:
    value = scaling.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ValueError(f"rope type {kind!r} needs a positive {key}, got {value!r}")
    return float(value)


def rope_tables(pos: np.ndarray, frequencies: np.ndarray, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin of position · frequency, times `factor`: float64 on the host, [B, 1, T, R/2] from pos [B,
    T]."""
    angles = pos[:, None, :, None] * frequencies
    return np.cos(angles) * factor, np.sin(angles) * factor


def rotate(x: Array, cos: Array, sin: Array, interleaved: bool = False) -> Array:
    """Turn every channel pair (a, b) of x by its angle: (a cos - b sin, b cos + a sin).

    x [B, heads, T, H]; cos and sin [B, 1, T, R/2] from `rope_tables`. The first R channels turn, the rest pass through.
    Checkpoints exist with both layouts of pairs: channels (i, i + R/2), Hugging Face's Llama layout; or `interleaved`,
    channels (2i, 2i + 1), the layout of the paper (arXiv 2104.09864, equation 34). The score of a rotated query and key
    depends on the difference of their positions only.
    """
    xp = namespace(x, cos, sin)
    half = cos.shape[-1]
    if interleaved:
        pairs = xp.reshape(x[..., : 2 * half], (*x.shape[:-1], half, 2))
        a, b = pairs[..., 0], pairs[..., 1]
        turned = xp.reshape(xp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1), (*x.shape[:-1], 2 * half))
        parts = [turned]
    else:
        a, b = x[..., :half], x[..., half : 2 * half]
        parts = [a * cos - b * sin, b * cos + a * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return xp.concat(parts, axis=-1)
