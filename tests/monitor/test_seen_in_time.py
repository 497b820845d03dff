"""How soon a monitor sees that a process attaches, exits, or is killed: within a second."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podrun.monitor.live.sighting import look_at_pod
from tests.monitor.real import RealPod

PROGRAM = """
import sys, time
import podrun.popart as popart
device = popart.DeviceManager().acquireAvailableDevice(4)
print(time.time(), flush=True)
sys.stdin.readline()
print(time.time(), flush=True)
"""
WITHIN_S = 1.0
DEADLINE_S = 60.0
LOOK_EVERY_S = 0.05
pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[RealPod]:
    pod = RealPod(tmp_path / "run", tmp_path / "cache")
    pod.active("p", 4)
    yield pod
    pod.stop()


@contextlib.contextmanager
def attached(pod: RealPod) -> Iterator[tuple[subprocess.Popen[str], float]]:
    """A process that holds the IPUs, and when it attached."""
    names = ("PATH", "HOME")
    environ = {name: os.environ[name] for name in names if name in os.environ}
    environ |= {
        "PODRUN_RUNTIME_DIR": str(pod.directory),
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PORT": str(pod.port),
        "IPUOF_VIPU_API_PARTITION_ID": "p",
    }
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=environ, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    try:
        yield program, float(program.stdout.readline())
    finally:
        program.kill()
        program.communicate()


def held_by(pod: RealPod) -> set[str]:
    """The processes of the job, as the live view shows them."""
    (job,) = look_at_pod(pod.client, time.time()).jobs
    return {text.split()[0] for text in job.processes}


def seen_after(begin: float, holds: Callable[[], bool]) -> float:
    """Seconds from ``begin`` until a look, of twenty a second, shows what ``holds`` says."""
    while not holds():
        assert time.time() < begin + DEADLINE_S, "it is never seen"
        time.sleep(LOOK_EVERY_S)
    return time.time() - begin


def test_attach_exit_and_kill_are_seen_within_a_second(pod: RealPod) -> None:
    with attached(pod) as (program, since):
        pid = str(program.pid)
        assert seen_after(since, lambda: held_by(pod) == {pid}) < WITHIN_S
        assert program.stdin is not None
        assert program.stdout is not None
        program.stdin.write("\n")
        program.stdin.flush()
        ended = float(program.stdout.readline())
        assert seen_after(ended, lambda: not held_by(pod)) < WITHIN_S
    with attached(pod) as (program, since):
        assert seen_after(since, lambda: held_by(pod) == {str(program.pid)}) < WITHIN_S
        killed = time.time()
        program.kill()
        assert seen_after(killed, lambda: not held_by(pod)) < WITHIN_S
