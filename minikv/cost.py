"""What does a configuration cost: how many bytes are remembered, how many operations and bytes does a step take?

All of it follows from the geometry alone; nothing here holds an array or runs a model. It does not answer how fast a
program is (`minikv bench` measures that): a best time is what no program can beat that computes as the ceilings do.

A multiply-add is 2 operations. Only matrix products are counted: norms, softmax, activations and rotations take few
operations per byte and a good kernel hides them. KB, MB, GB are powers of 10; KiB, MiB, GiB are powers of 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from .config import ModelConfig, weight_shapes

KIND_NAMES = {"G": "full", "L": "windowed", "C": "chunked", "S": "shared"}
PARTS = ("projections", "scores", "mixing", "feed-forward", "head")


@dataclass(frozen=True)
class Format:
    """Name a number format: `bits` per element and, with a `group`, one 16-bit scale per `group` elements of a row."""

    name: str
    bits: int
    group: int | None = None

    def row_bytes(self, width: int) -> int:
        """Count the bytes of a row: ⌈(width · bits + 16 · ⌈width / group⌉) / 8⌉."""
        scales = 0 if self.group is None else -(-width // self.group)
        return -(-(width * self.bits + 16 * scales) // 8)

    @property
    def activation_bytes(self) -> int:
        """Give the bytes of a number on its way from one product to the next: never under 16 bits."""
        return max(2, self.bits // 8)


# In 8 bits one scale for a whole tensor is usual and weighs nothing. In 4 bits the group is that of GGUF's Q4_0 blocks.
FP32, FP16, BF16 = Format("fp32", 32), Format("fp16", 16), Format("bf16", 16)
FP8, INT8, INT4 = Format("fp8", 8), Format("int8", 8), Format("int4", 4, group=32)
FORMATS = {format.name: format for format in (FP32, FP16, BF16, FP8, INT8, INT4)}


# What is remembered


def keys_in_sight(kind: str, tokens: int, window: int | None = None) -> int:
    """Count the keys that the last of `tokens` tokens sees, its own included.

    G: tokens.  L: min(tokens, window).  C: (tokens - 1) mod window + 1.
    """
    if kind == "G" or window is None:
        return tokens
    return min(tokens, window) if kind == "L" else (tokens - 1) % window + 1


def sight(config: ModelConfig) -> str:
    """Spell out the pattern with every shared layer replaced by the kind of the layer whose cache it reads.

    A shared layer reads the nearest earlier layer that has a cache of its own. Raises ValueError when there is none.
    """
    kinds = ""
    for layer, kind in enumerate(config.pattern):
        if kind == "S" and not kinds:
            raise ValueError(f"layer {layer} is shared, but no earlier layer of {config.pattern!r} has a cache")
        kinds += kinds[-1] if kind == "S" else kind
    return kinds


@dataclass(frozen=True)
class CacheCost:
    """Say what the layers of one kind remember: numbers and bytes per token, and bytes for the batch and context."""

    kind: str  # a letter of the pattern
    layers: int
    elements_per_token: int  # numbers that one more token adds as long as nothing is forgotten
    bytes_per_token: int
    needed: int  # bytes of the rows that the newest token may look at
    reserved: int  # bytes set aside for them


def cache_cost(
    config: ModelConfig,
    batch: int = 1,
    context: int = 1,
    format: Format = BF16,
    capacity: int | None = None,
    page_size: int = 1,
) -> tuple[CacheCost, ...]:
    """Price the caches of every kind of layer after `context` tokens.

    bytes_per_token = layers · Σ heads · row_bytes(width) over config.cache_rows, 0 for shared layers
    needed   = batch · bytes_per_token · keys_in_sight(kind, context, window)
    reserved = batch · bytes_per_token · ⌈rows / page_size⌉ · page_size
               rows: capacity, at most the window in windowed and chunked layers;
               without a capacity, context in full layers and the window in windowed and chunked ones

    What is needed is a fact about the model; what is reserved is a choice of the storage: buffers made for texts of
    `capacity` tokens, rings of a whole window, pages handed out whole. A chunked layer needs few rows early in a chunk
    and reserves the most that it ever needs. Raises ValueError for sizes below 1 and a capacity below the context.
    """
    _at_least_one(batch=batch, context=context, page_size=page_size)
    if capacity is not None and capacity < context:
        raise ValueError(f"capacity {capacity} cannot hold a context of {context} tokens")
    elements = sum(heads * width for heads, width in config.cache_rows)
    row_bytes = sum(heads * format.row_bytes(width) for heads, width in config.cache_rows)
    costs = []
    for kind in dict.fromkeys(config.pattern):
        layers = config.pattern.count(kind)
        storing = 0 if kind == "S" else layers
        rows = capacity or context
        if kind in "LC" and config.window:
            rows = min(config.window, capacity or config.window)
        reserved_rows = -(-rows // page_size) * page_size
        per_row = batch * storing * row_bytes
        needed = per_row * keys_in_sight(kind, context, config.window)
        costs.append(CacheCost(kind, layers, storing * elements, storing * row_bytes, needed, per_row * reserved_rows))
    return tuple(costs)


def cache_bytes_per_token(config: ModelConfig, format: Format = BF16) -> int:
    """Count the bytes that one token adds as long as every layer keeps it: Σ bytes_per_token over the kinds."""
    return sum(cost.bytes_per_token for cost in cache_cost(config, format=format))


def cache_bytes(config: ModelConfig, batch: int, context: int, format: Format = BF16) -> int:
    """Count the bytes that the batch's next step needs: Σ needed over the kinds."""
    return sum(cost.needed for cost in cache_cost(config, batch, context, format))


