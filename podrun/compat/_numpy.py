"""What NumPy 2 took from programs that were written for NumPy 1: given back, with a warning."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import numpy as np


def give_back() -> None:
    """Let ``numpy.fromstring(data, dtype)`` read binary data again, as published programs call it."""
    original = np.fromstring
    if getattr(original, "_podrun", False):
        return

    @functools.wraps(original)
    def fromstring(string: Any, dtype: Any = float, count: int = -1, *, sep: str = "", **other: Any) -> Any:
        if sep != "":
            return original(string, dtype, count, sep=sep, **other)
        warnings.warn(
            "numpy.fromstring of binary data is no part of NumPy 2; podrun reads it. Use numpy.frombuffer.",
            DeprecationWarning,
            stacklevel=2,
        )
        data = string.encode("latin-1") if isinstance(string, str) else string
        return np.frombuffer(data, dtype, count).copy()

    fromstring._podrun = True  # type: ignore[attr-defined]
    np.fromstring = fromstring  # type: ignore[assignment]
