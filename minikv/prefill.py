"""How does a long prompt use all cores of a CPU?

Matrix products spread over the cores by themselves, but everything between them, half of a long prefill, runs on one.
So the prompt is cut into a piece per core, and every piece runs by itself, one layer behind the piece before it, whose
keys it needs:

    core 0    layer 0 | layer 1 | layer 2 | ...        tokens    0.. 800
    core 1              layer 0 | layer 1 | layer 2    tokens  800..1400

That the logits stay the same is the theorem of `model.py`. What a step is, one piece or all, is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import cache as once
from itertools import pairwise
from threading import Event, Lock, Semaphore
from typing import Any

from .backend import Array, as_integers, namespace
from .caches import Cache, all_or_none
from .caches.base import to_the_end
from .config import ModelConfig
from .cost import step_cost, total
from .model import Model

LEAST = 128  # tokens of a piece: with fewer, products would wait for the weights rather than compute
CORES = Lock()  # two that set the number of a library's threads and put it back might leave it at 1


def prefill(
    model: Model, tokens: Any, caches: Sequence[Cache] | None = None, pos: Any = None, *, last: int | None = None
) -> Array:
    """Do what `model.step` does, with the same arguments, result and errors, on all cores where that is quicker.

    It is for long prompts on NumPy with threadpoolctl installed (`minikv[threads]`), by whose count of threads it goes.
    While it runs, the matrix products of the whole process keep to the thread that calls them. In every other case, and
    while another thread's prefill has the cores, it is `model.step`.
    """
    tokens = as_integers(tokens, "tokens")
    long = tokens.ndim == 2 and tokens.shape[1] >= 2 * LEAST and model.backend.name == "numpy"
    if not long or not CORES.acquire(blocking=False):
        return model.step(tokens, caches, pos, last=last)
    try:
        count = min(tokens.shape[1] // LEAST, matrix_threads())
        if count == 1:
            return model.step(tokens, caches, pos, last=last)
        caches = model.new_caches() if caches is None else caches
        tokens, pos = model.checked(tokens, caches, pos, last)
        pieces = cut(model.config, tokens.shape[1], caches[0].length, count)
        with all_or_none(caches):
            walks = [model.layer_by_layer(tokens[:, t], pos[:, t], caches) for t in pieces]
            with matrix_libraries().limit(limits=1):
                parts = in_step(walks, len(model.layers))
            return model.logits(namespace(parts[0]).concat(parts, axis=1), last)
    finally:
        CORES.release()


def cut(config: ModelConfig, new: int, past: int, count: int) -> list[slice]:
    """Cut `new` tokens behind `past` others into at most `count` pieces of equal work, as `cost.py` counts it.

    A later token sees more keys, so later pieces are shorter. The work of the first t tokens is taken as b t + c t²,
    which it is without windows; b and c are such that half of the tokens and all of them have theirs.
    """
    half, whole = (total(step_cost(config, 1, t, past, absorbed=True)).operations for t in (max(new // 2, 1), new))
    c = 2 * (whole / new - half / max(new // 2, 1)) / new
    b = whole / new - c * new
    shares = (i / count * whole for i in range(count + 1))
    ends = [round(2 * share / (b + math.sqrt(b * b + 4 * c * share))) for share in shares]
    return [slice(start, end) for start, end in pairwise(ends) if start < end]


def in_step(walks: Sequence[Iterator[Array]], length: int) -> list[Array]:
    """Take `length` items of every iterator, each on a thread of its own and one item behind the one before it.

    Returns the last items. Raises what an iterator raises, when no other is at work any more.
    """
    ready = [Semaphore(0) for _ in range(len(walks) + 1)]
    stop = Event()

    def run(i: int) -> Array | None:
        item = None
        for _ in range(length):
            ready[i].acquire()
            if stop.is_set():
                break
            item = next(walks[i])
            ready[i + 1].release()
        return item

    def finish() -> None:
        stop.set()
        for semaphore in ready:
            semaphore.release(length)
        wait(futures)  # not for the threads themselves: in Python 3.11 one counts as ended when waiting is interrupted
        pool.shutdown()

    pool = ThreadPoolExecutor(len(walks))
    futures: list[Future[Array | None]] = []
    try:
        # Each in the caller's context: how NumPy handles floating-point errors belongs to it.
        futures = [pool.submit(copy_context().run, run, i) for i in range(len(walks))]
        ready[0].release(length)  # not before: a thread whose start is interrupted is one that the pool does not know
        return [future.result() for future in futures]
    finally:
        to_the_end(finish)


@once
def matrix_libraries() -> Any:
    """Find what multiplies matrices in this process, through threadpoolctl; None where that is not installed."""
    try:
        import threadpoolctl
    except ImportError:
        return None
    return threadpoolctl.ThreadpoolController().select(user_api="blas")


def matrix_threads() -> int:
    """Tell how many threads a matrix product may use; 1 where nobody knows."""
    libraries = matrix_libraries()
    return max((library["num_threads"] for library in libraries.info()), default=1) if libraries else 1
