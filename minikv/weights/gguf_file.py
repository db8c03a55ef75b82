"""What does a GGUF file hold: which settings, which tokenizer, which tensors?

The header is read here and not by the `gguf` library's reader, which trusts every count and offset it finds and takes
many seconds over a large vocabulary. Turning quantised blocks into numbers is the library's part. Format: the GGUF
specification in the ggml project, docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .extras import optional
from .fields import shown
from .files import file_size
from .stored import Stored, check_extents

_SCALARS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9
_MAX_AXES = 4  # of a tensor, in ggml
_MAX_NAME = 64  # bytes of a tensor's name, in ggml
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GGUF:
    """Hold a file's metadata by key, and its tensors by name."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Stored]


def read_gguf(path: Path) -> GGUF:
    """Read the header of a GGUF file; the tensors' data stays in the file.

    Metadata values are Python scalars and strings, lists of strings, and NumPy arrays of numbers. Raises ValueError in
    one line, naming the file and the key or tensor, for anything that is cut short, out of range or contradictory;
    every count is compared with the bytes that are left before it is believed.
    """
    size = file_size(path)
    if size < 24:
        raise ValueError(f"{path}: cut short: {size} bytes are no GGUF header")
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        header = _Header(path, data)
        if header.take(4) != b"GGUF":
            raise ValueError(f"{path}: not a GGUF file: it does not begin with 'GGUF'")
        version, n_tensors, n_keys = header.number("<u4"), header.number("<u8"), header.number("<u8")
        if version not in (2, 3):
            raise ValueError(f"{path}: GGUF version {version} is not supported, only 2 and 3 (little-endian) are")
        metadata: dict[str, Any] = {}
        for _ in range(n_keys):
            key = header.string("a metadata key")
            if key in metadata:
                raise ValueError(f"{path}: metadata key {key!r:.80} appears twice")
            metadata[key] = header.value(key)
        entries = [header.tensor_entry() for _ in range(n_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"{path}: general.alignment must be a positive whole number, got {shown(alignment)}")
        start = -(-header.position // alignment) * alignment
    tensors: dict[str, Stored] = {}
    for name, shape, kind, offset in entries:
        if name in tensors:
            raise ValueError(f"{path}: tensor {name!r} appears twice")
        tensors[name] = _stored(path, name, shape, kind, start + offset)
    check_extents(tensors.values(), size)
    return GGUF(path, metadata, tensors)


class _Header:
    """Read values one after the other from a mapped file, never past its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.position = path, data, 0

    def require(self, n_bytes: int, what: str) -> None:
        if n_bytes > len(self.data) - self.position:
            left = len(self.data) - self.position
            raise ValueError(f"{self.path}: cut short or damaged: {what} needs {n_bytes} bytes, {left} are left")

    def take(self, n_bytes: int, what: str = "the header") -> bytes:
        self.require(n_bytes, what)
        self.position += n_bytes
        return self.data[self.position - n_bytes : self.position]

    def number(self, dtype: str, what: str = "the header") -> Any:
        return np.frombuffer(self.take(np.dtype(dtype).itemsize, what), dtype)[0].item()

    def string(self, what: str) -> str:
        raw = self.take(self.number("<u8", what), what)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {what} is not UTF-8") from None

    def value(self, key: str) -> Any:
        what = f"metadata key {key!r:.80}"
        kind = self.number("<u4", what)
        if kind in _SCALARS:
            return self.number(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            raise ValueError(f"{self.path}: {what} has the unknown value type {kind}")
        kind, count = self.number("<u4", what), self.number("<u8", what)
        if kind in _SCALARS:
            dtype = np.dtype(_SCALARS[kind])
            return np.frombuffer(self.take(count * dtype.itemsize, what), dtype)
        if kind != _STRING:
            raise ValueError(f"{self.path}: {what} is an array of the unsupported value type {kind}")
        return self._strings(count, what)

    def _strings(self, count: int, what: str) -> list[str]:
        # A vocabulary has hundreds of thousands: this loop is most of the time a header takes.
        strings, data, position, unpack = [], self.data, self.position, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                (length,) = unpack(data, position)
                position += 8 + length
                raw = data[position - length : position]
                if len(raw) != length:
                    raise ValueError(f"{self.path}: cut short or damaged: {what} reaches past the end of the file")
                strings.append(raw.decode())
        except struct.error:
            raise ValueError(f"{self.path}: cut short or damaged: {what} reaches past the end of the file") from None
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {what} is not UTF-8") from None
        self.position = position
        return strings

    def tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Return name, shape (slowest axis first; the file counts the other way), type and offset."""
        name = self.string("a tensor's name")
        if len(name.encode()) > _MAX_NAME:
            raise ValueError(
                f"{self.path}: a tensor's name has {len(name)} characters, at most {_MAX_NAME} are allowed"
            )
        what = f"tensor {name!r}"
        n_axes = self.number("<u4", what)
        if not 1 <= n_axes <= _MAX_AXES:
            raise ValueError(f"{self.path}: {what} has {n_axes} axes, allowed are 1 to {_MAX_AXES}")
        shape = tuple(self.number("<u8", what) for _ in range(n_axes))[::-1]
        return name, shape, self.number("<u4", what), self.number("<u8", what)


def _stored(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> Stored:
    gguf = optional("gguf", "a GGUF file")
    try:
        label = gguf.GGMLQuantizationType(kind)
        block, block_bytes = gguf.GGML_QUANT_SIZES[label]
    except (ValueError, KeyError):
        raise ValueError(f"{path}: tensor {name!r} has the unknown type {kind}") from None
    if min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{path}: tensor {name!r} of shape {shape} cannot be stored in blocks of {block}")

    def decode(raw: np.ndarray) -> np.ndarray:
        try:
            return gguf.dequantize(raw.reshape(-1, row_bytes), label)
        except NotImplementedError:
            raise ValueError(
                f"{path}: tensor {name!r} has type {label.name}, which the gguf library cannot decode"
            ) from None

    row_bytes = shape[-1] // block * block_bytes
    return Stored(path, name, shape, offset, prod(shape[:-1]) * row_bytes, decode)
