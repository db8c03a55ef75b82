"""Are the predicted bytes and operations those of real caches and real steps, and those that papers print?"""

from __future__ import annotations

import dataclasses
import os
import re
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minikv import KVCache, Model, ModelConfig, cost, random_model, weight_shapes
from minikv.arguments import as_model
from minikv.cost import BF16, FP32, INT4, Device, Format, Work
from minikv.presets import devices, models
from minikv.presets.measure import measure_this

WINDOW = 4
# Query rows come in fours here: attention pads few rows to a multiple of four, and these operations are not priced.
SIZES = {"vocab_size": 23, "d_model": 12, "n_layers": 3, "n_heads": 8, "n_kv_heads": 2, "head_dim": 8, "d_ff": 20}
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
STACKS = {
    "full": {},
    "one key/value head": {"n_kv_heads": 1},
    "windowed": {"window": WINDOW},
    "mixed": {"window": WINDOW, "layer_pattern": "LLG"},
    "latent": LATENT,
    "latent, mixed": {**LATENT, "q_lora_rank": 14, "window": WINDOW, "layer_pattern": "LG"},
    "biases and norms": {"qkv_bias": True, "o_bias": True, "qk_norm": True, "post_norms": True, "attn_sinks": True},
    "ungated, own head": {"gated": False, "mlp_bias": True, "norm": "layer", "tied_embeddings": False},
    "learned positions": {"rope_theta": None, "max_positions": 50},
    "experts": {
        **{"n_experts": 8, "n_experts_per_token": 2, "expert_d_ff": 6, "n_shared_experts": 1, "n_dense_layers": 1},
        **{"mlp_bias": True, "router_bias": True},
    },
}


def config_of(stack: str, **changes: Any) -> ModelConfig:
    return ModelConfig(**{**SIZES, **STACKS[stack], **changes})


# Published figures

KB_PER_TOKEN = {
    "gpt2-small": 36864, "llama-2-7b": 524288, "llama-2-13b": 819200, "llama-2-70b": 327680, "llama-3-8b": 131072,
    "llama-3-70b": 327680, "llama-3.1-405b": 516096, "mistral-7b-v0.1": 131072, "mixtral-8x7b": 131072,
    "qwen2.5-7b": 57344, "qwen3-8b": 147456, "qwen3-32b": 262144, "gemma-2-9b": 344064, "gemma-2-27b": 376832,
    "gemma-3-270m": 18432, "gemma-3-1b": 26624, "gemma-3-4b": 139264, "gemma-3-12b": 393216, "gemma-3-27b": 507904,
    "gpt-oss-20b": 49152, "gpt-oss-120b": 73728, "deepseek-v2": 69120, "deepseek-v2-lite": 31104,
    "deepseek-v3": 70272, "kimi-k2": 70272, "minicpm3-4b": 35712, "phi-3-mini-4k": 393216, "phi-3-mini-128k": 393216,
    "smollm2-135m": 23040, "falcon-7b": 8192, "palm-540b": 120832, "command-r-35b-v01": 1310720,
    "command-r7b-12-2024": 131072, "llama-4-scout-17b-16e": 196608, "deepseek-67b": 389120, "qwen2.5-72b": 327680,
    "gemma-2-2b": 106496, "opt-13b": 819200, "codellama-34b": 196608,
}  # fmt: skip


def elements(config: ModelConfig) -> int:
    return sum(kind.elements_per_token for kind in cost.cache_cost(config))


def heads_of_128(n_layers: int, n_heads: int, **changes: Any) -> ModelConfig:
    return config_of("full", n_layers=n_layers, n_heads=n_heads, n_kv_heads=n_heads, head_dim=128, **changes)


def test_bytes_per_token_of_every_preset() -> None:
    assert {name: cost.cache_bytes_per_token(preset.config) for name, preset in models().items()} == KB_PER_TOKEN


def test_every_preset_and_device_has_a_source() -> None:
    assert all(preset.source and preset.verified for preset in models().values())
    words = {word for preset in models().values() for word in re.findall(r"[a-z]+_[a-z_]+", preset.verified)}
    assert "tied_embeddings" in words and words <= set(ModelConfig.__dataclass_fields__)
    assert models()["gpt2-small"].verified == "all but tied_embeddings"  # its source has defaults only
    assert all(device.source for device in devices().values())
    assert list(devices()) == ["h100", "h200", "a100", "l40s", "rtx-4090", "mi300x", "tpu-v5e"]


