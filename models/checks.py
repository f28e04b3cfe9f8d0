"""Checks of values that stand in files and options: a bad one is a ValueError with its name, got and expected."""

import sys
from typing import Any


def require(ok: bool, field: str, got: Any, expected: str) -> None:
    """Raises ValueError unless `ok`."""
    if not ok:
        raise ValueError(f"{field}: got {got!r}, expected {expected}")


def as_float(field: str, value: Any) -> float:
    """A number > 0 as a float; ValueError otherwise."""
    require(is_positive(value), field, value, "a finite number > 0")
    return float(value)


def is_count(value: Any) -> bool:
    """An int of at least 1 that fits 64 bits, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def is_finite(value: Any) -> bool:
    """A number that a float can hold, and no bool: an int in a file may be larger than any float."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def is_positive(value: Any) -> bool:
    """A finite number above 0, and no bool."""
    return is_finite(value) and value > 0
