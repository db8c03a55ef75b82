"""What are the ceilings of the machine at hand?

A large matrix product and a large matrix-vector product, the best of a few tries. It does not measure the library:
these are what the library is held against.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np

from ..backend import Backend, get_backend
from ..cost import Device


def measure_this(backend: str | Backend = "numpy", dtype: str = "float32") -> Device:
    """Measure this machine, in about a second: operations and bytes per second at best, bytes of memory.

    operations_per_second = 2 · n³ / time of [n, n] @ [n, n], n doubled until a product takes 50 ms or n is 8192
    bytes_per_second      = n · m · itemsize / time of [n, m] @ [m], a matrix of 2²⁷ numbers that no CPU's cache holds
    """
    backend = get_backend(backend)
    n, seconds = 512, 0.0
    while seconds < 0.05 and n < 8192:
        n *= 2
        square = backend.asarray(np.ones((n, n), np.float32), dtype)
        seconds = _best_time(backend, lambda a=square: backend.xp.matmul(a, a))  # type: ignore[misc]
    operations_per_second = 2 * n**3 / seconds

    tall, vector = (backend.asarray(np.ones(shape, np.float32), dtype) for shape in ((2**14, 2**13), (2**13,)))
    seconds = _best_time(backend, lambda: backend.xp.matmul(tall, vector))
    source = f"measured here: {backend.name}, {dtype}"
    return Device("this", operations_per_second, tall.nbytes / seconds, _memory(backend), source)


def _best_time(backend: Backend, run: Callable[[], object], tries: int = 4) -> float:
    times = []
    for _ in range(tries):
        backend.synchronize()
        start = time.perf_counter()
        run()
        backend.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _memory(backend: Backend) -> int:
    if backend.name == "cupy":
        return backend.xp.cuda.Device().mem_info[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
