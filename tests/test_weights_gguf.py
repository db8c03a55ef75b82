"""Are GGUF files read exactly, block by block, and is everything that is wrong with one refused in one line?"""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import minikv
from checkpoints import GEMMA3, SMOLLM2, assert_refused, model_file
from minikv.config import ModelConfig
from minikv.rope import rope_frequencies
from minikv.weights.gguf_file import GGUF, read_gguf
from minikv.weights.gguf_models import gguf_config
from support import assert_same

FIXTURES = Path(__file__).parent / "fixtures"
TYPES = gguf.GGMLQuantizationType
LLAMA = {
    "llama.block_count": 2,
    "llama.context_length": 64,
    "llama.embedding_length": 12,
    "llama.feed_forward_length": 10,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 6,
    "llama.attention.value_length": 6,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 6,
    "llama.vocab_size": 7,
}
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": ["a", "b", "c", "ab", "<s>", "</s>", "d"],
    "tokenizer.ggml.token_type": [1, 1, 1, 1, 3, 3, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 5,
}
GEMMA = {
    **{key.replace("llama", "gemma3"): value for key, value in LLAMA.items() if "dimension" not in key},
    "gemma3.block_count": 7,
    "gemma3.attention.sliding_window": 5,
    "gemma3.rope.freq_base": 1e6,
}


