"""What goes wrong in a group, as errors that every rank of it raises alike.

A group fails once and for all: the first rank that sees a failure writes it down for the others as plain
data, and every rank, waiting or coming later, raises an equal error. The failed group can be closed and a new
one made at once.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator, Mapping
from typing import Any

from podrun.errors import ERROR_TYPES, DeadlineError, PodrunError, ServiceError, UsageError, error_from_dict


class RankLostError(ServiceError):
    """A rank died or left while others needed it. ``rank`` is the missing one."""

    def __init__(self, message: str, *, rank: int = -1, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rank = rank


class RankMissingError(DeadlineError):
    """A rank did not come within the deadline. ``ranks`` are those that did not."""

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.ranks = ranks


class MismatchError(UsageError):
    """Ranks of one group asked for different things: another collective, arena, dtype, size or reduction."""


def different_collectives(*called: tuple[int, str]) -> MismatchError:
    """The error for ranks, each with what it called, that did not all call the same."""
    said: dict[str, list[int]] = {}
    for rank, what in called:
        said.setdefault(what, []).append(rank)
    return MismatchError(
        "ranks of one group called different collectives: "
        + "; ".join(f"rank {', '.join(map(str, who))} called {what}" for what, who in said.items()),
        hint="All ranks must call the same collectives, on equal arenas, in the same order.",
    )


class HostLimitError(ServiceError):
    """A host gives a rank no further file, thread or memory."""


_LIMITS = {
    errno.EMFILE: "Raise the limit on open files (ulimit -n), or have fewer ranks in a process.",
    errno.ENFILE: "The whole host is out of open files: see /proc/sys/fs/file-nr.",
    errno.ENOMEM: "See how much memory is free (free -h) and allowed (ulimit -v).",
    errno.ENOSPC: "See how much memory is free (free -h) and allowed (ulimit -v).",
}


@contextlib.contextmanager
def within_limits(what: str) -> Iterator[None]:
    """Raises HostLimitError, which names ``what`` was wanted, where the host refuses files, threads or memory."""
    try:
        yield
    except OSError as error:
        if error.errno not in _LIMITS:
            raise
        raise HostLimitError(f"no {what}: {error.strerror}", hint=_LIMITS[error.errno]) from error
    except RuntimeError as error:
        if "new thread" not in str(error):
            raise
        raise HostLimitError(f"no {what}: {error}", hint="See how many are allowed (ulimit -u).") from error


@contextlib.contextmanager
def for_rank(rank: int) -> Iterator[None]:
    """Have what `within_limits` raises say which rank it is about."""
    try:
        yield
    except HostLimitError as error:
        raise HostLimitError(f"rank {rank} gets {error.message}", hint=error.hint) from error


class ClosedError(UsageError):
    """A group was used after `close`."""


class GroupError(ServiceError):
    """A group was ended by another rank with an error that is none of podrun's own classes."""


_OWN: dict[str, type[PodrunError]] = {
    kind.__name__: kind for kind in (MismatchError, HostLimitError, UsageError, GroupError)
}


def describe(error: PodrunError) -> dict[str, Any]:
    """Plain data from which `restore` makes an equal error on another rank."""
    to_dict = getattr(error, "to_dict", None)
    if to_dict is not None:
        data: dict[str, Any] = to_dict()
        return data
    data = {"type": type(error).__name__, "message": error.message, "hint": error.hint}
    if isinstance(error, RankLostError):
        data["rank"] = error.rank
    elif isinstance(error, RankMissingError):
        data["ranks"] = list(error.ranks)
    return data


def restore(data: Mapping[str, Any]) -> PodrunError:
    """The error that `describe` or ``PoplarError.to_dict`` described; GroupError for an unknown class."""
    name = str(data.get("type", ""))
    message, hint = str(data.get("message", "")), data.get("hint")
    if name in ERROR_TYPES:
        return error_from_dict(data)
    if name == RankLostError.__name__:
        return RankLostError(message, rank=int(data.get("rank", -1)), hint=hint)
    if name == RankMissingError.__name__:
        return RankMissingError(message, ranks=tuple(int(r) for r in data.get("ranks", ())), hint=hint)
    if name in _OWN:
        return _OWN[name](message, hint=hint)
    return GroupError(f"{name}: {message}" if name else message, hint=hint)
