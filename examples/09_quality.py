"""Does a smaller cache cost quality?

It depends on how much is taken away, and on whether the model was trained that way. Here two real models read a story
after their caches were made smaller, or larger, than what they were trained with. Perplexity says how many tokens the
model hesitates between, on average: lower is better.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from common import parser, progress, run

from minikv import Model, load
from minikv.arguments import as_count
from minikv.convert import WAYS, to_grouped
from minikv.cost import FP32, cache_bytes
from minikv.report import print_table, si

FILES = [Path("models/SmolLM2-135M-Instruct.Q4_1.gguf"), Path("models/gemma-3-270m-q4_k_m.gguf")]
STORY = Path(__file__).with_name("reading.txt")


def main(argv: Sequence[str] | None = None) -> None:
    """Measure the perplexity of every model that is there, as it was trained and otherwise."""
    arguments = parser(__doc__)
    arguments.add_argument("models", nargs="*", type=Path, metavar="FILE", help="default: those of `make demo`")
    arguments.add_argument("--tokens", type=as_count, default=1024, metavar="N", help="of the story (default 1024)")
    options = arguments.parse_args(argv)
    paths = options.models or [path for path in FILES if path.exists()]
    missing = [str(path) for path in options.models if not path.exists()]
    if missing or not paths:
        raise ValueError(f"{(missing or FILES)[0]} is not there: `make {FILES[0]}` fetches SmolLM2")
    for path in paths:
        model, tokenizer = load(path, options.backend)
        if tokenizer is None:
            raise ValueError(f"{path} has no tokenizer, so there is nothing to read the story with")
        ids = tokenizer.encode(STORY.read_text(encoding="utf-8"))[: options.tokens]
        variants = merged_heads(model) | other_windows(model)
        print(f"{path.name} reads {len(ids):,} tokens; perplexity of the second half, cache at its end in float32:")
        table = [["", "perplexity", "cache", ""]]
        for name, variant in progress(list(variants.items()), "variants"):
            size = si(cache_bytes(variant.config, 1, len(ids), FP32), "B")
            table.append([name, f"{perplexity(variant, ids):,.1f}", size, "trained so" if variant is model else ""])
        print_table(table)
        print()


def merged_heads(model: Model) -> dict[str, Model]:
    """Give the model as it is and, where it has several key/value heads, with all of them merged into one."""
    K = model.config.n_kv_heads
    variants = {f"{model.config.n_heads} query, {K} key/value heads": model}
    if K > 1:
        for how in WAYS:
            variants[f"merged into one ({how})"] = Model(*to_grouped(model.config, model.weights, 1, how))
    return variants


def other_windows(model: Model) -> dict[str, Model]:
    """Give the model with a smaller window, and a larger one where it was trained with one."""
    c = model.config
    windows = [256, 64] if c.window is None else [4 * c.window, c.window // 2, c.window // 8]
    return {f"window {window:,}": Model(replace(c, window=window), model.weights) for window in windows}


def perplexity(model: Model, ids: Sequence[int], chunk: int = 128) -> float:
    """Compute exp(mean of -log p) of every token in the second half of a text, given all before it."""
    caches, losses = model.new_caches(), []
    for start in range(0, len(ids) - 1, chunk):
        chunk_ids = ids[start : min(start + chunk, len(ids) - 1)]
        logits = model.backend.to_numpy(model.step([chunk_ids], caches))[0].astype(np.float64)
        logits -= logits.max(axis=-1, keepdims=True)
        said = ids[start + 1 : start + 1 + len(chunk_ids)]
        losses += list(np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(len(said)), said])
    return math.exp(np.mean(losses[len(ids) // 2 :]))


if __name__ == "__main__":
    run(main)
