"""Which files may be read, and are they the JSON they claim to be?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MAX_JSON = 100_000_000  # bytes; the index of the largest published model has a few million


def file_size(path: Path) -> int:
    """Return the size of a regular file in bytes. Raises ValueError naming the path for anything that is none."""
    try:
        if path.is_file():
            return path.stat().st_size
        problem = "not a file" if path.exists() else "there is no such file"
    except OSError as error:  # such as a name too long
        problem = f"cannot be read ({error.strerror})"
    except ValueError as error:  # a null byte
        problem = f"cannot be read ({error})"
    raise ValueError(f"{path}: {problem}")


def inside(folder: Path, name: str, index: Path | None = None) -> Path:
    """Return the path of a file in the folder. Raises ValueError when it lies, or leads as a link, anywhere else."""
    path = folder / name
    try:
        contained = path.resolve().parent == folder.resolve()
    except (OSError, ValueError, RuntimeError):  # a null byte, a name too long, links in a circle
        contained = False
    if not contained:
        raise ValueError(f"{index or folder}: the file {name!r:.200} is not in the folder, or leads out of it")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises ValueError naming the file when there is none."""
    size = file_size(path)
    if size > _MAX_JSON:
        raise ValueError(f"{path}: {size} bytes of JSON are beyond the limit of {_MAX_JSON}")
    return parse_json(path.read_bytes(), path)


def parse_json(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object. Raises ValueError naming the file when it is none, repeats a name, or holds NaN."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a JSON number")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for name, value in pairs:
            if name in result:
                raise ValueError(f"{name!r:.200} appears twice")
            result[name] = value
        return result

    try:
        parsed = json.loads(raw.decode("utf-8"), parse_constant=refuse, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: damaged JSON: {' '.join(str(error).split())}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(parsed).__name__}")
    return parsed
