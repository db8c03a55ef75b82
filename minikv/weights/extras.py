"""Is an optional library there, and if not, what must be installed?"""

from __future__ import annotations

import importlib
from typing import Any


def optional(name: str, purpose: str) -> Any:
    """Import and return an optional library. Raises ImportError in one line that says what needs it and how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{purpose} needs the library {name!r}: pip install 'minikv[models]'") from None