def write(path: Path, settings: dict[str, Any], tensors: dict[str, Any], architecture: str = "llama") -> Path:
    """Write a GGUF file with the library's own writer. A tensor is an array, or (bytes, block type)."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in {**settings, **TOKENIZER}.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        data, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tensors(model: minikv.Model, names: dict[str, str] | None = None) -> dict[str, np.ndarray]:
    """Name and permute a model's weights as llama.cpp's converter does; written from its description."""
    c, w, out = model.config, model.weights, {}
    out["token_embd.weight"], out["output_norm.weight"] = w["embed"], w["final_norm"]
    if not c.tied_embeddings:
        out["output.weight"] = w["head"]
    for layer in range(c.n_layers):
        ours, theirs = f"layers.{layer}.", f"blk.{layer}."
        rows = [heads * c.head_dim for heads in (c.n_heads, c.n_kv_heads, c.n_kv_heads)]
        q, k, v = np.split(w[ours + "qkv"], np.cumsum(rows)[:2])
        if not c.qk_norm:  # llama: channel i of a head goes to row 2 i, channel i + H/2 to row 2 i + 1
            place = [head * c.head_dim + i + half * (c.head_dim // 2) for head in range(c.n_heads)
                     for i in range(c.head_dim // 2) for half in (0, 1)]  # fmt: skip
            q, k = q[place], k[place[: len(k)]]
        gate, up = np.split(w[ours + "gate_up"], 2)
        out |= {theirs + "attn_q.weight": q, theirs + "attn_k.weight": k, theirs + "attn_v.weight": v}
        out |= {theirs + "ffn_gate.weight": gate, theirs + "ffn_up.weight": up}
        plain = {"attn_norm": "attn_norm", "o": "attn_output", "ffn_norm": "ffn_norm", "down": "ffn_down"}
        out |= {f"{theirs}{name}.weight": w[ours + key] for key, name in (plain | (names or {})).items()}
    return out


def llama_model(**changes: Any) -> minikv.Model:
    return minikv.random_model(ModelConfig(7, 12, 2, 4, 2, 6, 10, **changes), seed=3)


def assert_equal_models(actual: minikv.Model, expected: minikv.Model) -> None:
    assert actual.weights.keys() == expected.weights.keys()
    for name, weight in expected.weights.items():
        assert_same(actual.weights[name], weight)
    tokens = [[1, 5, 3, 0, 6, 2]]
    assert_same(actual.step(tokens), expected.step(tokens))


# --- Block types, on blocks made by hand


def half(x: float) -> bytes:
    return struct.pack("<e", x)


def nibbles(low: list[int], high: list[int]) -> bytes:
    return bytes(a | b << 4 for a, b in zip(low, high, strict=True))


UP, DOWN = list(range(16)), list(range(15, -1, -1))


def q4_0() -> tuple[bytes, list[float]]:
    """32 numbers: scale, then 16 bytes; low nibbles are the first half. x = d (q - 8)."""
    first = half(0.5) + nibbles(UP, DOWN)
    second = half(-2.0) + nibbles(DOWN, UP)
    return first + second, [0.5 * (q - 8) for q in UP + DOWN] + [-2.0 * (q - 8) for q in DOWN + UP]


def q4_1() -> tuple[bytes, list[float]]:
    """32 numbers: scale, minimum, 16 bytes. x = d q + m."""
    first = half(0.25) + half(-1.5) + nibbles(UP, DOWN)
    second = half(4.0) + half(7.0) + nibbles(DOWN, DOWN)
    return first + second, [0.25 * q - 1.5 for q in UP + DOWN] + [4.0 * q + 7 for q in DOWN + DOWN]


def q5_0() -> tuple[bytes, list[float]]:
    """32 numbers: scale, one fifth bit for each, 16 bytes of nibbles. x = d (q - 16)."""
    fifth = [1, 0] * 8 + [0, 0, 1, 1] * 4
    bits = sum(bit << i for i, bit in enumerate(fifth))
    block = half(0.5) + struct.pack("<I", bits) + nibbles(UP, DOWN)
    values = [0.5 * (q + 16 * bit - 16) for q, bit in zip(UP + DOWN, fifth, strict=True)]
    return block + block, values + values


def q8_0() -> tuple[bytes, list[float]]:
    """32 numbers: scale, 32 signed bytes."""
    q = [-128, 127, 0, -1, *range(-14, 14)]
    return half(0.125) + struct.pack("<32b", *q) + half(3.0) + struct.pack("<32b", *reversed(q)), [
        *(0.125 * x for x in q),
        *(3.0 * x for x in reversed(q)),
    ]


def q4_k() -> tuple[bytes, list[float]]:
    """256 numbers in 8 groups of 32: two scales, 12 bytes with a 6-bit scale and minimum a group, 128 bytes of nibbles.

    x = d s q - e m. Groups 0 to 3 have s and m in the low 6 bits of bytes 0 to 3 and 4 to 7; groups 4 to 7 have their
    low 4 bits in bytes 8 to 11 and their high 2 bits in the top of the others. A run of 32 bytes holds two groups.
    """
    blocks, values = b"", []
    for d, e, shift in ((0.5, 0.25, 0), (-1.0, 2.0, 5)):
        s = [(7 * g + 3 + shift) % 64 for g in range(8)]
        m = [(11 * g + 50 + shift) % 64 for g in range(8)]
        packed = [s[g] | (s[g + 4] >> 4) << 6 for g in range(4)]
        packed += [m[g] | (m[g + 4] >> 4) << 6 for g in range(4)]
        packed += [(s[g + 4] & 15) | (m[g + 4] & 15) << 4 for g in range(4)]
        q = [[(g * 5 + i * 3 + shift) % 16 for i in range(32)] for g in range(8)]
        blocks += half(d) + half(e) + bytes(packed) + b"".join(nibbles(q[g], q[g + 1]) for g in range(0, 8, 2))
        values += [d * s[g] * x - e * m[g] for g in range(8) for x in q[g]]
    return blocks, values


def q6_k() -> tuple[bytes, list[float]]:
    """256 numbers in 16 groups of 16: 128 bytes of low nibbles, 64 bytes of high pairs, 16 signed scales, one scale.

    x = d s (q - 32). In each half of 128: bytes i and 32 + i hold the low bits of numbers i and 64 + i, and of 32 + i
    and 96 + i; byte i of the high bits holds those of the four.
    """
    blocks, values = b"", []
    for d, shift in ((0.5, 0), (-0.25, 9)):
        s = [(13 * g + shift) % 256 - 128 for g in range(16)]
        q = [(n * 7 + shift) % 64 for n in range(256)]
        low, high = b"", b""
        for start in (0, 128):
            part = q[start : start + 128]
            low += nibbles([x & 15 for x in part[:64]], [x & 15 for x in part[64:]])
            high += bytes(sum((part[i + 32 * k] >> 4) << 2 * k for k in range(4)) for i in range(32))
        blocks += low + high + struct.pack("<16b", *s) + half(d)
        values += [d * s[n // 16] * (q[n] - 32) for n in range(256)]
    return blocks, values


def f16() -> tuple[bytes, list[float]]:
    values = [1.0, -0.0, 65504.0, 2.0**-24]
    return struct.pack("<4e", *values), values


def bf16() -> tuple[bytes, list[float]]:
    return struct.pack("<4H", 0x3F80, 0x0001, 0xC049, 0x7F7F), [1.0, 2.0**-133, -3.140625, (2 - 2.0**-7) * 2.0**127]


@pytest.mark.parametrize("blocks", [q4_0, q4_1, q5_0, q8_0, q4_k, q6_k, f16, bf16], ids=lambda f: f.__name__)
def test_blocks_made_by_hand(tmp_path: Path, blocks: Callable[[], tuple[bytes, list[float]]]) -> None:
    raw, expected = blocks()
    data = np.frombuffer(raw * 3, np.uint8).reshape(3, -1)  # three rows of two blocks each
    path = write(tmp_path / "a.gguf", {}, {"x": (data, TYPES[blocks.__name__.upper()])})
    stored = read_gguf(path).tensors["x"]
    assert stored.shape == (3, len(expected))
    numbers = np.empty(stored.shape, np.float32)
    stored.copy_to(numbers)
    assert_same(numbers, np.array([expected] * 3, np.float32))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "BF16", "F16", "TQ1_0", "TQ2_0", "MXFP4"])
def test_what_the_library_writes_comes_back(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).normal(size=(1500, 1024)).astype(np.float32)  # more than one read
    raw = gguf.quantize(values, TYPES[kind])
    path = write(tmp_path / "a.gguf", {}, {"before": np.ones(3, np.float32), "x": (raw, TYPES[kind])})
    stored = read_gguf(path).tensors["x"]
    numbers = np.empty(stored.shape, np.float32)
    stored.copy_to(numbers)
    assert_same(numbers, gguf.dequantize(raw, TYPES[kind]))


def test_a_type_that_nobody_decodes_is_named(tmp_path: Path) -> None:
    tensors = llama_tensors(llama_model())
    tensors["blk.1.attn_norm.weight"] = np.zeros(12, np.int32)
    assert_refused(write(tmp_path / "a.gguf", LLAMA, tensors), "blk.1.attn_norm.weight", "I32")


# --- Architectures


@pytest.mark.parametrize("tied", [True, False])
def test_llama_file_is_the_model_it_was_written_from(tmp_path: Path, tied: bool) -> None:
    model = llama_model(tied_embeddings=tied)
    loaded, tokenizer = minikv.load(write(tmp_path / "a.gguf", LLAMA, llama_tensors(model)))
    assert_equal_models(loaded, model)
    assert loaded.config.max_positions == 64
    assert tokenizer.encode("cab</s>") == [2, 3, 5] and tokenizer.eos_ids == (5,) and tokenizer.bos_id is None


def test_absent_settings_have_their_usual_meaning(tmp_path: Path) -> None:
    gone = ("head_count_kv", "key_length", "value_length", "dimension_count", "vocab_size")
    settings = {key: value for key, value in LLAMA.items() if not key.endswith(gone)}
    model = minikv.random_model(ModelConfig(7, 24, 2, 4, 4, 6, 10), seed=3)
    path = write(tmp_path / "a.gguf", settings | {"llama.embedding_length": 24}, llama_tensors(model))
    assert_equal_models(minikv.load(path)[0], model)


def gemma_model(**changes: Any) -> minikv.Model:
    config = {"window": 5, "layer_pattern": "LLLLLG", "attn_scale": 6**-0.5, "post_norms": True, "qk_norm": True}
    config |= {"embed_scale": 12**0.5, "activation": "gelu_tanh", "rope_theta": 1e6, "rope_local_theta": 1e4}
    return minikv.random_model(ModelConfig(7, 12, 7, 4, 2, 6, 10, **(config | changes)), seed=3)


GEMMA_NAMES = {"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}
GEMMA_NAMES |= {"attn_post_norm": "post_attention_norm", "ffn_post_norm": "post_ffw_norm"}


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, {}),
        ({"attention.sliding_window_pattern": 3}, {"layer_pattern": "LLG"}),
        ({"attention.sliding_window_pattern": [True, False] * 3 + [True]}, {"layer_pattern": "LGLGLGL"}),
        ({"rope.freq_base_swa": 500.0}, {"rope_local_theta": 500.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
        ),
        ({"final_logit_softcapping": 30.0}, {"final_softcap": 30.0}),
    ],
    ids=lambda value: str(list(value))[:40] if isinstance(value, dict) else None,
)
def test_gemma3_file_is_the_model_it_was_written_from(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any]
) -> None:
    model = gemma_model(**changes)
    own = {f"gemma3.{key}": value for key, value in settings.items()}
    path = write(tmp_path / "a.gguf", GEMMA | own, llama_tensors(model, GEMMA_NAMES), "gemma3")
    loaded, _ = minikv.load(path)
    assert_equal_models(loaded, model)
    assert loaded.config.pattern == model.config.pattern


@pytest.mark.parametrize(("n_layers", "width"), [(34, 128), (62, 168)])
def test_the_largest_gemma3_has_its_own_score_scale(n_layers: int, width: int) -> None:
    settings = {"block_count": n_layers, "embedding_length": 32 * 168, "attention.head_count": 32}
    settings |= {"attention.key_length": 128, "attention.value_length": 128, "attention.head_count_kv": 16}
    metadata = GEMMA | {f"gemma3.{key}": value for key, value in settings.items()} | TOKENIZER
    fake: Any = dict.fromkeys(map(str, range(n_layers)))
    file = GGUF(Path("a.gguf"), metadata | {"general.architecture": "gemma3"}, fake)
    assert gguf_config(file).attn_scale == width**-0.5


def test_llama3_frequencies_are_recognised(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    model = minikv.random_model(ModelConfig(7, 12, 2, 1, 1, 64, 10, rope_theta=5e5, rope_scaling=scaling), seed=3)
    settings = LLAMA | {
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.rope.freq_base": 5e5,
    }
    settings |= {
        f"llama.{key}": 64 for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    }
    divisors = (rope_frequencies(64, 5e5)[0] / rope_frequencies(64, 5e5, scaling)[0]).astype(np.float32)
    tensors = llama_tensors(model) | {"rope_freqs.weight": divisors}
    assert_equal_models(minikv.load(write(tmp_path / "a.gguf", settings, tensors))[0], model)
    divisors[20] *= 1.01
    assert_refused(write(tmp_path / "b.gguf", settings, tensors), "rope_freqs.weight", "Llama 3")
    tensors["rope_freqs.weight"] = divisors[:-1]
    assert_refused(write(tmp_path / "c.gguf", settings, tensors), "rope_freqs.weight", "(31,)", "(32,)")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "'longrope' is not supported"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "original_max_position_embeddings"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count 4"),
        ({"llama.expert_count": 8}, "'expert_count' = 8"),
        ({"llama.attention.scale": 0.5}, "'attention.scale' = 0.5"),
        ({"llama.attention.value_length": 8}, "value_length 8"),
        ({"llama.attention.head_count": [4, 4]}, "'attention.head_count' must be a whole number"),
        ({"llama.attention.head_count_kv": [4] * 40}, "'attention.head_count_kv' must be a whole number"),
        ({"llama.attention.scales": [0.5] * 40}, "'attention.scales' = array([0.5, "),
        ({"llama.attention.head_count_kv": 3}, "4 query heads cannot share 3 key/value heads"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon"),
        ({"llama.block_count": 4_000_000_000}, "block_count"),
        ({"llama.block_count": 2_000_000_000}, "layers cannot be made of"),
        ({"llama.embedding_length": 2_000_000_000}, "token_embd.weight"),
        ({"split.count": 2}, "one of 2 parts"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_settings_that_cannot_be_followed_are_named(tmp_path: Path, settings: dict[str, Any], says: str) -> None:
    assert_refused(write(tmp_path / "a.gguf", LLAMA | settings, llama_tensors(llama_model())), says)


def test_unknown_architecture_is_named(tmp_path: Path) -> None:
    assert_refused(write(tmp_path / "a.gguf", {}, {"x": np.ones(3, np.float32)}, "mamba"), "'mamba'", "llama, gemma3")


def test_wrong_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    good, name = llama_tensors(llama_model()), "blk.1.attn_k.weight"
    assert_refused(
        write(tmp_path / "a.gguf", LLAMA, {k: v for k, v in good.items() if k != name}), name, "(12, 12)", "missing"
    )
    assert_refused(
        write(tmp_path / "b.gguf", LLAMA, good | {name: np.ones((12, 14), np.float32)}), name, "(12, 14)", "(12, 12)"
    )
    assert_refused(
        write(tmp_path / "c.gguf", LLAMA, good | {"blk.1.more": np.ones((3, 4), np.float32)}), "blk.1.more", "(3, 4)"
    )


# --- Damage


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", LLAMA, llama_tensors(llama_model()))
    whole = path.read_bytes()
    used = max(tensor.offset + tensor.nbytes for tensor in read_gguf(path).tensors.values())
    for length in [*range(0, 64), *range(64, used, 37), used - 1]:
        path.write_bytes(whole[:length])
        assert_refused(path)
    path.write_bytes(whole[:used])
    minikv.load(path)


def with_header(tensors: list[tuple[str, list[int], int, int]], keys: bytes = b"", n_keys: int = 0) -> bytes:
    """Write a header by hand: tensors as (name, axes in the file's order, type, offset)."""
    raw = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), n_keys) + keys
    for name, axes, kind, offset in tensors:
        raw += struct.pack("<Q", len(name)) + name.encode() + struct.pack(f"<I{len(axes)}Q", len(axes), *axes)
        raw += struct.pack("<IQ", kind, offset)
    return raw + b"\0" * (-len(raw) % 32)


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


