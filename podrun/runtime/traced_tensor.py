"""The tensors of a graph while it is traced.

A tensor is held twice where possible. *Traced* is a JAX array, usually a tracer. *Known* is its NumPy value, worked out
only if an operator asks for it: the target of a Reshape, the axes of a reduction. The initializers and inputs that a
known value rests on are remembered by name as its *origins*.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InternalError
from podrun.runtime.device_types import TooWide, misfit, to_device
from podrun.runtime.operators import Form

NO_ORIGINS: frozenset[str] = frozenset()
UNKNOWN = object()


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