def reserved_bytes(config: ModelConfig, batch: int, context: int, format: Format = BF16, page_size: int = 1) -> int:
    """Count the bytes to set aside so that every sequence can reach `context` tokens: Σ reserved at that capacity."""
    return sum(cost.reserved for cost in cache_cost(config, batch, context, format, context, page_size))


# What is learned


def parameters(config: ModelConfig) -> int:
    """Count the weights: Σ over the shapes of all of them."""
    return sum(prod(shape) for shape in weight_shapes(config).values())


def active_parameters(config: ModelConfig) -> int:
    """Count the weights that one token passes: of a layer's experts only n_experts_per_token / n_experts.

    The embedding table counts in full, as most reports count it; the gpt-oss model card leaves it out.
    """
    return sum(
        prod(shape) * config.n_experts_per_token // config.n_experts if ".experts_" in name else prod(shape)
        for name, shape in weight_shapes(config).items()
    )


def weight_bytes(config: ModelConfig, format: Format = BF16) -> int:
    """Count the bytes of all weights: Σ rows · row_bytes(columns). Scales of a group lie along the inputs."""
    return sum(prod(shape[:-1]) * format.row_bytes(shape[-1]) for shape in weight_shapes(config).values())


def experts_read(config: ModelConfig, tokens: int) -> float:
    """Expect how many of a layer's experts `tokens` tokens choose: n · (1 - (1 - n_experts_per_token / n)^tokens).

    Every token chooses independently and evenly; a router that prefers some experts reads fewer.
    """
    n = config.n_experts
    return n * (1 - (1 - config.n_experts_per_token / n) ** tokens)


# What a step takes


@dataclass(frozen=True)
class Work:
    """Hold operations and bytes moved (inputs read once, outputs written once)."""

    operations: int = 0
    bytes: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes)

    @property
    def intensity(self) -> float:
        """Give the operations per byte moved."""
        return self.operations / self.bytes


def score_pairs(kind: str, past: int, new: int, window: int | None = None) -> int:
    """Count the pairs of query and key in sight: Σ keys_in_sight(kind, t, window) over t = past + 1 .. past + new."""

    def triangle(n: int) -> int:
        return n * (n + 1) // 2

    def up_to(tokens: int) -> int:
        if kind == "G" or window is None:
            return triangle(tokens)
        if kind == "C":
            chunks, rest = divmod(tokens, window)
            return chunks * triangle(window) + triangle(rest)
        ramp = min(tokens, window)
        return triangle(ramp) + (tokens - ramp) * window

    return up_to(past + new) - up_to(past)


def step_cost(
    config: ModelConfig,
    batch: int,
    new: int,
    past: int = 0,
    format: Format = BF16,
    weight_format: Format | None = None,
    absorbed: bool | None = None,
    head_positions: int = 1,
) -> dict[str, Work]:
    """Price one step, part by part: `new` tokens in each of `batch` sequences that remember `past` tokens.

    A prefill is a step with many tokens, `step_cost(config, batch, context)`; the decode step that looks at `context`
    tokens is `step_cost(config, batch, 1, context - 1)`.

    a matrix [out, in] on m vectors    2 · m · out · in operations; its own bytes + m · (in + out) · activation_bytes
    scores                             2 · batch · n_heads · score_pairs · (width of a key)
    mixing                             2 · batch · n_heads · score_pairs · (width of a value)

    m is batch · new, but batch · head_positions for the head, n_experts_per_token · batch · new for experts. Scores
    read queries and cached keys, mixing reads cached values and writes outputs; the square of scores in between never
    leaves the chip, as in blockwise attention.

    Latent attention expanded: `kv_b` turns every latent in sight into keys and values (m = keys in sight), widths are
    those of the heads. Absorbed: `kv_b` is applied to queries and outputs instead (m = batch · new), and all heads
    read the one latent: key width kv_lora_rank + qk_rope_head_dim, value width kv_lora_rank. `absorbed=None` takes the
    form with fewer operations: expanded in a prefill, absorbed in a decode step (arXiv 2405.04434, section 2.1).

    Raises ValueError for sizes below 1 and a negative past.
    """
    _at_least_one(batch=batch, new=new, head_positions=head_positions)
    if past < 0:
        raise ValueError(f"past must not be negative, got {past}")
    if config.is_mla and absorbed is None:
        forms = [
            step_cost(config, batch, new, past, format, weight_format, form, head_positions) for form in (True, False)
        ]
        return min(forms, key=lambda parts: total(parts).operations)

    c, stored, tokens = config, weight_format or format, batch * new
    act = stored.activation_bytes
    parts = dict.fromkeys(PARTS, Work())
    looks = sight(c)
    # The first new token sees what it remembers and itself; the new ones after it add one key each.
    keys = {kind: batch * (keys_in_sight(kind, past + 1, c.window) - 1 + new) for kind in set(looks)}

    for name, shape in weight_shapes(c).items():
        leaf = name.rsplit(".", 1)[-1]
        part = _part_of(leaf)
        size = prod(shape[:-1]) * stored.row_bytes(shape[-1])
        if leaf in ("embed", "positions"):  # one row per token is looked up
            parts[part] += Work(0, tokens * stored.row_bytes(c.d_model))
            if leaf == "positions" or not c.tied_embeddings:
                continue
        uses = tokens
        if part == "head":
            uses = batch * head_positions
        elif leaf.startswith("experts_"):
            uses = tokens * c.n_experts_per_token
            size = round(size * experts_read(c, tokens) / c.n_experts)
        elif leaf == "kv_b" and not absorbed:
            uses = keys[looks[int(name.split(".")[1])]]
        if len(shape) == 1 or leaf.endswith("_bias"):
            parts[part] += Work(0, size)
        else:
            outputs, inputs = shape[-2:]
            parts[part] += Work(2 * uses * outputs * inputs, size + uses * (outputs + inputs) * act)

    for kind in looks:
        pairs = batch * c.n_heads * score_pairs(kind, past, new, c.window)
        key_width, value_width, key_bytes, value_bytes = _rows_read(c, format, act, bool(absorbed))
        per_token = tokens * c.n_heads * act
        parts["scores"] += Work(2 * pairs * key_width, per_token * key_width + keys[kind] * key_bytes)
        parts["mixing"] += Work(2 * pairs * value_width, per_token * value_width + keys[kind] * value_bytes)
    return parts


