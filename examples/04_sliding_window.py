"""What if a layer looks at the last W tokens only?

Its cache is a ring of W rows: bytes and time per token stop growing with the text. What is lost is sight: a token can
be felt at most (layers x (W - 1)) tokens later, unless some layers still see everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from common import parser, picture, progress, run, times
from minikv import Cache, Model, ModelConfig, RollingCache, get_backend, namespace, random_model, visible
from minikv.arguments import as_count
from minikv.drawing import draw_lines
from minikv.report import print_table, si

FULL = ModelConfig(vocab_size=256, d_model=128, n_layers=6, n_heads=4, n_kv_heads=4, head_dim=32, d_ff=352)
PATTERNS = {"full": "G", "windowed": "L", "mixed, 2:1": "LLG"}


def main(argv: Sequence[str] | None = None) -> None:
    """Show the mask and the ring, then bytes and time as the text grows, then what each stack can still see."""
    arguments = parser(__doc__, plot=True)
    arguments.add_argument("--window", type=as_count, default=64, metavar="W", help="keys in sight (default 64)")
    options = arguments.parse_args(argv)
    backend, window = get_backend(options.backend), options.window

    print("Six tokens through a window of 3 (rows look, columns are looked at), and a ring of 3 rows filling up:\n")
    ring = RollingCache(3)
    for query, row in enumerate(visible(range(6), range(6), window=3)[0]):
        positions, _ = ring.extend([[query]], backend.asarray(np.zeros((1, 1, 1, 1), np.float32)))
        print("  " + " ".join("x" if seen else "." for seen in row), "    slots hold", *positions[0].tolist())

    configs = {name: replace(FULL, window=window, layer_pattern=pattern) for name, pattern in PATTERNS.items()}
    stacks = {name: random_model(config, backend=backend) for name, config in configs.items()}
    lengths = [max(1, window // 2), window, 2 * window, 10 * window, 100 * window]
    print(f"\nSix layers, window {window}: bytes that hold tokens, and the time of one more token.")
    table = [["text", *(f"{name}, {what}" for name in stacks for what in ("bytes", "time"))]]
    held: dict[str, list[int]] = {name: [] for name in stacks}
    caches = {name: model.new_caches() for name, model in stacks.items()}
    for length in progress(lengths, "lengths"):
        for name, model in stacks.items():
            read(model, caches[name], length)
            held[name].append(sum(cache.nbytes_used for cache in caches[name]))
        # The timed tokens go to copies, so that the text has the length that the row says.
        copies = {name: [cache.copy() for cache in caches[name]] for name in stacks}
        seconds = times(backend, *(partial(stacks[name].step, [[1]], copies[name]) for name in stacks), repeat=15)
        cells = zip((f"{held[name][-1]:,}" for name in stacks), (si(s, "s") for s in seconds), strict=True)
        table.append([f"{length:,}", *(cell for pair in cells for cell in pair)])
    print_table(table)

    small = 8
    reach = FULL.n_layers * (small - 1)
    print(
        f"\nIs a changed token felt d tokens later? Window {small}, six layers: 6 x 7 = {reach} is as far as it goes."
    )
    table = [["d", *stacks]]
    for distance in (small - 1, small, reach, reach + 1, 2 * reach):
        cells = [felt(random_model(replace(c, window=small), 0, backend), distance) for c in configs.values()]
        table.append([str(distance), *("yes" if cell else "no" for cell in cells)])
    print_table(table)
    lines = {name: [size / 1e3 for size in sizes] for name, sizes in held.items()}
    title = f"What six layers remember, window {window}"
    picture(options.plot, draw_lines, title, ("tokens of text", lengths), "cache, KB (KB = 10³ bytes)", lines)


def read(model: Model, caches: list[Cache], length: int) -> None:
    """Let the caches see random tokens up to `length`, in chunks of 512."""
    rng = np.random.default_rng(0)
    while caches[0].length < length:
        chunk = min(512, length - caches[0].length)
        model.step(rng.integers(0, model.config.vocab_size, (1, chunk)), caches, last=1)


def felt(model: Model, distance: int) -> bool:
    """Say whether changing one token changes anything at all in the logits `distance` tokens later."""
    text = np.ones((1, distance + 1), dtype=np.int64)
    changed = text.copy()
    changed[0, 0] = 2
    xp = namespace(model.weights["embed"])
    return bool(xp.any(model.step(text, last=1) != model.step(changed, last=1)))


if __name__ == "__main__":
    run(main)
