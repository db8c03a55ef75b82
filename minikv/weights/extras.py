"""Is an optional library there, and if not, what must be installed?"""

from __future__ import annotations

import importlib
from typing import Any


def optional(name: str, purpose: str) -> Any:
    """Import a library that may be missing. Raises ImportError in one line: what needs it, and what to install."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ImportError(f"{purpose} needs the library {name!r}: pip install 'minikv[models]'") from None
