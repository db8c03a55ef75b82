"""What is a planner told about a model? Everything `cost.py` knows, as plain values and as a table.

`cli.py` asks with a `Plan`; the formulas are `cost.py`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from . import cost
from .config import ModelConfig


@dataclass(frozen=True)
class Plan:
    """Say what is to be served, how it is stored, and on what."""

    context: int = 4096
    batch: int = 1
    format: cost.Format = cost.BF16
    weight_format: cost.Format = cost.BF16
    capacity: int | None = None  # tokens reserved per sequence; None: the context
    page_size: int = 1
    device: cost.Device | None = None
    devices: int = 1
    memory: int | None = None  # bytes to fit in; None: the devices' own

    @property
    def all_memory(self) -> int | None:
        """Give the bytes to fit in, or None when neither memory nor a device is given."""
        return self.memory or (self.device.memory * self.devices if self.device else None)


def price(name: str, config: ModelConfig, plan: Plan) -> dict[str, Any]:
    """Gather what one model costs as plain values ready for JSON.

    max_batch and max_context are None when there is no memory to fit in; max_context also when no context is too long.
    `seconds` and `bound` are there with a device only.
    """
    format, weights, memory = plan.format, plan.weight_format, plan.all_memory
    capacity = plan.capacity or plan.context
    kinds = cost.cache_cost(config, plan.batch, plan.context, format, capacity, plan.page_size)
    answer: dict[str, Any] = {
        "model": name,
        "context": plan.context,
        "batch": plan.batch,
        "format": format.name,
        "weight_format": weights.name,
        "cache_bytes": sum(kind.needed for kind in kinds),
        "cache_bytes_reserved": sum(kind.reserved for kind in kinds),
        "cache_bytes_per_token": cost.cache_bytes_per_token(config, format),
        "cache": [dataclasses.asdict(kind) for kind in kinds],
        "weight_bytes": cost.weight_bytes(config, weights),
        "parameters": cost.parameters(config),
        "active_parameters": cost.active_parameters(config),
        "cache_heads": max(heads for heads, _ in config.cache_rows),
        "max_positions": config.max_positions,
        "memory_bytes": memory,
        "max_batch": memory and cost.max_batch(config, memory, capacity, format, weights, plan.page_size),
        "max_context": memory and cost.max_context(config, memory, plan.batch, format, weights, plan.page_size),
        "device": plan.device and plan.device.name,
        "devices": plan.devices,
    }
    room = answer["weight_bytes"] + answer["cache_bytes_reserved"]
    answer["devices_needed"] = plan.device and -(-room // plan.device.memory)
    for phase, new, past in (("prefill", plan.context, 0), ("decode", 1, plan.context - 1)):
        parts = cost.step_cost(config, plan.batch, new, past, format, weights)
        step: dict[str, Any] = dataclasses.asdict(cost.total(parts))
        if plan.device:
            step["seconds"], step["bound"] = cost.best_time(cost.total(parts), plan.device, plan.devices)
        answer[phase] = step | {"parts": {part: dataclasses.asdict(work) for part, work in parts.items()}}
    return answer


def print_prices(prices: Sequence[dict[str, Any]], plan: Plan) -> None:
    """Print what models cost side by side, a column per model; one model alone also part by part."""
    print(
        f"context {plan.context:,} tokens, batch {plan.batch:,}, "
        f"cache in {plan.format.name}, weights in {plan.weight_format.name}"
    )
    if plan.device:
        rates = si(plan.device.operations_per_second, "FLOP/s"), si(plan.device.bytes_per_second, "B/s")
        print(f"{plan.devices} x {plan.device.name}: {', '.join(rates)} each ({plan.device.source})")
    table = [["", *(price["model"] for price in prices)]]

    def row(label: str, cell: Callable[[dict[str, Any]], str], of: Sequence[dict[str, Any]] = prices) -> None:
        table.append([label, *map(cell, of)])

    row("layers", lambda p: " + ".join(f"{kind['layers']} {cost.KIND_NAMES[kind['kind']]}" for kind in p["cache"]))
    row("cache per token, all layers", lambda p: f"{p['cache_bytes_per_token'] / 1000:,.3f} KB")
    row("cache needed", lambda p: both_units(p["cache_bytes"]))
    row("cache reserved", lambda p: both_units(p["cache_bytes_reserved"]))
    row("weights", lambda p: both_units(p["weight_bytes"]))
    row("parameters", lambda p: in_words(p["parameters"]))
    row("  active for a token", lambda p: in_words(p["active_parameters"]))
    if plan.all_memory:
        longest = f"  longest context at batch {plan.batch:,}"
        row("memory", lambda p: both_units(p["memory_bytes"]))
        row("  taken", lambda p: f"{(p['weight_bytes'] + p['cache_bytes_reserved']) / p['memory_bytes']:.0%}")
        row(f"  largest batch at {plan.capacity or plan.context:,}", lambda p: f"{p['max_batch']:,}")
        row(longest, lambda p: "no limit" if p["max_context"] is None else f"{p['max_context']:,}")
    if plan.device:
        row("devices that hold it", lambda p: f"{p['devices_needed']:,}")
    for phase, title in (("prefill", "prefill of the context"), ("decode", "decode step")):
        steps = [price[phase] for price in prices]
        row(title, lambda step: "", steps)
        row("  operations", lambda step: si(step["operations"], "FLOP"), steps)
        row("  bytes moved", lambda step: si(step["bytes"], "B"), steps)
        row("  FLOP per byte", lambda step: f"{step['operations'] / step['bytes']:,.1f}", steps)
        if plan.device:
            row("  best time", lambda step: f"{si(step['seconds'], 's')} ({step['bound']})", steps)
    if plan.device:
        row("tokens per second, best", lambda p: f"{p['batch'] / p['decode']['seconds']:,.0f}")
    print_table(table)
    if len(prices) == 1:
        table = [["", "prefill", "", "FLOP/B", "decode", "", "FLOP/B"]]
        for part in cost.PARTS:
            works = [cost.Work(**prices[0][phase]["parts"][part]) for phase in ("prefill", "decode")]
            cells = [(si(w.operations, "FLOP"), si(w.bytes, "B"), f"{w.intensity:,.1f}") for w in works]
            table.append([part, *cells[0], *cells[1]])
        print_table(table)
    notes = [note for price in prices for note in _notes(price, plan)]
    if plan.device and plan.weight_format.bits < 16:
        faster = f"a device that multiplies {plan.weight_format.name} faster can beat times bound by compute"
        notes.append(f"Products are taken to be bf16: {faster}.")
    if notes:
        print("\n" + "\n".join(notes))


def _notes(price: dict[str, Any], plan: Plan) -> Iterator[str]:
    """Say what the numbers of a model do not."""
    name, memory = price["model"], price["memory_bytes"]
    if price["max_positions"] and plan.context > price["max_positions"]:
        yield f"{name} was made for {price['max_positions']:,} positions, not for {plan.context:,}."
    weights, cache = price["weight_bytes"], price["cache_bytes_reserved"]
    if memory and weights + cache > memory:
        wanted = f"{si(weights, 'B')} of weights and {si(cache, 'B')} of cache"
        yield f"{name} does not fit: {wanted} want more than {si(memory, 'B')}."
    if plan.devices > price["cache_heads"]:
        heads, copies = price["cache_heads"], plan.devices / price["cache_heads"]
        split = f"split by heads over {plan.devices:,} devices, its cache takes {copies:.3g} times what is counted here"
        yield f"{name} caches {heads} head{'s' if heads > 1 else ''}: {split}."


def print_table(table: Sequence[Sequence[str]]) -> None:
    """Print an empty line and the columns two spaces apart, the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    print()
    for label, *cells in table:
        line = [label.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))]
        print("  ".join(line).rstrip())


