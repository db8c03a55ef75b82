"""Can the pictures be read? Their words must not lie on each other, and those in docs/ must be the ones drawn now."""

from __future__ import annotations

import argparse
import itertools
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minikv import ModelConfig, drawing, pictures
from minikv.cost import FP32, Device
from minikv.presets import devices, models

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

DOCS = Path(__file__).parent.parent / "docs"
ALL = {name: preset.config for name, preset in models().items()}
TEN = {name: ALL[name] for name in pictures.TEN_MODELS}
TINY = ModelConfig(vocab_size=32, d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=8, d_ff=16)
SLOW = Device("this", 3e9, 20e9, 2**30, "made up: a ridge far to the left")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures drawn, in place of their files."""
    figures: list[Any] = []
    for module in (drawing, pictures):
        monkeypatch.setattr(module, "save", lambda figure, path: figures.append(figure))
    return figures


def crossing(a: np.ndarray, b: np.ndarray) -> bool:
    """Tell whether two segments [2, 2] cross, touching ends aside."""

    def side(segment: np.ndarray, point: np.ndarray) -> float:
        (x0, y0), (x1, y1) = segment
        return (x1 - x0) * (point[1] - y0) - (y1 - y0) * (point[0] - x0)

    return side(a, b[0]) * side(a, b[1]) < -1e-6 and side(b, a[0]) * side(b, a[1]) < -1e-6


def check_words(figure: Any) -> None:
    """Demand that no two words meet, that none is cut off, and that no leader runs through another or a word."""
    from matplotlib.text import Annotation, Text

    figure.draw_without_rendering()
    renderer = figure._get_renderer()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    axes = figure.axes[0]
    outside = [  # ticks beyond the ends of an axis are there but not drawn
        tick.label1
        for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim()))
        for tick in axis.get_major_ticks()
        if not low <= tick.get_loc() <= high
    ]
    boxes = {text: Text.get_window_extent(text, renderer) for text in texts if text not in outside}
    for (a, box_a), (b, box_b) in itertools.combinations(boxes.items(), 2):
        width = min(box_a.x1, box_b.x1) - max(box_a.x0, box_b.x0)
        height = min(box_a.y1, box_b.y1) - max(box_a.y0, box_b.y0)
        assert min(width, height) <= 0.5, f"{a.get_text()!r} lies on {b.get_text()!r}"
    for text, box in boxes.items():
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1, f"{text.get_text()!r} is cut off"
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1, f"{text.get_text()!r} is cut off"
    leaders = {}
    for text in boxes:
        if isinstance(text, Annotation) and text.arrow_patch is not None:
            name = boxes[text]
            end = axes.transData.transform(text.xy)
            leaders[text] = np.array([end, (name.x0, (name.y0 + name.y1) / 2)])
    for (a, leader), (b, other) in itertools.combinations(leaders.items(), 2):
        assert not crossing(leader, other), f"the leader of {a.get_text()!r} crosses that of {b.get_text()!r}"
    for a, leader in leaders.items():
        for b, box in boxes.items():
            rising, falling = (
                np.array([(box.x0, y0), (box.x1, y1)]) for y0, y1 in (box.extents[1::2], box.extents[3::-2])
            )
            assert a is b or not (crossing(leader, rising) or crossing(leader, falling)), (a.get_text(), b.get_text())


DRAW: dict[str, Callable[..., None]] = {
    "context, ten models": partial(pictures.draw_context, TEN),
    "context, one model": partial(pictures.draw_context, {"falcon-7b": ALL["falcon-7b"]}),
    "context, all models": partial(pictures.draw_context, ALL, batch=32),
    "context, equal models": partial(pictures.draw_context, {f"the same {i}": TINY for i in range(12)}),
    "context, flat": partial(pictures.draw_context, {"windowed": replace(TINY, window=4)}),
    "fits, ten models": partial(pictures.draw_fits, TEN, devices()["h200"]),
    "fits, all models": partial(pictures.draw_fits, ALL, devices()["rtx-4090"]),
    "fits, lines that end early": partial(pictures.draw_fits, ALL, devices()["h100"], count=2),
    "fits, a tiny model": partial(pictures.draw_fits, {"tiny": TINY}, devices()["h100"]),
    "fits, hardly": partial(pictures.draw_fits, {"llama-2-13b": ALL["llama-2-13b"]}, devices()["l40s"]),
    "stacks": partial(pictures.draw_stacks, "gemma-3-27b", ALL["gemma-3-27b"]),
    "next token": partial(pictures.draw_next_token, [64, 128, 4096], [0.01, 0.02, 4.0], [3e-3] * 3, TINY),
    "roofline, a long name": partial(pictures.draw_roofline, "a-model-" * 12, TINY, devices()["mi300x"]),
} | {
    f"roofline, {name} on {count} x {device.name} at {context}": partial(
        pictures.draw_roofline, name, ALL[name], device, context=context, count=count
    )
    for name in ("llama-3-8b", "smollm2-135m", "deepseek-v3", "mistral-7b-v0.1", "falcon-7b", "gpt-oss-120b")
    for device, count in ((devices()["h100"], 1), (devices()["l40s"], 8), (SLOW, 1))
    for context in (1, 4096, 131072)
}


@pytest.mark.parametrize("name", DRAW)
def test_no_words_lie_on_each_other(name: str, drawn: list[Any]) -> None:
    DRAW[name](path=Path("a.png"))
    (figure,) = drawn
    (axes,) = figure.axes
    check_words(figure)
    assert axes.get_title() and axes.get_xlabel() and axes.get_ylabel()
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        shown = [tick.label1.get_text() for tick in axis.get_major_ticks() if limits[0] <= tick.get_loc() <= limits[1]]
        assert len([label for label in shown if label]) >= 2, f"{shown} does not make a scale"


def test_words_that_lie_on_each_other_are_found(drawn: list[Any]) -> None:
    """The test above is worth what this finds."""
    for spoil, told in (
        (lambda axes: axes.text(0.02, 0.98, "compute", va="top", transform=axes.transAxes), "lies on"),
        (lambda axes: axes.set_title("x" * 200), "is cut off"),
    ):
        DRAW["roofline, a long name"](path=Path("a.png"))
        spoil(drawn[-1].axes[0])
        with pytest.raises(AssertionError, match=told):
            check_words(drawn[-1])
    DRAW["context, ten models"](path=Path("a.png"))
    names = list(drawn[-1].axes[0].texts)
    first, second = names[0].get_position(), names[1].get_position()
    names[0].set_position(second)
    names[1].set_position(first)
    with pytest.raises(AssertionError, match=r"the leader of .* crosses that of"):
        check_words(drawn[-1])


def test_lines_differ_without_colour(drawn: list[Any]) -> None:
    pictures.draw_context(dict(itertools.islice(ALL.items(), 16)), Path("a.png"))
    looks = [(line.get_linestyle(), line.get_marker()) for line in drawn[0].axes[0].get_lines()]
    assert len(looks) == len(set(looks)) == 16


def test_what_is_drawn_is_what_cost_says(drawn: list[Any]) -> None:
    pictures.draw_stacks("tiny", replace(TINY, n_layers=2, window=64, layer_pattern="LG"), Path("a.svg"), FP32)
    lines = drawn[0].axes[0].get_lines()
    row = 2 * 8 * 4 / 1e9  # key and value · width · bytes
    contexts = np.array([1, 64, 4096, 8192, 16384, 32768])
    kept = np.minimum(contexts, 64)
    for line, rows in zip(lines, (2 * contexts, contexts + kept, 2 * kept), strict=True):
        assert line.get_xydata().tolist() == pytest.approx(np.stack([contexts, rows * row], axis=1))
    assert [text.get_text() for text in drawn[0].axes[0].texts] == [
        *("all layers windowed", "1 windowed + 1 full", "all layers full")
    ]


def test_nothing_that_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match="none of deepseek-v3 fits in 1 x h100"):
        pictures.draw_fits({"deepseek-v3": ALL["deepseek-v3"]}, devices()["h100"], Path("a.png"))


@pytest.mark.parametrize("word", ["a.pdf", "nowhere/a.svg", "folder.svg"])
def test_a_picture_that_cannot_be_drawn_is_refused_at_once(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder.svg").mkdir()
    assert drawing.as_picture("a.svg") == Path("a.svg") and not Path("a.svg").exists()
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(word)):
        drawing.as_picture(word)
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(argparse.ArgumentTypeError, match=r"pip install 'minikv\[plot\]'"):
        drawing.as_picture("a.svg")


def words_of(picture: Path) -> list[str]:
    texts = ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")
    return sorted("".join(text.itertext()) for text in texts)


def test_the_pages_show_the_pictures_that_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = {"cached": {"median": 0.003}, "recomputed": {"median": 0.1}}
    monkeypatch.setattr(pictures, "next_token", lambda backend, lengths: [(n, told) for n in lengths])
    assert pictures.main([str(tmp_path / "new")]) == 0
    drawn = sorted((tmp_path / "new").iterdir())
    assert capsys.readouterr().out.split() and len(drawn) == 10
    assert [file.name for file in drawn] == sorted(file.name for file in (DOCS / "pictures").iterdir())
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    assert set(re.findall(r"\(pictures/(.*?)\)", pages)) == {file.name for file in drawn if file.suffix == ".svg"}
    for file in drawn:
        if file.suffix == ".svg" and file.stem != "cached-against-recomputed":  # times differ from run to run
            assert words_of(file) == words_of(DOCS / "pictures" / file.name), f"make pictures: {file.name} is old"


@pytest.mark.parametrize(
    ("arguments", "told"), [([], "required: DIR"), (["file/folder"], "Not a directory"), (["a", "b"], "b")]
)
def test_the_module_wants_a_folder(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pictures, "next_token", lambda *arguments: pytest.fail("timed before it was refused"))
    Path("file").touch()
    with pytest.raises(SystemExit) as end:
        pictures.main(arguments)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and told in error


def test_no_matplotlib_is_said_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    monkeypatch.setattr(pictures, "next_token", lambda *arguments: pytest.fail("timed before it was refused"))
    with pytest.raises(SystemExit):
        pictures.main([str(tmp_path)])
    assert "pip install 'minikv[plot]'" in capsys.readouterr().err