@pytest.mark.parametrize(
    ("name", "file"),
    [("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf"), ("gemma-3-270m", "gemma-3-270m-q4_k_m.gguf")],
)
def test_presets_cost_what_their_checkpoints_cost(name: str, file: str) -> None:
    path = Path(os.environ.get("MINIKV_MODELS", Path(__file__).parent.parent / "models")) / file
    if not path.exists():
        pytest.skip(f"{path} is not there; make demo fetches it")
    (_, checkpoint), preset = as_model(str(path)), models()[name].config
    assert weight_shapes(checkpoint) == weight_shapes(preset)
    assert cost.cache_cost(checkpoint, 3, 5000) == cost.cache_cost(preset, 3, 5000)


def test_latent_attention_costs_as_much_as_two_and_a_quarter_groups() -> None:
    one_group = dataclasses.replace(models()["deepseek-v2"].config, kv_lora_rank=None, n_kv_heads=1, rotary_dim=64)
    assert elements(models()["deepseek-v2"].config) / elements(one_group) == 2.25  # arXiv 2405.04434, section 2.1.4


def test_elements_per_token_of_table_9() -> None:
    """arXiv 2405.04434, Table 9, prints 110.6K, 15.6K, 860.2K and 34.6K."""
    small, large = models()["deepseek-v2-lite"].config, models()["deepseek-v2"].config
    found = [elements(c) for c in (heads_of_128(27, 16), small, heads_of_128(60, 56), large)]
    assert found == [110592, 15552, 860160, 34560]
    assert [f"{n / 1000:.1f}K" for n in found] == ["110.6K", "15.6K", "860.2K", "34.6K"]


def test_kilobytes_per_token_of_three_large_models() -> None:
    """arXiv 2505.09343, Table 1. Its ratio of 7.28 does not follow from its own numbers."""
    kb = [
        cost.cache_bytes_per_token(models()[n].config) / 1000 for n in ("deepseek-v3", "qwen2.5-72b", "llama-3.1-405b")
    ]
    assert kb == [70.272, 327.680, 516.096]
    assert round(kb[2] / kb[0], 2) == 7.34


def test_a_rolling_buffer_is_eight_times_smaller_at_32k() -> None:
    mistral = models()["mistral-7b-v0.1"].config  # arXiv 2310.06825, section 2
    unlimited = dataclasses.replace(mistral, window=None, layer_pattern=None)
    assert cost.cache_bytes(unlimited, 1, 32768) / cost.cache_bytes(mistral, 1, 32768) == 8


def test_93_3_percent_needs_six_bits_and_equal_formats_give_82_2() -> None:
    v2, dense = models()["deepseek-v2"].config, models()["deepseek-67b"].config
    six_bits = cost.cache_bytes_per_token(v2, Format("6-bit", 6))
    assert six_bits == 576 * 60 * 6 // 8
    assert f"{1 - six_bits / cost.cache_bytes_per_token(dense):.2%}" == "93.34%"
    assert f"{1 - cost.cache_bytes_per_token(v2) / cost.cache_bytes_per_token(dense):.1%}" == "82.2%"


@pytest.mark.parametrize(
    ("name", "total", "active", "source"),
    [
        ("llama-2-7b", 6.74, 6.74, "arXiv 2307.09288: 7B; the checkpoint's index counts 6,738,415,616"),
        ("mixtral-8x7b", 46.7, 12.9, "Mistral's announcement of Mixtral 8x7B"),
        ("deepseek-v2", 236, 21, "arXiv 2405.04434, abstract"),
        ("deepseek-v3", 671, 37, "arXiv 2412.19437, abstract"),
        ("gpt-oss-120b", 116.83, 5.13, "arXiv 2508.10925, Table 1; active without the embedding table"),
        ("gpt-oss-20b", 20.91, 3.61, "arXiv 2508.10925, Table 1; active without the embedding table"),
        ("palm-540b", 540, 540, "arXiv 2204.02311, Table 1"),
    ],
)
def test_parameters_are_the_published_ones(name: str, total: float, active: float, source: str) -> None:
    c = models()[name].config
    table = c.vocab_size * c.d_model if name.startswith("gpt-oss") else 0

    def rounded(count: int, printed: float) -> float:
        digits = len(str(printed).partition(".")[2]) if isinstance(printed, float) else 0
        return round(count / 1e9, digits)

    assert rounded(cost.parameters(c), total) == total, source
    assert abs((cost.active_parameters(c) - table) / 1e9 - active) < 0.02 * active, source


