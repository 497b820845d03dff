"""What others see of a launch that runs, and may do to it. All tests of this file look at one; the last one ends it."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from tests.conftest import Commands, wait_until
from tests.system.conftest import PARTITION, PROGRAMS
from tests.system.test_endings import detached, until_stepping

pytestmark = pytest.mark.system

SMALL = PROGRAMS / "small.py"
RUN = ("podrun", "--num-replicas=16", "--num-instances=2", "--vipu-partition", PARTITION)


@pytest.fixture(scope="module")
def launch(server: Commands) -> Iterator[subprocess.Popen[str]]:
    """Two instances that step, until a test ends them or all tests are done."""
    process = server.start(*RUN, SMALL, "1000000")
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


def test_monitor_sees_the_partition_and_the_attached_processes(
    launch: subprocess.Popen[str], pod: Commands
) -> None:
    seen = pod.run("gc-monitor", "--json")
    assert seen.returncode == 0, seen.stderr
    data = json.loads(seen.stdout)
    text = pod.run("gc-monitor").stdout
    assert launch.poll() is None
    assert [p["name"] for p in data["partitions"]] == [PARTITION]
    assert seen.stdout.count('"PID"') == 16
    assert "small.py" in text


def test_a_partition_in_use_is_not_taken_away(launch: subprocess.Popen[str], pod: Commands) -> None:
    refused = pod.run(*RUN, SMALL)
    assert refused.returncode == 2
    assert f"partition {PARTITION} is in use by process" in refused.stderr
    assert launch.poll() is None


def test_podrun_stop_ends_a_launch_as_ctrl_c_does(launch: subprocess.Popen[str], pod: Commands) -> None:
    listed = pod.run("podrun", "ps")
    assert f" {PARTITION} " in listed.stdout
    assert "podrun --num-replicas=16" in listed.stdout
    stopped = pod.run("podrun", "stop", PARTITION)
    assert (stopped.returncode, stopped.stdout) == (0, f"{PARTITION} ended\n"), stopped.stderr
    _, err = launch.communicate(timeout=120)
    assert launch.returncode == 143
    assert "SIGTERM: all instances were ended" in err
    wait_until(lambda: detached(pod), 60, "the machines notice that the processes are gone")
    again = pod.run("podrun", "stop", PARTITION)
    assert again.returncode == 2
    assert f"vipu remove partition {PARTITION}" in again.stderr
