"""What does a safetensors file hold, and can its header be believed?

The library `safetensors` hands NumPy no bfloat16 and whole tensors only. The format is an 8-byte length, that many
bytes of JSON, and raw little-endian numbers; reading it here lets every count be checked and every tensor be read in
slices. Format: the safetensors project's README, section Format.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .files import file_size, parse_json
from .stored import Stored, check_extents

_MAX_HEADER = 100_000_000  # bytes; the reference implementation's limit


def _bfloat16(raw: np.ndarray) -> np.ndarray:
    """Widen to float32, of which bfloat16 is the upper half: exact for every value."""
    return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)


_DECODERS: dict[str, tuple[int, Callable[[np.ndarray], np.ndarray]]] = {
    "F16": (2, lambda raw: raw.view("<f2")),
    "BF16": (2, _bfloat16),
    "F32": (4, lambda raw: raw.view("<f4")),
    "F64": (8, lambda raw: raw.view("<f8")),
}


def read_safetensors(path: Path) -> dict[str, Stored]:
    """List the tensors of a safetensors file; their data stays in the file.

    Raises ValueError in one line, naming the file and the tensor, for a header that is cut short, lies about a length,
    is not JSON, or describes tensors that overlap, reach outside the file, do not match their shape, or are not F16,
    BF16, F32 or F64.
    """
    size = file_size(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path}: cut short or damaged: a header of {length} bytes in a file of {size}")
        if length > _MAX_HEADER:
            raise ValueError(f"{path}: a header of {length} bytes is beyond the limit of {_MAX_HEADER}")
        header = parse_json(file.read(length), path)
    header.pop("__metadata__", None)
    tensors = {name: _stored(path, name, entry, 8 + length) for name, entry in header.items()}
    check_extents(tensors.values(), size)
    return tensors


def _stored(path: Path, name: str, entry: Any, start: int) -> Stored:
    what = f"{path}: tensor {name!r:.200}"
    if not isinstance(entry, dict):
        raise ValueError(f"{what} is described by {entry!r:.80}, not by an object")
    dtype: Any = entry.get("dtype")
    shape: Any = entry.get("shape")
    offsets: Any = entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _DECODERS:
        raise ValueError(f"{what} has dtype {dtype!r:.80}; supported are {', '.join(_DECODERS)}")
    if not _counts(shape) or len(shape) > 8 or 0 in shape:
        raise ValueError(f"{what} has the impossible shape {shape!r:.80}")
    if not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{what} has the impossible offsets {offsets!r:.80}")
    width, decode = _DECODERS[dtype]
    nbytes = offsets[1] - offsets[0]
    if nbytes != width * prod(shape):
        raise ValueError(
            f"{what} of shape {shape} in {dtype} takes {width * prod(shape)} bytes, its offsets span {nbytes}"
        )
    return Stored(path, name, tuple(shape), start + offsets[0], nbytes, decode)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)
