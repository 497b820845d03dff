"""Memory that a machine shares with XLA, so that arrays are not copied on the way in or out.

* `Operands` gives XLA zero-copy arrays over memory of the machine. This is sound because the machine waits for a
  piece to end before anything writes to that memory.
* `DonatedArena` is an arena in memory that XLA owns. A piece that updates the whole arena gets it as a donated operand
  and writes the result over it. XLA only writes over memory of its own; elsewhere it allocates each result, which then
  has to be copied.
* `PendingGradients` leaves gradients where XLA put them until something reads their arena as a whole. The piece of the
  next micro-batch gets them as donated operands. This saves two copies and the memory of one micro-batch.

An arena (`arena_buffers`) has one copy for all machines of a host if every Computation that writes it writes only this
machine's slice. It lies in the group's per-rank buffers if it is reduced or gathered, and otherwise in plain memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.collectives import Group, slice_of
from podrun.core.aligned_memory import ALIGNMENT, aligned_zeros
from podrun.core.errors import InternalError
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Arena,
    ArenaMember,
    Array,
    Computation,
    Executable,
    ReduceScatter,
    numpy_dtype,
)
from podrun.core.names import SLICE, WHOLE
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.clients import on_one_thread, one_thread_device, own_settings

if TYPE_CHECKING:
    import jax


def _misaligned_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Zeros that XLA must copy to memory of its own. ``jnp.zeros`` would compile a program for each shape."""
    wide = aligned_zeros((math.prod(shape) + 1,), dtype)
    return wide[1:].reshape(shape)


class Operands:
    """Zero-copy arrays for XLA, one for each view of memory; made once and used again."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Array, jax.Array | Array]] = {}

    def over(self, view: Array) -> jax.Array | Array:
        """The zero-copy ``jax.Array`` over ``view``; ``view`` itself, which XLA copies, if it is not aligned."""
        address = view.ctypes.data
        key = hash((address, view.shape, view.dtype.num))
        known = self._made.get(key)
        if known is not None and known[0].ctypes.data == address and known[0].shape == view.shape:
            return known[1]
        operand: jax.Array | Array = view
        if address % ALIGNMENT == 0 and view.size and view.flags.c_contiguous:
            operand = _zero_copy(view)
        self._made[key] = (view, operand)
        return operand


def _zero_copy(view: Array) -> jax.Array | Array:
    import jax

    array = jax.device_put(view, one_thread_device())
    return array if array.unsafe_buffer_pointer() == view.ctypes.data else view


# --- Donated arenas -------------------------------------------------------------------------------------------


class DonatedArena:
    """An arena of zeros in memory of a ``jax.Device``, for a piece that takes it in ``shape`` and ``dtype``.

    Between `donate` and `take_back` only the piece may use the memory. A holder of `memory` keeps it alive.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], device: jax.Device) -> None:
        import jax

        with own_settings(), jax.enable_x64(True):
            zeros = jax.device_put(_misaligned_zeros(shape, dtype), device)
        self._array = zeros.block_until_ready()
        self._address = self._array.unsafe_buffer_pointer()
        self._dtype = dtype
        self.__array_interface__ = {
            "version": 3,
            "data": (self._address, False),
            "shape": (math.prod(shape) * dtype.itemsize,),
            "typestr": "|u1",
        }

    @property
    def memory(self) -> Array:
        """The contents as a flat array, to read and to write."""
        return np.asarray(self).view(self._dtype)

    def donate(self) -> Any:
        """The ``jax.Array`` for a piece that may write over it."""
        return self._array

    def take_back(self, result: jax.Array) -> None:
        """Take the piece's result, which lies in the same memory.

        Raises InternalError if XLA put the result elsewhere.
        """
        self._array = result
        if result.unsafe_buffer_pointer() != self._address:
            raise InternalError("XLA moved an arena that it was to update in place")


def updated_in_place(computation: Computation, arenas: Mapping[str, str], own: Set[str]) -> dict[int, int]:
    """Operands that the piece may write over: the position of each, and that of the result that replaces it.

    ``arenas``: the arena behind each buffer name that has one. ``own``: names that mean a whole arena in memory of this
    machine alone, which never holds the result of a collective. A piece that also reads a part of the arena may not
    write over it.
    """
    result_of: dict[int, int] = {}
    behind = [arenas.get(name) for name in computation.inputs]
    written = [arenas.get(name) for name in computation.outputs]
    for position, name in enumerate(computation.inputs):
        alone = name in own and behind.count(arenas[name]) == written.count(arenas[name]) == 1
        if alone and name in computation.outputs:
            result_of[position] = computation.outputs.index(name)
    return result_of