HUGE = 1 << 60
DAMAGED = {
    "not GGUF": (b"GGML" + b"\0" * 100, "not a GGUF file"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "little-endian"),
    "more tensors than bytes": (b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0), "cut short"),
    "more keys than bytes": (b"GGUF" + struct.pack("<IQQ", 3, 0, HUGE), "cut short"),
    "endless key": (with_header([], struct.pack("<Q", HUGE) + b"k", 1), "cut short"),
    "endless string": (with_header([], key(b"k", 8, struct.pack("<Q", HUGE)), 1), "'k'"),
    "endless array": (with_header([], key(b"k", 9, struct.pack("<IQ", 4, HUGE)), 1), "'k'"),
    "endless array of strings": (with_header([], key(b"k", 9, struct.pack("<IQ", 8, HUGE)), 1), "'k'"),
    "array of arrays": (with_header([], key(b"k", 9, struct.pack("<IQ", 9, 1)), 1), "'k'"),
    "string in an array beyond the end": (with_header([], key(b"k", 9, struct.pack("<IQQ", 8, 1, HUGE)), 1), "'k'"),
    "unknown value type": (with_header([], key(b"k", 99, b""), 1), "value type 99"),
    "key twice": (with_header([], key(b"k", 0, b"\1") * 2, 2), "'k' appears twice"),
    "not UTF-8": (with_header([], key(b"\xff\xfe", 0, b"\1"), 1), "UTF-8"),
    "alignment of nothing": (with_header([], key(b"general.alignment", 4, struct.pack("<I", 0)), 1), "alignment"),
    "tensor twice": (with_header([("x", [1], 0, 0), ("x", [1], 0, 32)]) + b"\0" * 64, "'x' appears twice"),
    "tensors overlap": (with_header([("x", [9], 0, 0), ("y", [9], 0, 32)]) + b"\0" * 99, "'x' and 'y' overlap"),
    "tensor outside": (with_header([("x", [9], 0, HUGE)]) + b"\0" * 64, "'x' ends at byte"),
    "sizes whose product wraps": (with_header([("x", [1 << 32, 1 << 32], 0, 0)]) + b"\0" * 64, "'x' ends at byte"),
    "size of nothing": (with_header([("x", [0], 0, 0)]) + b"\0" * 64, "'x' of shape (0,)"),
    "no axes": (with_header([("x", [], 0, 0)]) + b"\0" * 64, "'x' has 0 axes"),
    "many axes": (with_header([("x", [1] * 5, 0, 0)]) + b"\0" * 64, "'x' has 5 axes"),
    "unknown type": (with_header([("x", [32], 77, 0)]) + b"\0" * 64, "'x' has the unknown type 77"),
    "half a block": (with_header([("x", [48], 2, 0)]) + b"\0" * 64, "'x' of shape (48,)"),
    "long name": (with_header([("x" * 65, [1], 0, 0)]) + b"\0" * 64, "65 characters"),
    "no architecture": (with_header([("x", [1], 0, 0)]) + b"\0" * 64, "general.architecture"),
    "architecture that is a number": (with_header([], key(b"general.architecture", 0, b"\1"), 1), "must be a string"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path: Path, fault: str) -> None:
    raw, says = DAMAGED[fault]
    path = tmp_path / "a.gguf"
    path.write_bytes(raw)
    assert_refused(path, says)


