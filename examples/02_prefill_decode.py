"""Why are there two phases, and what bounds each?

Prefill takes all tokens of the prompt in one step: every weight that is read serves them all. Decode takes one token
per sequence: the same weights, and the whole cache, are read for very little arithmetic. Operations and bytes are
counted by minikv.cost; the ceilings and the times are measured on this machine, now.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from common import parser, progress, run, times
from minikv import ModelConfig, get_backend, random_model
from minikv.arguments import as_count
from minikv.cost import FP32, PARTS, best_time, step_cost, total
from minikv.presets.measure import measure_this
from minikv.report import print_table, si

CONFIG = ModelConfig(vocab_size=8192, d_model=768, n_layers=6, n_heads=12, n_kv_heads=4, head_dim=64, d_ff=2048)


def main(argv: Sequence[str] | None = None) -> None:
    """Count and measure a prefill and decode steps of several batches on one model."""
    arguments = parser(__doc__)
    add, batches = arguments.add_argument, [1, 4, 16]
    add("--context", type=as_count, default=512, metavar="N", help="tokens in sight of the newest (default 512)")
    add("--batches", type=as_count, nargs="+", default=batches, metavar="B", help="to decode in (default 1 4 16)")
    options = arguments.parse_args(argv)
    if options.context < 2:
        raise ValueError(f"--context must be at least 2, got {options.context}")
    backend, context = get_backend(options.backend), options.context
    device = measure_this(backend)
    ridge = device.operations_per_second / device.bytes_per_second
    print(
        f"This machine at best: {si(device.operations_per_second, 'FLOP/s')} and "
        f"{si(device.bytes_per_second, 'B/s')}.\nBelow {ridge:,.0f} FLOP per byte, memory is what a step waits for."
    )

    model = random_model(CONFIG, backend=backend)
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (1, context - 1)).tolist()
    prompt = model.new_caches()
    model.step(text, prompt, last=1)

    steps = {"prefill": (1, context, partial(model.step, [[*text[0], 0]], last=1))}
    for batch in options.batches:
        caches = [cache.copy() for cache in prompt]
        for cache in caches:
            cache.reorder([0] * batch)  # every sequence goes on from the same prompt
        steps[f"decode, batch {batch}"] = (batch, 1, partial(model.step, [[0]] * batch, caches))
    table = [["", "FLOP", "bytes", "FLOP/B", "bound", "time", "FLOP/s", "of best", "B/s", "of best", "tokens/s"]]
    for name, (batch, new, step) in progress(list(steps.items()), "steps"):
        work = total(step_cost(CONFIG, batch, new, context - new, FP32))
        (seconds,) = times(backend, step)
        rates = work.operations / seconds, work.bytes / seconds
        row = [name, si(work.operations, ""), si(work.bytes, "B"), f"{work.intensity:,.1f}", best_time(work, device)[1]]
        row += [si(seconds, "s"), si(rates[0], ""), f"{rates[0] / device.operations_per_second:.0%}"]
        row += [si(rates[1], ""), f"{rates[1] / device.bytes_per_second:.0%}", f"{batch * new / seconds:,.0f}"]
        table.append(row)
    print_table(table)

    print("\nFLOP per byte, part by part: a batch shares the weights, but every sequence brings its own cache.")
    table = [["", *steps]]
    costs = [step_cost(CONFIG, batch, new, context - new, FP32) for batch, new, _ in steps.values()]
    for part in PARTS:
        table.append([part, *(f"{parts[part].intensity:,.1f}" for parts in costs)])
    print_table(table)


if __name__ == "__main__":
    run(main)
