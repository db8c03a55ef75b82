"""Do the pages tell the truth? Every Python block of the README and of docs/ runs, top to bottom, a page at a time.

A ```text block right behind a ```python block is what the block prints, and a ```console block that begins with
`$ minikv` is what the command prints: both are compared word for word. Blocks that need the weights of a real model
are left out only where its file is missing.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest

from minikv import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODELS = Path(os.environ.get("MINIKV_MODELS", ROOT / "models"))


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, its text, and the line of the page on which the text begins."""

    language: str
    text: str
    line: int
    follows: bool  # nothing but empty lines between the block before and this one


def blocks_of(page: Path) -> list[Block]:
    blocks, inside, prose = [], None, True
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if inside is None and line.startswith("```"):
            inside, lines, start = line[3:].strip(), [], number + 1
        elif inside is not None and line.startswith("```"):
            blocks.append(Block(inside, "".join(lines), start, not prose))
            inside, prose = None, False
        elif inside is not None:
            lines.append(line + "\n")
        elif line.strip():
            prose = True
    assert inside is None, f"{page.name}: a block is never closed"
    return blocks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run_and_print_what_the_page_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if MODELS.is_dir():
        (tmp_path / "models").symlink_to(MODELS.resolve())
    names: dict[str, object] = {"__name__": "__main__"}
    missing, printed = set(), None
    for block in blocks_of(page):
        if block.language == "python":
            needs = {name for name in re.findall(r"models/[\w.-]+\.gguf", block.text) if not Path(name).exists()}
            missing |= needs
            printed = None if needs else _run(block, page, names)
        elif block.language == "text" and block.follows and printed is not None:
            assert block.text.split() == printed.split(), f"{page.name}:{block.line}"
        elif block.language == "console" and block.text.startswith("$ minikv "):
            command, expected = block.text.split("\n", 1)
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                assert cli.main(shlex.split(command)[2:]) == 0
            assert expected.split() == output.getvalue().split(), f"{page.name}:{block.line}: {command}"
    if missing:
        pytest.skip(f"all ran but the blocks that need {', '.join(sorted(missing))}, which is not here")


def _run(block: Block, page: Path, names: dict[str, object]) -> str:
    output = io.StringIO()
    # Empty lines in front, so that a traceback names the line of the page.
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    with contextlib.redirect_stdout(output):
        exec(code, names)
    return output.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_points_at_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
    for path in re.findall(r"\b((?:minikv|tests|examples|docs)/[\w./-]+\.(?:py|md|svg|txt))\b", text):
        assert (ROOT / path).exists(), f"{page.name} speaks of {path}"
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert target in targets, f"{page.name} speaks of make {target}"


def test_every_page_can_be_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f"(docs/{page.name})" in readme, page.name
    for example in sorted((ROOT / "examples").glob("[0-9]*.py")):
        assert f"examples/{example.name}" in readme, example.name


def test_the_table_of_what_is_remembered_is_what_the_example_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    names: dict[str, object] = {"__name__": "06_latent_attention"}
    exec((ROOT / "examples" / "06_latent_attention.py").read_text(encoding="utf-8"), names)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = {}
    for line in readme.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        table[cells[0]] = cells[-4:]
    for name, *cells in names["remembered"]():  # type: ignore[operator]
        assert table[name] == cells
