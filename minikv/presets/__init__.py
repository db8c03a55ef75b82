"""Which published models and devices are known by name, and where does each number come from?

`models.json` holds the geometry of models for `cost.py`: sizes, layer patterns, experts, positions. It does not hold
what only running a checkpoint needs, such as the rules by which experts are chosen; `minikv.load` reads those from the
checkpoint itself. `devices.json` holds the ceilings that datasheets state for dense bf16.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from ..config import ModelConfig
from ..cost import Device


@dataclass(frozen=True)
class Preset:
    """Name a published model's geometry, the source it was read from, and what is not verified about it."""

    name: str
    config: ModelConfig
    source: str
    verified: str
    notes: str = ""


@cache
def models() -> dict[str, Preset]:
    """Return the published models by name."""
    return {
        row["name"]: Preset(**{**row, "config": ModelConfig.from_dict(row["config"])}) for row in _rows("models.json")
    }


@cache
def devices() -> dict[str, Device]:
    """Return the devices by name."""
    return {row["name"]: Device(**row) for row in _rows("devices.json")}


def _rows(file: str) -> list[dict[str, Any]]:
    return json.loads((files(__name__) / file).read_text(encoding="utf-8"))
