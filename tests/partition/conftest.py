"""The real V-IPU service on fake machines, without processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from podrun.core.cluster import Cluster
from podrun.core.cluster_file import load_cluster
from podrun.core.errors import SilentMachineError, TakenBy
from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport
from podrun.faults import FaultSpec
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.pool import LeftMachine, MachinePool
from podrun.partition.server.access import AuditLog, FrontDesk
from podrun.partition.server.service import Service
from podrun.partition.state import events as ev
from podrun.partition.state.accounts import Accounts
from podrun.partition.state.records import ITSELF, Asker
from podrun.partition.state.store import Store
from podrun.partition.state.values import Requirements


class FakeMachine:
    """Remembers its calls; `fail` makes the named call fail."""

    def __init__(self, agent: str, endpoint: str) -> None:
        self.agent, self.endpoint = agent, endpoint
        self.calls: list[tuple[str, Any]] = []
        self.configured: dict[str, Any] = {}
        self.ipu_errors: dict[int, IpuErrorState] = {}
        self.links_down: set[int] = set()
        self.process: AttachedProcess | None = None
        self.alive = True
        self.planned: tuple[FaultSpec, ...] = ()
        self.fail = ""
        self.taken_by: list[TakenBy] = []
        self.gone: Callable[[], None] = lambda: None

    def _note(self, call: str, value: Any = None) -> None:
        if not self.alive or self.fail == call:
            raise SilentMachineError(f"{call} failed at {self.endpoint}")
        self.calls.append((call, value))

    def lead(self, timeout: float | None = None) -> tuple[str, int]:
        self._note("lead")
        return self.configured.get("partition", ""), self.configured.get("operation", 0)

    def configure(self, **settings: Any) -> None:
        self._note("configure", settings)
        self.configured = settings

    def reset_ipus(self, ipus: Sequence[int]) -> None:
        self._note("reset_ipus", list(ipus))
        for ipu in ipus:
            self.ipu_errors.pop(ipu, None)

    def reset_links(self) -> None:
        self._note("reset_links")
        self.links_down.clear()

    def power_cycle(self, taken_by: TakenBy = TakenBy.POWER_CYCLE) -> None:
        self._note("power_cycle")
        self.taken_by.append(taken_by)
        self.configured = {}
        self.ipu_errors.clear()
        self.links_down.clear()
        self.process = None

    def inject(self, faults: Sequence[FaultSpec]) -> None:
        self._note("inject", [fault.text for fault in faults])

    def cancel_faults(self, texts: Sequence[str] = ()) -> None:
        self._note("cancel_faults", list(texts))

    def telemetry(self, timeout: float | None = None) -> MachineReport:
        self._note("telemetry")
        ipus = tuple(
            IpuReport(
                partition_ipu=-1,
                ipu=i,
                error_state=self.ipu_errors.get(i, IpuErrorState.NO_ERRORS),
                links_down=tuple(sorted(self.links_down)),
                process=self.process,
                clock_mhz=1330.0,
            )
            for i in range(4)
        )
        return MachineReport(
            "", pid=4711, ipus=ipus, versions={"IPUoF server": "1.11.0"}, planned_faults=self.planned
        )

    def stop(self) -> None:
        self.alive = False

    def close(self) -> None:
        pass

    def die(self) -> None:
        """End without a request, as if the process had been killed."""
        self.alive = False
        self.gone()


class FakePool(MachinePool):
    """Machines are objects; everything else is the real pool. ``left``: machines that an earlier server left."""

    def __init__(
        self, cluster: Cluster, *, keep_spares: bool = False, left: Sequence[FakeMachine] | None = None
    ) -> None:
        super().__init__(cluster, keep_spares=keep_spares)
        self._left = left
        self.started: list[FakeMachine] = []
        self._ports = itertools.count(41000)

    def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
        machines = [FakeMachine(agent, f"127.0.0.1:{next(self._ports)}") for agent in agents]
        self.started += machines
        return [(machine.endpoint, machine) for machine in machines]

    def _find_left(self) -> list[LeftMachine] | None:
        if self._left is None:
            return None
        found = [machine for machine in self._left if machine.alive]
        self.started += found
        return [LeftMachine(m.agent, m.endpoint, m, m.configured.get("partition", "")) for m in found]

    def _kill(self, machine: Any) -> None:
        machine.handle.stop()

    def _connect(self, endpoint: str) -> Any:
        return next(machine for machine in self.started if machine.endpoint == endpoint)

    def _listens(self, machine: Any) -> bool:
        return bool(machine.handle.alive)

    def _watch(self, machine: Any) -> Callable[[], None]:
        machine.handle.gone = lambda: self._gone(machine)
        return lambda: None

    def machine(self, agent: str, partition: str) -> FakeMachine:
        """The machine in use at an agent for a partition."""
        found = next(
            m for use, m in self._in_use.items() if (use.agent_id, use.partition) == (agent, partition)
        )
        assert isinstance(found.handle, FakeMachine)
        return found.handle


_named = functools.cache(load_cluster)
"""The POD of a name, read once."""


class CheckedService(Service):
    """Checks the whole state, and that the store holds the same, after every event."""

    def _decide(self, event: ev.Event, asker: Asker = ITSELF) -> tuple[ev.MachineOrder, ...]:
        with self._lock:
            instructions = super()._decide(event, asker)
            self._allocator.validate_state()
            stored = self.store.load(_named(self.cluster.name))
            assert {p.name: p for p in stored.partitions} == self._allocator.partitions
            assert stored.lost == self._allocator.lost
            assert stored.layout in (None, self.cluster)
            return instructions


class Pod:
    """A service on fakes with a client that talks to it over gRPC."""

    def __init__(
        self,
        name: str = "pod16",
        state: Path | None = None,
        *,
        keep_spares: bool = False,
        left: Sequence[FakeMachine] | None = None,
        secure: bool = False,
        audit: Path | None = None,
        admin_port: int | None = None,
    ) -> None:
        self.cluster = _named(name)
        self.pool = FakePool(self.cluster, keep_spares=keep_spares, left=left)
        self.service = CheckedService(
            self.cluster, Store(state, name), self.pool, clock=lambda: 1_700_000_000.0
        )
        accounts = Accounts(self.service.store) if secure else None
        self.desk = FrontDesk(accounts=accounts, audit=AuditLog(audit), admin_port=admin_port)
        self.port = self.service.start("127.0.0.1", 0, desk=self.desk)
        self.client = VipuClient("127.0.0.1", self.port, timeout=60)

    def stop(self, *, leave_machines: bool = False) -> None:
        self.client.close()
        self.service.stop(grace=0, leave_machines=leave_machines)

    def active(self, name: str, size: int, **needs: Any) -> None:
        """Create a partition and wait until it is active."""
        self.client.create_partition(Requirements(name, size, **needs))
        assert self.service.wait_idle(60)


@pytest.fixture
def pod16() -> Iterator[Pod]:
    pod = Pod()
    yield pod
    pod.stop()


@pytest.fixture
def make_pod() -> Iterator[Callable[..., Pod]]:
    pods: list[Pod] = []

    def make(*args: Any, **options: Any) -> Pod:
        pods.append(Pod(*args, **options))
        return pods[-1]

    yield make
    for pod in pods:
        pod.stop()
