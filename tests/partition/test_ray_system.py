"""Real processes: machines as Ray actors behind `vipu-server`. Nothing is left behind, however they end."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil
import pytest

from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import ProcessId, Registry
from podrun.partition.machines.keeper import keepers
from podrun.partition.state.values import PartitionState, Requirements
from tests.conftest import Commands, script

pytestmark = [pytest.mark.system, pytest.mark.slow]
S = PartitionState


class Server:
    """A `vipu-server` process on a free port, with its own directories."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.environ = {
            **os.environ,
            "PODRUN_MACHINES_PER_PROCESS": "1",  # a killed process is one machine, whatever the host
            "PODRUN_RUNTIME_DIR": str(directory / "run"),
            "XDG_STATE_HOME": str(directory / "state"),
        }
        self.options = options
        self.run = directory / "run"
        self.family: list[ProcessId | None] = []
        self.start()

    def start(self, stderr: IO[str] | None = None) -> None:
        """Start it, once more after it was killed."""
        command = [
            sys.executable,
            "-m",
            "podrun.partition.commands.vipu_server",
            "--cluster=pod16",
            "--port=0",
            "--prestart",
        ]
        self.process = subprocess.Popen(
            [*command, *self.options],
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,  # so that select tells whether there is a line
            start_new_session=True,
        )
        self.await_machines()

    def await_machines(self) -> None:
        """Read what it says until all machines are up."""
        first, second = self._line(), self._line()
        assert second == "4 machines are up\n"
        self.port = int(first.rpartition(":")[2])
        parents = [self.process.pid, *(entry.owner.pid for entry in keepers(Registry(self.run)))]
        for parent in parents[1:]:
            self.family.append(ProcessId.of(parent))
        for parent in parents:
            self.family += [ProcessId.of(p.pid) for p in psutil.Process(parent).children(recursive=True)]

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 120)
        assert ready, "vipu-server said nothing for two minutes"
        return bytes(self.process.stdout.readline()).decode()

    def client(self) -> VipuClient:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PODRUN_RUNTIME_DIR", str(self.run))  # where the server's user keeps the secret
            return VipuClient("127.0.0.1", self.port, timeout=30)

    def ended(self, patience: float) -> bool:
        """True iff everything that the server had started ends in that time."""
        end = time.monotonic() + patience
        while time.monotonic() < end:
            if not any(process is not None and process.alive for process in self.family):
                return True
            select.select([], [], [], 0.05)
        return False


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path / "run"))  # The token is there.
    server = Server(tmp_path)
    yield server
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(30)
    assert server.ended(30)


def machine_pid(client: VipuClient, index: int) -> int:
    pid = client.machine_reports("p")[index].pid
    assert pid is not None
    return pid


def check_that_it_moves(client: VipuClient) -> None:
    """A relocatable partition becomes active on another machine when its own is killed."""
    client.create_partition(Requirements("p", 4, relocatable=True))
    client.wait_for_state("p", {S.ACTIVE}, 60)
    before = client.get_partition("p")
    os.kill(machine_pid(client, 0), signal.SIGKILL)
    end = time.monotonic() + 60
    while (now := client.get_partition("p")).state is not S.ACTIVE or now.generation == before.generation:
        assert time.monotonic() < end
        select.select([], [], [], 0.02)
    assert now.generation == before.generation + 1
    assert now.agents != before.agents
    (report,) = client.machine_reports("p")
    assert (report.state, report.agent_id) == ("up", now.agents[0])


