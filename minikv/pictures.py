"""What do the costs look like? Cache against context, the roofline, what fits in a device, and what a cache saves.

The last is timed, all others are drawn from `cost.py` alone. How a picture looks is `drawing.py`'s matter. `python -m
minikv.pictures DIR` draws the pictures of the documentation anew.
"""

from __future__ import annotations

import math
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from . import cost
from .arguments import Parser
from .backend import get_backend
from .bench import SMALL, next_token
from .config import ModelConfig
from .drawing import ENDINGS, as_picture, draw_lines, new_figure, save
from .presets import devices, models
from .report import si

TEN_MODELS = (
    *("llama-2-13b", "llama-3.1-405b", "qwen2.5-72b", "llama-3-8b", "gemma-3-27b", "deepseek-v3"),
    *("gpt-oss-120b", "qwen2.5-7b", "falcon-7b", "mistral-7b-v0.1"),
)
CONTEXTS = [2**power for power in range(9, 18)]


def draw_context(
    configs: Mapping[str, ModelConfig], path: Path, format: cost.Format = cost.BF16, batch: int = 1
) -> None:
    """Draw cache bytes against context, a line per model, into a .svg or .png file."""
    draw_lines(
        f"What the cache remembers as the text grows ({format.name})",
        ("context, tokens per sequence", CONTEXTS),
        f"cache, GB for {batch} sequence{'s' * (batch > 1)} (GB = 10⁹ bytes)",
        {
            name: [cost.cache_bytes(config, batch, t, format) / 1e9 for t in CONTEXTS]
            for name, config in configs.items()
        },
        path,
    )


def draw_stacks(name: str, config: ModelConfig, path: Path, format: cost.Format = cost.BF16) -> None:
    """Draw the bytes that a stack of windowed and full layers remembers as a text is read, beside its two extremes."""
    contexts = [1, config.window or 1, *CONTEXTS[CONTEXTS.index(4096) : CONTEXTS.index(32768) + 1]]
    stacks = {"all layers full": replace(config, layer_pattern="G")}
    stacks[" + ".join(f"{kind.layers} {cost.KIND_NAMES[kind.kind]}" for kind in cost.cache_cost(config))] = config
    stacks["all layers windowed"] = replace(config, layer_pattern="L")
    draw_lines(
        f"What full, mixed and windowed stacks remember as a text is read\n"
        f"({name}: {config.n_layers} layers, window {config.window:,} tokens, one sequence, {format.name})",
        ("text read so far, tokens", contexts),
        "cache, GB (GB = 10⁹ bytes)",
        {kinds: [cost.cache_bytes(stack, 1, t, format) / 1e9 for t in contexts] for kinds, stack in stacks.items()},
        path,
        scale="linear",
    )


def draw_next_token(
    lengths: Sequence[int], again: Sequence[float], cached: Sequence[float], config: ModelConfig, path: Path
) -> None:
    """Draw the measured seconds of one more token behind texts of some lengths, recomputed and on a cache."""
    size = f"{config.n_layers} layers of width {config.d_model}, {si(cost.parameters(config), '').strip()} parameters"
    draw_lines(
        f"Time of one more token, with and without a cache\n(a model of {size}; timed, medians)",
        ("tokens of text before it", lengths),
        "time per token, ms",
        {
            "everything again": [1e3 * seconds for seconds in again],
            "one step on a cache": [1e3 * seconds for seconds in cached],
        },
        path,
    )


def draw_fits(
    configs: Mapping[str, ModelConfig],
    device: cost.Device,
    path: Path,
    count: int = 1,
    format: cost.Format = cost.BF16,
    weight_format: cost.Format | None = None,
) -> None:
    """Draw the largest batch that fits in `count` devices against the context, a line per model that fits at all.

    Raises ValueError when none of the models fits.
    """
    memory, lines = count * device.memory, {}
    for name, config in configs.items():
        batches = [cost.max_batch(config, memory, t, format, weight_format) for t in CONTEXTS]
        if batches[0]:
            lines[name] = [batch or math.nan for batch in batches]
    if not lines:
        raise ValueError(f"none of {', '.join(configs)} fits in {count} x {device.name}")
    too_large = ", ".join(sorted(configs.keys() - lines.keys()))
    formats = f"cache in {format.name}, weights in {(weight_format or format).name}"
    draw_lines(
        f"What fits in {count} x {device.name}: on a line and below it\n({memory / 1e9:,.0f} GB, {formats})",
        ("context, tokens per sequence", CONTEXTS),
        "largest batch, sequences",
        lines,
        path,
        note=too_large and f"not even {CONTEXTS[0]} tokens fit: {too_large}",
    )


