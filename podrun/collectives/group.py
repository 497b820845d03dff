"""What a group of ranks is: the protocol that every kind of group implements, and its rules.

A *rank* is one member, usually one IPU-M2000's process. An *arena* is a flat buffer of one dtype with a name. There are
two kinds. `Group.allocate` gives every rank a buffer of its own, for gradients; a reduction over it leaves its result
in one further buffer that all ranks of a host read. `Group.shared` gives one buffer for all ranks of a host, for
weights and optimizer state; each rank writes its own slice, and all may read after an all_gather. Rank *m* of *M* owns
the slice ``[m * size // M, (m + 1) * size // M)`` of an arena.

One batch of data-parallel training, the sequence that all this is made for::

    mine = group.reduce_scatter("gradients", Reduction.SUM, settle=False)    # sum over ranks of my slice
    weights[slice_of(group.rank, group.size, weights.size)] -= rate * mine   # I update my slice, in place
    group.all_gather("weights")                                              # now all slices are new

Results do not depend on the kind of group, nor on which ranks share a host: every sum is taken in rank order, half
types in float32 and rounded once at the end (`podrun.collectives.arithmetic`).

Collectives that only move data are data themselves (`Movement`): every rank *posts* a block of bytes, and
`Movement.part` says which bytes of the block of ``source`` rank ``dest`` needs. Each kind of group has one way to carry
out any movement (`Group.exchange`), so broadcast, gather, scatter, all-gather and all-to-all are the same code over
shared memory and over TCP.
"""

from __future__ import annotations

import contextlib
import enum
import errno
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from podrun.core.errors import DeadlineError, ServiceError, UsageError
from podrun.core.executable import Array, Reduction, numpy_dtype
from podrun.core.quick_dataclass import dataclass


class RankLostError(ServiceError):
    """A rank died or left while others needed it. ``rank`` is the missing one."""

    def __init__(self, message: str, *, rank: int = -1, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class RankMissingError(DeadlineError):
    """Ranks did not arrive within the deadline. ``ranks`` are the missing ones."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ranks = ranks


class MismatchError(UsageError):
    """Ranks of one group requested different collectives, arenas, dtypes, sizes or reductions."""


def different_collectives(*called: tuple[int, str]) -> MismatchError:
    """The error for ranks that called different collectives; ``called`` has each rank with its call."""
    callers: dict[str, list[int]] = {}
    for rank, what in called:
        callers.setdefault(what, []).append(rank)
    return MismatchError(
        "ranks of one group called different collectives: "
        + "; ".join(f"rank {', '.join(map(str, who))} called {what}" for what, who in callers.items()),
        hint="All ranks must call the same collectives, on equal arenas, in the same order.",
    )


class HostLimitError(ServiceError):
    """The host refuses a rank another file, thread or memory."""


_LIMITS = {
    errno.EMFILE: "Raise the limit on open files (ulimit -n), or put fewer ranks in a process.",
    errno.ENFILE: "The whole host has no more open files: see /proc/sys/fs/file-nr.",
    errno.ENOMEM: "Check how much memory is free (free -h) and allowed (ulimit -v).",
    errno.ENOSPC: "Check how much memory is free (free -h) and allowed (ulimit -v).",
}


@contextlib.contextmanager
def within_limits(what: str) -> Iterator[None]:
    """Raise HostLimitError, which names ``what``, where the host refuses files, threads or memory."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        raise HostLimitError(f"no {what}: {error.strerror}", hint=_LIMITS[error.errno]) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise HostLimitError(
            f"no {what}: {error}", hint="Check how many threads are allowed (ulimit -u)."
        ) from error


@contextlib.contextmanager
def for_rank(rank: int) -> Iterator[None]:
    """Let the errors of `within_limits` name the rank."""
    try:
        yield
    except HostLimitError as error:
        raise HostLimitError(f"rank {rank} gets {error.message}", hint=error.hint) from error


class ClosedError(UsageError):
    """A group was used after `close`."""


class GroupError(ServiceError):
    """Another rank ended the group with an error of a class that podrun does not know."""


