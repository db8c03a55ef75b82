"""Does a smaller cache cost quality?

It depends on how much is taken away, and on whether the model was trained that way. Here real models read a story after
their caches were made smaller, or larger, than what they were trained with. Perplexity says how many tokens the
model hesitates between, on average: lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from common import parser, progress, run
from minikv import Cache, Model, RollingCache, load, namespace
from minikv.arguments import as_count
from minikv.backend import Array
from minikv.convert import WAYS, to_grouped
from minikv.report import print_table, si

FILE = Path("models/SmolLM2-135M-Instruct.Q4_1.gguf")
STORY = Path(__file__).with_name("reading.txt")
FIRST = 4  # tokens that some variants keep for good


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the perplexity of every model, as it was trained and otherwise."""
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="*", type=Path, metavar="FILE", help=f"default {FILE}")
    arguments.add_argument("--tokens", type=as_count, default=640, metavar="N", help="of the story (default 640)")
    options = arguments.parse_args(argv)
    for path in options.models or [FILE]:
        if not path.exists():
            raise ValueError(f"{path} is not there: `make {FILE}` fetches SmolLM2, `make demo MODEL=gemma3` Gemma 3")
        model, tokenizer = load(path, options.backend)
        if tokenizer is None:
            raise ValueError(f"{path} has no tokenizer, so there is nothing to read the story with")
        ids = tokenizer.encode(STORY.read_text(encoding="utf-8"))[: options.tokens]
        variants = {**merged_heads(model), **other_windows(model)}
        print(f"{path.name} reads {len(ids):,} tokens; perplexity of the second half, bytes held at its end:")
        table = [["", "perplexity", "cache", ""]]
        for name, (variant, caches) in progress(list(variants.items()), "variants"):
            row = [
                name,
                f"{perplexity(variant, caches, ids):,.1f}",
                si(sum(cache.nbytes_used for cache in caches), "B"),
            ]
            table.append([*row, "trained so" if variant is model else ""])
        print_table(table)
        print()


Variants = dict[str, tuple[Model, list[Cache]]]


def merged_heads(model: Model) -> Variants:
    """Give the model as it is and, where it has several key/value heads, with all of them merged into one."""
    K = model.config.n_kv_heads
    models = {f"{model.config.n_heads} query, {K} key/value heads": model}
    if K > 1:
        for how in WAYS:
            models[f"merged into one ({how})"] = Model(*to_grouped(model.config, model.weights, 1, how))
    return {name: (model, model.new_caches()) for name, model in models.items()}


def other_windows(model: Model) -> Variants:
    """Give a fully seeing model windows, also with the first tokens kept; a windowed one a larger and smaller ones."""
    c, variants = model.config, {}
    for window in (128,) if c.window is None else (4 * c.window, c.window // 2):
        changed = Model(replace(c, window=window), model.weights)
        variants[f"window {window:,}"] = changed, changed.new_caches()
        if c.window is None:
            kept: list[Cache] = [FirstAndLast(window) for _ in changed.layers]
            variants[f"window {window:,} and the first {FIRST}"] = changed, kept
    return variants


class FirstAndLast(RollingCache):
    """Remember the first tokens of one text for good, beside a ring of the last ones (arXiv 2309.17453).

    A window would hide the first tokens, so they are handed out under the position at which the step begins; their keys
    stay rotated to where they stood. Steps must not be longer than the window, and the first one must hold them all.
    """

    first: tuple[Array, ...] = ()

    @property
    def nbytes_used(self) -> int:
        """Count the bytes of the ring's rows and of the first ones."""
        return super().nbytes_used + sum(row.nbytes for row in self.first)

    def _store(self, pos: np.ndarray, rows: tuple[Array, ...]) -> tuple[Any, ...]:
        seen_pos, *seen = super()._store(pos, rows)
        if not self.first:
            self.first = tuple(namespace(row).asarray(row[:, :, :FIRST, :], copy=True) for row in rows)
            return seen_pos, *seen
        seen_pos = np.where(seen_pos < FIRST, -1, seen_pos)  # none twice
        both = (namespace(row).concat([first, row], axis=2) for first, row in zip(self.first, seen, strict=True))
        return np.concatenate([np.repeat(pos[:, :1], FIRST, axis=1), seen_pos], axis=1), *both


def perplexity(model: Model, caches: list[Cache], ids: Sequence[int], chunk: int = 128) -> float:
    """Compute exp(mean of -log p) of every token in the second half of a text, given all before it."""
    losses: list[float] = []
    for start in range(0, len(ids) - 1, chunk):
        read = ids[start : min(start + chunk, len(ids) - 1)]
        logits = model.backend.to_numpy(model.step([read], caches))[0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        said = ids[start + 1 : start + 1 + len(read)]
        losses += list(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(said)), said])
    return math.exp(np.mean(losses[len(ids) // 2 :]))


if __name__ == "__main__":
    run(main)