def test_headers_changed_at_random_load_or_are_refused_in_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", LLAMA, llama_tensors(llama_model()))
    whole = path.read_bytes()
    header = min(tensor.offset for tensor in read_gguf(path).tensors.values())
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(500):
        changed = bytearray(whole)
        for place in rng.integers(0, header, rng.integers(1, 4)):
            changed[place] = rng.choice([int(rng.integers(256)), 0, 1, 8, 9, 255])
        path.write_bytes(changed[: rng.integers(1, len(whole))] if rng.random() < 0.1 else changed)
        try:
            minikv.load(path)
        except ValueError as refusal:
            refused += 1
            assert "\n" not in str(refusal) and str(path) in str(refusal)
    assert 250 < refused < 500  # some changes, in names of tokens or padding, do no harm


# --- The real files


def test_smollm2_predicts_paris() -> None:
    model, tokenizer = minikv.load(model_file(SMOLLM2))
    ids = tokenizer.encode("The capital of France is")
    assert ids == [504, 3575, 282, 4649, 314]
    logits = model.step([ids], last=1)[0, -1]
    best = np.argsort(-logits)[:5]
    assert best.tolist() == [7042, 260, 4528, 2250, 1315]
    np.testing.assert_allclose(logits[best], [17.371, 14.889, 13.245, 13.010, 12.952], atol=1e-3)
    assert tokenizer.decode([7042]) == " Paris"