Token = dict[str, Any]
"""What `join` needs to find a group: plain values only, so that it can be sent as JSON."""

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of bytes."""

EXCHANGE_BYTES = 1024 * 1024
"""Most bytes that one rank posts in one exchange: two such buffers for each rank stay in the caches."""

DEFAULT_TIMEOUT = 120.0
"""Seconds that a collective waits for its ranks: longer than one of them may take to compile its program."""


class MovementKind(enum.Enum):
    """The collectives that only move data."""

    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"


@dataclass(frozen=True, slots=True)
class Movement:
    """One collective that moves data. ``nbytes``: size of the piece that one rank needs of another.

    ``root`` is the sender of a broadcast or scatter and the receiver of a gather. ``detail`` describes the call (dtype,
    shape) for messages; ranks whose descriptions differ get a MismatchError.
    """

    kind: MovementKind
    nbytes: int
    root: int = 0
    detail: str = ""

    def part(self, source: int, dest: int) -> tuple[int, int]:
        """Offset and size, in bytes, of what ``dest`` needs of what ``source`` posts; size 0 for nothing."""
        if self.kind is MovementKind.ALL_GATHER or (
            self.kind is MovementKind.BROADCAST and source == self.root
        ):
            return 0, self.nbytes
        if self.kind is MovementKind.GATHER and dest == self.root:
            return 0, self.nbytes
        if self.kind is MovementKind.ALL_TO_ALL or (
            self.kind is MovementKind.SCATTER and source == self.root
        ):
            return dest * self.nbytes, self.nbytes
        return 0, 0

    def pieces_of(self, ranks: int) -> int:
        """Most pieces that one rank posts."""
        return ranks if self.kind in (MovementKind.ALL_TO_ALL, MovementKind.SCATTER) else 1

    @property
    def text(self) -> str:
        """The call as it stands in messages."""
        root = (
            f", root {self.root}"
            if self.kind in (MovementKind.BROADCAST, MovementKind.GATHER, MovementKind.SCATTER)
            else ""
        )
        return f"{self.kind.value}({self.detail or f'{self.nbytes} bytes'}{root})"


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where a group is made: without ``address`` on one host, else by a listener at ``address``, for ``host``."""

    timeout: float
    address: str | None = None
    host: str | None = None


class Group(Protocol):
    """A fixed set of ranks that compute together. One object per rank, used by one thread at a time.

    All ranks call the same collectives in the same order. Every wait ends: with the result, with an error that names
    the missing ranks, or with the error that another rank gave to `abort`. After any such error the group cannot be
    used.
    """

    @property
    def rank(self) -> int:
        """This member, from 0."""

    @property
    def size(self) -> int:
        """Number of members."""

    @property
    def host_ranks(self) -> tuple[int, ...]:
        """The ranks that share `shared` arenas with this one, itself included, in order."""

    def allocate(self, arena: str, dtype: str, size: int) -> Array:
        """This rank's own buffer of the arena: ``size`` zeros, flat, 64-byte aligned. Does not wait.

        Another call with the same arguments gives the same buffer. If two ranks give different arguments, all ranks get
        a MismatchError.
        """

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        """One buffer for all ranks of this host: ``size`` zeros, flat, 64-byte aligned. Does not wait.

        A rank writes only its own slice, unless only one rank of `host_ranks` writes.
        """

    def reduce_scatter(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        settle: bool = True,
        count: int | None = None,
    ) -> Array:
        """Reduce an allocated arena over all ranks; returns this rank's slice of the result.

        The result is valid until the next collective on the arena. With ``settle`` no rank reads this rank's buffer
        after the return. Without it, which saves a barrier, this holds after the next all_gather, all_reduce or
        barrier. ``Reduction.LOCAL``: this rank's slice of its own buffer. ``count``: reduce and slice only the first
        ``count`` elements.
        """

    def all_reduce(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        count: int | None = None,
        in_place: bool = False,
    ) -> Array:
        """Reduce an allocated arena over all ranks; returns the whole result, which ranks of a host may share.

        The result is read-only and valid until the next collective on the arena. The rank may write to its own buffer
        after the return. ``Reduction.LOCAL``: this rank's own buffer. ``count``: only the first ``count`` elements.
        ``in_place``: each rank gets the result in its own buffer instead, and may write to it.
        """

    def all_gather(self, arena: str) -> Array:
        """Make all slices, each as its owner wrote it, visible to every rank; returns the whole arena.

        For a shared arena this is the arena itself; for an allocated one it is a result like that of `all_reduce`.
        """

    def barrier(self) -> None:
        """Wait until all ranks have arrived."""

    def exchange(self, posted: ByteArray, pattern: Movement) -> list[ByteArray]:
        """Carry out a movement: post bytes, and get each rank's piece for this one.

        At most `EXCHANGE_BYTES` are posted. The returned pieces, by source, are read-only and valid until the next
        exchange. `podrun.collectives.Communicator` does this for arrays of any size.
        """

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        """Send a contiguous array to a rank. Returns when the array may be rewritten, often before it is received."""

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        """Fill a contiguous array with the next message that ``source`` sent with ``tag``.

        If dtype or size differ from the sender's, all ranks get a MismatchError.
        """

    def place_for(self, ranks: Sequence[int]) -> GroupPlace:
        """Where a further group of these ranks can be made (`podrun.collectives.rendezvous.create_within`)."""

    def abort(self, error: Mapping[str, Any]) -> None:
        """End the group: every rank, waiting now or calling later, raises the error that this plain data describes.

        May be called from any thread. The first error counts. See `podrun.core.error_codec.error_to_dict`.
        """

    def close(self) -> None:
        """Leave the group. Idempotent. Returned arrays stay valid; ranks that wait for this one get an error."""