# --- Pending gradients ----------------------------------------------------------------------------------------


class _Memory:
    """The bytes of a ``jax.Array`` for NumPy, without a reference to them that would keep XLA from writing there."""

    def __init__(self, array: jax.Array) -> None:
        self.array = array
        self.__array_interface__ = {
            "version": 3,
            "data": (array.unsafe_buffer_pointer(), False),
            "shape": (array.nbytes,),
            "typestr": "|u1",
        }


def _memory_of(array: jax.Array) -> Array:
    """A writable view of the elements of ``array``, whose memory is an operand's that XLA wrote the result over."""
    return np.asarray(_Memory(array)).view(array.dtype).reshape(array.shape)


MemberMemory = Callable[[], Array]
"""Gives the memory of an arena's member."""
MOST_KEPT = 1 << 30
"""Bytes of memory that a program keeps on each machine for the gradients of its next batch."""
_ZEROS = object()
"""In place of a value: zeros."""


class PendingGradients:
    """Gradients of a micro-batch that no arena has taken yet, and arenas that are to be zero and were not written yet.

    It serves arenas that hold no variable: only pieces and reductions read them. ``places``: the memory of each member,
    by arena and name. Memory of values that pieces wrote over is kept, up to `MOST_KEPT` bytes, for the next batch's.
    """

    def __init__(self, places: Mapping[str, Mapping[str, MemberMemory]]) -> None:
        self._places = {name: place for members in places.values() for name, place in members.items()}
        self._members = {arena: tuple(members) for arena, members in places.items()}
        self._pending: dict[str, Any] = {}
        self._in_place: set[str] = set()
        self._kept: dict[str, jax.Array] = {}
        self._kept_bytes = 0

    def __contains__(self, name: str) -> bool:
        """Whether a buffer name is a member of an arena of gradients."""
        return name in self._places

    def has_arena(self, arena: str) -> bool:
        """Whether this is an arena of gradients."""
        return arena in self._members

    def store(self, name: str, value: object, *, in_place: bool = False) -> None:
        """Keep the result of a piece. ``in_place``: it lies in the memory that `donate` gave."""
        self._pending[name] = value
        (self._in_place.add if in_place else self._in_place.discard)(name)

    def clear(self, arena: str) -> None:
        """Let all members be zero. Their memory is written when something reads it."""
        self._pending.update(dict.fromkeys(self._members[arena], _ZEROS))

    def operand(self, name: str) -> Any:
        """The pending value of a member for a piece of the one-thread client; None if the arena holds the value."""
        value = self._pending.get(name)
        if value is _ZEROS:
            self._settle(name)
            return None
        return None if value is None else on_one_thread(value)

    def donate(self, name: str, in_arena: Array, device: jax.Device) -> Any:
        """A member as a ``jax.Array`` on a ``jax.Device``, for a piece to write over. ``in_arena``: the member's value
        if none is pending."""
        import jax
        import jax.numpy as jnp

        value = self._pending.pop(name, None)
        kept = self._kept.pop(name, None)
        self._kept_bytes -= 0 if kept is None else in_arena.nbytes
        if value is not None and value is not _ZEROS and value.device == device:
            return value
        if kept is not None and kept.device == device:
            _memory_of(kept)[...] = 0 if value is _ZEROS else in_arena if value is None else np.asarray(value)
            return kept
        if value is _ZEROS:
            value = np.zeros(in_arena.shape, in_arena.dtype)
        with jax.default_device(device):
            return jnp.array(in_arena if value is None else np.asarray(value), copy=True)

    def flush(self, arena: str) -> None:
        """Copy pending values into their arena."""
        if not self._pending:
            return
        for name in self._members.get(arena, ()):
            if name in self._pending:
                self._settle(name)

    def _settle(self, name: str) -> None:
        """Write a member's pending value to its arena."""
        value, place = self._pending.pop(name), self._places[name]()
        if value is _ZEROS:
            place[...] = 0
        elif name not in self._in_place or not place.nbytes:
            np.copyto(place, np.asarray(value))
        else:
            np.copyto(place, _memory_of(value))
            if self._kept_bytes + place.nbytes <= MOST_KEPT:
                self._kept[name] = value
                self._kept_bytes += place.nbytes

    def discard(self, arena: str) -> None:
        """Drop pending values: the whole arena is about to be written."""
        if not self._pending:
            return
        for name in self._members.get(arena, ()):
            self._pending.pop(name, None)