def test_recovery_and_a_clean_stop(server: Server) -> None:
    with server.client() as client:
        client.create_partition(Requirements("p", 16, reconfigurable=True))
        client.wait_for_state("p", {S.ACTIVE}, 60)
        template = psutil.Process(machine_pid(client, 1)).parent()
        assert template is not None
        assert "--template" in template.cmdline()
        os.kill(machine_pid(client, 1), signal.SIGKILL)
        assert client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR
        assert client.machine_reports("p")[1].state == "lost"
        client.restart_agent("ipum2")
        client.reset_partition("p")
        client.wait_for_state("p", {S.ACTIVE}, 60)
        assert [report.state for report in client.machine_reports("p")] == ["up"] * 4
        monitor = subprocess.run(
            [
                sys.executable,
                "-c",
                "from podrun.commands import gc_monitor as run; raise SystemExit(run())",
                "-j",
            ],
            env=server.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert 4 * len(json.loads(monitor.stdout)["cards"]) == 16
        client.remove_partition("p")
        client.wait_for_state("p", {S.REMOVED}, 60)
        check_that_it_moves(client)
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert server.ended(10)
    assert list(server.run.glob("*.json")) == []


def test_podruns_own_ray_runs_without_the_memory_monitor(server: Server) -> None:
    """Else any process that takes the host's memory would end the machines of every POD."""
    raylets = {
        psutil.Process(one.pid)
        for one in server.family
        if one is not None and psutil.Process(one.pid).name() == "raylet"
    }
    assert {process.environ()["RAY_memory_monitor_refresh_ms"] for process in raylets} == {"0"}


def test_machines_outlive_a_killed_server_and_end_with_stop(server: Server, commands: Commands) -> None:
    with server.client() as client:
        client.create_partition(Requirements("p", 8, reconfigurable=True))
        client.wait_for_state("p", {S.ACTIVE}, 60)
        before = [machine_pid(client, index) for index in range(2)]
        generation = client.get_partition("p").generation
    server.process.kill()
    server.process.wait(30)
    assert all(psutil.pid_exists(pid) for pid in before)
    server.start()
    with server.client() as client:
        assert client.partition_state("p") == (S.ACTIVE, "")
        assert client.get_partition("p").generation == generation
        assert [machine_pid(client, index) for index in range(2)] == before
        os.kill(machine_pid(client, 1), signal.SIGKILL)  # Machines that were taken over are watched.
        client.wait_for_state("p", {S.ERROR}, 60)
    server.process.kill()
    server.process.wait(30)
    stopped = commands.run(
        "vipu-server", "stop", f"--port={server.port}", env={"PODRUN_RUNTIME_DIR": str(server.run)}
    )
    assert stopped.returncode == 0, stopped.stderr
    assert stopped.stdout == f"the machines of pod16, which a server at port {server.port} left, have ended\n"
    assert server.ended(10)
    assert list(server.run.glob("*.json")) == []
    again = commands.run("vipu-server", "stop", env={"PODRUN_RUNTIME_DIR": str(server.run)})
    assert again.returncode == 2
    assert "none has left machines" in again.stderr


def test_a_server_of_another_build_ends_the_keeper_and_begins_anew(server: Server) -> None:
    (keeper,) = keepers(Registry(server.run))
    with server.client() as client:
        client.create_partition(Requirements("p", 4))
        client.wait_for_state("p", {S.ACTIVE}, 60)
        before = machine_pid(client, 0)
    server.process.kill()
    server.process.wait(30)
    (file,) = server.run.glob("vipu-pod-*.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "protocol": keeper.protocol - 1}))
    said = server.run.parent / "stderr"
    with said.open("w") as stderr:
        server.start(stderr)
    assert (
        "an earlier build of podrun, which this one cannot command: they end with their keeper (process "
        in (said.read_text())
    )
    assert not keeper.owner.alive
    with server.client() as client:
        client.wait_for_state("p", {S.ACTIVE}, 60)
        assert machine_pid(client, 0) != before


def test_a_killed_keeper_takes_the_machines_with_it_and_not_the_server(server: Server) -> None:
    (keeper,) = keepers(Registry(server.run))
    with server.client() as client:
        client.create_partition(Requirements("p", 4))
        client.wait_for_state("p", {S.ACTIVE}, 60)
    os.kill(keeper.owner.pid, signal.SIGKILL)
    server.await_machines()  # The server begins anew, in its process and at its port.
    assert server.process.poll() is None
    with server.client() as client:
        state, error = client.partition_state("p")
        if state is S.ERROR:  # Its loss was noticed before that of the keeper.
            assert "machine ipum1 is lost" in error
            client.restart_agent("ipum1")
            client.reset_partition("p")
        client.wait_for_state("p", {S.ACTIVE}, 60)


def test_without_a_state_kill_nine_leaves_nothing(tmp_path: Path) -> None:
    server = Server(tmp_path, "--no-state")
    server.process.kill()
    server.process.wait(30)
    assert server.ended(20)
    (entry,) = Registry(server.run)._read()
    assert entry[1].processes
    assert not any(Path(directory).exists() for directory in entry[1].directories)
    subprocess.run(
        [sys.executable, "-c", "from podrun.partition.host.discovery import Registry; Registry().sweep()"],
        env=server.environ,
        timeout=60,
        check=True,
    )
    assert list(server.run.glob("*.json")) == []


DIES_ONCE = """
import os, signal, sys

class Killer:
    def find_spec(self, name, path=None, target=None):
        # Imported when Ray makes the actor: a worker was chosen, and nothing of the actor has run.
        if name == "podrun.device.service.server":
            try:
                os.unlink(os.environ["LIVES"] + "/" + min(os.listdir(os.environ["LIVES"])))
            except (ValueError, FileNotFoundError):
                return None
            os.kill(os.getpid(), signal.SIGKILL)

def arm():
    sys.modules.pop("podrun.device.service.server", None)
    sys.meta_path.insert(0, Killer())

if "--template" in sys.orig_argv:
    os.register_at_fork(after_in_child=arm)
elif any(word.endswith("private_apis/ray_worker.py") for word in sys.orig_argv):
    arm()
"""


@pytest.mark.parametrize("deaths", [1, 2])
def test_a_machine_whose_process_dies_before_it_ran_is_started_once_more(
    tmp_path: Path, commands: Commands, deaths: int
) -> None:
    """Killed by itself at that very moment, ``deaths`` times."""
    script(tmp_path, DIES_ONCE, "sitecustomize.py")
    lives = tmp_path / "lives"
    lives.mkdir()
    for number in range(deaths):
        (lives / str(number)).touch()
    server = commands.start(
        *("vipu-server", "--cluster=ipu-m2000", "--port=0", "--no-state"),
        env={"PYTHONPATH": str(tmp_path), "LIVES": str(lives)},
    )
    assert server.stdout is not None
    port = server.stdout.readline().rpartition(":")[2].strip()
    made = commands.run("vipu", f"--api-port={port}", "create", "partition", "p", "--size=4")
    assert list(lives.iterdir()) == []
    server.send_signal(signal.SIGINT)
    said = server.communicate(timeout=120)[1]
    assert "the process of machine ipum1 on 127.0.0.1 ended before it ran (Worker unexpectedly exits" in said
    assert "; starting it once more" in said
    assert made.returncode == deaths - 1, made.stderr
    if deaths > 1:
        assert (
            "machine ipum1 did not start: its process on 127.0.0.1 ended twice before it ran" in made.stderr
        )
        assert "PODRUN_MACHINES_PER_PROCESS" in made.stderr