def _part_of(leaf: str) -> str:
    if leaf in ("embed", "positions", "head", "final_norm", "final_norm_bias"):
        return "head"
    if leaf.startswith(("ffn_", "gate_up", "up", "down", "router", "experts_", "shared_")):
        return "feed-forward"
    return "projections"


def _rows_read(c: ModelConfig, format: Format, act: int, absorbed: bool) -> tuple[int, int, int, int]:
    """Give the widths of a key and of a value head, and the bytes of all keys and of all values of one position."""
    if not c.is_mla:
        row = c.n_kv_heads * format.row_bytes(c.head_dim)
        return c.head_dim, c.head_dim, row, row
    latent, rotary = c.kv_lora_rank or 0, c.qk_rope_head_dim
    if absorbed:  # the latent is key and value at once and is read once
        return latent + rotary, latent, format.row_bytes(latent) + format.row_bytes(rotary), 0
    keys = c.n_heads * c.qk_nope_head_dim * act + format.row_bytes(rotary)
    return c.qk_nope_head_dim + rotary, c.v_head_dim, keys, c.n_heads * c.v_head_dim * act


def total(parts: dict[str, Work]) -> Work:
    """Add up the parts of a step."""
    return sum(parts.values(), Work())


# What a device allows


@dataclass(frozen=True)
class Device:
    """Name a device's ceilings: operations per second, bytes per second, bytes of memory; and where they come from."""

    name: str
    operations_per_second: float
    bytes_per_second: float
    memory: int
    source: str


def best_time(work: Work, device: Device, devices: int = 1) -> tuple[float, str]:
    """Give the seconds that the work takes at best and the ceiling that binds, "compute" or "memory".

    max(operations / operations_per_second, bytes / bytes_per_second) / devices

    Several devices share the work evenly and what they tell each other is free, so more of them look better than they
    are (the roofline model: Williams, Waterman, Patterson, CACM 52(4), 2009).
    """
    compute = work.operations / device.operations_per_second / devices
    memory = work.bytes / device.bytes_per_second / devices
    return (compute, "compute") if compute >= memory else (memory, "memory")


def max_batch(
    config: ModelConfig,
    memory: int,
    context: int,
    format: Format = BF16,
    weight_format: Format | None = None,
    page_size: int = 1,
) -> int:
    """Give the largest batch that fits: ⌊(memory - weight_bytes) / reserved_bytes of one sequence⌋, at least 0."""
    room = memory - weight_bytes(config, weight_format or format)
    return max(0, room // reserved_bytes(config, 1, context, format, page_size))


def max_context(
    config: ModelConfig,
    memory: int,
    batch: int,
    format: Format = BF16,
    weight_format: Format | None = None,
    page_size: int = 1,
) -> int | None:
    """Give the longest context that fits: the largest with weight_bytes + reserved_bytes ≤ memory; 0 if none does.

    None means that no context is too long, because no layer keeps more than its window. What the model was trained
    for (`max_positions`) is not considered.
    """
    room = memory - weight_bytes(config, weight_format or format)

    def fits(context: int) -> bool:
        return reserved_bytes(config, batch, context, format, page_size) <= room

    if "G" not in config.pattern and fits(config.window or 1):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _at_least_one(**sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