def draw_roofline(
    name: str,
    config: ModelConfig,
    device: cost.Device,
    path: Path,
    context: int = 4096,
    count: int = 1,
    format: cost.Format = cost.BF16,
    weight_format: cost.Format | None = None,
) -> None:
    """Draw the roofline of `count` devices and on it a prefill and a decode step at batch 1, 8, 64 and 512.

    Each point is what the step can reach at best: its operations / `best_time`.
    """
    memory = f"{count * device.memory / 1e9:,.0f} GB"
    title = (
        f"{name} on {count} x {device.name}: prefill and decode under the roofline\n"
        f"({context:,} tokens of context, {format.name}; hollow: the batch does not fit in {memory})"
    )
    figure, axes = new_figure(path, title, "arithmetic intensity, FLOP per byte moved", "attainable rate, TFLOP/s")
    axes.set_xscale("log")
    axes.set_yscale("log")
    peak, bandwidth = count * device.operations_per_second / 1e12, count * device.bytes_per_second / 1e12
    ridge, fitting = peak / bandwidth, cost.max_batch(config, count * device.memory, context, format, weight_format)
    intensities = {
        (phase, batch): cost.total(cost.step_cost(config, batch, new, past, format, weight_format)).intensity
        for phase, new, past in (("decode", 1, context - 1), ("prefill", context, 0))
        for batch in (1, 8, 64, 512)
    }
    left, right = min(*intensities.values(), ridge) / 4, max(*intensities.values(), ridge) * 4
    axes.plot([left, ridge, right], [left * bandwidth, peak, peak], color="#444444", linewidth=2)
    axes.axvline(ridge, color="#999999", linewidth=1, linestyle=":")
    axes.set_xlim(left, right)
    axes.set_ylim(left * bandwidth / 2, peak * 6)
    for phase, marker, colour in (("decode", "o", "#b3441e"), ("prefill", "s", "#1b6ca8")):
        points = {batch: x for (of_phase, batch), x in intensities.items() if of_phase == phase}
        for batch, x in points.items():
            fill = colour if batch <= fitting else "white"
            axes.plot(x, min(peak, x * bandwidth), marker, color=colour, mfc=fill, markersize=8)
        for batches, x in _close_together(points, ridge, right / left):
            up, flat = (1 if phase == "prefill" else -1), x >= ridge
            axes.annotate(
                f"{phase}\nbatch {', '.join(map(str, batches))}",
                (x, min(peak, x * bandwidth)),
                xytext=(0 if flat else -10 * up, 8 * up),
                textcoords="offset points",
                va="bottom" if up > 0 else "top",
                ha="left" if up < 0 else ("center" if flat else "right"),
                color=colour,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 0},  # the ridge does not run through words
            )
    ceilings = f"compute: {si(peak * 1e12, 'FLOP/s')}\nmemory: {si(bandwidth * 1e12, 'B/s')}"
    axes.text(0.02, 0.98, ceilings, va="top", transform=axes.transAxes)
    axes.text(
        ridge,
        left * bandwidth / 1.7,
        f" ridge: {ridge:,.{0 if ridge >= 10 else 2}f} FLOP/byte",
        va="bottom",
        color="#555555",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    save(figure, path)


def _close_together(points: Mapping[int, float], ridge: float, span: float) -> list[tuple[list[int], float]]:
    """Gather batches whose points lie too close for a label each: (batches, their middle) per label.

    On the slope labels need little room beside each other, on the flat roof a good part of the axis.
    """
    groups: list[list[int]] = []
    for batch, x in points.items():
        before = points[groups[-1][-1]] if groups else 0.0
        room = span ** (0.25 if before >= ridge else 0.12 if x >= ridge else 0.07)
        if x < before * room:
            groups[-1].append(batch)
        else:
            groups.append([batch])
    return [(group, math.sqrt(points[group[0]] * points[group[-1]])) for group in groups]


def main(argv: Sequence[str]) -> int:
    """Draw the pictures that the documentation shows, each as .svg and .png, into the folder named by the argument."""
    parser = Parser(prog="python -m minikv.pictures", description=main.__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR")
    folder: Path = parser.parse_args(argv).folder
    try:  # before anything is timed
        folder.mkdir(parents=True, exist_ok=True)
        as_picture(str(folder / "roofline.svg"))
    except (OSError, ArgumentTypeError) as error:
        parser.error(str(error))
    ten, h100, h200 = {name: models()[name].config for name in TEN_MODELS}, devices()["h100"], devices()["h200"]
    timed = dict(next_token(get_backend("numpy"), (64, 128, 256, 512, 1024, 2048)))
    cached, again = ([told[name]["median"] for told in timed.values()] for name in ("cached", "recomputed"))
    pictures: dict[str, Callable[[Path], None]] = {
        "cache-against-context": lambda path: draw_context(ten, path),
        "full-mixed-windowed": lambda path: draw_stacks("gemma-3-27b", ten["gemma-3-27b"], path),
        "cached-against-recomputed": lambda path: draw_next_token([*timed], again, cached, SMALL, path),
        "roofline": lambda path: draw_roofline("llama-3-8b", ten["llama-3-8b"], h100, path),
        "what-fits": lambda path: draw_fits(ten, h200, path),
    }
    for name, draw in pictures.items():
        for ending in ENDINGS:
            draw(folder / f"{name}{ending}")
            print(folder / f"{name}{ending}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
