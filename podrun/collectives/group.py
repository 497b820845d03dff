"""What a group of ranks is: the protocol that every kind of group here keeps, and its few rules.

A *rank* is one member, usually one IPU-M2000's process. An *arena* is a flat buffer of one dtype with a name.
There are two kinds. `Group.allocate` gives every rank a buffer of its own, for gradients; a reduction over it
leaves its result in one further buffer that all ranks of a host read. `Group.shared` gives one buffer for all
ranks of a host, for weights and optimizer state; each rank writes its own slice, and all_gather is the moment
from which all may read.

Rank *m* of *M* owns the slice ``[m * size // M, (m + 1) * size // M)`` of an arena.

One batch of data-parallel training, the sequence that all this is made for::

    mine = group.reduce_scatter("gradients", Reduction.SUM, settle=False)    # sum over ranks of my slice
    weights[slice_of(group.rank, group.size, weights.size)] -= rate * mine   # I update my slice, in place
    group.all_gather("weights")                                              # now all slices are new

Results do not depend on the kind of group, nor on which ranks share a host: every sum is taken in rank order,
half types in float32 and rounded once at the end (`podrun.collectives.arithmetic`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from podrun.collectives.errors import MismatchError
from podrun.collectives.patterns import Pattern
from podrun.errors import UsageError
from podrun.executable import Reduction, numpy_dtype

Array = np.ndarray[Any, np.dtype[Any]]
"""Any NumPy array."""

Token = dict[str, Any]
"""What `join` needs to find a group: plain values only, so it may travel as JSON."""

ByteArray = np.ndarray[Any, np.dtype[np.uint8]]
"""A flat array of bytes."""

EXCHANGE_BYTES = 1024 * 1024
"""Most bytes that one rank posts in one exchange: two such buffers a rank stay within reach of the caches."""

DEFAULT_TIMEOUT = 120.0
"""Seconds that a collective waits for its ranks: longer than compiling a step on one of them may take."""


def slice_of(rank: int, ranks: int, size: int) -> slice:
    """The slice of ``size`` elements that ``rank`` of ``ranks`` owns; sizes differ by at most one."""
    return slice(rank * size // ranks, (rank + 1) * size // ranks)


class Group(Protocol):
    """A fixed set of ranks that compute together. One object per rank, used by one thread at a time.

    All ranks call the same collectives in the same order. Every wait ends: with the result, with an error
    that names who is missing, or with the error another rank gave to `abort`. After any such error the group
    is of no use.
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
        """This rank's own buffer of the arena: ``size`` zeros, flat, 64-byte aligned. Does not wait for
        anyone.

        Call again with the same arguments for the same buffer. Other arguments than another rank's:
        MismatchError, here and on all ranks.
        """

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        """One buffer for all ranks of this host: ``size`` zeros, flat, 64-byte aligned. Does not wait for
        anyone.

        Write only your own slice, or from one rank of `host_ranks` only.
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

        The result stands until the next collective on the arena. With ``settle`` no rank reads this rank's
        buffer any more on return. Without it, which saves a barrier, that is so after the next all_gather,
        all_reduce or barrier. ``Reduction.LOCAL``: this rank's slice of its own buffer. ``count``: only the
        first so many elements, which are then what is sliced.
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

        Do not write to it; it stands until the next collective on the arena. The rank's own buffer is free on
        return. ``Reduction.LOCAL``: this rank's own buffer. ``count``: only the first so many elements.
        ``in_place``: the result comes into each rank's own buffer instead, and is the rank's to write to.
        """

    def all_gather(self, arena: str) -> Array:
        """Make every rank see all slices, each as its owner wrote it; returns the whole.

        For a shared arena that is the arena itself; for an allocated one a result as of `all_reduce`.
        """

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def exchange(self, posted: ByteArray, pattern: Pattern) -> list[ByteArray]:
        """Carry out a collective that only moves data: post bytes, get what each rank has for this one.

        At most `EXCHANGE_BYTES` are posted. What is returned, by source, is read-only and stands until the
        next exchange. `podrun.collectives.Communicator` does this for arrays of any size.
        """

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        """Send a contiguous array to a rank. Returns when the array may be rewritten, often before it is
        received.
        """

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        """Fill a contiguous array with the next message that ``source`` sent with ``tag``.

        Another dtype or size than the sender's: MismatchError on all ranks.
        """

    def establish(self, ranks: Sequence[int]) -> tuple[Group, Token]:
        """Make a further group, of these ranks of this one; returns its rank 0 and the others' token."""

    def abort(self, error: Mapping[str, Any]) -> None:
        """End the group: every rank, waiting now or calling later, raises the error that this plain data
        describes.

        May be called from any thread. The first error stands. See ``PoplarError.to_dict``.
        """

    def close(self) -> None:
        """Leave the group. Idempotent. Arrays handed out stay valid; ranks that still wait for this one get
        an error.
        """


def check_arena(arena: str, dtype: str, size: int) -> None:
    """Raises UsageError for a name, dtype or size that cannot be an arena's."""
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
    """How many elements of an arena a collective is about. Raises UsageError for a count it does not have."""
    if count is None:
        return whole
    if not 1 <= count <= whole:
        raise UsageError(f"arena {arena!r} has {whole} elements, not {count}")
    return count


def check_peer(rank: int, size: int, peer: int, what: str) -> None:
    """Raises UsageError for a peer that a rank cannot send to or receive from."""
    if not 0 <= peer < size or peer == rank:
        raise UsageError(f"rank {rank} of {size} cannot {what} rank {peer}")


def as_bytes(array: Array) -> ByteArray:
    """The memory of a contiguous array, without a copy. Raises UsageError for one that is not contiguous."""
    if array.dtype.hasobject:
        raise UsageError("collectives move plain numbers, not Python objects")
    if not array.flags.c_contiguous:
        raise UsageError("collectives need contiguous arrays", hint="Use numpy.ascontiguousarray.")
    return array.reshape(-1).view(np.uint8)


def unknown_arena(arena: str, known: list[str]) -> UsageError:
    """The error for a collective on an arena that this rank has not asked for."""
    listed = ", ".join(sorted(known)) or "none"
    return UsageError(
        f"no arena {arena!r} on this rank (there are: {listed})",
        hint="Call allocate() or shared() for it first, on every rank.",
    )


def wrong_kind(arena: str, operation: str) -> UsageError:
    """The error for a reduction over an arena of which the host has only one copy."""
    return UsageError(
        f"{operation} needs a buffer on every rank, and arena {arena!r} is shared",
        hint="Use allocate() for what is reduced.",
    )


def message_mismatch(rank: int, source: int, tag: int, out: Array, kind: str, nbytes: int) -> MismatchError:
    """The error for a message that is not what its receiver has room for."""
    return MismatchError(
        f"rank {rank} receives {out.dtype.name} of {out.nbytes} bytes from rank {source} with tag {tag}, "
        f"which sent {kind} of {nbytes} bytes",
        hint="Send and receive arrays of one dtype and size.",
    )
