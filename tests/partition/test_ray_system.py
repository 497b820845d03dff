"""Real processes: machines as Ray actors behind `vipu-server`. Whatever ends how, nothing is left behind."""

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

import psutil
import pytest

from podrun.partition.client import VipuClient
from podrun.partition.discovery import ProcessId, Registry
from podrun.partition.types import PartitionState, Requirements
from tests.conftest import Commands, script

pytestmark = [pytest.mark.system, pytest.mark.slow]
S = PartitionState


class Server:
    """A `vipu-server` process on a free port, with its own directories."""

    def __init__(self, directory: Path) -> None:
        self.environ = {
            **os.environ,
            "PODRUN_MACHINES_PER_PROCESS": "1",  # a killed process is one machine, whatever the host
            "PODRUN_RUNTIME_DIR": str(directory / "run"),
            "XDG_STATE_HOME": str(directory / "state"),
        }
        command = [
            sys.executable,
            "-m",
            "podrun.partition.cli_server",
            "--cluster",
            "pod16",
            "--port",
            "0",
            "--prestart",
        ]
        self.process = subprocess.Popen(
            command, env=self.environ, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        first, second = self._line(), self._line()
        assert second == "4 machines are up\n"
        self.port = int(first.rpartition(":")[2])
        self.run = directory / "run"
        self.family = [ProcessId.of(p.pid) for p in psutil.Process(self.process.pid).children(recursive=True)]

    def _line(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 120)
        assert ready, "vipu-server said nothing for two minutes"
        return self.process.stdout.readline()

    def client(self) -> VipuClient:
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
def server(tmp_path: Path) -> Iterator[Server]:
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


def test_recovery_and_a_clean_stop(server: Server) -> None:
    with server.client() as client:
        client.create_partition(Requirements("p", 16, reconfigurable=True))
        client.wait_for_state("p", {S.ACTIVE}, 60)
        os.kill(machine_pid(client, 1), signal.SIGKILL)
        assert client.wait_for_state("p", {S.ERROR}, 5) is S.ERROR
        assert client.machine_reports("p")[1].state == "lost"
        client.restart_agent("ipum2")
        client.reset_partition("p")
        client.wait_for_state("p", {S.ACTIVE}, 60)
        assert [report.state for report in client.machine_reports("p")] == ["up"] * 4
        monitor = subprocess.run(
            [sys.executable, "-m", "podrun.monitor.gc_monitor", "-j"],
            env=server.environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert 4 * len(json.loads(monitor.stdout)["cards"]) == 16
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(30) == 0
    assert server.ended(10)
    assert list(server.run.iterdir()) == []


def test_kill_nine_leaves_nothing(server: Server) -> None:
    server.process.kill()
    server.process.wait(30)
    assert server.ended(20)
    (entry,) = Registry(server.run)._read()
    assert entry[1].processes
    assert not any(Path(directory).exists() for directory in entry[1].directories)
    subprocess.run(
        [sys.executable, "-c", "from podrun.partition.discovery import Registry; Registry().sweep()"],
        env=server.environ,
        timeout=60,
        check=True,
    )
    assert list(server.run.iterdir()) == []


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

if any(word.endswith("ray_worker.py") for word in sys.orig_argv):
    sys.meta_path.insert(0, Killer())
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
    said = server.communicate(timeout=30)[1]
    assert "the process of machine ipum1 on 127.0.0.1 ended before it ran (Worker unexpectedly exits" in said
    assert "; starting it once more" in said
    assert made.returncode == deaths - 1, made.stderr
    if deaths > 1:
        assert (
            "machine ipum1 did not start: its process on 127.0.0.1 ended twice before it ran" in made.stderr
        )
        assert "PODRUN_MACHINES_PER_PROCESS" in made.stderr