@pytest.mark.parametrize("name", [SMOLLM2, GEMMA3])
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_the_whole_process(name: str) -> None:
    code = (
        "import minikv, sys\n"
        "size = sum(weight.nbytes for weight in minikv.load(sys.argv[1])[0].weights.values())\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss would count the process that this one was made from
        "print(int(status.split('VmHWM:')[1].split()[0]) * 1024 / size)"
    )
    command = [sys.executable, "-c", code, str(model_file(name))]
    run = subprocess.run(command, cwd=FIXTURES.parent.parent, capture_output=True, text=True, check=True)
    assert 1 < float(run.stdout) < 1.3  # Python, the libraries and the tokenizer included


@pytest.fixture(scope="module")
def gemma3() -> minikv.Model:
    return minikv.load(model_file(GEMMA3))[0]


@pytest.mark.parametrize("chunk", [1, 100, 511, 512, 513, 600])
def test_gemma3_agrees_beyond_its_window(gemma3: minikv.Model, chunk: int) -> None:
    expected = np.load(FIXTURES / "gemma3_logits.npz")
    ids, positions = expected["ids"], expected["positions"]
    caches = gemma3.new_caches()
    for start in range(0, len(ids), chunk):
        wanted = [i for i, pos in enumerate(positions) if start <= pos < start + chunk]
        part = ids[None, start : start + chunk]
        last = part.shape[1] - (positions[wanted[0]] - start) if wanted else 1
        logits = gemma3.step(part, caches, last=int(last))[0]
        for i in wanted:
            row = logits[positions[i] - start - part.shape[1]]
            np.testing.assert_allclose(row[expected["columns"]], expected["column_logits"][i], rtol=0, atol=1e-3)
            np.testing.assert_allclose(row[expected["top_ids"][i]], expected["top_logits"][i], rtol=0, atol=1e-3)
    assert [cache.length for cache in caches] == [600] * 18