Shape = tuple[int, ...] | None
"""The shape in which a piece takes an arena or a slice of one. None: flat."""


@dataclass(slots=True)
class ArenaBuffer:
    """An arena's memory: ``own`` (this machine's, or the host's one copy), and the results of the last collective."""

    arena: Arena
    own: Array
    mine: slice
    one_copy: bool
    whole_result: Array | None = None
    slice_result: Array | None = None

    def whole(self) -> Array:
        """The current contents of the arena."""
        return self.own if self.whole_result is None else self.whole_result

    def part(self) -> Array:
        """The current contents of this machine's slice."""
        return self.whole()[self.mine] if self.slice_result is None else self.slice_result

    def settle(self) -> None:
        """Copy the result of the last collective into the arena's own memory, before a part of it is overwritten."""
        if self.whole_result is not None:
            self.own[:] = self.whole_result
        if self.slice_result is not None:
            self.own[self.mine] = self.slice_result
        self.forget()

    def forget(self) -> None:
        """Drop the result of the last collective: the whole arena is about to be overwritten."""
        self.whole_result = self.slice_result = None


@dataclass(frozen=True, slots=True)
class Member:
    """A part of an arena, from element ``start``."""

    arena: str
    start: int
    stop: int
    shape: tuple[int, ...]

    def of(self, arena: Array) -> Array:
        """A view of it in the arena's memory."""
        return arena[self.start : self.stop].reshape(self.shape)


def arena_buffers(executable: Executable, group: Group) -> tuple[dict[str, ArenaBuffer], frozenset[str]]:
    """Memory for all arenas of a program, and the names of those whose contents may be a collective's result."""
    reduced, gathered = set(), set()
    if group.size > 1:
        reduced = {i.arena for i in _collectives(executable) if isinstance(i, ReduceScatter | AllReduce)}
        gathered = {i.arena for i in _collectives(executable) if isinstance(i, AllGather)}
    changing = reduced | gathered
    buffers = {}
    for name, arena in executable.arenas.items():
        one_copy = (
            group.size > 1 and name not in reduced and arena.shared and _written_by_slices(executable, arena)
        )
        if one_copy:
            own = group.shared(name, arena.dtype, arena.size)
            changing.discard(name)
        elif name in changing:
            own = group.allocate(name, arena.dtype, arena.size)
        else:
            own = aligned_zeros((arena.size,), numpy_dtype(arena.dtype))
        buffers[name] = ArenaBuffer(arena, own, slice_of(group.rank, group.size, arena.size), one_copy)
    return buffers, frozenset(changing)


def in_shape(flat: Array, shape: Shape) -> Array:
    """A flat arena as a piece takes it."""
    return flat if shape is None else flat.reshape(shape)


def member_of(arena: Arena, member: ArenaMember) -> Member:
    """Where a member of an arena lies in it, in bytes."""
    size = int(np.prod(member.shape, dtype=np.int64))
    return Member(arena.name, member.offset, member.offset + size, member.shape)


def arena_of(name: str, members: Mapping[str, Member]) -> str | None:
    """The arena behind a buffer name; None if there is none."""
    for prefix in (WHOLE, SLICE):
        if name.startswith(prefix):
            return name[len(prefix) :]
    member = members.get(name)
    return None if member is None else member.arena


def _collectives(executable: Executable) -> Iterable[ReduceScatter | AllReduce | AllGather]:
    for ipu in executable.instructions:
        for instruction in ipu:
            if isinstance(instruction, ReduceScatter | AllReduce | AllGather):
                yield instruction


def _written_by_slices(executable: Executable, arena: Arena) -> bool:
    """True iff no Computation writes the arena other than by this machine's slice."""
    members = {member.name for member in arena.members}
    whole = WHOLE + arena.name
    return not any(
        name == whole or name in members for c in executable.computations.values() for name in c.outputs
    )
