"""Who may do what at a server that all users of its host share.

A server normally answers the user who runs it and nobody else; then every call is that user's. One that is shared
(``vipu-server --shared``) answers all users of its host. Each call then counts as its user, whose id the kernel tells
(`podrun.core.identity`). A partition belongs to the user who made it: others may see that it exists and how busy it is,
and nothing more. Calls that concern the whole POD are for administrators: the user who runs the server, root, and those
that ``--admin`` names.
"""

from __future__ import annotations

import contextlib
import enum
import os
import pwd
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from podrun.core.errors import DeniedError, ExhaustedError, NotFoundError
from podrun.core.identity import Caller, user_name
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import AttachedProcess, MachineReport
from podrun.partition.state.records import NOBODY, owner_name
from podrun.partition.state.values import NO_USER


class Right(enum.Enum):
    """Who may make a call."""

    ANYBODY = "anybody"
    """Every user that the server answers."""
    OWNER = "owner"
    """The owner of the partition that the call names, and administrators."""
    ADMIN = "admin"
    """Administrators."""


RIGHTS: Mapping[str, Right] = {
    "GetServerVersion": Right.ANYBODY,
    "GetCluster": Right.ANYBODY,
    "ListClusters": Right.ANYBODY,
    "CreatePartition": Right.ANYBODY,
    "GetPartition": Right.ANYBODY,
    "ListPartitions": Right.ANYBODY,
    "GetPartitionStatus": Right.ANYBODY,
    "ListAllocations": Right.ANYBODY,
    "ListQueue": Right.ANYBODY,
    "PlanPartition": Right.ANYBODY,
    "CaptureState": Right.ANYBODY,  # without holders and faults
    "ListReservations": Right.ANYBODY,
    "Watch": Right.ANYBODY,
    "GetServiceMetrics": Right.ANYBODY,
    "ListMachineReports": Right.ANYBODY,  # what concerns partitions of others is left out
    "ListAgents": Right.ANYBODY,  # without the addresses of machines
    "ResetPartition": Right.OWNER,
    "RemovePartition": Right.OWNER,
    "HoldPartition": Right.OWNER,
    "GetPartitionIpuofConfig": Right.OWNER,
    "ResetIpus": Right.OWNER,
    "InjectFaults": Right.OWNER,
    "SetMaintenance": Right.ADMIN,
    "EndMaintenance": Right.ADMIN,
    "CreateReservation": Right.ADMIN,
    "RemoveReservation": Right.ADMIN,
    "CreateAllocation": Right.ADMIN,
    "RemoveAllocation": Right.ADMIN,
    "PowerCycleAgent": Right.ADMIN,
    "RestartAgent": Right.ADMIN,
    "CreateAgent": Right.ADMIN,
    "RemoveAgent": Right.ADMIN,
    "CreateCluster": Right.ADMIN,
    "RemoveCluster": Right.ADMIN,
    "CreateUser": Right.ADMIN,
    "RemoveUser": Right.ADMIN,
    "ListUsers": Right.ADMIN,
}
"""The right for each call by name; a call that is not listed is for administrators."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """The users whom a server answers. ``admins``: user ids of administrators besides the user who runs it, and
    root.
    """

    shared: bool = False
    admins: frozenset[int] = frozenset()

    def is_admin(self, caller: Caller) -> bool:
        """Whether a caller has all rights."""
        return caller.own or caller.uid in (0, os.getuid()) or caller.uid in self.admins

    def machine_options(self) -> dict[str, Any]:
        """The facts about sharing that machines need (`podrun.device.service.server.MachineServer`)."""
        return {"shared": self.shared, "admins": tuple(sorted(self.admins))}

    def owns(self, caller: Caller, owner: int) -> bool:
        """Whether a partition of user ``owner`` is the caller's, or the caller is an administrator."""
        return self.is_admin(caller) or (owner not in (NO_USER, NOBODY) and owner == caller.uid)

    def check(self, caller: Caller, method: str, partition: str, owner: int | None) -> None:
        """Raise DeniedError if the caller may not make a call about a partition of user ``owner`` (None: unknown)."""
        right = RIGHTS.get(method, Right.ADMIN)
        if right is Right.ANYBODY or self.is_admin(caller):
            return
        who = user_name(caller.uid)
        if right is Right.ADMIN:
            raise DeniedError(
                f"{method} is for administrators of this server; {who} is none",
                hint=f"Ask {user_name(os.getuid())}, who runs it; or run one of your own: vipu-server --port 0",
            )
        if owner is not None and not self.owns(caller, owner):
            raise DeniedError(
                f"partition {partition} belongs to {owner_name(owner)}, not to {who}",
                hint="vipu list partitions shows whose partitions there are; vipu create partition makes one of yours.",
            )

    def visible(self, caller: Caller, report: MachineReport, owner: int | None) -> MachineReport:
        """A machine's report as a caller may see it: reports of others' partitions come without processes and
        addresses.
        """
        if owner is None or self.owns(caller, owner):
            return report
        hidden = AttachedProcess(0, owner_name(owner), "(of another user)")
        ipus = tuple(
            ipu if ipu.process is None else replace(ipu, process=replace(hidden, host=ipu.process.host))
            for ipu in report.ipus
        )
        return replace(
            report, ipus=ipus, endpoint="", pid=0, planned_faults=(), struck_faults=(), control_events=()
        )


CALLS_OF_OTHERS = 4
"""Most calls at a time from one user other than the one who runs the server; the other threads are for others."""


class CallRoom:
    """Counts the calls of each user that are under way. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: Counter[int] = Counter()

    @contextlib.contextmanager
    def call(self, caller: Caller) -> Iterator[None]:
        """A call for as long as the context lasts. Raises ExhaustedError if the user has too many under way."""
        if caller.own:
            yield
            return
        with self._lock:
            if self._calls[caller.uid] >= CALLS_OF_OTHERS:
                raise ExhaustedError(
                    f"{user_name(caller.uid)} has {CALLS_OF_OTHERS} calls under way at this server",
                    hint="Wait until one of them is answered.",
                )
            self._calls[caller.uid] += 1
        try:
            yield
        finally:
            with self._lock:
                self._calls[caller.uid] -= 1


def user_ids(names: tuple[str, ...]) -> frozenset[int]:
    """The ids of users, by name or number. Raises NotFoundError."""
    ids = set()
    for name in names:
        try:
            ids.add(int(name) if name.isdecimal() else pwd.getpwnam(name).pw_uid)
        except KeyError:
            raise NotFoundError(
                f"there is no user {name!r} on this host", hint="Name another, or give the user's number."
            ) from None
    return frozenset(ids)
