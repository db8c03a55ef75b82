"""Which array library holds the data?

The arrays themselves answer: `xp = namespace(x)` is the first line of a function that computes. This is the only file
that names an array library for data. It does not hold any array code: that is written once, in the functions of the
Python Array API standard listed here, and runs wherever they exist. Positions and token ids are not data in this sense:
they are NumPy integers on the host, wherever the data is.
"""

from __future__ import annotations

import importlib
import operator
import os
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

Array = Any  # an array of whichever library: NumPy, CuPy, array-api-strict, ...

# Every function of the data arrays' library that this package calls. All are in the Python Array API standard, so that
# NumPy >= 2, CuPy >= 14 and the strict checker have them. A test reads the source and holds it to this list.
ARRAY_FUNCTIONS = (
    *("asarray", "astype", "empty", "zeros", "zeros_like", "finfo", "iinfo", "isdtype"),
    *("concat", "stack", "reshape", "permute_dims", "matrix_transpose", "broadcast_to", "take"),
    *("matmul", "where", "maximum", "clip", "exp", "log", "sqrt", "sin", "tanh"),
    *("max", "mean", "sum", "argmax", "argsort"),
)


def namespace(*arrays: Array) -> Any:
    """Find the array library that all the arrays belong to. Arguments that are None are passed over.

    Raises TypeError when an argument is not an array, or when the arrays come from different libraries.
    """
    common = None
    for array in arrays:
        if array is not None:
            library = _library(array)
            if common is not None and library is not common:
                names = f"{common.__name__} and {library.__name__}"
                raise TypeError(f"arrays of different libraries in one call, {names}: move them with Backend.asarray")
            common = library
    if common is None:
        raise TypeError("namespace() needs at least one array, got none")
    return common


def _library(array: Array) -> Any:
    if type(array) is np.ndarray:  # a quarter of the time, some five hundred times a step
        return np
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    if type(array).__module__.partition(".")[0] == "cupy":  # follows the standard, but its arrays do not say so
        return importlib.import_module("cupy")
    raise TypeError(f"expected an array, got {type(array).__name__}")


def copies_slices(array: Array) -> bool:
    """Say whether this library's product of stacked matrices copies operands that are not contiguous, as CuPy's does.

    Source: `matmul` in CuPy's _routines_linalg.pyx. A product of two matrices takes them as they lie.
    """
    return namespace(array).__name__ == "cupy"


def itemsize(array: Array) -> int:
    """Tell how many bytes one element of the array takes (the standard has no name for it)."""
    xp = namespace(array)
    info = xp.iinfo if xp.isdtype(array.dtype, "integral") else xp.finfo
    return info(array.dtype).bits // 8


def whole(value: Any, name: str, least: int | None = 1) -> int:
    """Return a count as an int. Raises TypeError when it is no whole number, ValueError when it is below `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be a whole number, got {value!r:.80}") from None
    if least is not None and number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}")
    return number


def as_integers(values: Any, name: str) -> np.ndarray:
    """Return host integers, such as token ids, as a NumPy array; nothing at all counts as integers.

    Raises TypeError when they are not integers, ValueError when the lists in a list differ in length.
    """
    try:
        array = np.asarray(values)
    except ValueError:
        raise ValueError(f"{name} must be an array of integers, got lists that differ in length") from None
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array


def as_positions(pos: Any, name: str) -> np.ndarray:
    """Return positions as a NumPy integer array [B, T]; one vector [T] counts for the whole batch.

    Raises TypeError when they are not integers, ValueError when they have neither one nor two axes.
    """
    array = as_integers(pos, name)
    if array.ndim == 2 and array.dtype == np.int64:
        return array
    if array.ndim not in (1, 2):
        raise ValueError(f"{name} must have axes [T] or [B, T], got shape {array.shape}")
    if array.dtype.kind == "u" and array.max(initial=0) > np.iinfo(np.int64).max:  # would turn negative: padding
        raise ValueError(f"{name} must be below 2^63, got {array.max()}")
    return np.atleast_2d(array).astype(np.int64, copy=False)


@dataclass(frozen=True)
class Backend:
    """Put data into one array library, and take it out again.

    `name` is what `get_backend` was asked for and `xp` the library. Anything that implements ARRAY_FUNCTIONS can be a
    backend: the tests run the whole package on `Backend("strict", array_api_strict)`.
    """

    name: str
    xp: Any

    def asarray(self, x: Any, dtype: Any = None) -> Array:
        """Turn numbers, a NumPy array or an array of this library into one of this library, as `dtype` if given."""
        if isinstance(dtype, str):
            if not hasattr(self.xp, dtype):
                raise ValueError(f"unknown dtype {dtype!r}: {self.xp.__name__} does not have it")
            dtype = getattr(self.xp, dtype)
        return self.xp.asarray(x, dtype=dtype)

    def to_numpy(self, x: Array) -> np.ndarray:
        """Copy an array of this library to the host. On a GPU this waits for the device."""
        return self.xp.asnumpy(x) if self.name == "cupy" else np.asarray(x)

    def synchronize(self) -> None:
        """Wait until everything launched on the device is done; a time read without this measures the launch only."""
        if self.name == "cupy":
            self.xp.cuda.get_current_stream().synchronize()

    def memory_used(self) -> int:
        """Count the bytes in use: of the device's memory pool, or on a CPU of the whole process (resident set)."""
        if self.name == "cupy":
            return self.xp.get_default_memory_pool().used_bytes()
        try:
            with open("/proc/self/statm") as file:
                return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:  # not Linux: the largest size so far is the nearest thing every Unix tells
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def get_backend(name: str | Backend = "numpy") -> Backend:
    """Return the backend called `name`: "numpy", "cupy", or "auto" (CuPy where a CUDA device works, else NumPy).

    A Backend is returned as it is. Raises ValueError for an unknown name and RuntimeError when CuPy cannot be used,
    saying what to install.
    """
    if isinstance(name, Backend):
        return name
    if name == "auto":
        name = available_backends()[-1]
    if name == "numpy":
        return Backend("numpy", np)
    if name == "cupy":
        cupy, problem = _usable_cupy()
        if problem:
            raise RuntimeError(problem)
        return Backend("cupy", cupy)
    raise ValueError(f"unknown backend {name!r}: known are numpy, cupy and auto")


def available_backends() -> list[str]:
    """List the names that `get_backend` accepts on this machine: "numpy" always, "cupy" where a CUDA device works."""
    return ["numpy"] if _usable_cupy()[1] else ["numpy", "cupy"]


def _usable_cupy() -> tuple[ModuleType | None, str]:
    """Return CuPy and "", or None and one line that says why it cannot be used."""
    try:
        cupy = importlib.import_module("cupy")
        cupy.zeros(1).sum()  # a driver too old or no device shows only when something runs
        return cupy, ""
    except ImportError:
        return None, "backend cupy: CuPy is not installed; pip install 'minikv[cuda12]' or 'minikv[cuda13]'"
    except Exception as error:  # CuPy raises a class of its own for every way a device can be missing
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return (
            None,
            f"backend cupy: no usable CUDA device ({reason}); CuPy >= 14 needs an NVIDIA driver for CUDA 12 or 13",
        )
