"""How the machines of a program find each other when it is loaded.

The machine of rank 0 creates the group and offers its token; each other rank claims the token once. A claim waits for
an offer that the rank has not claimed yet. So the order of loads does not matter, and a machine that loads again
joins a new group. A job that ends withdraws its offer and its claims.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, Protocol

from podrun.collectives import ClosedError
from podrun.core.error_codec import error_to_dict
from podrun.core.errors import PoplarError
from podrun.core.layout import IpuRange
from podrun.core.quick_dataclass import dataclass
from podrun.device.error_messages import different_programs, host_sync_timeout, ipus_in_words

LOOK_SECONDS = 0.5
"""Seconds after which a waiting claim checks whether it is still wanted."""


@dataclass(frozen=True, slots=True)
class Wait:
    """How long to wait for an offer, in seconds, and whether it is still wanted."""

    seconds: float
    wanted: Callable[[], bool] = lambda: True


@dataclass(slots=True)
class _Offer:
    digest: str
    token: Mapping[str, Any]
    abort: Callable[[Mapping[str, Any]], None]
    claimed: set[int] = field(default_factory=set)
    error: PoplarError | None = None


@dataclass(frozen=True, slots=True)
class JobName:
    """The name of a job among its machines. ``who``: its launch or its only process; empty where several processes
    without a launch hold it.
    """

    range: IpuRange
    who: str = ""


class OfferBook:
    """The groups that one machine offers, one for each job. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offers: dict[JobName, _Offer] = {}

    def publish(
        self,
        job: JobName,
        digest: str,
        token: Mapping[str, Any],
        abort: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Offer a group for ``job``, instead of any before. ``abort``: ends it for the ranks that are in it."""
        with self._changed:
            self._offers[job] = _Offer(digest, token, abort)
            self._changed.notify_all()

    def fail(self, job: JobName, error: PoplarError) -> None:
        """Fail the group on offer: ranks that still come for it get the reason."""
        with self._changed:
            if job in self._offers:
                self._offers[job].error = error

    def withdraw(self, job: JobName) -> None:
        """Offer no group for ``job`` any more."""
        with self._changed:
            self._offers.pop(job, None)

    def jobs(self) -> tuple[JobName, ...]:
        """The jobs that a group is on offer for."""
        with self._changed:
            return tuple(self._offers)

    def claim(self, job: JobName, rank: int, digest: str, wait: Wait) -> Mapping[str, Any]:
        """The token of a group for ``job`` that ``rank`` has not had yet; waits for one.

        Raises ApplicationRuntimeError if rank 0 loads another program, UnknownRuntimeError (host sync) if it
        loads none, ClosedError if the claim is no longer wanted.
        """
        end = time.monotonic() + wait.seconds
        with self._changed:
            while (offer := self._open(job, rank)) is None:
                left = end - time.monotonic()
                if not wait.wanted():
                    raise ClosedError("the job ended before its group of machines was formed")
                if left <= 0:
                    raise host_sync_timeout(
                        wait.seconds, f"the first machine of {ipus_in_words(job.range)} has loaded nothing"
                    )
                self._changed.wait(min(left, LOOK_SECONDS))
            if not wait.wanted():
                raise ClosedError("the job ended before its group of machines was formed")
            if offer.error is not None:
                offer.claimed.add(rank)
                raise offer.error
            if offer.digest != digest:
                error = different_programs()
                offer.abort(error_to_dict(error))
                raise error
            offer.claimed.add(rank)
            return offer.token

    def _open(self, job: JobName, rank: int) -> _Offer | None:
        offer = self._offers.get(job)
        return None if offer is None or rank in offer.claimed else offer


class Fabric(Protocol):
    """A machine's way to the others of its partition."""

    def claim(self, machine: int, job: JobName, rank: int, digest: str, wait: Wait) -> Mapping[str, Any]:
        """`OfferBook.claim` on another machine. ``machine``: its index in the partition."""

    def alive(self, machine: int) -> bool:
        """Whether another machine still answers; at once."""


class LocalFabric:
    """Machines of one process: their offer books, by machine index."""

    def __init__(self) -> None:
        self._books: dict[int, OfferBook] = {}

    def add(self, machine: int, book: OfferBook) -> None:
        """Let other machines claim the offers of ``machine``."""
        self._books[machine] = book

    def claim(self, machine: int, job: JobName, rank: int, digest: str, wait: Wait) -> Mapping[str, Any]:
        return self._books[machine].claim(job, rank, digest, wait)

    def alive(self, machine: int) -> bool:
        return True


def program_digest(data: bytes) -> str:
    """A digest of a program's bytes, by which machines and owners compare programs."""
    import hashlib

    return hashlib.sha256(data).hexdigest()
