"""What a C++ value may be given as from Python: the conversions of pybind11, which PopART's bindings are made with.

Programs hand over NumPy scalars where they mean numbers (a learning rate out of a schedule, a count out of a shape),
and None or 1 where they mean a flag. Each function gives the plain Python value, or raises TypeError for what no
conversion exists for: no float is an integer, and no string a number.
"""

from __future__ import annotations

import operator
from typing import Any


def boolean(value: Any) -> bool:
    """A flag: True and False, None (False), and numbers."""
    if value is None or isinstance(value, bool):
        return bool(value)
    if isinstance(value, (str, bytes, list, tuple, set, dict)) or not hasattr(value, "__bool__"):
        raise TypeError(f"{value!r} is no flag")
    return bool(value)


def integer(value: Any) -> int:
    """A whole number: Python's, NumPy's, and flags."""
    return operator.index(value)


def number(value: Any) -> float:
    """A number: whatever has a float value, but strings."""
    if isinstance(value, (str, bytes)) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise TypeError(f"{value!r} is no number")
    return float(value)
