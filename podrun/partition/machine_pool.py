"""Machines as processes: starting them when a partition needs them, watching them, ending them.

A *seat* is one IPU-M2000 as one partition uses it. Almost always a machine has one seat; partitions of one or
two IPUs may share a machine, and then each gets a process of its own, so that nothing one does can touch the
other.

`MachinePool` is what the service needs. `LocalMachinePool` runs machines in threads of this process (tests,
and wherever processes are not worth their start); `podrun.partition.ray_pool.RayMachinePool` runs each as a
Ray actor.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from podrun.cluster import Cluster
from podrun.errors import PodrunError, ServiceError
from podrun.partition.watch import Watcher, listens
from podrun.telemetry import MachineReport

OnLost = Callable[[str, str], None]
"""Called with (agent id, reason) from a thread of the pool when a machine's process is gone unasked."""


@dataclass(frozen=True, slots=True)
class Seat:
    """One machine as one partition uses it."""

    agent_id: str
    partition: str


class Control(Protocol):
    """The service's hold on one machine; `podrun.device.service.control.MachineControl` over gRPC."""

    def configure(
        self, *, partition: str, first_ipu: int, machine_index: int, endpoints: Sequence[str], ipus: int = 4
    ) -> None:
        """Make the machine part of a partition: its place there, and where all machines of it listen."""

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """Reset IPUs by their index at the machine; clears their errors, not those of links."""

    def reset_links(self) -> None:
        """Retrain the machine's IPU-Links."""

    def power_cycle(self) -> None:
        """Forget everything, as if the power had been off."""

    def inject(self, faults: Iterable[str]) -> None:
        """Plan faults."""

    def telemetry(self) -> MachineReport:
        """What it reports now."""

    def stop(self) -> None:
        """End the machine's server."""

    def close(self) -> None:
        """End the connection."""


class MachinePool(Protocol):
    """Starts and stops machines. Methods may be called from any thread."""

    def open(self, on_lost: OnLost) -> None:
        """Get ready; ``on_lost`` is told of machines that end unasked."""

    def prestart(self, agents: Sequence[str]) -> None:
        """Start a spare machine for each agent, all together, for partitions to come."""

    def acquire(self, seats: Sequence[Seat]) -> dict[Seat, str]:
        """Machines for seats that have none, started together; endpoints (host:port) of all seats."""

    def endpoints(self) -> dict[Seat, str]:
        """Where the machines that are in use listen."""

    def control(self, seat: Seat) -> Control:
        """The hold on a machine in use. Raises ServiceError if there is none."""

    def release(self, seats: Iterable[Seat]) -> None:
        """Take machines back; a machine that cannot be used again is ended."""

    def check(self, seat: Seat) -> None:
        """Somebody got no answer from a machine: tell `OnLost` if it is gone."""

    def stop_agent(self, agent: str) -> None:
        """End every process of an agent, at once and without a word to `OnLost`."""

    def running_agents(self) -> set[str]:
        """Agents that have a process, in use or spare."""

    def close(self) -> None:
        """End everything. Idempotent."""


@dataclass(slots=True)
class _Machine:
    """A running machine. ``handle`` is what starts and ends it (a server, an actor)."""

    agent_id: str
    endpoint: str
    handle: Any
    control: Control
    watch: Callable[[], None] | None = None


