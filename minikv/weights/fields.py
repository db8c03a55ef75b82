"""Which settings of a checkpoint were understood, and which would silently change the result?

A checkpoint's settings are taken one by one; what nobody took must be known to be harmless, or the load is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

_MISSING = object()


def shown(value: Any) -> str:
    """Spell a value for an error: on one line, which NumPy's arrays do not keep to, and the beginning only."""
    return " ".join(repr(value).split())[:80]


class Fields:
    """Hand out settings by name and remember which were asked for; `where` begins every error."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self._values = values
        self._taken: set[str] = set()
        self.where = where

    def take(self, name: str, default: Any = _MISSING) -> Any:
        """Return a setting of any type; a null counts as absent. Raises ValueError when it is absent and needed."""
        self._taken.add(name)
        value = self._values.get(name)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.where}: field {name!r} is missing")
            return default
        return value

    def whole(self, name: str, default: Any = _MISSING) -> Any:
        """Return a whole number of at least 0. Raises ValueError for anything else."""
        value = self.take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**31:
            raise ValueError(f"{self.where}: field {name!r} must be a whole number below 2^31, got {shown(value)}")
        return value

    def number(self, name: str, default: Any = _MISSING) -> Any:
        """Return a positive finite number as a float. Raises ValueError for anything else."""
        value = self.take(name, default)
        if value is default:
            return value
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e300:
            raise ValueError(f"{self.where}: field {name!r} must be a positive finite number, got {shown(value)}")
        return float(value)

    def flag(self, name: str, default: Any = _MISSING) -> Any:
        """Return a truth value. Raises ValueError for anything else."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, bool):
            raise ValueError(f"{self.where}: field {name!r} must be true or false, got {shown(value)}")
        return value

    def text(self, name: str, default: Any = _MISSING) -> Any:
        """Return a string. Raises ValueError for anything else."""
        value = self.take(name, default)
        if value is not default and not isinstance(value, str):
            raise ValueError(f"{self.where}: field {name!r} must be a string, got {shown(value)}")
        return value

    def finish(self, harmless: Collection[str], no_effect: Mapping[str, Collection[Any]]) -> None:
        """Refuse by name any setting nobody took, unless it is harmless or at a value that changes nothing."""
        for name, value in self._values.items():
            if name in self._taken or name in harmless or value is None:
                continue
            if any(type(value) is type(allowed) and value == allowed for allowed in no_effect.get(name, ())):
                continue
            raise ValueError(f"{self.where}: field {name!r} = {shown(value)} is not supported")