def check_arena(arena: str, dtype: str, size: int) -> None:
    """Raise UsageError for a name, dtype or size that an arena cannot have."""
    if not arena or len(arena) > 1000:
        raise UsageError(f"an arena needs a name of 1 to 1000 characters, not {arena[:40]!r}")
    if size < 1:
        raise UsageError(f"arena {arena!r} cannot have {size} elements", hint="Sizes start at 1.")
    try:
        plain = not numpy_dtype(dtype).hasobject
    except (TypeError, AttributeError):
        plain = False
    if not plain:
        raise UsageError(
            f"arena {arena!r} cannot be of {dtype!r}", hint='Give a dtype\'s name, as "float32".'
        )


def first_elements(arena: str, whole: int, count: int | None) -> int:
    """The number of elements that a collective uses. Raises UsageError if the arena has fewer than ``count``."""
    if count is None:
        return whole
    if not 1 <= count <= whole:
        raise UsageError(f"arena {arena!r} has {whole} elements, not {count}")
    return count


def check_peer(rank: int, size: int, peer: int, what: str) -> None:
    """Raise UsageError for a peer that a rank cannot send to or receive from."""
    if not 0 <= peer < size or peer == rank:
        raise UsageError(f"rank {rank} of {size} cannot {what} rank {peer}")


def as_bytes(array: Array) -> ByteArray:
    """The memory of a contiguous array, without a copy. Raises UsageError if it is not contiguous."""
    if array.dtype.hasobject:
        raise UsageError("collectives move plain numbers, not Python objects")
    if not array.flags.c_contiguous:
        raise UsageError("collectives need contiguous arrays", hint="Use numpy.ascontiguousarray.")
    return array.reshape(-1).view(np.uint8)


def unknown_arena(arena: str, known: list[str]) -> UsageError:
    """The error for a collective on an arena that this rank has not requested."""
    listed = ", ".join(sorted(known)) or "none"
    return UsageError(
        f"no arena {arena!r} on this rank (there are: {listed})",
        hint="Call allocate() or shared() for it first, on every rank.",
    )


def wrong_kind(arena: str, operation: str) -> UsageError:
    """The error for a reduction over a shared arena, of which the host has only one copy."""
    return UsageError(
        f"{operation} needs a buffer on every rank, and arena {arena!r} is shared",
        hint="Use allocate() for what is reduced.",
    )


def message_mismatch(rank: int, source: int, tag: int, out: Array, kind: str, nbytes: int) -> MismatchError:
    """The error for a message whose dtype or size differs from the receiver's array."""
    return MismatchError(
        f"rank {rank} receives {out.dtype.name} of {out.nbytes} bytes from rank {source} with tag {tag}, "
        f"which sent {kind} of {nbytes} bytes",
        hint="Send and receive arrays of one dtype and size.",
    )
