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

from ..config import ModelConfig
from ..rope import rope_frequencies
from .assemble import Layout
from .extras import optional
from .fields import Fields
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

    Metadata values are Python scalars and strings, lists of strings, and NumPy arrays of numbers. Raises ValueError in one
    line, naming the file and the key or tensor, for anything that is cut short, out of range or contradictory; every
    count is compared with the bytes that are left before it is believed.
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
            raise ValueError(f"{path}: general.alignment must be a positive whole number, got {alignment!r:.80}")
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
        self.require(8 * count, what)
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


def paired_rows(config: ModelConfig, weight: np.ndarray) -> tuple[np.ndarray, tuple[int, ...]]:
    """Look at query or key rows as a `llama` file orders them: the two channels of a rotary pair beside each other.

    A head of the weight has the rows (a0 a1 .. b0 b1 ..), a head in the file (a0 b0 a1 b1 ..).
    """
    heads = weight.reshape(-1, 2, config.head_dim // 2, weight.shape[-1])
    return heads.swapaxes(1, 2), weight.shape


_LLAMA = {
    "embed": ("token_embd.weight",),
    "final_norm": ("output_norm.weight",),
    "head": ("output.weight",),
    "attn_norm": ("blk.{layer}.attn_norm.weight",),
    "qkv": ("blk.{layer}.attn_q.weight", "blk.{layer}.attn_k.weight", "blk.{layer}.attn_v.weight"),
    "o": ("blk.{layer}.attn_output.weight",),
    "ffn_norm": ("blk.{layer}.ffn_norm.weight",),
    "gate_up": ("blk.{layer}.ffn_gate.weight", "blk.{layer}.ffn_up.weight"),
    "down": ("blk.{layer}.ffn_down.weight",),
}
_GEMMA3 = {
    **_LLAMA,
    "q_norm": ("blk.{layer}.attn_q_norm.weight",),
    "k_norm": ("blk.{layer}.attn_k_norm.weight",),
    "attn_post_norm": ("blk.{layer}.post_attention_norm.weight",),
    "ffn_post_norm": ("blk.{layer}.post_ffw_norm.weight",),
}
LAYOUTS = {
    "llama": Layout(
        _LLAMA,
        views={"blk.{layer}.attn_q.weight": paired_rows, "blk.{layer}.attn_k.weight": paired_rows},
        ignored=r"rope_freqs\.weight",  # read into the configuration
    ),
    "gemma3": Layout(_GEMMA3),  # its norms are stored with the 1 of (1 + weight) already added
}


def gguf_config(file: GGUF) -> ModelConfig:
    """Translate a file's metadata into a configuration.

    Raises ValueError naming the file and the key: for an unknown architecture, a missing or impossible value, and for any
    setting of the architecture that is not understood, since it would change the result.
    """
    architecture = file.metadata.get("general.architecture")
    if architecture not in LAYOUTS:
        known = ", ".join(LAYOUTS)
        raise ValueError(f"{file.path}: architecture {architecture!r:.80} is not supported; known are {known}")
    if file.metadata.get("split.count", 1) != 1:
        raise ValueError(f"{file.path}: this is one part of {file.metadata['split.count']}; join the parts first")
    start = f"{architecture}."
    own = {key.removeprefix(start): value for key, value in file.metadata.items() if key.startswith(start)}
    f = Fields(own, f"{file.path} ({architecture})")
    n_layers, d_model, n_heads = f.whole("block_count"), f.whole("embedding_length"), f.whole("attention.head_count")
    if n_layers > len(file.tensors):
        raise ValueError(f"{file.path}: {n_layers} layers cannot be made of {len(file.tensors)} tensors")
    head_dim = f.whole("attention.key_length", d_model // max(n_heads, 1))
    if f.whole("attention.value_length", head_dim) != head_dim:
        value_length = f.whole("attention.value_length")
        raise ValueError(f"{f.where}: key_length {head_dim} and value_length {value_length} differ")
    common: dict[str, Any] = dict(
        vocab_size=f.whole("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ()))),
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=f.whole("attention.head_count_kv", n_heads),
        head_dim=head_dim,
        d_ff=f.whole("feed_forward_length"),
        tied_embeddings="output.weight" not in file.tensors,
        norm_eps=f.number("attention.layer_norm_rms_epsilon"),
        rope_theta=f.number("rope.freq_base", 10000.0),
        rotary_dim=f.whole("rope.dimension_count", head_dim),
        rope_scaling=_rope_scaling(f),
        max_positions=f.whole("context_length", None),
    )
    special = _gemma3(f, common) if architecture == "gemma3" else _llama(f, common, file)
    f.finish(harmless=(), no_effect={"expert_count": (0,), "expert_used_count": (0,)})
    return ModelConfig(**common, **special)


def _rope_scaling(f: Fields) -> dict[str, Any] | None:
    kind = f.take("rope.scaling.type", "none")
    f.flag("rope.scaling.finetuned", False)
    factor = f.number("rope.scaling.factor", None)
    original = f.whole("rope.scaling.original_context_length", None)
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise ValueError(f"{f.where}: rope.scaling.type {kind!r:.80} is not supported; known are none, linear and yarn")


def _llama(f: Fields, common: dict[str, Any], file: GGUF) -> dict[str, Any]:
    if "rope_freqs.weight" not in file.tensors:
        return {}
    # Llama 3.1 and later: the file lists the divisor of every frequency but not the recipe, whose other numbers are the
    # same for all published models; the factor is the largest divisor.
    divisors = np.empty(file.tensors["rope_freqs.weight"].shape)
    file.tensors["rope_freqs.weight"].copy_to(divisors)
    recipe = {"rope_type": "llama3", "factor": float(divisors.max()), "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    recipe["original_max_position_embeddings"] = 8192
    plain, _ = rope_frequencies(common["rotary_dim"], common["rope_theta"])
    scaled, _ = rope_frequencies(common["rotary_dim"], common["rope_theta"], recipe)
    if divisors.shape != plain.shape or not np.allclose(plain / scaled, divisors, rtol=1e-5, atol=0):
        raise ValueError(f"{file.path}: tensor 'rope_freqs.weight' does not hold the frequencies of Llama 3")
    return {"rope_scaling": recipe}


def _gemma3(f: Fields, common: dict[str, Any]) -> dict[str, Any]:
    d_model, n_layers = common["d_model"], common["n_layers"]
    pattern = f.take("attention.sliding_window_pattern", 6)
    if isinstance(pattern, np.ndarray):  # one flag a layer
        letters = "".join("L" if windowed else "G" for windowed in pattern)
    else:
        letters = "L" * (f.whole("attention.sliding_window_pattern", 6) - 1) + "G"
    # The 27B model alone scales by the width of the model over the heads; the file does not say so.
    scale_width = d_model / common["n_heads"] if n_layers == 62 else common["head_dim"]
    return dict(
        window=f.whole("attention.sliding_window"),
        layer_pattern=letters,
        attn_scale=scale_width**-0.5,
        attn_softcap=f.number("attn_logit_softcapping", None),
        final_softcap=f.number("final_logit_softcapping", None),
        rope_local_theta=f.number("rope.freq_base_swa", 10000.0),
        post_norms=True,
        qk_norm=True,
        embed_scale=d_model**0.5,
        activation="gelu_tanh",
    )
