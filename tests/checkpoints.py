"""What do the tests of checkpoints share: the real files, and the demand that a bad one is refused in one line?"""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path

import pytest

import minikv

SMOLLM2 = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3 = "gemma-3-270m-q4_k_m.gguf"


def model_file(name: str) -> Path:
    """Find a real model file in $MINIKV_MODELS, or models/ as `make demo` leaves it; skip the test without one."""
    path = Path(os.environ.get("MINIKV_MODELS", Path(__file__).parent.parent / "models")) / name
    if not path.exists():
        pytest.skip(f"the model file {path} is not here: make demo fetches it")
    return path


def assert_refused(path: Path, *parts: str) -> None:
    """Demand a ValueError of one line that names the file and all `parts`, and nothing large allocated on the way."""
    tracemalloc.start()
    try:
        with pytest.raises(ValueError) as refusal:
            minikv.load(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(refusal.value)
    assert "\n" not in message and len(message) < 1000
    for part in (str(path), *parts):
        assert part in message, f"{part!r} is not in {message!r}"
    assert peak < 10_000_000, f"{peak} bytes were allocated before the refusal"
