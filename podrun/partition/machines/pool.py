"""What the service wants of machines and of those who run them.

A *machine use* is one IPU-M2000 as one partition uses it. Partitions of one or two IPUs may share an IPU-M2000; each
use has a process of its own then, so that partitions cannot disturb each other.

`MachinePool` is what the service works with: the common part of pools (uses, spares, watching, taking over); `Control`
is the interface of one machine. `local_pool.LocalMachinePool` runs machines in threads of this process (for tests, and
where a process costs more than it gives); `ray_pool.RayMachinePool` runs each as a Ray actor.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from podrun.core.cluster import Cluster
from podrun.core.errors import PodrunError, ServiceError, TakenBy
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import MachineReport
from podrun.faults import FaultSpec
from podrun.partition.host.discovery import listens
from podrun.partition.machines.endpoint_watch import EndpointWatcher
from podrun.partition.machines.keeper import Keeper
from podrun.partition.state.records import NO_LEASE, Lease, MachineUse

log = logging.getLogger("podrun.partition")
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


ADOPT_SECONDS = 2.0
"""Longest wait for the answer of a machine that an earlier server left."""


@dataclass(slots=True)
class PooledMachine:
    """A running machine. ``handle``: the server or actor that runs it."""

    agent_id: str
    endpoint: str
    handle: Any
    control: Control
    stop_watching: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class LeftMachine:
    """A machine that an earlier server left. ``partition``: the one it worked for, as far as that is known without
    asking it.
    """

    agent_id: str
    endpoint: str
    handle: Any
    partition: str = ""


class MachinePool:
    """Gives machines to partitions: uses, spares, watching. A subclass starts and ends machines. Methods may be called
    from any thread."""

    def __init__(self, cluster: Cluster, *, keep_spares: bool = False) -> None:
        self.cluster = cluster
        self._keep_spares = keep_spares
        self._lock = threading.RLock()
        self._in_use: dict[MachineUse, PooledMachine] = {}
        self._spares: dict[str, PooledMachine] = {}
        self._starting: set[str] = set()
        self._start_ended = threading.Condition(self._lock)
        self._on_lost: OnLost = lambda agent, reason: None
        self._closed = False
        self._watcher = EndpointWatcher()
        self.lease = Lease()
        self.keeper: Keeper | None = None
        self.on_keeper_ended: Callable[[], None] = lambda: None

    # A subclass provides these three.

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        """Start a machine for each of ``agents`` (one may occur twice), together: endpoints and handles."""
        raise NotImplementedError

    def _kill(self, machine: PooledMachine) -> None:
        """End a machine; no error if it has ended."""
        raise NotImplementedError

    def _connect(self, endpoint: str) -> Control:
        """A connection to the machine at an endpoint."""
        raise NotImplementedError

    def _find_left(self) -> list[LeftMachine] | None:
        """Machines that an earlier server left. None if none of its processes is left."""
        return None

    def _note_machines(self) -> None:
        """Called with the lock after machines have been taken into use or given back."""

    def settle(self) -> None:
        """Finish the work that `adopt` left for the time when the service already answers. Returns at once."""

    def _watch(self, machine: PooledMachine) -> Callable[[], None]:
        """Call `_gone` when the machine ends; returns a function that stops watching."""
        return self._watcher.watch(machine.endpoint, partial(self._gone, machine))

    def open(self, on_lost: OnLost, lease: Lease = NO_LEASE) -> None:
        """Prepare the pool; ``on_lost`` is called for machines that end by themselves."""
        self._on_lost, self.lease = on_lost, lease

    def arrange(self, pod: Cluster) -> None:
        """Continue with a changed POD: its present agents and clusters."""
        self.cluster = pod

    def adopt(self, wanted: Collection[MachineUse]) -> dict[MachineUse, int] | None:
        """Take over the machines that an earlier server of the lease's POD left. Machines of ``wanted`` uses go on; the
        others become spares or end. Returns the operation that configured each, `SILENT` for a machine that listens but
        does not answer; None if no machine was left.
        """
        left = self._find_left() if self.lease.epoch else None
        if left is None:
            return None
        machines = [
            PooledMachine(entry.agent_id, entry.endpoint, entry.handle, self._connect(entry.endpoint))
            for entry in left
        ]
        if not machines:
            return {}
        with ThreadPoolExecutor(min(len(machines), 16), thread_name_prefix="podrun-adopt") as threads:
            orders = list(threads.map(_lead, machines))
        adopted: dict[MachineUse, int] = {}
        for machine, order, entry in zip(machines, orders, left, strict=True):
            use = MachineUse(machine.agent_id, entry.partition if order is None else order[0])
            stays = use in wanted and use not in adopted
            if order is None and stays and self._listens(machine):
                log.warning("machine %s listens and does not answer; it is left as it is", machine.agent_id)
                order = (use.partition, SILENT)
            if order is not None and stays:
                adopted[use] = order[1]
                self._keep(machine, use)
            elif (
                order is not None
                and self._is_spare(machine.agent_id)
                and _clear(machine.control, TakenBy.REMOVAL)
            ):
                self._keep(machine, None)
            else:
                self._end(machine)
        with self._lock:
            self._note_machines()
        return adopted

    def _is_spare(self, agent: str) -> bool:
        """Whether a machine of the agent that no partition uses stays."""
        return self._keep_spares and not self._closed and agent not in self._spares

    def _keep(self, machine: PooledMachine, use: MachineUse | None) -> None:
        with self._lock:
            if use is None:
                self._spares[machine.agent_id] = machine
            else:
                self._in_use[use] = machine
        machine.stop_watching = self._watch(machine)

    def prestart(self, agents: Sequence[str]) -> None:
        """Start a spare machine for each agent, all together, for later partitions."""
        with self._lock:
            missing = [agent for agent in agents if agent not in self._spares]
            self._starting.update(missing)
        try:
            for machine in self._launch(missing):
                with self._lock:
                    self._spares[machine.agent_id] = machine
        finally:
            with self._lock:
                self._note_machines()
                self._starting.difference_update(missing)
                self._start_ended.notify_all()

    def acquire(self, uses: Sequence[MachineUse]) -> dict[MachineUse, str]:
        """Give each use a machine, starting those that are missing together; returns endpoints (host:port) of all."""
        missing: list[MachineUse] = []
        with self._lock:
            wanted = {use.agent_id for use in uses if use not in self._in_use}
            # A spare that is already starting is up sooner than a second machine.
            self._start_ended.wait_for(lambda: not wanted & self._starting)
            for use in uses:
                if use not in self._in_use:
                    spare = self._spares.pop(use.agent_id, None)
                    if spare is None:
                        missing.append(use)
                    else:
                        self._in_use[use] = spare
        machines = self._launch([use.agent_id for use in missing])
        with self._lock:
            self._in_use.update(zip(missing, machines, strict=True))
            self._note_machines()
            return {use: self._in_use[use].endpoint for use in uses}

    def endpoints(self) -> dict[MachineUse, str]:
        """Endpoints of the machines in use."""
        with self._lock:
            return {use: machine.endpoint for use, machine in self._in_use.items()}

    def control(self, use: MachineUse) -> Control:
        """The connection to a machine in use. Raises ServiceError if the use has none."""
        with self._lock:
            machine = self._in_use.get(use)
        if machine is None:
            raise ServiceError(
                f"partition {use.partition} has no machine at agent {use.agent_id}",
                hint=f"Reset the partition: vipu reset partition {use.partition}",
            )
        return machine.control

    def release(self, uses: Iterable[MachineUse], taken_by: TakenBy = TakenBy.REMOVAL) -> None:
        """Take machines back: as spares, or ended if they are not wanted or do not answer. ``taken_by``: what processes
        that are attached to them read.
        """
        for use in uses:
            with self._lock:
                machine = self._in_use.pop(use, None)
                wanted = self._is_spare(use.agent_id)
            if machine is None:
                continue
            # Also call it for a machine that ends: attached processes read there why they lose their IPUs.
            cleared = _clear(machine.control, taken_by)
            if wanted and cleared:
                with self._lock:
                    self._spares[use.agent_id] = machine
            else:
                self._end(machine)
        with self._lock:
            self._note_machines()

    def stop_agent(self, agent: str) -> None:
        """End every process of an agent at once; `OnLost` is not called."""
        with self._lock:
            gone = [use for use in self._in_use if use.agent_id == agent]
            machines = [self._in_use.pop(use) for use in gone]
            spare = self._spares.pop(agent, None)
            self._note_machines()
        for machine in machines + ([spare] if spare else []):
            self._end(machine)

    def running_agents(self) -> set[str]:
        """Agents that have a process, in use or spare."""
        with self._lock:
            return {machine.agent_id for machine in self._in_use.values()} | set(self._spares)

    def close(self, *, leave: bool = False) -> None:
        """End everything; with ``leave`` machines stay for the next server of the lease. Idempotent."""
        with self._lock:
            self._closed = True
            machines = [*self._in_use.values(), *self._spares.values()]
            self._in_use.clear()
            self._spares.clear()
        if leave and self.lease.epoch:
            for machine in machines:
                _disconnect(machine)
            return
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="podrun-pool-close") as threads:
            list(threads.map(self._end, machines))

    def _launch(self, agents: Sequence[str]) -> list[PooledMachine]:
        if not agents:
            return []
        machines = [
            PooledMachine(agent, endpoint, handle, self._connect(endpoint))
            for agent, (endpoint, handle) in zip(agents, self._start(agents), strict=True)
        ]
        for machine in machines:
            machine.stop_watching = self._watch(machine)
        return machines

    def check(self, use: MachineUse) -> None:
        """Call `OnLost` if a machine, which did not answer, no longer listens."""
        with self._lock:
            machine = self._in_use.get(use)
        if machine is not None and not self._listens(machine):
            self._gone(machine)

    def _listens(self, machine: PooledMachine) -> bool:
        return listens(machine.endpoint)

    def _gone(self, machine: PooledMachine) -> None:
        """Report a machine whose connection broke, unless the pool ended it."""
        with self._lock:
            ours = [use for use, other in self._in_use.items() if other is machine]
            spare = self._spares.get(machine.agent_id) is machine
            if self._closed or not (ours or spare):
                return
        self._on_lost(machine.agent_id, self._why_ended(machine))

    def _why_ended(self, machine: PooledMachine) -> str:
        """What is known of the end of a machine that the pool did not end, as a phrase."""
        return f"its process at {machine.endpoint} ended"

    def _end(self, machine: PooledMachine) -> None:
        _disconnect(machine)
        self._kill(machine)


def _disconnect(machine: PooledMachine) -> None:
    if machine.stop_watching is not None:
        machine.stop_watching()
    with contextlib.suppress(PodrunError):
        machine.control.close()


def _lead(machine: PooledMachine) -> tuple[str, int] | None:
    """Take command of a machine. None if it does not answer, or obeys a newer server."""
    try:
        return machine.control.lead(timeout=ADOPT_SECONDS)
    except PodrunError as error:
        log.warning("machine %s is not taken over: %s", machine.agent_id, error.message)
        return None


def _clear(control: Control, taken_by: TakenBy = TakenBy.POWER_CYCLE) -> bool:
    """Clear a machine's state. False if it does not answer."""
    try:
        control.power_cycle(taken_by)
    except PodrunError:
        return False
    return True