def si(value: float, unit: str) -> str:
    """Write a number with three digits or more and a power of 1000; seconds stay seconds.

    >>> si(16_060_522_496, "B"), si(0.00577, "s"), si(5770, "s"), si(0, "B")
    ('16.1 GB', '5.77 ms', '5,770 s', '0.00 B')
    """
    power = min(max(math.floor(math.log10(value) / 3), -3), 0 if unit == "s" else 6) if value else 0
    digits = value / 1000**power
    places = min(max(2 - math.floor(math.log10(digits)), 0), 2) if digits else 2
    return f"{digits:,.{places}f} {('n', 'u', 'm', '', 'K', 'M', 'G', 'T', 'P', 'E')[power + 3]}{unit}"


def in_words(count: int) -> str:
    """Write a number of parameters as people say it.

    >>> in_words(8_030_261_248), in_words(134_515_008), in_words(5_520)
    ('8.030 billion', '134.515 million', '5,520')
    """
    for unit, word in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:,.3f} {word}"
    return f"{count:,}"


def both_units(size: int) -> str:
    """Write bytes in a power of 1000 and in one of 1024.

    >>> both_units(16_060_522_496)
    '16.1 GB (14.96 GiB)'
    """
    power = min((size.bit_length() - 1) // 10, 5) if size else 0
    return f"{si(size, 'B')} ({size / 1024**power:,.4g} {('', 'Ki', 'Mi', 'Gi', 'Ti', 'Pi')[power]}B)"
