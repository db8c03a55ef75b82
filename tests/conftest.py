"""Which array libraries run the tests, and how many examples does Hypothesis draw?

Every test that takes `backend` runs once per library: NumPy, the strict checker of the array standard, and CuPy where a
CUDA device works. MINIKV_TEST_BACKENDS (names with commas between) restricts them. HYPOTHESIS_PROFILE=thorough draws
many more examples, and other ones each time; the default draws the same few on every run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest

from minikv.backend import Backend, get_backend

BACKENDS = ("numpy", "strict", "cupy")

hypothesis.settings.register_profile(
    "default", max_examples=60, derandomize=True, deadline=None, report_multiple_bugs=False
)
hypothesis.settings.register_profile(  # to see whether something fails at all: `mutants.py`
    "quick",
    max_examples=40,
    derandomize=True,
    deadline=None,
    phases=[hypothesis.Phase.generate],
)
hypothesis.settings.register_profile(
    "thorough", max_examples=600, deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config: pytest.Config) -> None:
    """Let matrix products warn on Apple's processors; any warning elsewhere is an error.

    NumPy there multiplies with Accelerate, which reports floating-point errors even of a product of two identity
    matrices (numpy/numpy issues 28687 and 29820). Every comparison demands finite results, so what such a warning could
    mean for the numbers is still seen.
    """
    if sys.platform == "darwin":
        config.addinivalue_line("filterwarnings", "ignore:.*encountered in matmul:RuntimeWarning")


def make_backend(name: str) -> Backend:
    """Open a library by name, "strict" included, which is for tests alone."""
    if name == "strict":
        import array_api_strict

        return Backend("strict", array_api_strict)
    return get_backend(name)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """One array library after the other."""
    wanted = os.environ.get("MINIKV_TEST_BACKENDS")
    if wanted and request.param not in wanted.split(","):
        pytest.skip(f"MINIKV_TEST_BACKENDS asks for {wanted} only")
    try:
        return make_backend(request.param)
    except (ImportError, ValueError, RuntimeError) as reason:
        if request.param != "cupy":
            raise
        pytest.skip(str(reason))


@pytest.fixture(scope="session", params=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> str:
    """The widths that every library has."""
    return request.param


@pytest.fixture(scope="session", autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill memory that nobody wrote with NaN, which multiplying by zero does not hide."""
    empty = np.empty

    def poisoned(*args: object, **kwargs: object) -> np.ndarray:
        array = empty(*args, **kwargs)
        if array.dtype.kind == "f":
            array.fill(np.nan)
        return array

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(np, "empty", poisoned)
        yield