# Formats


@pytest.mark.parametrize(
    ("format", "width", "expected"),
    [
        *(("fp32", 5, 20), ("fp16", 5, 10), ("bf16", 5, 10), ("fp8", 5, 5), ("int8", 5, 5)),
        *(("int4", 32, 18), ("int4", 64, 36), ("int4", 1, 3)),
        ("int4", 33, 21),  # 33 numbers of 4 bits and two scales: 16.5 + 4 bytes
    ],
)
def test_bytes_of_a_row(format: str, width: int, expected: int) -> None:
    assert cost.FORMATS[format].row_bytes(width) == expected


# The kinds of layers, against the rule of who sees whom written out


def sees(kind: str, query: int, key: int, window: int) -> bool:
    rule = {"G": True, "L": query - key < window, "C": query // window == key // window}
    return key <= query and rule[kind]


@pytest.mark.parametrize("kind", "GLC")
@pytest.mark.parametrize("window", range(1, 6))
def test_keys_and_pairs_follow_from_the_rule(kind: str, window: int) -> None:
    seen = [sum(sees(kind, q, k, window) for k in range(q + 1)) for q in range(18)]
    assert [cost.keys_in_sight(kind, t + 1, window) for t in range(18)] == seen
    for past in range(12):
        for new in range(1, 7):
            assert cost.score_pairs(kind, past, new, window) == sum(seen[past : past + new])


def test_a_shared_layer_stores_nothing_and_makes_no_keys() -> None:
    shared, own = config_of("mixed", layer_pattern="LGS"), config_of("mixed", layer_pattern="LGG")
    assert cost.sight(shared) == "LGG"
    last = cost.cache_cost(shared, 2, 9)[-1]
    assert (last.kind, last.layers, last.needed, last.reserved) == ("S", 1, 0, 0)
    assert cost.cache_bytes(own, 2, 9) - cost.cache_bytes(shared, 2, 9) == 2 * 9 * 2 * (2 * 8) * 2
    assert cost.parameters(own) - cost.parameters(shared) == 2 * 2 * 8 * 12
    steps = [cost.step_cost(c, 2, 1, 8) for c in (shared, own)]
    assert steps[0]["scores"] == steps[1]["scores"]  # it still reads what the layer before it stored
    assert cost.sight(config_of("mixed", n_layers=5, layer_pattern="GLSSG")) == "GLLLG"
    with pytest.raises(ValueError, match="layer 0 is shared"):
        cost.sight(config_of("mixed", layer_pattern="SG"))


def test_a_chunked_layer_needs_its_chunk_and_reserves_a_whole_one() -> None:
    config, row = config_of("mixed", layer_pattern="C"), 3 * 2 * (2 * 8) * 2
    found = {t: (c.needed // row, c.reserved // row) for t in (1, 3, 4, 5, 40) for c in cost.cache_cost(config, 1, t)}
    assert found == {1: (1, 4), 3: (3, 4), 4: (4, 4), 5: (1, 4), 40: (4, 4)}


def test_pages_are_reserved_whole_and_a_capacity_bounds_the_ring() -> None:
    (windowed, full), row = cost.cache_cost(config_of("mixed"), 1, 5, page_size=3), 2 * (2 * 8) * 2
    assert (windowed.reserved, full.reserved) == (2 * row * 6, row * 6)
    (windowed, full) = cost.cache_cost(config_of("mixed"), 1, 2, capacity=3)
    assert (windowed.reserved, full.reserved) == (2 * row * 3, row * 3)
    with pytest.raises(ValueError, match="capacity 3 cannot hold a context of 4 tokens"):
        cost.cache_cost(config_of("mixed"), 1, 4, capacity=3)


# Real caches


def fed(model: Model, caches: list[Any], batch: int, tokens: int, chunk: int) -> list[Any]:
    for start in range(0, tokens, chunk):
        model.step(np.zeros((batch, min(chunk, tokens - start)), dtype=np.int64), caches)
    return caches


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 10 * WINDOW])
@pytest.mark.parametrize("stack", ["full", "one key/value head", "windowed", "mixed", "latent", "latent, mixed"])
def test_predicted_bytes_are_those_of_real_caches(stack: str, tokens: int, batch: int, chunk: int) -> None:
    config = config_of(stack)
    model = random_model(config)
    caches = fed(model, model.new_caches(), batch, tokens, chunk)
    for kind in cost.cache_cost(config, batch, tokens, FP32):
        of_kind = [cache for cache, letter in zip(caches, config.pattern, strict=True) if letter == kind.kind]
        assert len(of_kind) == kind.layers
        assert sum(cache.nbytes_used for cache in of_kind) == kind.needed
        if kind.kind == "L":  # a ring is made whole
            assert sum(cache.nbytes for cache in of_kind) == kind.reserved
        else:  # a doubling buffer holds the text, and less than twice the text
            assert kind.reserved <= sum(cache.nbytes for cache in of_kind) < 2 * kind.reserved
    assert sum(cache.nbytes_used for cache in caches) == cost.cache_bytes(config, batch, tokens, FP32)


@pytest.mark.parametrize("stack", ["full", "latent"])
def test_predicted_reservation_is_that_of_fixed_and_of_exact_buffers(stack: str) -> None:
    config, batch, tokens = config_of(stack), 3, 5
    model = random_model(config)
    fixed = fed(model, model.new_caches(lambda: KVCache(capacity=9)), batch, tokens, 2)
    exact = fed(model, model.new_caches("concat"), batch, tokens, 2)
    for caches, capacity in ((fixed, 9), (exact, None)):
        (kind,) = cost.cache_cost(config, batch, tokens, FP32, capacity)
        assert sum(cache.nbytes for cache in caches) == kind.reserved
        assert sum(cache.nbytes_used for cache in caches) == kind.needed


# Real steps, on an array library that counts


class Counted(np.ndarray):
    """A NumPy array whose library counts the operations and bytes of its matrix products."""

    def __array_namespace__(self, api_version: str | None = None) -> CountingLibrary:
        return LIBRARY

    def __matmul__(self, other: Any) -> Any:
        raise AssertionError("a product that nobody counts")


class CountingLibrary:
    """NumPy, but with a record of every matrix product."""

    __name__ = "counting"

    def __init__(self) -> None:
        self.products: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def matmul(self, a: np.ndarray, b: np.ndarray) -> Any:
        out = np.matmul(a.view(np.ndarray), b.view(np.ndarray))
        self.products.append((a, b, out))
        return out.view(Counted)

    def __getattr__(self, name: str) -> Any:
        found = getattr(np, name)
        if not callable(found) or isinstance(found, type):
            return found

        def run(*arguments: Any, **named: Any) -> Any:
            out = found(*arguments, **named)
            return out.view(Counted) if isinstance(out, np.ndarray) else out

        return run

    @property
    def operations(self) -> int:
        return sum(2 * out.size * a.shape[-1] for a, _, out in self.products)


LIBRARY = CountingLibrary()


def counting_model(config: ModelConfig) -> Model:
    weights = random_model(config).weights
    return Model(config, {name: weight.view(Counted) for name, weight in weights.items()})


def count(model: Model, caches: list[Any], batch: int, new: int, last: int | None = None) -> list[Any]:
    LIBRARY.products.clear()
    model.step(np.zeros((batch, new), dtype=np.int64), caches, last=last)
    return LIBRARY.products


def score_widths(config: ModelConfig, absorbed: bool) -> int:
    """Width of a key plus width of a value."""
    if not config.is_mla:
        return 2 * config.head_dim
    latent, rotary = config.kv_lora_rank or 0, config.qk_rope_head_dim
    return 2 * latent + rotary if absorbed else config.qk_nope_head_dim + rotary + config.v_head_dim


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("stack", STACKS)
def test_predicted_operations_of_decode_are_those_counted(stack: str, batch: int) -> None:
    config = config_of(stack)
    model = counting_model(config)
    caches = model.new_caches()
    for past in range(3 * WINDOW):
        count(model, caches, batch, 1)
        assert LIBRARY.operations == cost.total(cost.step_cost(config, batch, 1, past)).operations


@pytest.mark.parametrize("last", [1, None])
@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "experts"])
def test_predicted_operations_of_prefill_are_those_counted(stack: str, last: int | None) -> None:
    """A short prefill is one tile, in which hidden scores are computed too: T · T pairs instead of those in sight.

    Experts are left out: to spare the device a wait, a prefill lets every expert compute every token.
    """
    config, batch, new = config_of(stack), 2, 8
    model = counting_model(config)
    for form in ("absorbed", "expanded") if config.is_mla else (None,):
        for layer in model.layers:
            layer.attention.form = form  # type: ignore[union-attr]
        count(model, model.new_caches(), batch, new, last)
        parts = cost.step_cost(config, batch, new, absorbed=form == "absorbed", head_positions=last or new)
        hidden = sum(new * new - cost.score_pairs(kind, 0, new, config.window) for kind in config.pattern)
        extra = 2 * batch * config.n_heads * score_widths(config, form == "absorbed") * hidden
        assert LIBRARY.operations == cost.total(parts).operations + extra


