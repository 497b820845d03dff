"""The errors of a group, which every rank of it raises alike.

A group fails once and for all: the first rank that sees a failure records it for the others as plain data, and every
rank, waiting or calling later, raises an equal error. The failed group can be closed and a new one made at once.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from podrun.core.errors import DeadlineError, ServiceError, UsageError


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
