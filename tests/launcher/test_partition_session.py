"""Launches that compete for partitions, against a service on pretended machines."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator

import pytest

from podrun.errors import ExhaustedError, UsageError
from podrun.launcher import partition
from podrun.launcher.log import Log
from podrun.launcher.options import parse_command_line
from podrun.launcher.partition import PartitionSession
from podrun.launcher.plan import Surroundings, plan_launch
from podrun.telemetry import AttachedProcess
from tests.partition.conftest import Pod


class Launches:
    """Sessions of launches on one POD. ``between``: what happens between two attempts of the next one."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self.between: list[Callable[[], None]] = []
        self.said = io.StringIO()
        self._sessions: list[PartitionSession] = []

    def __call__(self, words: str) -> PartitionSession:
        line = parse_command_line(
            ["--vipu-server-host=127.0.0.1", f"--vipu-server-port={self.pod.port}", *words.split(), "true"]
        )
        spec = plan_launch(line.given, line.program, Surroundings({"PATH": os.defpath}, "/", "python"))
        session = Watched(spec, {}, Log(stream=self.said), launches=self)
        self._sessions.append(session)
        session.connect()
        return session

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class Watched(PartitionSession):
    def __init__(self, *args: object, launches: Launches) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._launches = launches

    def _pause(self, seconds: float) -> None:
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
    with pytest.raises(ExhaustedError, match=f"partitions in the way: {', '.join(names)}$"):
        launch("--num-replicas 4 --vipu-partition third").prepare()


def test_what_an_earlier_launch_has_left_on_purpose_is(launch: Launches) -> None:
    gone = 1 << 22  # Linux gives no process a larger number.
    launch.pod.active(f"podrun-{gone}", 8)
    session = launch("--num-replicas 8")
    assert not session.prepare()
    assert session.name == f"podrun-{gone}"
    launch.pod.active("other", 8)
    with pytest.raises(UsageError, match=f"there are several partitions: other, podrun-{gone}$"):
        launch("--num-replicas 8").prepare()


def test_attempts_wait_for_ipus_that_others_have(launch: Launches) -> None:
    launch.pod.active("mine", 16)
    launch.between = [lambda: None, lambda: launch.pod.client.remove_partition("mine")]
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