@pytest.mark.parametrize("stack", [stack for stack in STACKS if "latent" not in stack])
def test_a_prefill_takes_the_operations_of_its_decode_steps(stack: str) -> None:
    config, new = config_of(stack), 3 * WINDOW
    whole = cost.step_cost(config, 2, new, head_positions=new)
    steps = [cost.step_cost(config, 2, 1, past) for past in range(new)]
    assert {part: work.operations for part, work in whole.items()} == {
        part: sum(step[part].operations for step in steps) for part in whole
    }


@pytest.mark.parametrize("stack", [stack for stack in STACKS if stack != "experts" and "latent" not in stack])
def test_predicted_bytes_of_decode_are_those_of_the_products(stack: str) -> None:
    """Products with weights read the input and the weight and write the output; scores read q and k, mixing reads v.

    What else is moved is counted here: vectors (norms, biases, sinks) and the looked-up rows of tables.
    """
    config, batch = config_of(stack), 4  # fewer take a product each
    model = counting_model(config)
    caches = model.new_caches()
    for past in range(2 * WINDOW):
        products = count(model, caches, batch, 1)
        moved = dict.fromkeys(("weights", "scores", "mixing"), 0)
        attention = [product for product in products if product[1].ndim == 4]
        for a, b, out in products:
            if b.ndim == 2:
                moved["weights"] += 4 * (a.size + b.size + out.size)
        for (k, q, _), (_, v, out) in zip(attention[::2], attention[1::2], strict=True):
            moved["scores"] += 4 * (k.size + q.size)
            moved["mixing"] += 4 * (v.size + out.size)
        parts = cost.step_cost(config, batch, 1, past, FP32)
        vectors = sum(shape[0] for shape in weight_shapes(config).values() if len(shape) == 1)
        tables = 1 + (config.rope_theta is None)
        other = 4 * (vectors + tables * batch * config.d_model)
        assert parts["scores"].bytes == moved["scores"]
        assert parts["mixing"].bytes == moved["mixing"]
        assert cost.total(parts).bytes == sum(moved.values()) + other


