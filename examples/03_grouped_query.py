"""What changes when query heads share keys and values?

The number of key/value heads K, and nothing else: K = N is multi-head attention (MHA), K = 1 multi-query (MQA), between
them grouped-query (GQA). The cache and what a decode step reads shrink by N / K; the theorem does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from common import in_eps, parser, progress, run, times
from minikv import Backend, ModelConfig, attention, get_backend, namespace, random_model
from minikv.arguments import as_count
from minikv.backend import Array
from minikv.cost import FP32, cache_bytes_per_token
from minikv.report import print_table, si

N, H, LAYERS = 32, 128, 32  # the heads of Llama 2 7B and 3 8B


def main(argv: Sequence[str] | None = None) -> None:
    """Compare 32, 8 and 1 key/value heads: the theorem, the bytes, the time of a decode step's attention."""
    arguments = parser(__doc__)
    arguments.add_argument("--keys", type=as_count, default=4096, metavar="S", help="in sight (default 4096)")
    options = arguments.parse_args(argv)
    backend = get_backend(options.backend)

    print(f"{N} query heads of width {H}, one query, {options.keys:,} keys; bytes are of {LAYERS} layers in float32.")
    table = [["", "K", "steps = whole", "bytes per token", "keys and values", "time", "B/s", "repeated first"]]
    for name, K in progress([("MHA", 32), ("GQA", 8), ("MQA", 1)], "kinds"):
        config = ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=N, n_kv_heads=K, head_dim=8, d_ff=96)
        full_size = ModelConfig(
            vocab_size=32000, d_model=4096, n_layers=LAYERS, n_heads=N, n_kv_heads=K, head_dim=H, d_ff=11008
        )
        rng = np.random.default_rng(0)
        q, k, v = (
            backend.asarray(rng.standard_normal(shape, dtype=np.float32))
            for shape in ((1, N, 1, H), (1, K, options.keys, H), (1, K, options.keys, H))
        )
        folded, repeated = times(backend, partial(attention, q, k, v), partial(repeating, q, k, v))
        read = 2 * K * options.keys * H * 4
        row = [name, str(K), f"{theorem(config, backend):.1f} eps", f"{cache_bytes_per_token(full_size, FP32):,}"]
        table.append([*row, si(read, "B"), si(folded, "s"), si(read / folded, "B/s"), si(repeated, "s")])
    print_table(table)
    print(
        "\nThe last column copies every key/value head N / K times before attending, which is what sharing them saves."
    )


def theorem(config: ModelConfig, backend: Backend) -> float:
    """Give the largest difference, in eps, between a text in one step and the same text in steps of 7, 1, 4, 1 ..."""
    model = random_model(config, backend=backend, dtype="float64")
    text = np.random.default_rng(1).integers(0, config.vocab_size, (2, 20))
    whole, caches = model.step(text), model.new_caches()
    cuts = [0, 7, 8, 12, 13, 14, 20]
    parts = [model.step(text[:, a:b], caches) for a, b in pairwise(cuts)]
    return in_eps(namespace(whole).concat(parts, axis=1), whole)


def repeating(q: Array, k: Array, v: Array) -> Array:
    """Attend as if there were as many key/value heads as query heads, by copying them."""
    xp = namespace(q, k, v)
    group = q.shape[1] // k.shape[1]
    return attention(q, xp.repeat(k, group, axis=1), xp.repeat(v, group, axis=1))


if __name__ == "__main__":
    run(main)
