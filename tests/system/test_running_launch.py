"""What others see of a launch that runs, and may do to it. Tests of this file share one until a test ends it."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import Commands, wait_until
from tests.copies import run_command
from tests.system.conftest import PARTITION, PROGRAMS, nothing_left
from tests.system.test_endings import detached, until_stepping

pytestmark = pytest.mark.system

SMALL = PROGRAMS / "small.py"
RUN = ("podrun", "--num-replicas=16", "--num-instances=2", "--vipu-partition", PARTITION)


class Launch:
    """Two instances that step. Tests share them until one ends them; the next one starts others."""

    def __init__(self, server: Commands, ends: contextlib.ExitStack) -> None:
        self._server, self._ends = server, ends
        self._process: subprocess.Popen[str] | None = None

    def stepping(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._ends.close()
            self._process = self._ends.enter_context(_steps(self._server))
        return self._process


@contextlib.contextmanager
def _steps(server: Commands) -> Iterator[subprocess.Popen[str]]:
    with nothing_left(server):
        process = server.start(*RUN, SMALL, "1000000", f"until:{server.home / 'never'}")
        try:
            until_stepping(process)
            yield process
            if process.poll() is None:
                process.terminate()
                process.communicate(timeout=120)
            assert process.returncode == 143
        finally:
            process.kill()
            process.communicate(timeout=120)


@pytest.fixture(scope="module")
def launches(server: Commands) -> Iterator[Launch]:
    with contextlib.ExitStack() as ends:
        yield Launch(server, ends)


@pytest.fixture
def launch(launches: Launch) -> subprocess.Popen[str]:
    """A launch that steps when a test begins."""
    return launches.stepping()


def test_monitor_sees_the_partition_and_the_attached_processes(
    launch: subprocess.Popen[str], pod: Commands
) -> None:
    seen = run_command(pod, "gc-monitor", "--json")
    assert seen.returncode == 0, seen.stderr
    data = json.loads(seen.stdout)
    text = run_command(pod, "gc-monitor").stdout
    assert launch.poll() is None
    assert [p["name"] for p in data["partitions"]] == [PARTITION]
    assert seen.stdout.count('"PID"') == 16
    assert "small.py" in text


def test_a_partition_in_use_is_not_taken_away(launch: subprocess.Popen[str], pod: Commands) -> None:
    refused = run_command(pod, *RUN, SMALL)
    assert refused.returncode == 2
    assert f"partition {PARTITION} is in use by process" in refused.stderr
    assert launch.poll() is None


def test_podrun_stop_ends_a_launch_as_ctrl_c_does(launch: subprocess.Popen[str], pod: Commands) -> None:
    listed = run_command(pod, "podrun", "ps")
    assert f" {PARTITION} " in listed.stdout
    assert "podrun --num-replicas=16" in listed.stdout
    stopped = run_command(pod, "podrun", "stop", PARTITION)
    assert (stopped.returncode, stopped.stdout) == (0, f"{PARTITION} ended\n"), stopped.stderr
    _, err = launch.communicate(timeout=120)
    assert launch.returncode == 143
    assert "SIGTERM: all instances were ended" in err
    wait_until(lambda: detached(pod), 60, "the machines notice that the processes are gone")
    again = run_command(pod, "podrun", "stop", PARTITION)
    assert again.returncode == 2
    assert f"vipu remove partition {PARTITION}" in again.stderr
