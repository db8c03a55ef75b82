"""What do the costs look like? Cache against context, the roofline, and what fits in a device.

Every picture is drawn from `cost.py` alone and reads without colour: lines differ by dash and marker and carry their
names. `python -m minikv.pictures DIR` draws the pictures of the documentation anew. Needs matplotlib (`minikv[plot]`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import cost
from .config import ModelConfig
from .presets import devices, models
from .report import si

TEN_MODELS = (
    *("llama-2-13b", "llama-3.1-405b", "qwen2.5-72b", "llama-3-8b", "gemma-3-27b", "deepseek-v3"),
    *("gpt-oss-120b", "qwen2.5-7b", "falcon-7b", "mistral-7b-v0.1"),
)
LINES = [(dash, marker) for marker in "os^D" for dash in ("-", "--", "-.", ":")]
COLOURS = ("#1b6ca8", "#b3441e", "#3a7d2c", "#7a3b8f", "#8a6d00", "#0f766e", "#a1134d", "#444444")


def draw_context(
    configs: Mapping[str, ModelConfig], path: Path, format: cost.Format = cost.BF16, batch: int = 1
) -> None:
    """Draw cache bytes against context, a line per model, into a .svg or .png file."""
    figure, axes = _figure(path)
    contexts = [2**power for power in range(9, 18)]
    lines = {
        name: [cost.cache_bytes(config, batch, t, format) / 1e9 for t in contexts] for name, config in configs.items()
    }
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _plot_lines(axes, contexts, lines)
    _count_axis(axes.xaxis, contexts[::2])
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.set_xlabel("context, tokens per sequence")
    axes.set_ylabel(f"cache, GB for {batch} sequence{'s' * (batch > 1)} (GB = 10⁹ bytes)")
    axes.set_title(f"What the cache remembers as the text grows ({format.name})")
    _save(figure, path)


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
    memory, contexts = count * device.memory, [2**power for power in range(9, 18)]
    lines = {}
    for name, config in configs.items():
        batches = [cost.max_batch(config, memory, t, format, weight_format) for t in contexts]
        if batches[0]:
            lines[name] = [batch or math.nan for batch in batches]
    if not lines:
        raise ValueError(f"none of {', '.join(configs)} fits in {count} x {device.name}")
    too_large = ", ".join(sorted(configs.keys() - lines.keys()))
    figure, axes = _figure(path)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    _plot_lines(axes, contexts, lines)
    _count_axis(axes.xaxis, contexts[::2])
    top = max(max(filter(math.isfinite, batches)) for batches in lines.values())
    _count_axis(axes.yaxis, [4**power for power in range(math.ceil(math.log(top, 4)) + 1)])
    axes.set_xlabel("context, tokens per sequence")
    axes.set_ylabel("largest batch, sequences")
    formats = f"cache in {format.name}, weights in {(weight_format or format).name}"
    axes.set_title(f"What fits in {count} x {device.name}: on a line and below it\n({memory / 1e9:,.0f} GB, {formats})")
    if too_large:
        axes.set_xlabel(f"context, tokens per sequence\n\nweights alone are too large: {too_large}")
    _save(figure, path)


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
    figure, axes = _figure(path)
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
            )
    ceilings = f"compute: {si(peak * 1e12, 'FLOP/s')}\nmemory: {si(bandwidth * 1e12, 'B/s')}"
    axes.text(0.02, 0.98, ceilings, va="top", transform=axes.transAxes)
    axes.text(ridge, left * bandwidth / 1.7, f" ridge: {ridge:,.0f} FLOP/byte", va="bottom", color="#555555")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:,g}")
    axes.set_xlabel("arithmetic intensity, FLOP per byte moved")
    axes.set_ylabel("attainable rate, TFLOP/s")
    memory = f"{count * device.memory / 1e9:,.0f} GB"
    axes.set_title(
        f"{name} on {count} x {device.name}: prefill and decode under the roofline\n"
        f"({context:,} tokens of context, {format.name}; hollow: the batch does not fit in {memory})"
    )
    _save(figure, path)


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


def _figure(path: Path) -> tuple[Any, Any]:
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"a picture's file must end in .svg or .png, got {path}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'minikv[plot]'") from None
    # Equal pictures become equal files.
    matplotlib.rcParams.update({"svg.hashsalt": "minikv", "svg.fonttype": "none", "font.size": 10})
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot_lines(axes: Any, x: Sequence[int], lines: Mapping[str, Sequence[float]]) -> None:
    """Draw lines of different dash and marker, each named to the right of its end, names spread until none overlap."""
    ends = []
    for i, (name, y) in enumerate(lines.items()):
        dash, marker = LINES[i % len(LINES)]
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(x, y, dash, marker=marker, markersize=4, linewidth=1.5, color=colour)
        last = max(j for j, value in enumerate(y) if math.isfinite(value))
        ends.append((math.log(y[last]), name, x[last], y[last], colour))
    axes.autoscale_view()
    low, high = map(math.log, axes.get_ylim())
    gap, height = (high - low) / 24, -math.inf
    for at, name, end, value, colour in sorted(ends):
        height = max(at, height + gap)
        axes.annotate(
            name,
            (end, value),
            xytext=(x[-1] * 1.35, math.exp(height)),
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def _count_axis(axis: Any, ticks: Sequence[int]) -> None:
    axis.set_ticks(ticks, [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _save(figure: Any, path: Path) -> None:
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=110, metadata=metadata)


def main(argv: Sequence[str]) -> int:
    """Draw the pictures that the documentation shows into the folder named by the only argument."""
    if len(argv) != 1:
        print("usage: python -m minikv.pictures DIR", file=sys.stderr)
        return 2
    folder = Path(argv[0])
    folder.mkdir(parents=True, exist_ok=True)
    ten = {name: models()[name].config for name in TEN_MODELS}
    draw_context(ten, folder / "cache-against-context.svg")
    draw_roofline("llama-3-8b", ten["llama-3-8b"], devices()["h100"], folder / "roofline.svg")
    draw_fits(ten, devices()["h200"], folder / "what-fits.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
