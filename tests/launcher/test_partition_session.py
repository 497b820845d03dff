"""Launches that compete for partitions, against a service on fake machines."""

from __future__ import annotations

import io
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from podrun.core.cluster import Cluster
from podrun.core.errors import ConflictError, DeniedError, ExhaustedError, ServiceError, UsageError
from podrun.core.ipu_states import MachineState
from podrun.core.layout import IpuRange
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport
from podrun.launcher import machine_work, partition
from podrun.launcher.launch_server import LaunchOverError, LaunchPauses, LaunchServer
from podrun.launcher.machine_work import reports_of_all, work_since
from podrun.launcher.options import parse_command_line
from podrun.launcher.own_streams import Log
from podrun.launcher.partition import LaunchPartition
from podrun.launcher.plan import plan_launch
from podrun.launcher.program import LaunchContext
from podrun.launcher.recovery import Answer, Attempt, Coordinator, FailureKind, Recovery, RestartPolicy
from podrun.launcher.repair import Repairs
from podrun.launcher.server import usable_names
from podrun.launcher.spec import CurrentLaunch, LaunchSpec
from podrun.partition.client.connection import NoServerError
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import POD, Registry, ServiceEntry, own_process_id
from podrun.partition.host.holders import this_holder
from podrun.partition.host.leases import SignsOfLife
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.state import events as ev
from podrun.partition.state.orphans import HolderWatch
from podrun.partition.state.values import PartitionState
from tests.conftest import wait_until
from tests.partition.conftest import Pod


