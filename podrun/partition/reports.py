"""Collects what machines report, and says so plainly when one does not answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from podrun.cluster import Cluster
from podrun.errors import PodrunError
from podrun.partition.events import Partition
from podrun.partition.machine_pool import MachinePool, Seat
from podrun.telemetry import IpuReport, MachineReport

log = logging.getLogger("podrun.partition")


@dataclass(frozen=True, slots=True)
class _Place:
    """A machine of a partition: its seat, its index there, its first IPU there, and how many IPUs."""

    seat: Seat
    index: int
    first_ipu: int
    count: int


class Reporter:
    """Asks machines for telemetry, all at once, and fills in what only the service knows."""

    def __init__(self, cluster: Cluster, pool: MachinePool) -> None:
        self.cluster, self._pool = cluster, pool

    def reports(self, partitions: Iterable[Partition], lost: set[str]) -> list[MachineReport]:
        """A report for each machine of each partition, in partition order."""
        seats = [
            _Place(Seat(part.agent_id, partition.name), index, first, part.count)
            for partition in partitions
            for index, (first, part) in enumerate(partition.machines())
        ]
        if not seats:
            return []
        with ThreadPoolExecutor(min(len(seats), 16), thread_name_prefix="podrun-telemetry") as threads:
            return list(threads.map(lambda place: self._ask(place, lost), seats))

    def _ask(self, place: _Place, lost: set[str]) -> MachineReport:
        seat, first, count = place.seat, place.first_ipu, place.count
        agent = self.cluster.agents_by_id[seat.agent_id]
        where = self._pool.endpoints().get(seat, "")
        known = MachineReport(
            agent_id=agent.id,
            state="lost" if agent.id in lost else "standby",
            endpoint=where,
            partition=seat.partition,
            machine_index=place.index,
            serial=agent.serial,
            target=self.cluster.target,
            ipus=tuple(
                IpuReport(first + i, i, error_state="machine lost" if agent.id in lost else "not ready")
                for i in range(count)
            ),
        )
        if agent.id in lost or not where:
            return known
        try:
            report = self._pool.control(seat).telemetry()
        except PodrunError as error:
            log.warning("machine %s does not report: %s", seat.agent_id, error.message)
            self._pool.check(seat)
            silent = tuple(replace(ipu, error_state="no answer") for ipu in known.ipus)
            return replace(known, state="no answer", ipus=silent)
        ipus = tuple(replace(ipu, partition_ipu=first + ipu.ipu) for ipu in report.ipus[:count])
        return replace(
            report,
            agent_id=agent.id,
            state="up",
            endpoint=where,
            partition=seat.partition,
            machine_index=place.index,
            serial=agent.serial,
            target=self.cluster.target,
            ipus=ipus,
        )

    def whole_pod(self, reports: Sequence[MachineReport], lost: set[str]) -> list[MachineReport]:
        """Reports in the order of agents, with a bare one for each agent that no partition uses."""
        running = self._pool.running_agents()
        result: list[MachineReport] = []
        for agent in self.cluster.agents:
            own = [report for report in reports if report.agent_id == agent.id]
            state = "lost" if agent.id in lost else "up" if agent.id in running else "standby"
            bare = MachineReport(agent.id, state=state, serial=agent.serial, target=self.cluster.target)
            result += own or [bare]
        return result
