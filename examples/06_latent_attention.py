"""How can many heads remember one small vector per token?

Multi-head latent attention (MLA) caches a latent from which the keys and values of all heads can be made. Expanded, it
makes them; absorbed, it carries the queries to the latents instead, and is then multi-query attention over latents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from common import in_eps, parser, picture, progress, run, times
from minikv import Cache, KVCache, Model, get_backend, random_model
from minikv.arguments import as_count
from minikv.cost import cache_cost, keys_in_sight
from minikv.drawing import draw_lines
from minikv.mla import cheaper_form
from minikv.presets import models
from minikv.report import print_table, si

V2, LITE = models()["deepseek-v2"].config, models()["deepseek-v2-lite"].config
FORMS = ("expanded", "absorbed")


def main(argv: Sequence[str] | None = None) -> None:
    """Compare both forms shape by shape, in their results and in time, and MLA's memory with the other kinds'."""
    arguments = parser(__doc__, plot=True)
    arguments.add_argument("--longest", type=as_count, default=2048, metavar="N", help="tokens (default 2048)")
    options = arguments.parse_args(argv)
    backend = get_backend(options.backend)
    lengths = [n for n in (64, 256, 512, 1024, 2048, 4096, 8192) if n <= options.longest]
    if not lengths:
        raise ValueError(f"--longest must be at least 64, got {options.longest}")

    print("What a layer remembers per token, at the sizes of DeepSeek-V2 (128 heads of width 128):")
    print_table([["", "numbers", "of MHA", "bytes in bf16", "at 100,000 tokens"], *remembered()])

    c = V2
    C, R, P, V, N = c.kv_lora_rank, c.qk_rope_head_dim, c.qk_nope_head_dim, c.v_head_dim, c.n_heads
    print("\nOne decode step over S cached rows of C + R numbers, shape by shape (axes: docs/axes.md):")
    table = [["", "expanded", "absorbed", "multi-query attention"]]
    table.append(["queries", f"[B, {N}, 1, {P}+{R}]", f"[B, {N}, 1, {C}+{R}]", "[B, N, 1, H]"])
    table.append(["keys", f"[B, {N}, S, {P}+{R}]", f"[B, 1, S, {C}+{R}]", "[B, 1, S, H]"])
    table.append(["values", f"[B, {N}, S, {V}]", f"[B, 1, S, {C}]", "[B, 1, S, V]"])
    table.append(["out", f"[B, {N}, 1, {V}]", f"[B, {N}, 1, {C}]", "[B, N, 1, V]"])
    table.append(["made from latents", f"{N} x S x ({P}+{V})", "nothing", "nothing"])
    print_table(table)

    # One layer of DeepSeek-V2-Lite, without the rest of a model that would only add to both times.
    config = replace(LITE, n_layers=1, vocab_size=64, n_experts=0, n_experts_per_token=0, n_shared_experts=0, d_ff=64)
    wide = random_model(replace(config, d_model=256), backend=backend, dtype="float64")
    text = np.random.default_rng(0).integers(0, 64, (1, 40))
    whole = by_form(wide, FORMS[0]).step(text)
    print(
        f"\nBoth forms on 40 tokens in float64 differ by {in_eps(by_form(wide, FORMS[1]).step(text), whole):.1f} eps."
    )

    model = random_model(config, backend=backend)
    print(f"\nOne more token, one layer of DeepSeek-V2-Lite ({LITE.n_heads} heads, the same C, R, P and V):")
    table = [["text", *FORMS, "ratio", "fewer operations"]]
    seconds = []
    for n in progress(lengths, "lengths"):
        caches = [[KVCache(capacity=n + 16)] for _ in FORMS]  # room for the timed tokens
        for cache in caches:
            by_form(model, None).step(np.ones((1, n - 1), np.int64), cache, last=1)
        steps = (partial(one_more, model, form, cache) for form, cache in zip(FORMS, caches, strict=True))
        seconds.append(times(backend, *steps))
        expanded, absorbed = seconds[-1]
        row = [f"{n:,}", si(expanded, "s"), si(absorbed, "s"), f"{expanded / absorbed:,.1f}x"]
        table.append([*row, cheaper_form(config, 1, n)])
    print_table(table)
    lines = {form: [1e3 * pair[i] for pair in seconds] for i, form in enumerate(FORMS)}
    title = "One more token through one latent layer of DeepSeek-V2-Lite\n(timed, medians)"
    picture(options.plot, draw_lines, title, ("tokens of text before it", lengths), "time per token, ms", lines)


def by_form(model: Model, form: str | None) -> Model:
    """Have every layer of a model compute in one form (None: whichever takes fewer operations), and return it."""
    for layer in model.layers:
        layer.attention.form = form
    return model


def one_more(model: Model, form: str, caches: list[Cache]) -> None:
    """Feed one more token, computed in one form."""
    by_form(model, form).step([[1]], caches)


def remembered() -> list[list[str]]:
    """List, for every kind of layer, what one layer remembers: the numbers of a token, as a share of MHA, in bytes."""
    heads = replace(V2, kv_lora_rank=None, n_layers=1, head_dim=128)
    kinds = {
        "multi-head": replace(heads, n_kv_heads=128),
        "grouped, 8 key/value heads": replace(heads, n_kv_heads=8),
        "multi-query": replace(heads, n_kv_heads=1),
        "latent": replace(V2, n_layers=1),
        "grouped, window 4,096": replace(heads, n_kv_heads=8, window=4096),
    }
    rows, most = [], 2 * 128 * 128
    for name, config in kinds.items():
        (cost,) = cache_cost(config)
        tokens = keys_in_sight(cost.kind, 100_000, config.window)
        numbers = cost.elements_per_token
        share = f"1/{most / numbers:.3g}" if numbers < most else "1"
        rows.append([name, f"{numbers:,}", share, f"{cost.bytes_per_token:,}", si(tokens * cost.bytes_per_token, "B")])
    return rows


if __name__ == "__main__":
    run(main)
