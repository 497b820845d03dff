"""Functions and names that NumPy 2 took from programs written for NumPy 1.

`give_back` restores them, with a warning. What arrays themselves no longer do cannot be given back; a program that ends
there gets a hint (`hint_of_numpy`).
"""

from __future__ import annotations

import builtins
import functools
import warnings
from collections.abc import Callable
from typing import Any

_FORMER_NAMES = {
    **{name: f"builtins.{name}" for name in ("float", "int", "object", "str", "complex")},
    **dict.fromkeys(("Inf", "Infinity", "infty", "PINF"), "inf"),
    "NINF": "-inf",
    "NaN": "nan",
    "float_": "float64",
    "complex_": "complex128",
    "bool8": "bool_",
    "unicode_": "str_",
    "string_": "bytes_",
    "product": "prod",
    "cumproduct": "cumprod",
    "alltrue": "all",
    "sometrue": "any",
    "round_": "round",
    "in1d": "isin",
    "trapz": "trapezoid",
    "mat": "asmatrix",
    "asfarray": "asarray",
    "msort": "sort",
}
"""Names of NumPy 1 that published programs use, and the present ones."""
_FORMER_METHODS = {
    "tostring": "array.tobytes()",
    "ptp": "numpy.ptp(array)",
    "itemset": "array[index] = value",
    "newbyteorder": "array.view(array.dtype.newbyteorder(order))",
}


def hint_of_numpy(error: BaseException) -> str:
    """The hint for an error of an array that NumPy 1 did not raise; empty for all others."""
    if (
        isinstance(error, AttributeError)
        and type(error.obj).__name__ == "ndarray"
        and error.name in _FORMER_METHODS
    ):
        return f"NumPy 2 has no ndarray.{error.name}: write {_FORMER_METHODS[error.name]}"
    if isinstance(error, TypeError) and "0-dimensional arrays can be converted" in str(error):
        return "NumPy 2 makes a number of an array without dimensions only: write array.item()"
    return ""


def _former(np: Any, name: str) -> Any:
    """The value of a name of NumPy 1."""
    present = _FORMER_NAMES[name]
    if name == "NINF":
        return -np.inf
    if name == "in1d":
        return lambda a, *rest, **given: np.isin(np.ravel(a), *rest, **given)
    if name == "msort":
        return lambda a: np.sort(a, axis=0)
    if name == "asfarray":
        return lambda a, dtype=np.float64: np.asarray(
            a, dtype if np.issubdtype(dtype, np.inexact) else np.float64
        )
    owner, _, attribute = present.rpartition(".")
    return getattr(builtins if owner else np, attribute)


def give_back() -> None:
    """Let ``numpy.fromstring`` read binary data again, and names of NumPy 1 be found, as in published programs."""
    import numpy as np

    if not getattr(np.fromstring, "_podrun", False):
        np.fromstring = _reading_binary(np.fromstring)
    lookup = np.__dict__.get("__getattr__")
    if lookup is not None and not getattr(lookup, "_podrun", False):
        np.__dict__["__getattr__"] = _with_former_names(np, lookup)


def _with_former_names(np: Any, lookup: Callable[[str], Any]) -> Callable[[str], Any]:
    @functools.wraps(lookup)
    def of_module(name: str) -> Any:
        if name not in _FORMER_NAMES:
            return lookup(name)
        present = f"numpy.{_FORMER_NAMES[name]}".replace("numpy.builtins.", "").replace("numpy.-", "-numpy.")
        warnings.warn(
            f"numpy.{name} is NumPy 1's; podrun gives it back. Use {present}.",
            DeprecationWarning,
            stacklevel=2,
        )
        return _former(np, name)

    of_module._podrun = True  # type: ignore[attr-defined]
    return of_module


def _reading_binary(original: Callable[..., Any]) -> Any:
    import numpy as np

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
    return fromstring
