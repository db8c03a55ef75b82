"""What does a Hugging Face folder hold: one configuration, and the tensors of one or many files?

`config.json` is translated by the family's entry in `families.py`. Weights come from `model.safetensors`, or from the
files that `model.safetensors.index.json` lists, which must lie in the folder itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..config import ModelConfig
from .assemble import Layout
from .families import understand
from .files import file_size, inside, read_json
from .safetensors_file import read_safetensors
from .stored import Stored

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


@dataclass(frozen=True)
class Folder:
    """Hold what a folder says: the configuration, where each weight's parts are, and the tensors by name."""

    config: ModelConfig
    layout: Layout
    tensors: dict[str, Stored]


def read_folder(folder: Path) -> Folder:
    """Read everything about a folder but the tensors' data.

    Raises ValueError in one line, naming the file and the field or tensor, for what is missing, damaged or unsupported.
    """
    values = read_json(inside(folder, "config.json"))
    tensors = _tensors(folder)
    config, layout = understand(values, folder / "config.json", tensors)
    return Folder(config, layout, tensors)


def _tensors(folder: Path) -> dict[str, Stored]:
    if not (folder / _INDEX).exists():
        if not (folder / _SINGLE).exists():
            raise ValueError(f"{folder}: holds neither {_SINGLE} nor {_INDEX} (pickled weights are not read)")
        return read_safetensors(inside(folder, _SINGLE))
    index = inside(folder, _INDEX)
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index}: 'weight_map' must map tensor names to file names")
    tensors: dict[str, Stored] = {}
    shards = {name: inside(folder, name, index) for name in dict.fromkeys(places.values())}
    for path in shards.values():
        file_size(path)  # all must be there before any is read
    for name, path in shards.items():
        for tensor in read_safetensors(path).values():
            if places.get(tensor.name) != name:
                says = f"in {places[tensor.name]!r:.80}" if tensor.name in places else "nowhere"
                raise ValueError(f"{tensor.file}: tensor {tensor.name!r:.200} should be {says}, says {_INDEX}")
            tensors[tensor.name] = tensor
    for name, place in places.items():
        if name not in tensors:
            raise ValueError(f"{index}: tensor {name!r:.200} is not in {place!r:.80}")
    return tensors
