"""Gradients on their way from the pieces that give them to the reduction or update that takes them.

An arena that no variable lies in (one of gradients) is of interest to nobody but pieces and reductions. So what a piece
gives for one of its members stays where XLA put it: the next piece that adds to it is handed it and writes over it, and
it is copied into the arena once, when somebody wants the arena as a whole. With many micro-batches in a batch that
saves memory for each of them and two copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from podrun.device.program.operands import Array
from podrun.device.xla.clients import home

Place = Callable[[], Array]
"""Where a member lies in its arena."""


class Passing:
    """``places``: of the members of such arenas, by arena and name."""

    def __init__(self, places: Mapping[str, Mapping[str, Place]]) -> None:
        self._places = {name: place for members in places.values() for name, place in members.items()}
        self._members = {arena: tuple(members) for arena, members in places.items()}
        self._held: dict[str, Any] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a buffer name is a member of such an arena."""
        return name in self._places

    def is_of(self, arena: str) -> bool:
        """Whether an arena is such a one."""
        return arena in self._members

    def hold(self, name: str, value: Any) -> None:
        """What a piece gave."""
        self._held[name] = value

    def held(self, name: str) -> Any:
        """What is held for a member, for a piece of JAX's own client; None: it is as it lies in the arena."""
        value = self._held.get(name)
        if value is None or value.device == home():
            return value
        import jax

        return jax.device_put(np.asarray(value), home())

    def lend(self, name: str, lies: Array, device: Any) -> Any:
        """A member as a ``jax.Array`` on a ``jax.Device``, for a piece to write over: nobody else has it afterwards.
        ``lies``: as it stands in the arena, if nothing is held for it."""
        import jax
        import jax.numpy as jnp

        value = self._held.pop(name, None)
        if value is not None and value.device == device:
            return value
        with jax.default_device(device):
            return jnp.array(lies if value is None else np.asarray(value), copy=True)

    def put(self, arena: str) -> None:
        """Copy what is held into the arena."""
        for name in self._members.get(arena, ()):
            if name in self._held:
                np.copyto(self._places[name](), np.asarray(self._held.pop(name)))

    def drop(self, arena: str) -> None:
        """Forget what is held: the arena is written as a whole."""
        for name in self._members.get(arena, ()):
            self._held.pop(name, None)
