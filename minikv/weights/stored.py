"""Where do tensors lie in files, and how do their bytes become numbers?

A reader lists what a file holds as `Stored` tensors: checked sizes and offsets, no data. Which weight a tensor belongs
to is `assemble.py`'s matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

_READ_ELEMENTS = 1 << 20  # decoded at once: small beside any real model, large beside the cost of a call


@dataclass(frozen=True)
class Stored:
    """Say where one tensor lies and how its bytes turn into numbers; `shape` as NumPy counts, slowest axis first.

    `decode` takes the bytes of whole rows, uint8 [n], and returns their numbers as floats of the file's precision.
    """

    file: Path
    name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    decode: Callable[[np.ndarray], np.ndarray]

    def copy_to(self, target: np.ndarray, add: float = 0.0) -> None:
        """Write every number plus `add` into `target`: as many elements in the tensor's order, any strides and axes.

        Reads whole slices along the first axis, a few megabytes at a time; adds in at least float32 and rounds once to
        the target's type. Raises ValueError when the file has become too short.
        """
        if target.ndim == 1:
            target = target[None]
        slice_bytes = self.nbytes // target.shape[0]
        step = max(1, _READ_ELEMENTS * target.shape[0] // target.size)
        working = np.promote_types(target.dtype, np.float32)
        with open(self.file, "rb") as file:
            file.seek(self.offset)
            for start in range(0, target.shape[0], step):
                part = target[start : start + step]
                raw = np.fromfile(file, np.uint8, slice_bytes * part.shape[0])
                if raw.size != slice_bytes * part.shape[0]:
                    raise ValueError(f"{self.file}: tensor {self.name!r} is cut short")
                numbers = self.decode(raw).reshape(part.shape)
                part[...] = numbers.astype(working) + add if add else numbers


def check_extents(tensors: Iterable[Stored], file_size: int) -> None:
    """Refuse tensors that reach outside their file or share bytes. Raises ValueError naming file and tensor."""
    end, previous = 0, ""
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset + tensor.nbytes > file_size:
            stop = tensor.offset + tensor.nbytes
            raise ValueError(f"{tensor.file}: tensor {tensor.name!r} ends at byte {stop}, the file at byte {file_size}")
        if tensor.offset < end:
            raise ValueError(f"{tensor.file}: tensors {previous!r} and {tensor.name!r} overlap")
        end, previous = tensor.offset + tensor.nbytes, tensor.name