class BasePool:
    """What pools have in common: seats, spares, watching. A subclass starts and ends machines."""

    def __init__(self, cluster: Cluster, *, keep_spares: bool = False) -> None:
        self.cluster = cluster
        self._keep_spares = keep_spares
        self._lock = threading.RLock()
        self._seated: dict[Seat, _Machine] = {}
        self._spares: dict[str, _Machine] = {}
        self._coming: set[str] = set()
        self._came = threading.Condition(self._lock)
        self._on_lost: OnLost = lambda agent, reason: None
        self._closed = False
        self._watcher = Watcher()

    # A subclass provides these three.

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        """Start a machine for each of ``agents`` (one may stand there twice), together: endpoints and
        handles.
        """
        raise NotImplementedError

    def _kill(self, machine: _Machine) -> None:
        """End a machine for certain. Does not raise if it is gone already."""
        raise NotImplementedError

    def _connect(self, endpoint: str) -> Control:
        """A hold on the machine at an endpoint."""
        raise NotImplementedError

    def _watch(self, machine: _Machine) -> Callable[[], None]:
        """Have `_gone` called when the machine ends; returns how to stop watching."""
        return self._watcher.watch(machine.endpoint, partial(self._gone, machine))

    def open(self, on_lost: OnLost) -> None:
        """See MachinePool."""
        self._on_lost = on_lost

    def prestart(self, agents: Sequence[str]) -> None:
        """See MachinePool."""
        with self._lock:
            missing = [agent for agent in agents if agent not in self._spares]
            self._coming.update(missing)
        try:
            for machine in self._launch(missing):
                with self._lock:
                    self._spares[machine.agent_id] = machine
        finally:
            with self._lock:
                self._coming.difference_update(missing)
                self._came.notify_all()

    def acquire(self, seats: Sequence[Seat]) -> dict[Seat, str]:
        """See MachinePool."""
        missing: list[Seat] = []
        with self._lock:
            wanted = {seat.agent_id for seat in seats if seat not in self._seated}
            # A spare that is on its way is there sooner than a second machine beside it.
            self._came.wait_for(lambda: not wanted & self._coming)
            for seat in seats:
                if seat not in self._seated:
                    spare = self._spares.pop(seat.agent_id, None)
                    if spare is None:
                        missing.append(seat)
                    else:
                        self._seated[seat] = spare
        machines = self._launch([seat.agent_id for seat in missing])
        with self._lock:
            self._seated.update(zip(missing, machines, strict=True))
            return {seat: self._seated[seat].endpoint for seat in seats}

    def endpoints(self) -> dict[Seat, str]:
        """See MachinePool."""
        with self._lock:
            return {seat: machine.endpoint for seat, machine in self._seated.items()}

    def control(self, seat: Seat) -> Control:
        """See MachinePool."""
        with self._lock:
            machine = self._seated.get(seat)
        if machine is None:
            raise ServiceError(
                f"partition {seat.partition} has no machine at agent {seat.agent_id}",
                hint=f"Reset the partition: vipu reset partition {seat.partition}",
            )
        return machine.control

    def release(self, seats: Iterable[Seat]) -> None:
        """See MachinePool."""
        for seat in seats:
            with self._lock:
                machine = self._seated.pop(seat, None)
                wanted = self._keep_spares and not self._closed and seat.agent_id not in self._spares
            if machine is None:
                continue
            if wanted and _clean(machine.control):
                with self._lock:
                    self._spares[seat.agent_id] = machine
            else:
                self._end(machine)

    def stop_agent(self, agent: str) -> None:
        """See MachinePool."""
        with self._lock:
            gone = [seat for seat in self._seated if seat.agent_id == agent]
            machines = [self._seated.pop(seat) for seat in gone]
            spare = self._spares.pop(agent, None)
        for machine in machines + ([spare] if spare else []):
            self._end(machine)

    def running_agents(self) -> set[str]:
        """See MachinePool."""
        with self._lock:
            return {machine.agent_id for machine in self._seated.values()} | set(self._spares)

    def close(self) -> None:
        """See MachinePool."""
        with self._lock:
            self._closed = True
            machines = [*self._seated.values(), *self._spares.values()]
            self._seated.clear()
            self._spares.clear()
        with ThreadPoolExecutor(max_workers=8, thread_name_prefix="podrun-pool-close") as threads:
            list(threads.map(self._end, machines))

    def _launch(self, agents: Sequence[str]) -> list[_Machine]:
        if not agents:
            return []
        machines = [
            _Machine(agent, endpoint, handle, self._connect(endpoint))
            for agent, (endpoint, handle) in zip(agents, self._start(agents), strict=True)
        ]
        for machine in machines:
            machine.watch = self._watch(machine)
        return machines

    def check(self, seat: Seat) -> None:
        """See MachinePool."""
        with self._lock:
            machine = self._seated.get(seat)
        if machine is not None and not self._listens(machine):
            self._gone(machine)

    def _listens(self, machine: _Machine) -> bool:
        return listens(machine.endpoint)

    def _gone(self, machine: _Machine) -> None:
        """The connection to a machine broke: tell, unless it was ended on purpose."""
        with self._lock:
            ours = [seat for seat, other in self._seated.items() if other is machine]
            spare = self._spares.get(machine.agent_id) is machine
            if self._closed or not (ours or spare):
                return
        self._on_lost(machine.agent_id, f"its process at {machine.endpoint} ended")

    def _end(self, machine: _Machine) -> None:
        if machine.watch is not None:
            machine.watch()
        with contextlib.suppress(PodrunError):
            machine.control.close()
        self._kill(machine)


def _clean(control: Control) -> bool:
    """Make a machine as new. False if it does not answer."""
    try:
        control.power_cycle()
    except PodrunError:
        return False
    return True


class LocalMachinePool(BasePool):
    """Machines in threads of this process, each behind its own gRPC server on 127.0.0.1."""

    def __init__(
        self, cluster: Cluster, *, keep_spares: bool = False, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(cluster, keep_spares=keep_spares)
        self._options = dict(options or {})

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        from podrun.device.service.server import MachineServer

        started = []
        for agent in agents:
            server = MachineServer(agent_id=agent, target=self.cluster.target, **self._options)
            started.append((server.start(), server))
        return started

    def _kill(self, machine: _Machine) -> None:
        machine.handle.stop()

    def _connect(self, endpoint: str) -> Control:
        from podrun.device.service.control import MachineControl

        control: Control = MachineControl(endpoint)
        return control
