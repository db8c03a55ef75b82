"""What does a KV cache save, and what does it cost?

The next token needs the keys and values of all earlier tokens. They never change, so they can be kept instead of being
computed again: the work per token stops growing with the text, and memory starts to.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from common import in_eps, parser, picture, progress, run, times
from minikv import Cache, ConcatCache, KVCache, ModelConfig, get_backend, random_model
from minikv.arguments import as_count
from minikv.backend import Array
from minikv.cost import FP32, cache_bytes, step_cost, total, weight_bytes
from minikv.pictures import draw_next_token
from minikv.presets import models
from minikv.report import print_table, si

CONFIG = ModelConfig(vocab_size=512, d_model=256, n_layers=4, n_heads=8, n_kv_heads=8, head_dim=32, d_ff=704)


def main(argv: Sequence[str] | None = None) -> None:
    """Compare recomputing with caching, concatenating with doubling, and the cache with the weights."""
    arguments = parser(__doc__, plot=True)
    arguments.add_argument("--longest", type=as_count, default=1024, metavar="N", help="tokens (default 1024)")
    options = arguments.parse_args(argv)
    backend = get_backend(options.backend)
    lengths = [n for n in (64, 128, 256, 512, 1024, 2048, 4096) if n <= options.longest]
    if not lengths:
        raise ValueError(f"--longest must be at least 64, got {options.longest}")

    model = random_model(CONFIG, backend=backend)
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, lengths[-1] + 1).tolist()
    print("One more token behind a text: everything computed again, or one step on a cache.")
    table = [["text", "FLOP again", "cached", "ratio", "time again", "cached", "ratio", "cache", "difference"]]
    seconds = []
    for n in progress(lengths, "lengths"):
        caches = model.new_caches()
        model.step([text[: n - 1]], caches, last=1)
        cached = model.step([text[n - 1 : n]], caches)
        stored = sum(cache.nbytes_used for cache in caches)
        difference = in_eps(cached, model.step([text[:n]], last=1))
        step = partial(model.step, [text[n : n + 1]], caches)  # each timed one adds a token, as in generation
        seconds.append(times(backend, partial(model.step, [text[:n]], last=1), step, repeat=3))
        again, once = (total(step_cost(CONFIG, 1, new, n - new, FP32)).operations for new in (n, 1))
        row = [f"{n:,}", si(again, ""), si(once, ""), f"{again / once:,.0f}x"]
        row += [si(seconds[-1][0], "s"), si(seconds[-1][1], "s"), f"{seconds[-1][0] / seconds[-1][1]:,.1f}x"]
        table.append([*row, si(stored, "B"), f"{difference:.1f} eps"])
    print_table(table)

    print("\nKeeping rows of 2 x 8 x 64 numbers, a token at a time: bytes written for every byte stored.")
    table = [["tokens", "stored", "concatenating", "doubling", "time", "doubling"]]
    for n in progress(lengths, "appends"):
        rows = backend.asarray(np.ones((1, 8, 1, 64), np.float32))
        stored, written = n * 2 * 8 * 64 * 4, [bytes_written(kind(), rows, n) for kind in (ConcatCache, KVCache)]
        spent = times(backend, partial(fill, ConcatCache, rows, n), partial(fill, KVCache, rows, n), repeat=3)
        ratios = (f"{count / stored:,.1f}x" for count in written)
        table.append([f"{n:,}", si(stored, "B"), *ratios, si(spent[0], "s"), si(spent[1], "s")])
    print_table(table)

    llama = models()["llama-2-7b"].config
    print(f"\nThe new bottleneck: Llama 2 7B in bf16, weights {si(weight_bytes(llama), 'B')}; its cache:")
    batches = (1, 8, 32)
    table = [["text", *(f"{batch} users" if batch > 1 else "1 user" for batch in batches)]]
    for n in (512, 2048, 4096):
        table.append([f"{n:,}", *(si(cache_bytes(llama, batch, n), "B") for batch in batches)])
    print_table(table)

    again, cached = zip(*seconds, strict=True)
    picture(options.plot, draw_next_token, lengths, again, cached, CONFIG)


def fill(kind: type[Cache], rows: Array, count: int) -> None:
    """Append the same row for keys and for values `count` times to a new cache."""
    cache = kind()
    for p in range(count):
        cache.extend([[p]], rows, rows)


def bytes_written(cache: Cache, rows: Array, count: int) -> int:
    """Count the bytes written by `count` appends, by watching the buffers: the new row, or all rows that moved."""
    written = owned = used = 0
    for p in range(count):
        cache.extend([[p]], rows, rows)
        moved = cache.nbytes != owned
        written += cache.nbytes_used if moved else cache.nbytes_used - used
        owned, used = cache.nbytes, cache.nbytes_used
    return written


if __name__ == "__main__":
    run(main)
