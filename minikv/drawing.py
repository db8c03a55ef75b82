"""How do lines become a picture that reads without colour?

Lines differ by dash and marker and carry their names, axes carry words and units. What is drawn is the matter of
`pictures.py` and of the examples. Needs matplotlib (`minikv[plot]`).
"""

from __future__ import annotations

import argparse
import math
import textwrap
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import mean
from typing import Any

from .arguments import as_output

ENDINGS = (".svg", ".png")
COLOURS = ("#1b6ca8", "#b3441e", "#3a7d2c", "#7a3b8f", "#8a6d00", "#0f766e", "#a1134d", "#444444")
DASHES, MARKERS = ("-", "--", "-.", ":"), "os^D"
HEIGHT, ROW = 3.9, 0.2  # inches: of the axes, at least, and from a line of text to the next
NAMES_FROM = 1.04  # where the names of lines begin, in widths of the axes


def as_picture(word: str) -> Path:
    """Read the name of a picture's file; refuses other endings, what cannot be written, and a missing matplotlib."""
    path = as_output(*ENDINGS)(word)
    if not find_spec("matplotlib"):
        raise argparse.ArgumentTypeError("pictures need matplotlib: pip install 'minikv[plot]'")
    return path


def draw_lines(
    title: str,
    x: tuple[str, Sequence[int]],
    y: str,
    lines: Mapping[str, Sequence[float]],
    path: Path,
    scale: str = "log",
    note: str = "",
) -> None:
    """Draw named lines over common x values into a .svg or .png file, both axes on one scale, "log" or "linear".

    A line that ends early, where it has fallen below all others, goes on with NaN. A note goes below the picture.
    """
    height = max(HEIGHT, ROW * (len(lines) + 1))
    figure, axes = new_figure(path, title, x[0], y, height, note)
    for i, values in enumerate(lines.values()):
        axes.plot(
            x[1],
            values,
            DASHES[(i + i // 4) % 4] + MARKERS[i % 4],
            color=COLOURS[i % len(COLOURS)],
            linewidth=1.5,
            markersize=7.5 - 5 * i / len(lines),  # where lines lie on each other, the small is seen inside the large
            markerfacecolor="white",
        )
    _scale(axes, scale, x[1])
    _name_lines(axes, list(lines), ROW / height)
    save(figure, path)


def new_figure(path: Path, title: str, x: str, y: str, height: float = HEIGHT, note: str = "") -> tuple[Any, Any]:
    """Begin a picture: matplotlib's figure and axes (of `height` inches) with words on them."""
    if path.suffix not in ENDINGS:
        raise ValueError(f"a picture's file must end in {' or '.join(ENDINGS)}, got {path}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("pictures need matplotlib: pip install 'minikv[plot]'") from None
    # Equal pictures become equal files.
    matplotlib.rcParams.update({"svg.hashsalt": "minikv", "svg.fonttype": "none", "font.size": 10})
    title = "\n".join(textwrap.fill(line, 76) for line in title.splitlines())
    note = textwrap.fill(note, 84)
    words = 1.1 + ROW * (title.count("\n") + note.count("\n") + 2 * bool(note))
    figure = Figure(figsize=(8, height + words), layout="constrained")
    axes = figure.add_subplot()
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title)
    axes.set_xlabel(f"{x}\n\n{note}".rstrip())
    axes.set_ylabel(y)
    return figure, axes


def _scale(axes: Any, scale: str, x: Sequence[int]) -> None:
    """Put a few of the x values, or quarters of the last, on the x axis, and plain numbers on the y axis."""
    axes.set_xscale(scale)
    axes.set_yscale(scale)
    ticks = x[:: len(x) // 7 + 1] if scale == "log" else [x[-1] * quarter // 4 for quarter in range(5)]
    axes.set_xticks(ticks, [f"{t // 1024}k" if t and t % 1024 == 0 else f"{t:,}" for t in ticks])
    axes.set_xticks([], minor=True)
    low, high = axes.get_ylim()
    if scale == "log" and high / low < 1000:
        axes.yaxis.get_major_locator().set_params(subs=(1, 2, 5))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.yaxis.set_minor_formatter("")


def _name_lines(axes: Any, names: Sequence[str], gap: float) -> None:
    """Name each line to the right of the axes, with a thin leader from its end; no two names or leaders meet.

    Lines that end early are named in a strip below all lines, the earliest lowest: leaders run down beside the names.
    """
    ends = []
    for name, line in zip(names, axes.get_lines(), strict=True):
        x, y = [point for point in line.get_xydata() if math.isfinite(point[1])][-1]
        ends.append((x, y, name, line.get_color()))
    ends.sort()
    early = [end for end in ends if end[0] < axes.get_lines()[0].get_xdata()[-1]]
    strip = gap * (len(early) + 1) if early else 0.0
    _add_below(axes, strip)
    to_axes = axes.transData + axes.transAxes.inverted()
    places = [(float(to_axes.transform((x, y))[0]) + 0.01, (i + 0.5) * gap) for i, (x, y, *_) in enumerate(early)]
    wanted = [float(to_axes.transform((x, y))[1]) for x, y, *_ in ends[len(early) :]]
    places += [(NAMES_FROM, height) for height in _spread(wanted, gap, strip)]
    for (x, y, name, colour), place in zip(ends, places, strict=True):
        leader = {"arrowstyle": "-", "relpos": (0, 0.5), "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            name,
            (x, y),
            xytext=place,
            textcoords="axes fraction",
            va="center",
            color=colour,
            annotation_clip=False,
            arrowprops=leader,
        )


def _add_below(axes: Any, share: float) -> None:
    """Lengthen the y axis downwards, without ticks, until what is new takes a share of it."""
    low, high = axes.get_ylim()
    if share:
        axes.set_yticks([tick for tick in axes.get_yticks() if low <= tick <= high])
        axes.set_yticks([], minor=True)
        axes.set_ylim(high * (low / high) ** (1 / (1 - share)), high)
    else:
        axes.set_ylim(low, high)


def _spread(wanted: Sequence[float], gap: float, low: float = 0.0) -> list[float]:
    """Move rising heights apart to at least a gap, as little as possible, all from `low` up to half a gap under 1.

    >>> _spread([0.5, 0.5, 1.0], 0.25)
    [0.375, 0.625, 0.875]
    """
    groups: list[list[float]] = []  # of names that touch: what each wants, less the gaps of the names below
    for i, height in enumerate(wanted):
        groups.append([height - i * gap])
        while len(groups) > 1 and mean(groups[-2]) > mean(groups[-1]):
            last = groups.pop()
            groups[-1] += last
    moved = [mean(group) for group in groups for _ in group]
    return [min(max(move, low), 1 - (len(moved) - 0.5) * gap) + i * gap for i, move in enumerate(moved)]


def save(figure: Any, path: Path) -> None:
    """Write the file."""
    metadata = {"Date": None} if path.suffix == ".svg" else {}
    figure.savefig(path, dpi=110, metadata=metadata)
