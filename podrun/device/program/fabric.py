"""How the machines of a program find each other when it is loaded.

The machine of rank 0 makes the group and offers its token; each other rank claims it once. A claim waits for
an offer that it has not had, so it does not matter who loads first, and a machine that loads again gets a new
group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from podrun.collectives import Group, create, join
from podrun.device.connection import IpuRange
from podrun.device.trouble import different_programs, host_sync_timeout, span
from podrun.errors import PoplarError


@dataclass(slots=True)
class _Offer:
    digest: str
    token: Mapping[str, Any]
    abort: Callable[[Mapping[str, Any]], None]
    claimed: set[int] = field(default_factory=set)
    error: PoplarError | None = None


class OfferBook:
    """The groups that one machine offers, one for each job. Safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._offers: dict[IpuRange, _Offer] = {}

    def publish(
        self,
        job: IpuRange,
        digest: str,
        token: Mapping[str, Any],
        abort: Callable[[Mapping[str, Any]], None],
    ) -> None:
        """Offer a group for ``job``, instead of any before. ``abort``: ends it for the ranks that are in it."""
        with self._changed:
            self._offers[job] = _Offer(digest, token, abort)
            self._changed.notify_all()

    def fail(self, job: IpuRange, error: PoplarError) -> None:
        """The group on offer has failed: ranks that still come for it are told why."""
        with self._changed:
            if job in self._offers:
                self._offers[job].error = error

    def withdraw(self, job: IpuRange) -> None:
        """Offer no group for ``job`` any more."""
        with self._changed:
            self._offers.pop(job, None)

    def claim(self, job: IpuRange, rank: int, digest: str, timeout: float) -> Mapping[str, Any]:
        """The token of a group for ``job`` that ``rank`` has not had yet; waits up to ``timeout`` seconds for
        one.

        Raises ApplicationRuntimeError if rank 0 loads another program, UnknownRuntimeError (host sync) if it
        loads none.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._open(job, rank) is not None, timeout):
                raise host_sync_timeout(timeout, f"the first machine of {span(job)} has loaded nothing")
            offer = self._open(job, rank)
            assert offer is not None
            if offer.error is not None:
                offer.claimed.add(rank)
                raise offer.error
            if offer.digest != digest:
                error = different_programs()
                offer.abort(error.to_dict())
                raise error
            offer.claimed.add(rank)
            return offer.token

    def _open(self, job: IpuRange, rank: int) -> _Offer | None:
        offer = self._offers.get(job)
        return None if offer is None or rank in offer.claimed else offer


class Fabric(Protocol):
    """A machine's way to the others of its partition."""

    def claim(self, machine: int, job: IpuRange, rank: int, digest: str, timeout: float) -> Mapping[str, Any]:
        """`OfferBook.claim` on another machine. ``machine``: its index in the partition."""

    def alive(self, machine: int) -> bool:
        """Whether another machine still answers; at once."""


class LocalFabric:
    """Machines of one process: their offer books, by machine index."""

    def __init__(self) -> None:
        self._books: dict[int, OfferBook] = {}

    def add(self, machine: int, book: OfferBook) -> None:
        """Let other machines claim what ``machine`` offers."""
        self._books[machine] = book

    def claim(self, machine: int, job: IpuRange, rank: int, digest: str, timeout: float) -> Mapping[str, Any]:
        return self._books[machine].claim(job, rank, digest, timeout)

    def alive(self, machine: int) -> bool:
        return True


def form_group(
    fabric: Fabric,
    book: OfferBook,
    *,
    job: IpuRange,
    first_machine: int,
    rank: int,
    size: int,
    digest: str,
    timeout: float,
    address: str | None = None,
) -> Group:
    """The group of a job's machines, for one of them. ``timeout``: seconds, also for the group's
    own waits. ``address``: where this machine is reached from other hosts, if some of the job's machines are there.
    """
    if rank == 0:
        group, token = create(size, timeout=timeout, address=address)
        if size > 1:
            book.publish(job, digest, token, group.abort)
        return group
    return join(fabric.claim(first_machine, job, rank, digest, timeout), rank, timeout=timeout)


def digest_of(data: bytes) -> str:
    """The name of a program's bytes."""
    import hashlib

    return hashlib.sha256(data).hexdigest()
