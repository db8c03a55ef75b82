"""Can a trained model get a smaller cache afterwards?

Merging key/value heads (MHA to GQA) loses what the heads had of their own, and nothing where they had nothing. Writing
GQA as MLA loses nothing and saves nothing; a smaller latent then saves what the weights do not use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from common import in_eps, parser, progress, run
from minikv import Backend, Model, ModelConfig, get_backend, namespace, random_model
from minikv.backend import Array
from minikv.convert import WAYS, to_grouped, to_latent, to_mla
from minikv.cost import FP32, cache_bytes_per_token
from minikv.report import print_table

N, H, GROUP = 8, 16, 4  # heads, their width, and how many of them say nearly the same
MHA = ModelConfig(vocab_size=128, d_model=256, n_layers=3, n_heads=N, n_kv_heads=N, head_dim=H, d_ff=256, rotary_dim=4)


def main(argv: Sequence[str] | None = None) -> None:
    """Merge heads that differ more and more, write GQA as MLA, and shrink the latent."""
    options = parser(__doc__).parse_args(argv)
    backend = get_backend(options.backend)
    text = np.random.default_rng(0).integers(0, MHA.vocab_size, (2, 48))

    print(f"{N} heads to {N // GROUP}: error of the logits, by how much each head has of its own.")
    table = [["own share", *WAYS, "bytes per token"]]
    for own in progress((0.0, 0.001, 0.01, 0.1, 1.0), "shares"):
        model = alike(own, backend)
        merged = {how: Model(*to_grouped(model.config, model.weights, N // GROUP, how)) for how in WAYS}
        errors = (f"{error(merged[how].step(text), model.step(text)):.1%}" for how in WAYS)
        sizes = (cache_bytes_per_token(config, FP32) for config in (MHA, merged["mean"].config))
        table.append([f"{own:.1%}", *errors, " -> ".join(f"{size:,}" for size in sizes)])
    print_table(table)

    gqa = random_model(replace(MHA, n_kv_heads=2), 0, backend, "float64")
    mla = Model(*to_mla(gqa.config, gqa.weights))
    caches = [model.new_caches() for model in (gqa, mla)]
    expected, actual = (model.step(text, cache) for model, cache in zip((gqa, mla), caches, strict=True))
    held = [sum(layer.nbytes_used for layer in cache) // text.size for cache in caches]
    print("\nTwo key/value heads written as latent attention, float64:")
    print(f"{held[0]:,} and {held[1]:,} bytes per token, logits {in_eps(actual, expected):.1f} eps apart.")

    model = alike(0.01, backend)
    print("\nEight heads that have 1% of their own, written as latent attention of a smaller and smaller rank:")
    table = [["rank", "error of keys and values", "error of the logits", "bytes per token", "of before"]]
    before = cache_bytes_per_token(MHA, FP32)
    for rank in progress((224, 112, 56, 48, 32, 16), "ranks"):
        config, weights, lost = to_latent(model.config, model.weights, rank)
        size = cache_bytes_per_token(config, FP32)
        row = [str(rank), f"{max(lost):.1%}", f"{error(Model(config, weights).step(text), model.step(text)):.1%}"]
        table.append([*row, f"{size:,}", f"{size / before:.0%}"])
    print_table(table)


def alike(own: float, backend: Backend) -> Model:
    """Make a random model whose key/value heads share, in groups of four, all of their variance but `own`."""
    model, rng = random_model(MHA, backend="numpy", dtype="float64"), np.random.default_rng(1)
    for name, rows in model.weights.items():
        if name.endswith(".qkv"):
            kv = rows[N * H :].reshape(2, N // GROUP, GROUP, H, -1)  # a view of the model's weights
            common = rng.standard_normal((2, N // GROUP, 1, H, MHA.d_model)) / np.sqrt(MHA.d_model)
            kv[:] = np.sqrt(1 - own) * common + np.sqrt(own) * kv
    return model.to(backend)


def error(actual: Array, expected: Array) -> float:
    """Give the root mean square of the difference as a share of that of what is expected."""
    xp, difference = namespace(actual, expected), actual - expected
    return float(xp.mean(difference * difference) / xp.mean(expected * expected)) ** 0.5


if __name__ == "__main__":
    run(main)