def test_decode_of_latent_attention_is_absorbed_and_reads_each_latent_once() -> None:
    config = models()["deepseek-v3"].config
    decode = cost.step_cost(config, 1, 1, 99_999)
    assert decode == cost.step_cost(config, 1, 1, 99_999, absorbed=True)
    assert cost.step_cost(config, 1, 100_000) == cost.step_cost(config, 1, 100_000, absorbed=False)
    queries = 128 * (512 + 64) * 2
    assert decode["scores"].bytes == 61 * (queries + 100_000 * (512 + 64) * 2)
    assert decode["mixing"].bytes == 61 * 128 * 512 * 2


def test_experts_read_are_those_expected() -> None:
    config = config_of("experts")
    assert cost.experts_read(config, 1) == 2
    assert cost.experts_read(config, 2) == 2 + 2 * 6 / 8  # the second token finds each of its two new with chance 6/8
    assert cost.experts_read(config, 1000) == pytest.approx(8)
    # One expert, two bytes a number: gate and up, their bias, down, its bias. Two layers are sparse.
    expert = 2 * (2 * 6 * 12 + 2 * 6 + 12 * 6 + 12)
    moved = {batch: cost.step_cost(config, batch, 1)["feed-forward"].bytes for batch in (1, 2, 3)}
    inputs_and_outputs = (
        moved[3] - moved[2] - 2 * expert * (cost.experts_read(config, 3) - cost.experts_read(config, 2))
    )
    assert moved[2] - moved[1] == pytest.approx(2 * expert * (3.5 - 2) + inputs_and_outputs, abs=4)


