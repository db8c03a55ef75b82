"""What the examples share: arguments, one-line errors, honest times, pictures."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from minikv import Backend, namespace
from minikv.arguments import Parser, one_of
from minikv.drawing import as_picture


def parser(doc: str, plot: bool = False) -> Parser:
    """Begin an example's arguments: its docstring as help, --backend and, where there is a picture, --plot."""
    formatter = argparse.RawDescriptionHelpFormatter
    arguments = Parser(description=doc, formatter_class=formatter)
    backends = ("numpy", "cupy", "auto")
    add = arguments.add_argument
    add("--backend", type=one_of("backend", backends), default="numpy", help="numpy, cupy or auto (default numpy)")
    if plot:
        add("--plot", type=as_picture, metavar="FILE", help="draw a picture too, .svg or .png (needs matplotlib)")
    return arguments


def run(main: Callable[[Sequence[str] | None], None]) -> None:
    """Run an example's main; a wrong argument or a missing file gives one line, Ctrl-C a polite end."""
    try:
        main(None)
    except (ValueError, TypeError, OSError, RuntimeError, ImportError) as error:
        print(f"{Path(sys.argv[0]).name}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        raise SystemExit(130) from None


def times(backend: Backend, *actions: Callable[[], Any], repeat: int = 5) -> list[float]:
    """Measure actions in turn, `repeat` times after one unmeasured round, and return each one's median in seconds.

    The device is waited for before both readings of the clock: a launch alone takes no time worth measuring.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    for turn in range(repeat + 1):
        for action, measured in zip(actions, seconds, strict=True):
            backend.synchronize()
            start = time.perf_counter()
            action()
            backend.synchronize()
            if turn:
                measured.append(time.perf_counter() - start)
    return [statistics.median(measured) for measured in seconds]


def progress(items: Sequence[Any], what: str) -> Iterator[Any]:
    """Yield the items and say on standard error, every other second, how many are done."""
    said, end = time.perf_counter(), "\r" if sys.stderr.isatty() else "\n"
    for done, item in enumerate(items):
        if time.perf_counter() - said > 2:
            said = time.perf_counter()
            print(f"{what}: {done} of {len(items)}", end=end, file=sys.stderr, flush=True)
        yield item
    if end == "\r":
        print("\033[K", end="", file=sys.stderr, flush=True)  # clears the line


def in_eps(actual: Any, expected: Any) -> float:
    """Give the largest difference in units of the type's rounding step and the largest expected magnitude."""
    xp = namespace(actual, expected)
    largest = float(xp.max(xp.abs(expected)))
    return float(xp.max(xp.abs(actual - expected))) / (xp.finfo(expected.dtype).eps * largest)


def picture(path: Path | None, draw: Callable[..., None], *arguments: Any) -> None:
    """Draw a picture if one is wanted, and say where it is."""
    if path:
        draw(*arguments, path=path)
        print(f"\ndrawn into {path}")
