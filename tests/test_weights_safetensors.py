"""Are the numbers of a Hugging Face folder read exactly, and is whatever is wrong with one refused in one line?"""

from __future__ import annotations

import json
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import minikv
from checkpoints import assert_refused
from minikv.config import ModelConfig, weight_shapes
from minikv.weights.safetensors_file import read_safetensors
from support import assert_same

CONFIG = {
    "model_type": "llama",
    "vocab_size": 19,
    "hidden_size": 12,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rms_norm_eps": 1e-5,
}
BLOCK = "model.layers.{}."
SHAPES = {
    "model.embed_tokens.weight": (19, 12),
    "model.norm.weight": (12,),
    "lm_head.weight": (19, 12),
    **{
        BLOCK.format(layer) + name: shape
        for layer in range(2)
        for name, shape in {
            "input_layernorm.weight": (12,),
            "post_attention_layernorm.weight": (12,),
            "self_attn.q_proj.weight": (24, 12),
            "self_attn.k_proj.weight": (12, 12),
            "self_attn.v_proj.weight": (12, 12),
            "self_attn.o_proj.weight": (12, 24),
            "mlp.gate_proj.weight": (10, 12),
            "mlp.up_proj.weight": (10, 12),
            "mlp.down_proj.weight": (12, 10),
        }.items()
    },
}


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def write_folder(folder: Path, weights: dict[str, np.ndarray], config: dict[str, Any] | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    save_file(weights, folder / "model.safetensors")
    return folder


def write_raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a safetensors file by hand, true or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(dtype: str, shape: list[Any], begin: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(path: Path, name: str, dtype: str) -> np.ndarray:
    stored = read_safetensors(path)[name]
    out = np.empty(stored.shape, dtype)
    stored.copy_to(out)
    return out


# --- Numbers


def test_bfloat16_is_exact(tmp_path: Path) -> None:
    bits = [0x3F80, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0x0001, 0x807F, 0x7F7F, 0x4049]
    expected = [1.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-133, -127 * 2.0**-133, (2 - 2.0**-7) * 2.0**127, 3.140625]
    path = write_raw(tmp_path / "a", {"x": entry("BF16", [9], 0, 18)}, struct.pack("<9H", *bits))
    numbers = read(path, "x", "float32")
    assert_same(numbers.view(np.uint32), np.array(bits, np.uint32) << 16)
    assert np.array_equal(numbers, np.array(expected, np.float32), equal_nan=True)
    assert np.array_equal(read(path, "x", "float64"), expected, equal_nan=True)


@pytest.mark.parametrize(("code", "numpy"), [("F16", "<f2"), ("F32", "<f4"), ("F64", "<f8")])
def test_plain_floats_are_read_as_they_are(tmp_path: Path, code: str, numpy: str) -> None:
    values = np.array([[1.0, -0.0, 65504.0], [2.0**-24, np.inf, 1 / 3]]).astype(numpy)
    header = {"pad": entry("F16", [1], 0, 2), "x": entry(code, [2, 3], 2, 2 + values.nbytes)}
    path = write_raw(tmp_path / "a", header, b"zz" + values.tobytes())
    assert_same(read(path, "x", "float64"), values.astype(np.float64))


def test_a_tensor_longer_than_one_read_is_whole(tmp_path: Path) -> None:
    values = np.arange(3_000_001, dtype=np.float32)
    save_file({"flat": values, "rows": values[:-1].reshape(1000, 3000)}, tmp_path / "a")
    assert_same(read(tmp_path / "a", "flat", "float32"), values)
    assert_same(read(tmp_path / "a", "rows", "float32"), values[:-1].reshape(1000, 3000))


def test_every_tensor_finds_its_place(tmp_path: Path) -> None:
    source = tensors()
    model, tokenizer = minikv.load(write_folder(tmp_path / "m", source))
    assert tokenizer is None
    block = BLOCK.format(1)
    attention = [source[f"{block}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert_same(model.weights["layers.1.qkv"], np.concatenate(attention))
    feed_forward = [source[f"{block}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert_same(model.weights["layers.1.gate_up"], np.concatenate(feed_forward))
    for ours, theirs in {
        "embed": "model.embed_tokens.weight",
        "head": "lm_head.weight",
        "final_norm": "model.norm.weight",
        "layers.1.attn_norm": block + "input_layernorm.weight",
        "layers.1.ffn_norm": block + "post_attention_layernorm.weight",
        "layers.1.o": block + "self_attn.o_proj.weight",
        "layers.1.down": block + "mlp.down_proj.weight",
    }.items():
        assert_same(model.weights[ours], source[theirs])


def test_shards_and_bare_names_hold_the_same_model(tmp_path: Path) -> None:
    source = tensors()
    whole, _ = minikv.load(write_folder(tmp_path / "whole", source))
    sharded = write_shards(tmp_path / "sharded", source)
    bare = {name.removeprefix("model."): weight for name, weight in source.items()}
    for folder in (sharded, write_folder(tmp_path / "bare", bare)):
        model, _ = minikv.load(folder)
        for name, weight in whole.weights.items():
            assert_same(model.weights[name], weight)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_weights_have_the_type_asked_for(tmp_path: Path, dtype: str) -> None:
    source = tensors()
    model, _ = minikv.load(write_folder(tmp_path / "m", source), dtype=dtype)
    assert_same(model.weights["embed"], source["model.embed_tokens.weight"].astype(dtype))
    with pytest.raises(ValueError, match=r"dtype must be one of .*, got 'int8'"):
        minikv.load(tmp_path / "m", dtype="int8")


def test_head_width_comes_from_the_file(tmp_path: Path) -> None:
    config = {**CONFIG, "hidden_size": 640, "head_dim": 256, "num_hidden_layers": 1, "num_key_value_heads": 1}
    shapes = {name: shape for name, shape in SHAPES.items() if ".1." not in name}
    shapes |= {name: tuple(640 if n == 12 else n for n in shape) for name, shape in shapes.items()}
    attention = BLOCK.format(0) + "self_attn."
    shapes |= {attention + "q_proj.weight": (1024, 640), attention + "o_proj.weight": (640, 1024)}
    shapes |= {attention + part + "_proj.weight": (256, 640) for part in "kv"}
    source = {name: np.zeros(shape, np.float16) for name, shape in shapes.items()}
    model, _ = minikv.load(write_folder(tmp_path / "m", source, config))
    assert model.config.head_dim == 256


# --- Memory


def test_peak_memory_stays_near_the_size_of_the_model(tmp_path: Path) -> None:
    config = {**CONFIG, "vocab_size": 12_000, "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 3}
    config |= {"head_dim": 64, "num_key_value_heads": 4}
    geometry = ModelConfig(12_000, 256, 3, 4, 4, 64, 2048, tied_embeddings=False)
    size = 4 * sum(int(np.prod(shape)) for shape in weight_shapes(geometry).values())
    widths = {19: 12_000, 12: 256, 10: 2048, 24: 256}
    source = {
        name.replace(".1.", f".{layer}."): np.zeros([widths[n] for n in shape], np.float16)
        for layer in (1, 2)
        for name, shape in SHAPES.items()
    }
    folder = write_folder(tmp_path / "m", source, config)
    del source
    tracemalloc.start()
    model, _ = minikv.load(folder)
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(weight.nbytes for weight in model.weights.values()) == size
    assert size > 40_000_000
    assert size <= held <= peak < 1.3 * size, f"{peak / size:.2f} times the model"


# --- What does not belong together


def test_wrong_tensors_are_named_with_both_shapes(tmp_path: Path) -> None:
    name = BLOCK.format(1) + "self_attn.k_proj.weight"
    source = tensors()
    folder = write_folder(tmp_path / "missing", {key: value for key, value in source.items() if key != name})
    assert_refused(folder, name, "(12, 12)", "missing")
    folder = write_folder(tmp_path / "misshapen", source | {name: np.zeros((12, 13), np.float32)})
    assert_refused(folder, name, "(12, 13)", "(12, 12)")
    folder = write_folder(tmp_path / "extra", source | {"model.layers.2.extra": np.zeros((3, 4), np.float32)})
    assert_refused(folder, "model.layers.2.extra", "(3, 4)")


def write_shards(folder: Path, source: dict[str, np.ndarray], places: dict[str, Any] | None = None) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shards: dict[str, list[str]] = {"one.safetensors": list(source)[:9], "two.safetensors": list(source)[9:]}
    for shard, names in shards.items():
        save_file({name: source[name] for name in names}, folder / shard)
    true = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": {"total_size": 1}, "weight_map": true if places is None else {**true, **places}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_an_index_that_does_not_fit_its_shards(tmp_path: Path) -> None:
    source = tensors()
    folder = write_shards(tmp_path / "absent", source, {"lm_head.weight": "three.safetensors"})
    assert_refused(folder, "three.safetensors", "no such file")
    folder = write_shards(tmp_path / "elsewhere", source, {"lm_head.weight": "two.safetensors"})
    assert_refused(folder, "one.safetensors", "lm_head.weight", "two.safetensors")
    folder = write_shards(tmp_path / "ghost", source, {"ghost": "one.safetensors"})
    assert_refused(folder, "index.json", "ghost")
    folder = write_shards(tmp_path / "unlisted", source)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(folder, "lm_head.weight", "nowhere")
    for weight_map in ([], {"lm_head.weight": 3}, None):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        assert_refused(folder, "weight_map")


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "{absolute}", "link.safetensors", "sub/x", "..", "a\0b", ""]
)
def test_an_index_cannot_lead_out_of_its_folder(tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside.safetensors"
    save_file({"lm_head.weight": np.zeros((19, 12), np.float32)}, outside)
    name = name.replace("{absolute}", str(outside))
    folder = write_shards(tmp_path / "m", tensors(), {"lm_head.weight": name})
    (folder / "link.safetensors").symlink_to(outside)
    assert_refused(folder, "index.json", repr(name), "not in the folder")


def test_a_single_file_cannot_be_a_link_out_of_its_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors())
    (folder / "model.safetensors").rename(tmp_path / "moved")
    (folder / "model.safetensors").symlink_to(tmp_path / "moved")
    assert_refused(folder, "model.safetensors", "not in the folder")


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    assert_refused(tmp_path, "config.json", "no such file")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"cposix\nsystem\n(S'echo'\ntR.")
    assert_refused(tmp_path, "neither model.safetensors nor", "pickled")
    assert_refused(tmp_path / "nowhere", "no such file or folder")
    assert_refused(tmp_path / "pytorch_model.bin", "neither a .gguf file nor a folder")


# --- Damage

GOOD = entry("F32", [2, 3], 0, 24)
DAMAGED: dict[str, tuple[dict[str, Any] | bytes, bytes, int | None, str]] = {
    "cut short": ({"x": GOOD}, b"\0" * 20, None, "ends at byte"),
    "header longer than the file": ({"x": GOOD}, b"\0" * 24, 5000, "header of 5000 bytes"),
    "header of 2 GB": ({"x": GOOD}, b"\0" * 24, 2 << 30, f"header of {2 << 30} bytes"),
    "header of 2^63 bytes": ({"x": GOOD}, b"\0" * 24, 1 << 63, "header of"),
    "header cut inside the JSON": ({"x": GOOD}, b"\0" * 24, 30, "JSON"),
    "header of nothing": (b"", b"", None, "JSON"),
    "no object": (b"[1, 2]", b"", None, "expected a JSON object"),
    "not UTF-8": (b'{"\xff\xfe": 1}', b"", None, "JSON"),
    "nested without end": (b'{"a":' + b"[" * 100_000, b"", None, "JSON"),
    "a tensor twice": (b'{"x": {}, "x": {}}', b"", None, "appears twice"),
    "not an object": ({"x": [1]}, b"", None, "'x'"),
    "NaN for a size": (b'{"x": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}', b"\0" * 4, None, "NaN"),
    "a fraction for a size": ({"x": entry("F32", [1.5], 0, 6)}, b"\0" * 6, None, "shape [1.5]"),
    "a truth value for a size": ({"x": entry("F32", [True], 0, 4)}, b"\0" * 4, None, "shape [True]"),
    "a negative size": ({"x": entry("F32", [-2, -3], 0, 24)}, b"\0" * 24, None, "shape [-2, -3]"),
    "no size": ({"x": entry("F32", [0, 3], 0, 0)}, b"", None, "shape [0, 3]"),
    "a size beyond 2^63": ({"x": entry("F32", [1 << 70], 0, 24)}, b"\0" * 24, None, "shape"),
    "sizes whose product wraps": ({"x": entry("F32", [1 << 32, 1 << 32], 0, 0)}, b"", None, "takes"),
    "wrong span": ({"x": entry("F32", [2, 3], 0, 20)}, b"\0" * 24, None, "takes 24 bytes, its offsets span 20"),
    "backwards": ({"x": entry("F32", [2, 3], 24, 0)}, b"\0" * 24, None, "span -24"),
    "outside": ({"x": entry("F32", [2, 3], 1 << 40, (1 << 40) + 24)}, b"\0" * 24, None, "ends at byte"),
    "overlapping": ({"x": GOOD, "y": entry("F32", [6], 4, 28)}, b"\0" * 28, None, "'x' and 'y' overlap"),
    "the same bytes": ({"x": GOOD, "y": GOOD}, b"\0" * 24, None, "overlap"),
    "unknown dtype": ({"x": entry("F8_E4M3", [24], 0, 24)}, b"\0" * 24, None, "'F8_E4M3'"),
    "dtype of another kind": ({"x": entry(7, [24], 0, 24)}, b"\0" * 24, None, "dtype 7"),  # type: ignore[arg-type]
    "three offsets": ({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 2, 4]}}, b"\0" * 4, None, "[0, 2, 4]"),
}


@pytest.mark.parametrize("fault", DAMAGED)
def test_a_damaged_file_is_refused(tmp_path: Path, fault: str) -> None:
    header, data, length, says = DAMAGED[fault]
    folder = write_folder(tmp_path / "m", tensors())
    write_raw(folder / "model.safetensors", header, data, length)
    assert_refused(folder, "model.safetensors", says)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 200, 5000])
def test_a_file_cut_anywhere_is_refused(tmp_path: Path, length: int) -> None:
    folder = write_folder(tmp_path / "m", tensors())
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:length])
    assert_refused(folder, "model.safetensors")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"model_type": NaN}', b"\xff", b'{"a":' * 100_000, b'{"a":1,"a":2}']
)
def test_damaged_configurations_are_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_folder(tmp_path / "m", tensors())
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, "config.json")


def test_headers_changed_at_random_load_or_are_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", tensors())
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        for place in rng.integers(0, header, rng.integers(1, 4)):
            changed[place] = rng.choice([int(rng.integers(256)), ord("9"), ord("0"), ord('"'), ord("]"), ord("-")])
        path.write_bytes(changed[: rng.integers(1, len(whole))] if rng.random() < 0.1 else changed)
        try:
            minikv.load(folder)
        except ValueError as refusal:
            refused += 1
            assert "\n" not in str(refusal) and str(folder) in str(refusal)
    assert 200 < refused < 400  # some changes, in the numbers of the metadata or in spaces, do no harm