class Launches:
    """Partitions of launches on one POD. ``between``: what happens between two attempts of the next one."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.between: list[Callable[[], None]] = []
        self.said = io.StringIO()
        self._sessions: list[LaunchPartition] = []

    def __call__(self, words: str) -> LaunchPartition:
        line = parse_command_line(
            ["--vipu-server-host=127.0.0.1", f"--vipu-server-port={self.pod.port}", *words.split(), "true"]
        )
        spec = plan_launch(line.options, line.program, LaunchContext({"PATH": os.defpath}, "/", "python"))
        server = LaunchServer(CurrentLaunch(spec), {}, Log(stream=self.said))
        session = LaunchPartition(server, pauses=WatchedPauses(self))
        self._sessions.append(session)
        server.connect()
        return session

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class WatchedPauses(LaunchPauses):
    def __init__(self, launches: Launches) -> None:
        super().__init__()
        self._launches = launches

    def pause(self, seconds: float) -> None:
        if seconds == partition.BETWEEN_ATTEMPTS_SECONDS:
            self._launches.between.pop(0)()


@pytest.fixture
def launch() -> Iterator[Launches]:
    pod = Pod()
    launches = Launches(pod)
    yield launches
    launches.close()
    pod.stop()


def test_a_partition_of_another_launch_is_not_the_only_one(launch: Launches) -> None:
    launch.pod.active(f"podrun-{os.getppid()}", 8)
    session = launch("--num-replicas 8")
    assert session.prepare()
    assert session.name == f"podrun-{os.getpid()}"
    names = sorted(f"podrun-{pid}" for pid in (os.getpid(), os.getppid()))
    with pytest.raises(ExhaustedError, match=f"partitions in the way: {names[0]} .*, {names[1]} "):
        launch("--num-replicas 4 --vipu-partition third").prepare()


def test_a_partition_ends_with_its_launch(launch: Launches) -> None:
    service = launch.pod.service
    session = launch("--num-replicas 4")
    session.prepare()
    session.wait_active()
    info = service.partition(session.name)
    assert info.holder == str(this_holder())
    assert usable_names({info.name: info, "own": replace(info, name="own", holder="")}, {}) == ["own"]
    dead = SignsOfLife(see=lambda text: False)
    service._holders = HolderWatch(dead)  # The launch is killed.
    service.look_around()
    wait_until(lambda: service.partitions() == [], 60, "the partition is removed")
    kept = launch("--num-replicas 4 --remove-partition=no --vipu-partition=stays")
    kept.prepare()
    assert service.partition("stays").holder == ""


def test_a_server_that_is_starting_again_is_waited_for(tmp_path: Path, silent_port: int) -> None:
    """Its machines run: their keeper says at which port it will be back. A port without any is an error at once."""
    words = ["--vipu-server-host=127.0.0.1", f"--vipu-server-port={silent_port}", "--num-replicas=4", "true"]
    line = parse_command_line(words)
    spec = plan_launch(line.options, line.program, LaunchContext({"PATH": os.defpath}, "/", "python"))
    said, environ = io.StringIO(), {"PODRUN_RUNTIME_DIR": str(tmp_path)}
    pauses: list[float] = []

    def start_again(seconds: float) -> None:
        pauses.append(seconds)
        raise LaunchOverError("it would have been waited for")

    with pytest.raises(NoServerError):
        LaunchServer(CurrentLaunch(spec), environ, Log(stream=said)).connect(start_again)
    assert (pauses, said.getvalue()) == ([], "")
    entry = ServiceEntry(
        POD, "", 0, own_process_id(), "pod16", pod="4711", address="h:1", last_port=silent_port
    )
    Registry(tmp_path).publish(entry)
    with pytest.raises(LaunchOverError):
        LaunchServer(CurrentLaunch(spec), environ, Log(stream=said)).connect(start_again)
    assert said.getvalue().startswith(
        "podrun: waiting for the V-IPU server: no V-IPU server answers at 127.0.0.1"
    )


def test_what_an_earlier_launch_has_left_on_purpose_is(launch: Launches) -> None:
    gone = 1 << 22  # Linux gives no process a larger number.
    launch.pod.active(f"podrun-{gone}", 8)
    session = launch("--num-replicas 8")
    assert not session.prepare()
    assert session.name == f"podrun-{gone}"
    launch.pod.active("other", 8)
    with pytest.raises(UsageError, match=f"there are several partitions: other, podrun-{gone}$"):
        launch("--num-replicas 8").prepare()


def test_a_partition_of_another_user_is_neither_taken_nor_named(launch: Launches) -> None:
    launch.pod.active("theirs", 4)
    launch.pod.active("ours", 4)
    there = {info.name: info for info in launch.pod.client.list_partitions()}
    there["theirs"] = replace(there["theirs"], owner="somebody else")
    assert usable_names(there, {}) == ["ours"]
    # A server with users of its own knows which account's they are.
    assert usable_names(there, {"VIPU_CLI_API_USER_ID": "me"}) == ["ours", "theirs"]


def test_a_partition_that_its_server_denies_is_refused_before_anything_starts(
    launch: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(client: VipuClient, name: str, gcd: int = 0) -> None:
        raise DeniedError(f"partition {name} belongs to somebody, not to you")

    launch.pod.active("theirs", 4)
    monkeypatch.setattr(VipuClient, "ipuof_config", denied)
    with pytest.raises(DeniedError, match="partition theirs belongs to somebody"):
        launch("--num-replicas 4 --vipu-partition theirs").prepare()


def _remove(launch: Launches, name: str) -> None:
    """Remove a partition and wait until its IPUs are free."""
    launch.pod.client.remove_partition(name)
    launch.pod.client.wait_for_state(name, {PartitionState.REMOVED}, 60)


def test_attempts_wait_for_ipus_that_others_have(launch: Launches) -> None:
    launch.pod.active("mine", 16)
    launch.between = [lambda: None, lambda: _remove(launch, "mine")]
    session = launch("--num-replicas 16 --vipu-partition yours --vipu-partition-attempts 5")
    assert session.prepare()
    assert launch.between == []
    assert "[W] attempt 1 of 5: no 16 aligned IPUs are free" in launch.said.getvalue()
    launch.between = [lambda: None]
    with pytest.raises(ExhaustedError, match="partitions in the way: yours"):
        launch("--num-replicas 16 --vipu-partition mine --vipu-partition-attempts 2").prepare()
    assert launch.between == []


def test_attempts_wait_for_a_partition_in_use(launch: Launches) -> None:
    launch.pod.active("shared", 4)
    machine = launch.pod.pool.machine("ipum1", "shared")
    machine.process = AttachedProcess(pid=4711, user="u", command="train.py", start_time_s=0.0)
    with pytest.raises(ExhaustedError, match=r"partition shared is in use by process 4711 \(train\.py\)"):
        launch("--num-replicas 4 --vipu-partition shared").prepare()
    launch.between = [lambda: setattr(machine, "process", None)]
    assert not launch("--num-replicas 4 --vipu-partition shared --vipu-partition-attempts 2").prepare()


def test_machines_that_do_not_answer_in_time_are_asked_again() -> None:
    up, silent = MachineReport("ipum1"), MachineReport("ipum1", state=MachineState.NO_ANSWER)
    replies, pauses = iter([[silent, up], [up, silent], [up, up], [silent]]), list[float]()
    assert reports_of_all(lambda: next(replies), pauses.append) == [up, up]
    assert pauses == [machine_work.BETWEEN_REPORTS_SECONDS] * 2
    assert reports_of_all(lambda: [silent], pauses.append, attempts=4) == [silent]
    assert len(pauses) == 5


def test_a_launch_is_refused_by_name_of_the_machine_that_is_silent() -> None:
    def report(machine: int, state: MachineState) -> MachineReport:
        ipus = tuple(IpuReport(4 * machine + i, i) for i in range(4))
        return MachineReport(f"ipum{machine + 1}", state=state, stale_seconds=12.4, ipus=ipus)

    pauses: list[float] = []
    there = [report(0, MachineState.UP), report(1, MachineState.NO_ANSWER)]
    reports = machine_work.LaunchReports(lambda: there, pauses.append, Log(stream=io.StringIO()))
    with pytest.raises(
        ServiceError, match="machine ipum2 of partition p has not answered for 12 s"
    ) as refused:
        reports.answering("p", IpuRange(0, 8))
    assert refused.value.hint == (
        "Replace the machine: vipu-admin restart agent ipum2, then: vipu reset partition p"
    )
    assert len(pauses) == machine_work.SILENT_ATTEMPTS - 1
    assert reports.answering("p", IpuRange(0, 4)) == there  # It does not need the machine, and does not wait.
    assert len(pauses) == machine_work.SILENT_ATTEMPTS - 1


def test_a_launch_waits_in_the_queue(launch: Launches) -> None:
    launch.pod.active("taken", 16)
    session = launch("--num-replicas 16 --vipu-partition mine --wait yes")
    waiter = threading.Thread(target=session.prepare)
    waiter.start()
    wait_until(lambda: bool(launch.pod.client.list_queue()), 60, "the launch is not in the queue")
    assert [told.name for told in launch.pod.client.list_queue()] == ["mine"]
    launch.pod.client.remove_partition("taken")
    waiter.join(60)
    assert not waiter.is_alive()
    session.wait_active()
    assert launch.pod.client.list_queue() == []
    assert "[W] partition mine waits in the queue; see vipu explain mine" in launch.said.getvalue()


def test_the_work_of_a_launch_is_not_that_of_others_in_its_partition() -> None:
    def report(machine: int, done: tuple[int, ...]) -> MachineReport:
        ipus = tuple(IpuReport(4 * machine + i, i, batches_done=done[i]) for i in range(4))
        return MachineReport(
            f"ipum{machine + 1}",
            ipus=ipus,
            batches_done=max(done),
            samples_done=90,
            modelled_s=0.7,
            emulation_s=1.4,
        )

    busy, idle, half = report(0, (9,) * 4), report(1, (0,) * 4), report(2, (9, 9, 2, 2))
    reports = machine_work.LaunchReports(
        lambda: [busy, idle, half], lambda seconds: None, Log(stream=io.StringIO())
    )
    assert reports.of_launch(IpuRange(4, 4)) == [idle]
    assert reports.of_launch(IpuRange(0, 4)) == [busy]
    (own,) = reports.of_launch(IpuRange(10, 2))
    assert [ipu.partition_ipu for ipu in own.ipus] == [10, 11]
    assert own.batches_done == 2
    assert (own.samples_done, own.modelled_s, own.emulation_s) == (None, None, None)


def test_the_work_of_a_launch_is_what_machines_did_since() -> None:
    now = MachineReport("ipum1", batches_done=7, samples_done=70, modelled_s=0.7, emulation_s=1.4)
    assert work_since([MachineReport("ipum1")], now) == now  # It was not ready, so its report had no samples.
    before = MachineReport("ipum1", batches_done=2, samples_done=20, modelled_s=0.2, emulation_s=0.4)
    since = work_since([before], now)
    assert (since.batches_done, since.samples_done) == (5, 50)
    assert since.emulation_s == pytest.approx(1.0)
    assert work_since([now], before) == before  # The machine was started anew.
    ipus = [tuple(IpuReport(i, i, batches_done=done[i]) for i in range(2)) for done in ((2, 5), (7, 5))]
    earlier, later = (MachineReport("ipum1", batches_done=5, ipus=each) for each in ipus)
    assert [ipu.batches_done for ipu in work_since([earlier], later).ipus] == [5, 0]
    unknown = MachineReport("ipum1", batches_done=2)
    assert (
        work_since([unknown], now).samples_done == 70
    )  # An earlier job did not say how many samples it took.


@pytest.mark.parametrize(
    ("after", "wanted"), [(Answer.REPLACE, 8), (Answer.FEWER, 4)], ids=["replace", "fewer replicas"]
)
def test_a_spare_without_room_leaves_the_next_way(launch: Launches, after: Answer, wanted: int) -> None:
    """Two machines are left, and no partition of 8 fits on them: by then the old partition is gone."""

    def replan(replicas: int) -> LaunchSpec:
        line = parse_command_line([f"--num-replicas={replicas}", "true"])
        return plan_launch(line.options, line.program, LaunchContext({"PATH": os.defpath}, "/", "python"))

    session = launch("--num-replicas 8")
    session.prepare()
    session.wait_active()
    for agent in ("ipum2", "ipum4"):
        launch.pod.service.handle(ev.AgentLost(agent, "power"))
    repairs = Repairs(session, Log(stream=launch.said), replan)
    damage, _ = repairs.look()
    policy = RestartPolicy(1, after={FailureKind.LOST: (Answer.SPARE, after)})
    answer = Coordinator(policy).failed(Attempt("instance 0 failed", 1, damage))
    assert isinstance(answer, Recovery)
    assert repairs.carry_out(answer) == answer.ways[1]
    session.wait_again()
    assert "no 8 aligned IPUs are free" in launch.said.getvalue()
    (info,) = launch.pod.service.partitions()
    assert (info.name, info.size, info.state) == (session.name, wanted, PartitionState.ACTIVE)


class BegunPool(LocalMachinePool):
    """A pool of a launch's own server that notes when its Ray begins."""

    begun: ClassVar[list[str]] = []

    def __init__(self, cluster: Cluster, *, address: str | None, token: str) -> None:
        super().__init__(cluster)

    def begin(self) -> None:
        """See `RayMachinePool`."""
        self.begun.append(self.cluster.name)


