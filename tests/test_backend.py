"""Do the arrays know their library, and does a backend put data in and take it out unchanged?"""

from __future__ import annotations

import sys

import numpy as np
import pytest

import minikv.backend
from minikv import Backend, available_backends, get_backend, namespace
from minikv.backend import ARRAY_FUNCTIONS
from support import host


def test_arrays_name_their_library(backend):
    x = backend.asarray(np.ones(3))
    assert namespace(x) is namespace(x, None, x)
    assert namespace(x).__name__ == backend.xp.__name__


def test_what_is_no_array_is_refused(backend):
    for wrong in (3.0, [1.0, 2.0], "x"):
        with pytest.raises(TypeError, match=type(wrong).__name__):
            namespace(backend.asarray(np.ones(2)), wrong)
    with pytest.raises(TypeError, match="at least one"):
        namespace(None)


def test_mixtures_are_refused_with_both_names():
    strict = pytest.importorskip("array_api_strict")
    with pytest.raises(TypeError, match=r"numpy.*array_api_strict|array_api_strict.*numpy"):
        namespace(np.ones(1), strict.ones(1))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool"])
def test_data_comes_out_as_it_went_in(backend, dtype):
    x = np.array([[0, 1], [5, 0]]).astype(dtype)
    moved = backend.asarray(x)
    back = backend.to_numpy(moved)
    assert type(back) is np.ndarray and back.dtype == dtype and np.array_equal(back, x)
    assert host(backend.asarray([[0, 1]], dtype="float32")).dtype == "float32"
    assert host(backend.asarray(moved, dtype="float32")).dtype == "float32"


def test_waiting_and_counting_work_everywhere(backend):
    backend.synchronize()
    block = backend.asarray(np.ones(2**22))
    assert backend.memory_used() >= 2**25 and block.shape == (2**22,)


def test_backends_by_name():
    assert get_backend("numpy").xp is np and get_backend("numpy").name == "numpy"
    mine = Backend("mine", np)
    assert get_backend(mine) is mine
    names = available_backends()
    assert names[0] == "numpy" and set(names) <= {"numpy", "cupy"}
    assert get_backend("auto").name == ("cupy" if "cupy" in names else "numpy")


def test_a_missing_cupy_is_told_in_one_line_that_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match="cuda12") as caught:
        get_backend("cupy")
    assert "\n" not in str(caught.value)
    assert available_backends() == ["numpy"] and get_backend("auto").name == "numpy"


def test_a_missing_device_is_told_in_one_line(monkeypatch):
    class NoDevice:
        @staticmethod
        def zeros(count: int) -> None:
            raise OSError("cudaErrorNoDevice: no CUDA-capable device is detected\nmore of it")

    monkeypatch.setitem(sys.modules, "cupy", NoDevice)
    with pytest.raises(RuntimeError, match=r"device.*cudaErrorNoDevice") as caught:
        get_backend("cupy")
    assert "\n" not in str(caught.value)
    assert get_backend("auto").name == "numpy"


@pytest.mark.parametrize("library", ["numpy", "array_api_strict", "cupy"])
def test_every_listed_function_exists(library):
    """CuPy imports without a GPU, so this holds its names to the list on any machine where it is installed."""
    xp = pytest.importorskip(library, reason=f"{library} is not installed")
    missing = [name for name in ARRAY_FUNCTIONS if not hasattr(xp, name)]
    assert not missing


def test_the_list_is_short_and_names_nothing_twice():
    assert len(ARRAY_FUNCTIONS) == len(set(ARRAY_FUNCTIONS)) <= 40


def test_sizes_of_elements(backend):
    sizes = {"float32": 4, "float64": 8, "int64": 8, "int32": 4, "uint8": 1}
    for dtype, size in sizes.items():
        assert minikv.backend.itemsize(backend.asarray(np.zeros(2, dtype))) == size
