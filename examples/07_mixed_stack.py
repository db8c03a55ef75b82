"""What does a stack remember in which only some layers see everything?

A windowed layer stops growing at W tokens, a full one never does. With five windowed layers to each full one, as in
Gemma 3, the cache of a long text nears a sixth of a full stack's, and no token is out of sight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common import in_eps, parser, picture, progress, run
from minikv import ModelConfig, get_backend, namespace, random_model
from minikv.arguments import as_count
from minikv.cost import FP32, cache_bytes
from minikv.pictures import draw_stacks
from minikv.presets import models
from minikv.report import print_table, si

STACK = ModelConfig(
    vocab_size=256, d_model=64, n_layers=6, n_heads=4, n_kv_heads=2, head_dim=16, d_ff=128, rope_local_theta=1000.0
)
PATTERNS = {"full": "G", "5:1": "LLLLLG", "windowed": "L"}


def main(argv: Sequence[str] | None = None) -> None:
    """Feed a text to three stacks and weigh their caches, then price the same choice for Gemma 3 27B."""
    arguments = parser(__doc__, plot=True)
    arguments.add_argument("--window", type=as_count, default=64, metavar="W", help="of windowed layers (default 64)")
    options = arguments.parse_args(argv)
    backend, window = get_backend(options.backend), options.window

    configs = {name: replace(STACK, window=window, layer_pattern=p) for name, p in PATTERNS.items()}
    stacks = {name: random_model(config, backend=backend) for name, config in configs.items()}
    caches = {name: model.new_caches() for name, model in stacks.items()}
    lengths = [window // 2 + 1, window, 2 * window, 4 * window, 16 * window, 32 * window]
    text = np.random.default_rng(0).integers(0, STACK.vocab_size, (1, lengths[-1]))
    print(
        f"Bytes that hold tokens in the caches of six layers, window {window}, as a text is read; predicted = counted."
    )
    table = [["text", *stacks, "5:1 of full"]]
    for past, length in progress(list(zip([0, *lengths], lengths, strict=False)), "lengths"):
        held = []
        for name, model in stacks.items():
            model.step(text[:, past:length], caches[name], last=1)
            held.append(sum(cache.nbytes_used for cache in caches[name]))
            if held[-1] != cache_bytes(configs[name], 1, length, FP32):
                raise RuntimeError(f"{name} holds {held[-1]} bytes, not what minikv.cost predicts")
        table.append([f"{length:,}", *(f"{size:,}" for size in held), f"{held[1] / held[0]:.1%}"])
    print_table(table)

    whole = random_model(configs["5:1"], 0, backend, "float64")
    steps, short = whole.new_caches(), text[:, : 2 * window + 7]
    parts = [whole.step(short[:, start : start + 9], steps) for start in range(0, short.shape[1], 9)]
    difference = in_eps(namespace(*parts).concat(parts, axis=1), whole.step(short))
    print(
        f"\nThe 5:1 stack, {short.shape[1]} tokens, in steps of 9 and at once: {difference:.1f} eps apart in float64."
    )

    gemma = models()["gemma-3-27b"].config
    print(f"\nGemma 3 27B, {gemma.n_layers} layers, window {gemma.window:,}, cache of one sequence in bf16:")
    choices = [replace(gemma, layer_pattern="G"), gemma, replace(gemma, layer_pattern="L")]
    table = [["text", "if all were full", "as it is", "if all were windowed", "of full"]]
    for length in (1024, 8192, 32768, 131072):
        sizes = [cache_bytes(config, 1, length) for config in choices]
        table.append([f"{length:,}", *(si(size, "B") for size in sizes), f"{sizes[1] / sizes[0]:.1%}"])
    print_table(table)
    picture(options.plot, draw_stacks, "gemma-3-27b", gemma)


if __name__ == "__main__":
    run(main)