@pytest.mark.parametrize(
    ("words", "begun"),
    [
        ("--num-replicas=4", ["pod16"]),
        ("--num-replicas=4 --vipu-server-port={free}", []),  # Another program may have that port.
        ("--num-replicas=16 --num-ilds=2 --num-instances=2", None),
        ("--num-replicas=4 --vipu-server-port={taken}", None),
    ],
)
def test_ray_begins_before_the_launchs_own_server_once_nothing_can_refuse_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent_port: int, words: str, begun: list[str] | None
) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("podrun.partition.machines.ray_pool.RayMachinePool", BegunPool)
    monkeypatch.setattr(BegunPool, "begun", [])
    environ = {"PATH": os.defpath, "IPUOF_VIPU_API_PORT": str(silent_port)}
    with socket.socket() as taken, socket.socket() as free:
        # Bound so and not listening, it leaves its port to a server that is told the number and binds in the same way,
        # as gRPC's does, and to no program that takes any port.
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for bound in (taken, free):
            bound.bind(("127.0.0.1", 0))
        taken.listen()
        ports = {"taken": taken.getsockname()[1], "free": free.getsockname()[1]}
        line = parse_command_line([*words.format(**ports).split(), "true"])
        spec = plan_launch(line.options, line.program, LaunchContext(environ, "/", "python"))
        server = LaunchServer(CurrentLaunch(spec), environ, Log(stream=io.StringIO()))
        try:
            with nullcontext() if begun is not None else pytest.raises((UsageError, ConflictError)):
                assert server.connect().name == "pod16"
        finally:
            server.close()
    assert BegunPool.begun == (begun or [])


class ClosedPool(BegunPool):
    """Notes that it was closed, too."""

    def close(self, *, leave: bool = False) -> None:
        """See `RayMachinePool`."""
        super().close(leave=leave)
        self.begun.append("closed")


def test_a_ray_that_began_is_closed_where_the_launchs_own_server_cannot_be_made(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, silent_port: int
) -> None:
    def refuse(*args: object) -> None:
        raise ServiceError("no room for a server")

    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("podrun.partition.machines.ray_pool.RayMachinePool", ClosedPool)
    monkeypatch.setattr("podrun.partition.server.service.Service", refuse)
    monkeypatch.setattr(BegunPool, "begun", [])
    environ = {"PATH": os.defpath, "IPUOF_VIPU_API_PORT": str(silent_port)}
    line = parse_command_line(["--num-replicas=4", "true"])
    spec = plan_launch(line.options, line.program, LaunchContext(environ, "/", "python"))
    server = LaunchServer(CurrentLaunch(spec), environ, Log(stream=io.StringIO()))
    with pytest.raises(ServiceError, match="no room"):
        server.connect()
    server.close()
    assert BegunPool.begun == ["pod16", "closed"]
