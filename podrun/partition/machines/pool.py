"""What the service wants of machines and of those who run them.

A *machine use* is one IPU-M2000 as one partition uses it. Partitions of one or two IPUs may share an IPU-M2000; each
use has a process of its own then, so that partitions cannot disturb each other.

`MachinePool` is the interface of the service, `Control` that of one machine. `local_pool.LocalMachinePool` runs
machines in threads of this process (for tests, and where a process costs more than it gives);
`ray_pool.RayMachinePool` runs each as a Ray actor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

from podrun.core.cluster import Cluster
from podrun.core.errors import TakenBy
from podrun.core.telemetry import MachineReport
from podrun.faults import FaultSpec
from podrun.partition.state.records import NO_LEASE, Lease, MachineUse

SILENT = -1
"""Replaces the operation that configured a machine which listens and does not answer, so that the operation is
unknown.
"""
OnLost = Callable[[str, str], None]
"""Called with (agent id, reason) from a thread of the pool when a machine's process ends by itself."""


class Control(Protocol):
    """The service's connection to one machine; over gRPC `podrun.device.service.control.MachineControl`."""

    def lead(self, timeout: float | None = None) -> tuple[str, int]:
        """Take command. Returns the partition that the machine is configured for (or empty), and by which operation."""

    def configure(
        self,
        *,
        partition: str,
        first_ipu: int,
        machine_index: int,
        endpoints: Sequence[str],
        ipus: int = 4,
        owner: int = -1,
        operation: int = 0,
        epoch: str = "",
    ) -> None:
        """Make the machine part of a partition: its place there, the endpoints of all its machines, whose it is, and
        which life of the partition this is."""

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """Reset IPUs by their index at the machine; clears their errors, not those of links."""

    def reset_links(self) -> None:
        """Retrain the machine's IPU-Links."""

    def power_cycle(self, taken_by: TakenBy = TakenBy.POWER_CYCLE) -> None:
        """Forget everything, as after a power cut. ``taken_by``: what attached processes read."""

    def inject(self, faults: Iterable[FaultSpec]) -> None:
        """Let these faults strike at their time."""

    def cancel_faults(self, texts: Iterable[str] = ()) -> None:
        """Take faults off the plan: those of these texts, or all."""

    def telemetry(self, timeout: float | None = None) -> MachineReport:
        """The machine's report of this moment; ``timeout``: seconds it may take, if not the connection's own."""

    def stop(self) -> None:
        """End the machine's server."""

    def close(self) -> None:
        """End the connection."""


class MachinePool(Protocol):
    """Starts and stops machines. Methods may be called from any thread."""

    def open(self, on_lost: OnLost, lease: Lease = NO_LEASE) -> None:
        """Prepare the pool; ``on_lost`` is called for machines that end by themselves."""

    def arrange(self, pod: Cluster) -> None:
        """Continue with a changed POD: its present agents and clusters."""

    def adopt(self, wanted: Collection[MachineUse]) -> dict[MachineUse, int] | None:
        """Take over the machines that an earlier server of the lease's POD left. Machines of ``wanted`` uses go on; the
        others become spares or end. Returns the operation that configured each, `SILENT` for a machine that listens but
        does not answer; None if no machine was left.
        """

    def settle(self) -> None:
        """Finish the work that `adopt` left for the time when the service already answers. Returns at once."""

    def prestart(self, agents: Sequence[str]) -> None:
        """Start a spare machine for each agent, all together, for later partitions."""

    def acquire(self, uses: Sequence[MachineUse]) -> dict[MachineUse, str]:
        """Give each use a machine, starting those that are missing together; returns endpoints (host:port) of all."""

    def endpoints(self) -> dict[MachineUse, str]:
        """Endpoints of the machines in use."""

    def control(self, use: MachineUse) -> Control:
        """The connection to a machine in use. Raises ServiceError if the use has none."""

    def release(self, uses: Iterable[MachineUse], taken_by: TakenBy = TakenBy.REMOVAL) -> None:
        """Take machines back: as spares, or ended if they are not wanted or do not answer. ``taken_by``: what processes
        that are attached to them read.
        """

    def check(self, use: MachineUse) -> None:
        """Call `OnLost` if a machine, which did not answer, no longer listens."""

    def stop_agent(self, agent: str) -> None:
        """End every process of an agent at once; `OnLost` is not called."""

    def running_agents(self) -> set[str]:
        """Agents that have a process, in use or spare."""

    def close(self, *, leave: bool = False) -> None:
        """End everything; with ``leave`` machines stay for the next server of the lease. Idempotent."""
