"""Machines in threads of this process: the real server and the real control, without processes."""

from __future__ import annotations

import ctypes
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ServiceError
from podrun.device.service.control import MachineControl
from podrun.faults import parse_faults
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import listens
from podrun.partition.machines import ray_session
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.machines.ray_head import HeadWatch
from podrun.partition.server.service import Service
from podrun.partition.state.records import MachineUse
from podrun.partition.state.store import Store
from podrun.partition.state.values import PartitionState, Requirements

from .conftest import FakePool

S = PartitionState


@pytest.fixture
def pool() -> Iterator[LocalMachinePool]:
    pool = LocalMachinePool(load_cluster("pod16"))
    yield pool
    pool.close()


def test_each_use_has_a_machine_of_its_own(pool: LocalMachinePool) -> None:
    one, two = MachineUse("ipum1", "p"), MachineUse("ipum1", "q")
    where = pool.acquire([one, two])
    assert where[one] != where[two]
    assert pool.acquire([one]) == {one: where[one]}
    assert pool.running_agents() == {"ipum1"}
    pool.release([one])
    assert not listens(where[one])
    assert listens(where[two])
    with pytest.raises(ServiceError, match="no machine at agent ipum1"):
        pool.control(one)
    pool.close()
    pool.close()
    assert not listens(where[two])


def test_the_service_on_real_machines(pool: LocalMachinePool) -> None:
    service = Service(pool.cluster, Store(None, "pod16"), pool)
    port = service.start("127.0.0.1", 0)
    try:
        with VipuClient("127.0.0.1", port, timeout=30) as client:
            client.create_partition(
                Requirements("p", 8, reconfigurable=True, faults=parse_faults("machine:1@batch=3:lost"))
            )
            client.wait_for_state("p", {S.ACTIVE}, 60)
            reports = client.machine_reports("p")
            assert [report.state for report in reports] == ["up", "up"]
            assert [ipu.partition_ipu for report in reports for ipu in report.ipus] == list(range(8))
            assert all(ipu.error_state == "no errors" for report in reports for ipu in report.ipus)
            client.reset_partition("p")
            client.wait_for_state("p", {S.ACTIVE}, 60)
            client.reset_ipus("p", [5])
            client.power_cycle_agent("ipum2")
            assert client.partition_state("p")[0] is S.ERROR
            client.reset_partition("p")
            client.wait_for_state("p", {S.ACTIVE}, 60)
            # The server of a machine ends without a word, as if its process had been killed.
            pool._in_use[MachineUse("ipum2", "p")].handle._end_abruptly()
            assert client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR
            assert "machine ipum2 is lost" in client.get_partition("p").error
            client.restart_agent("ipum2")
            client.reset_partition("p")
            client.wait_for_state("p", {S.ACTIVE}, 60)
            client.remove_partition("p")
            client.wait_for_state("p", {S.REMOVED}, 60)
            assert pool.running_agents() == set()
    finally:
        service.stop(grace=0)


def test_one_stopped_machine_leaves_the_reports_of_the_others(
    pool: LocalMachinePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(pool.cluster, Store(None, "pod16"), pool)
    port = service.start("127.0.0.1", 0)
    try:
        with (
            VipuClient("127.0.0.1", port, timeout=60) as client,
            socket.create_server(("127.0.0.1", 0)) as stopped,
        ):
            client.create_partition(Requirements("p", 8))
            client.wait_for_state("p", {S.ACTIVE}, 60)
            # From outside, a stopped process is a port that accepts connections and never answers.
            machine = pool._in_use[MachineUse("ipum2", "p")]
            running = machine.control
            machine.control = MachineControl(f"127.0.0.1:{stopped.getsockname()[1]}")
            for seconds in (0.5, 5.0, 25.0):  # on a busy host those that do answer take longer
                monkeypatch.setattr("podrun.partition.machines.operations.REPORT_SECONDS", seconds)
                reports = {report.agent_id: report for report in client.machine_reports()}
                if reports["ipum1"].state == "up":
                    break
            assert {agent: report.state for agent, report in reports.items()} == {
                "ipum1": "up",
                "ipum2": "no answer",
                "ipum3": "standby",
                "ipum4": "standby",
            }
            assert [ipu.error_state for ipu in reports["ipum2"].ipus] == ["no answer"] * 4
            assert [ipu.error_state for ipu in reports["ipum1"].ipus] == ["no errors"] * 4
            machine.control.close()
            machine.control = running
    finally:
        service.stop(grace=0)


def test_ending_ray_keeps_the_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ray:
        def shutdown(self) -> None:  # As Ray's core does, below Python.
            ctypes.CDLL(None).signal(signal.SIGTERM, None)

    def caught() -> bool:
        (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("SigCgt")]
        return bool(int(line.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    session = object.__new__(ray_session.RaySession)
    monkeypatch.setattr(ray_session, "_initialized", lambda: True)
    session.__dict__.update(
        ray=Ray(),
        processes=(),
        directory=None,
        _owned=True,
        _gcs=(),
        _guardian=None,
        _template=None,
        _saved={},
    )
    session._closed = threading.Event()
    session.head = HeadWatch("", lambda address, seconds: "")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        session.close()
        assert caught()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_partition_waits_for_spares_that_are_starting() -> None:
    cluster = load_cluster("pod16")
    begun, waiting, let = threading.Event(), threading.Event(), threading.Event()

    class SlowPool(FakePool):
        def _start(self, agents: Sequence[str]) -> list[tuple[str, Any]]:
            begun.set()
            assert let.wait(60)
            return super()._start(agents)

    class Noticed(threading.Condition):
        def wait_for(self, predicate: Any, timeout: float | None = None) -> Any:
            waiting.set()
            return super().wait_for(predicate, timeout)

    pool = SlowPool(cluster)
    pool._start_ended = Noticed(pool._lock)
    agents = [agent.id for agent in cluster.agents]
    uses = [MachineUse(agent, "p") for agent in agents[:2]]
    with ThreadPoolExecutor(2) as threads:
        prestart = threads.submit(pool.prestart, agents)
        assert begun.wait(60)
        acquired = threads.submit(pool.acquire, uses)
        assert waiting.wait(60)
        let.set()
        prestart.result(60)
        assert set(acquired.result(60)) == set(uses)
    assert len(pool.started) == len(agents)
    pool.close()
