"""Which stored tensors make up each weight of a model, and how do they get there without a second copy?

A `Layout` is the table of one family's names. Fusing, transposing and reordering are views of the weight that is being
filled, so each number is written once, to its final place. What the numbers mean is `model.py`'s matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..backend import Array, Backend
from ..config import ModelConfig, weight_shapes
from .stored import Stored

# Looks at (part of) a weight as a family stores it: the view, and the shape that the file gives to it.
View = Callable[[ModelConfig, np.ndarray], tuple[np.ndarray, tuple[int, ...]]]


@dataclass(frozen=True)
class Layout:
    """Tell how a family stores the weights that `weight_shapes` lists.

    `names` maps the last part of our name to the file's names, with `{layer}` and `{expert}` where they are counted;
    the rows of several follow each other. `views` maps a file's name (as it stands in `names`) to the way it looks at
    its part of the weight, where that is not the plain one. `norm_offset` is added to every norm's weights (1 for
    families that compute 1 + weight). Names that match `ignored` may be there and are not read. Files saved from a bare
    stack, without its output head, lack the `prefix` in all their names.
    """

    names: Mapping[str, tuple[str, ...]]
    views: Mapping[str, View] = field(default_factory=dict)
    norm_offset: float = 0.0
    ignored: str = r"(?!)"
    prefix: str = ""


class _Piece(NamedTuple):
    name: str  # of a stored tensor
    shape: tuple[int, ...]  # that it must have
    target: np.ndarray  # the view of a weight that it fills


def assemble(
    config: ModelConfig, layout: Layout, stored: Mapping[str, Stored], backend: Backend, dtype: str, source: Path
) -> dict[str, Array]:
    """Build every weight of `config` from stored tensors, as arrays of `backend` in `dtype`.

    Raises ValueError naming the tensor and both shapes when one is missing, misshapen or left over, before anything is
    allocated. At any time only one weight and a few megabytes of a tensor exist beside what `backend` holds.
    """
    shapes = weight_shapes(config)
    missing_prefix = "" if any(name.startswith(layout.prefix) for name in stored) else layout.prefix
    left_over = {name for name in stored if not re.fullmatch(layout.ignored, name)}
    for name, shape in shapes.items():
        if prod(shape) > 2**56:
            raise ValueError(f"{source}: a weight {name} of shape {shape} cannot exist")
        outline = np.broadcast_to(np.float32(0), shape)  # has a shape and views, but no memory
        for piece in _pieces(config, layout, missing_prefix, name, outline):
            if piece.name not in stored:
                raise ValueError(f"{source}: tensor {piece.name!r} of shape {piece.shape} is missing")
            found = stored[piece.name]
            if found.shape != piece.shape:
                raise ValueError(f"{found.file}: tensor {piece.name!r} has shape {found.shape}, expected {piece.shape}")
            left_over.discard(piece.name)
    for name in sorted(left_over):
        raise ValueError(
            f"{stored[name].file}: tensor {name!r} of shape {stored[name].shape} has no place in the model"
        )

    weights = {}
    for name, shape in shapes.items():
        weight = np.empty(shape, dtype)
        for piece in _pieces(config, layout, missing_prefix, name, weight):
            stored[piece.name].copy_to(piece.target, layout.norm_offset if name.endswith("norm") else 0.0)
        weights[name] = backend.asarray(weight)
    return weights


def _pieces(
    config: ModelConfig, layout: Layout, missing_prefix: str, name: str, weight: np.ndarray
) -> Iterator[_Piece]:
    """List the stored tensors that make up `weight`, each with the view of it that it fills."""
    layer, _, part = name.removeprefix("layers.").rpartition(".")
    templates = layout.names[part]
    per_expert = "{expert}" in templates[0]
    for expert in range(config.n_experts if per_expert else 1):
        rows = weight[expert] if per_expert else weight
        start = 0
        for template, count in zip(templates, _row_counts(config, part, len(rows), len(templates)), strict=True):
            target = rows[start : start + count]
            start += count
            target, shape = (
                layout.views[template](config, target) if template in layout.views else (target, target.shape)
            )
            yield _Piece(template.format(layer=layer, expert=expert).removeprefix(missing_prefix), shape, target)


def _row_counts(config: ModelConfig, part: str, n_rows: int, n_templates: int) -> tuple[int, ...]:
    if part in ("qkv", "qkv_bias") and n_templates == 3:
        return tuple(heads * config.head_dim for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads))
    return (n_rows // n_templates,) * n_templates


def transposed(config: ModelConfig, weight: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Look at [..., out, in] as the file's [..., in, out]."""
    view = weight.swapaxes(-1, -2)
    return view, view.shape
