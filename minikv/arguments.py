"""How do words on a command line become numbers of tokens, sizes, models, or one line on what is wrong with them?

Which commands there are and what they do is `cli.py`'s matter.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .config import ModelConfig
from .presets import models
from .weights.families import understand
from .weights.files import read_json
from .weights.gguf_file import read_gguf
from .weights.gguf_models import gguf_config

TOKEN_UNITS = {"": 1, "k": 2**10, "m": 2**20}
BYTE_UNITS = {"b": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("kmgt", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
LARGEST = 1e15  # beyond this a number is a slip of the hand
# Settings without weights: there are no tensors to hold the number of layers against.
MANY_TENSORS: dict[str, Any] = dict.fromkeys(map(str, range(10_000)))


class Parser(argparse.ArgumentParser):
    """Parse arguments and, when they are wrong, say so in one line and leave with exit code 2."""

    def error(self, message: str) -> NoReturn:
        """Print one line and leave."""
        self.exit(2, f"{self.prog}: {' '.join(message.split())}\n")


def add_command(
    commands: Any, name: str, positional: str, run: Callable[..., int], help: str, description: str, epilog: str = ""
) -> Callable[..., Any]:
    """Add a command whose arguments go to `run`, and return what adds one to its page, which must fit a screen.

    `help` is for the list of commands, the description and the epilog are for the command's own page.
    """

    def formatter(prog: str) -> argparse.HelpFormatter:
        return argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=80)

    usage = f"minikv {name} {positional} [options]"
    parser = commands.add_parser(
        name, usage=usage, help=help, description=description, epilog=epilog, formatter_class=formatter, add_help=False
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser.add_argument_group("arguments").add_argument


def add_backend(add: Callable[..., Any], what: str) -> None:
    """Add --backend and --dtype, which mean the same for every command."""
    backends, dtypes = ("numpy", "cupy", "auto"), ("float32", "float16", "float64")
    add("--backend", type=one_of("backend", backends), default="numpy", help=f"{', '.join(backends)}: {what}")
    add("--dtype", type=one_of("dtype", dtypes), default="float32", help=f"{', '.join(dtypes)}")


def in_a_line(error: Exception) -> str:
    """Say what went wrong, without the number that the system gives its error."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def flush() -> None:
    """Write out what was printed, so that an error comes now; Python must not try again when it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise


def is_path(word: str, *endings: str) -> bool:
    """Tell whether a word that could also be a known name stands for a file or a folder."""
    return os.path.exists(word) or os.sep in word or word.endswith(endings)


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return ": did you mean X?" when something known is near, else nothing."""
    near = difflib.get_close_matches(word.lower(), list(known), n=1)
    return f": did you mean {near[0]}?" if near else ""


def one_of(what: str, known: Sequence[str]) -> Callable[[str], str]:
    """Return a reader of one of the known words."""

    def read(word: str) -> str:
        if word.lower() in known:
            return word.lower()
        hint = suggestion(word, known) or f": known are {', '.join(known)}"
        raise argparse.ArgumentTypeError(f"unknown {what} {word!r}{hint}")

    return read


def as_count(word: str) -> int:
    """Read a whole number of at least 1."""
    if not re.fullmatch(r"[+-]?\d+", word):
        raise argparse.ArgumentTypeError(f"{word!r} is not a whole number")
    return int(_in_range(float(word), word))


def as_tokens(word: str) -> int:
    """Read a number of tokens: 131072, or 128k with k = 1024."""
    tokens = _scaled(word, TOKEN_UNITS, "a number of tokens", "k")
    if tokens != int(tokens):
        raise argparse.ArgumentTypeError(f"{word!r} is no whole number of tokens")
    return int(tokens)


def as_bytes(word: str) -> int:
    """Read a size: 80GB with powers of 1000, 80GiB with powers of 1024."""
    return int(_scaled(word, BYTE_UNITS, "a size in bytes", "GB"))


def _scaled(word: str, units: dict[str, int], what: str, usual: str) -> float:
    match = re.fullmatch(r"([+-]?\d*\.?\d+) *([a-z]*)", word.lower())
    if not match:
        raise argparse.ArgumentTypeError(f"{word!r} is not {what}: write it like 128{usual}")
    number, unit = match.groups()
    if unit not in units:
        raise argparse.ArgumentTypeError(f"{word!r} is not {what}: did you mean {number}{usual}?")
    return _in_range(float(number) * units[unit], word)


def _in_range(value: float, word: str) -> float:
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {word}")
    if value > LARGEST:
        raise argparse.ArgumentTypeError(f"must be at most {LARGEST:.0e}, got {word[:20]}")
    return value


def as_output(*endings: str) -> Callable[[str], Path]:
    """Return a reader of a file to write that refuses, before any work is done, what cannot be written."""

    def read(word: str) -> Path:
        path = Path(word)
        if endings and path.suffix not in endings:
            raise argparse.ArgumentTypeError(f"must end in {' or '.join(endings)}, got {word}")
        try:
            new = not os.path.exists(path)
            path.open("ab").close()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"cannot write {word}: {error.strerror}") from None
        if new:
            path.unlink()
        return path

    return read


def as_model(word: str) -> tuple[str, ModelConfig]:
    """Find a model's configuration: a preset's, or that in a Hugging Face config.json or folder, or in a GGUF file."""
    if word.lower() in models():
        return word.lower(), models()[word.lower()].config
    if not is_path(word, ".json", ".gguf"):
        hint = suggestion(word, models()) or "; `minikv models` lists the known ones"
        raise argparse.ArgumentTypeError(f"unknown model {word!r:.80}{hint}")
    path = Path(word)
    try:
        if path.suffix == ".gguf":
            return path.stem, gguf_config(read_gguf(path))
        file = path / "config.json" if path.is_dir() else path
        if file.exists() and file.suffix != ".json":
            raise ValueError(f"{file}: neither a config.json nor a folder with one nor a .gguf file")
        config, _ = understand(read_json(file), file, MANY_TENSORS)
        return file.resolve().parent.name, config
    except (OSError, ValueError, ImportError) as error:
        raise argparse.ArgumentTypeError(in_a_line(error)) from None
