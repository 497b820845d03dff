"""The tensors of a graph while it is traced.

A tensor is held twice where possible. *Traced* is a JAX array, usually a tracer. *Known* is its NumPy value, worked out
only if an operator asks for it: the target of a Reshape, the axes of a reduction. The initializers and inputs that a
known value rests on are remembered by name as its *origins*. `TooWide` stands for integers that do not fit the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InternalError, UnsupportedError
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.operators import Form


def device_dtype(dtype: np.dtype[Any], x64: bool) -> np.dtype[Any]:
    """The device's type for a host type: 64-bit integers narrow to 32 bits; float64 and complex128 are refused."""
    if x64:
        return dtype
    if dtype in (np.dtype(np.float64), np.dtype(np.complex128)):
        raise UnsupportedError(
            "The data type DOUBLE is not supported in Poplar: IPUs have no 64-bit floating point"
        )
    return {np.dtype(np.int64): np.dtype(np.int32), np.dtype(np.uint64): np.dtype(np.uint32)}.get(
        dtype, dtype
    )


NO_ORIGINS: frozenset[str] = frozenset()
UNKNOWN = object()


@dataclass(frozen=True, slots=True)
class TooWide:
    """Stands for a traced value whose integers do not fit the device. Operators may have it as an input if they only
    use the value while tracing (the ends of a Slice); computing with it is refused in the words kept here.
    """

    reason: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class TracedTensor:
    """One tensor of a running graph: its traced value, its known value if there is one, and its origins.

    Sequences are tuples of arrays, an empty optional is None; both are traced values.
    """

    __slots__ = ("_known", "_traced", "_work", "name", "origins", "x64")

    def __init__(
        self,
        name: str,
        x64: bool,
        traced: Any = UNKNOWN,
        known: Any = UNKNOWN,
        work: Callable[[], Any] | None = None,
        origins: frozenset[str] = NO_ORIGINS,
    ) -> None:
        self.name = name
        self.x64 = x64
        self.origins = origins
        self._traced = traced
        self._known = known
        self._work = work
        concrete = isinstance(traced, (np.ndarray, jax.Array)) and not isinstance(traced, jax.core.Tracer)
        if known is UNKNOWN and work is None and concrete:
            self._known = np.asarray(traced)

    @property
    def is_known(self) -> bool:
        """True iff `known` can be computed."""
        return self._known is not UNKNOWN or self._work is not None

    @property
    def at_hand(self) -> bool:
        """True iff the value is a constant of the program: known, and independent of anything that may change."""
        return self._known is not UNKNOWN and not self.origins and isinstance(self._known, np.ndarray)

    @property
    def known(self) -> Any:
        """The NumPy value, with 64-bit types. Only if `is_known`."""
        if self._known is UNKNOWN:
            if self._work is None:
                raise InternalError(f"the value of tensor '{self.name}' is not known while tracing")
            self._known, self._work = self._work(), None
        return self._known

    @property
    def traced(self) -> Any:
        """The JAX value, of device type."""
        if self._traced is UNKNOWN:
            self._traced = lift(self._known, self.name, self.x64)
        return self._traced

    @property
    def form(self) -> Form | None:
        """Type and shape; None for sequences and empty optionals."""
        value = self._known if self._traced is UNKNOWN else self._traced
        if value is UNKNOWN or value is None or isinstance(value, (tuple, list)):
            return None
        return Form(np.dtype(value.dtype), tuple(value.shape))

    @property
    def operand(self) -> Any:
        """`traced`, or `TooWide` if the value does not fit the device."""
        if self._traced is UNKNOWN and isinstance(self._known, np.ndarray):
            reason = misfit(self._known, self.name, self.x64)
            if reason:
                return TooWide(reason, self._known.shape, self._known.dtype)
        return self.traced


def lift(value: Any, name: str, x64: bool) -> Any:
    """A NumPy value (or sequence) as JAX values of device type. Refuses strings, and integers that do not fit."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return tuple(lift(v, name, x64) for v in value)
    return jnp.asarray(to_device(np.asarray(value), name, x64))


def to_device(value: np.ndarray, name: str, x64: bool) -> np.ndarray:
    """The array in its device type: INT64 as INT32. Raises `UnsupportedError` if a value does not fit or
    is a string.
    """
    if value.dtype.kind in "OUS":
        raise UnsupportedError(f"tensor '{name}' holds strings, which are not computed on IPUs")
    try:
        dtype = device_dtype(value.dtype, x64)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor '{name}': {error}") from None
    reason = misfit(value, name, x64)
    if reason:
        raise UnsupportedError(reason)
    return value.astype(dtype, copy=False)


def misfit(value: np.ndarray, name: str, x64: bool) -> str | None:
    """Why an integer array does not fit its device type, or None if it does."""
    if value.dtype.kind not in "iu":
        return None
    dtype = device_dtype(value.dtype, x64)
    if dtype == value.dtype:
        return None
    bounds = np.iinfo(dtype)
    if value.size and (value.max() > bounds.max or value.min() < bounds.min):
        worst = value.max() if value.max() > bounds.max else value.min()
        return f"tensor '{name}' holds {worst}, which does not fit {dtype.name.upper()} on the device"
    return None