# Devices


def test_the_slower_ceiling_binds_and_devices_share() -> None:
    device = Device("toy", operations_per_second=100.0, bytes_per_second=10.0, memory=1000, source="")
    assert cost.best_time(Work(400, 20), device) == (4.0, "compute")
    assert cost.best_time(Work(400, 80), device) == (8.0, "memory")
    assert cost.best_time(Work(400, 80), device, devices=4) == (2.0, "memory")


@given(
    st.sampled_from(sorted(models())), st.integers(1, 300_000), st.integers(1, 64), st.integers(1, 32), st.booleans()
)
def test_the_largest_fit_fits_and_one_more_does_not(
    name: str, context: int, batch: int, gigabytes: int, small: bool
) -> None:
    config, memory, format = models()[name].config, gigabytes * 16 * 10**9, INT4 if small else BF16
    room = memory - cost.weight_bytes(config, format)
    most = cost.max_batch(config, memory, context, format)
    assert most == 0 or cost.reserved_bytes(config, most, context, format) <= room
    assert cost.reserved_bytes(config, most + 1, context, format) > room
    longest = cost.max_context(config, memory, batch, format)
    if longest is None:
        assert "G" not in config.pattern and cost.reserved_bytes(config, batch, 10**9, format) <= room
    else:
        assert longest == 0 or cost.reserved_bytes(config, batch, longest, format) <= room
        assert cost.reserved_bytes(config, batch, longest + 1, format) > room


def test_pages_make_less_fit() -> None:
    config, memory = config_of("full"), 10**5
    row = cost.cache_bytes_per_token(config)
    room = memory - cost.weight_bytes(config)
    assert cost.max_batch(config, memory, 5, page_size=4) == room // (8 * row)
    assert cost.max_context(config, memory, 2, page_size=4) == room // (8 * row) * 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: cost.cache_cost(c, batch=0), "batch must be at least 1, got 0"),
        (lambda c: cost.cache_cost(c, context=-1), "context must be at least 1, got -1"),
        (lambda c: cost.cache_cost(c, page_size=0), "page_size must be at least 1, got 0"),
        (lambda c: cost.step_cost(c, 1, 0), "new must be at least 1, got 0"),
        (lambda c: cost.step_cost(c, 1, 1, -1), "past must not be negative, got -1"),
    ],
)
def test_impossible_sizes_are_refused(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(config_of("full"))


def test_this_machine_has_ceilings() -> None:
    this = measure_this()
    assert this.name == "this" and "numpy" in this.source
    # Even a small machine multiplies a billion and reads a hundred million a second; none reads a petabyte.
    assert 1e9 < this.operations_per_second < 1e15
    assert 1e8 < this.bytes_per_second < 1e14
    assert this.memory > 2**28


def test_the_roofline_separates_prefill_from_decode() -> None:
    device, config = devices()["h100"], models()["llama-3-8b"].config
    ridge = device.operations_per_second / device.bytes_per_second
    prefill, decode = (cost.total(cost.step_cost(config, 8, new, past)) for new, past in ((4096, 0), (1, 4095)))
    assert decode.intensity < 10 < ridge < 1000 < prefill.intensity
    assert cost.best_time(prefill, device)[1] == "compute"
    assert cost.best_time(decode, device)[1] == "memory"
    assert ceil(decode.operations / 1e9) == ceil(
        8 * (2 * (cost.parameters(config) - 128256 * 4096) + 32 * 4 * 32 * 128 * 4096) / 1e9
    )
