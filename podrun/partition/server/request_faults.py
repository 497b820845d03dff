"""Faults of the partition service itself: a request that is answered late, or not, or is carried out twice.

`ControlLog` keeps requests and their effects, for the records of launches.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from podrun.core.cluster import Cluster
from podrun.core.errors import LostAnswerError, NotFoundError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import ControlEvent, MachineReport, planned_in
from podrun.faults import FaultSpec, FaultTarget, Struck, partition_links, validate
from podrun.partition.state.placement import routing_of

log = logging.getLogger("podrun.partition")


def of_service(specs: Iterable[FaultSpec]) -> tuple[FaultSpec, ...]:
    """The faults of the service among ``faults``."""
    return tuple(spec for spec in specs if spec.target is FaultTarget.SERVICE)


def check_faults(
    faults: Sequence[FaultSpec], cluster: Cluster, size: int, ilds: int, *, created: str = ""
) -> None:
    """Raises UsageError for a fault on an IPU, link or machine that a partition of a V-IPU cluster lacks, for one that
    strikes in the process of an instance, and for one of the creation of a partition that is there. ``created``: its
    name.
    """
    for spec in faults:
        if created and spec.during == "CreatePartition":
            raise UsageError(
                f"fault {spec.text}: partition {created} is created already",
                hint="Plan it with the launch that creates the partition: podrun --fault.",
            )
        if spec.in_program:
            raise UsageError(
                f"fault {spec.text} strikes in the process of an instance, which the partition service does not reach",
                hint=f"Plan it before the launch: podrun --fault {spec.text} ...",
            )
    topology = routing_of(cluster, size, ilds).link_topology
    validate(faults, ipus=size, links=partition_links(size, ilds, topology), ilds=ilds)


def planned_faults(
    partition: str, reports: Iterable[MachineReport], texts: Sequence[str] = ()
) -> tuple[str, ...]:
    """Of the faults planned on a partition those of these texts, or all. Raises NotFoundError for a text that is not
    planned."""
    planned = {str(spec): spec for spec in planned_in(reports)}
    known = {text for spec in planned.values() for text in (spec.text, str(spec))}
    for text in texts:
        if text not in known:
            listed = ", ".join(sorted(spec.text for spec in planned.values())) or "none"
            raise NotFoundError(
                f"no fault {text} is planned on partition {partition}", hint=f"Planned: {listed}."
            )
    return tuple(spec.text for spec in planned.values() if not texts or {spec.text, str(spec)} & set(texts))


@dataclass(slots=True)
class _Waiting:
    """A fault that has still to strike. ``partition``: whose requests it strikes; ``left``: how often."""

    spec: FaultSpec
    partition: str
    left: int


CONTROL = {
    "CreatePartition": "partition created",
    "ResetPartition": "partition reset",
    "RemovePartition": "partition removed",
    "ResetIpus": "IPUs reset",
    "PowerCycleAgent": "machine power-cycled",
    "RestartAgent": "machine replaced",
    "InjectFaults": "faults injected",
}
"""The requests that a launch's record lists, and what each did."""
REMEMBERED = 1000
"""Number of events of a partition that are kept."""


class ControlLog:
    """What was done to each partition. Thread-safe. ``clock``: seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._events: dict[str, list[ControlEvent]] = {}

    def note(self, partition: str, did: str, what: str = "", why: str = "") -> None:
        """Note a change of a partition. ``why``: what ended a machine, as far as that is known."""
        with self._lock:
            known = self._events.setdefault(partition, [])
            known.append(ControlEvent(did, what, self._clock(), why))
            del known[:-REMEMBERED]

    def note_request(self, method: str, partitions: Iterable[str], request: object) -> None:
        """Note a request that was carried out."""
        if method not in CONTROL:
            return
        parts = [*getattr(request, "faults", ()), getattr(request, "agent_id", "")]
        parts += [f"IPU {ipu}" for ipu in getattr(request, "partition_ipus", ())]
        did = CONTROL[method]
        if method == "InjectFaults" and getattr(request, "cancel", False):
            did = "faults cancelled"
        for partition in partitions:
            self.note(partition, did, " ".join(part for part in parts if part))

    def of(self, partition: str) -> tuple[ControlEvent, ...]:
        """The events of a partition, oldest first."""
        with self._lock:
            return tuple(self._events.get(partition, ()))


class RequestFaults:
    """The faults planned for requests about partitions. Safe to use from several threads. ``end``: ends the server."""

    def __init__(
        self,
        sleep: Callable[[float], None] = time.sleep,
        end: Callable[[], Any] = lambda: os.kill(os.getpid(), signal.SIGKILL),
    ) -> None:
        self._sleep = sleep
        self._end = end
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._struck: list[Struck] = []

    def plan(self, partition: str, specs: Iterable[FaultSpec]) -> None:
        """Plan faults for requests about a partition."""
        with self._lock:
            self._waiting += [_Waiting(spec, partition, spec.repeat) for spec in of_service(specs)]

    def cancel(self, partition: str, texts: Sequence[str] = ()) -> None:
        """Take faults off the plan: those of these texts, or all of a partition."""
        with self._lock:
            self._waiting = [
                entry
                for entry in self._waiting
                if entry.partition != partition
                or (texts and not {entry.spec.text, str(entry.spec)} & set(texts))
            ]

    def planned(self, partition: str) -> tuple[FaultSpec, ...]:
        """The faults that have still to strike."""
        with self._lock:
            return tuple(entry.spec for entry in self._waiting if entry.partition == partition)

    def struck(self, partition: str) -> tuple[Struck, ...]:
        """The faults that struck."""
        with self._lock:
            return tuple(entry for entry in self._struck if entry.partition == partition)

    def answer(self, request: str, partition: str, work: Callable[[], Any]) -> Any:
        """The answer to a request. A fault may delay it, lose it, or have the request carried out twice. Raises
        LostAnswerError for a lost answer.
        """
        spec = self._take(request, partition) if self._waiting else None
        if spec is None:
            return work()
        log.warning("fault %s strikes %s of partition %s", spec.text, request, partition)
        if spec.kind == "slow":
            self._sleep(spec.number("seconds"))
        answer = work()
        if spec.kind == "twice":
            try:
                work()
            except Exception as error:  # The caller gets the first answer only.
                log.warning("%s, the second time: %s", request, error)
        if spec.kind == "killed":
            self._end()
        if spec.kind == "answer-lost":
            raise LostAnswerError(
                f"the answer to {request} was lost", hint="It may have been carried out: vipu list partitions"
            )
        return answer

    def _take(self, request: str, partition: str) -> FaultSpec | None:
        with self._lock:
            for entry in self._waiting:
                if entry.spec.during == request and entry.partition == partition:
                    entry.left -= 1
                    if not entry.left:
                        self._waiting.remove(entry)
                    self._struck.append(Struck(entry.spec, entry.spec.launch, None, time.time(), partition))
                    return entry.spec
        return None


def with_request_faults(report: MachineReport, faults: RequestFaults, log: ControlLog) -> MachineReport:
    """The report of a partition's first machine tells its faults of the service too, and what was asked for."""
    if report.machine_index or not report.partition:
        return report
    return replace(
        report,
        planned_faults=report.planned_faults + faults.planned(report.partition),
        struck_faults=report.struck_faults + faults.struck(report.partition),
        control_events=log.of(report.partition),
    )
