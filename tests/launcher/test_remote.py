"""Instances on another host, without Ray: nothing of a launch stays there, however it ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.core.errors import NotFoundError
from podrun.launcher.output import OutputChannel
from podrun.launcher.process import Printed
from podrun.launcher.remote import HostActor, event_of, nodes_of
from tests.conftest import wait_until

INSTANCE = """
import os, subprocess, sys, time
os.mkdir(sys.argv[1])
child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
print(child.pid, flush=True)
time.sleep(600)
"""
ACTOR = """
import os, sys
from tests.launcher.test_remote import begin
actor, pid = begin(sys.argv[1])
print(pid, flush=True)
sys.stdin.read()
"""


def begin(scratch: str) -> tuple[HostActor, int]:
    """An actor whose instance has made the directory and started a process outside of its group; that one's id."""
    actor = HostActor(scratch)
    actor.start(0, [sys.executable, "-S", "-c", INSTANCE, scratch], "/", dict(os.environ))
    while True:
        for event in map(event_of, actor.poll(10.0)):
            assert isinstance(event, Printed), event
            assert event.channel is OutputChannel.STDOUT, event.data.decode()
            return actor, int(event.data)


def gone(pid: int, seconds: float = 10.0) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], seconds)[0])
    finally:
        os.close(fd)


@pytest.mark.parametrize("killed", [False, True])
def test_nothing_of_a_launch_stays_on_another_host(tmp_path: Path, killed: bool) -> None:
    scratch = tmp_path / "podrun-scratch-here"
    if killed:
        process = subprocess.Popen(
            [sys.executable, "-c", ACTOR, str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert process.stdout is not None
        background = int(process.stdout.readline())
        assert scratch.is_dir()
        # As Ray ends an actor whose owner is gone: its children first.
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (*map(int, children), process.pid):
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        wait_until(lambda: not scratch.exists(), 60, "the directory is removed")
    else:
        actor, background = begin(str(scratch))
        assert scratch.is_dir()
        actor.close()
    assert gone(background, 0.0 if not killed else 10.0)
    assert not scratch.exists()


def test_a_host_that_came_back_is_its_new_node() -> None:
    def node(name: str, alive: bool) -> dict[str, object]:
        return {
            "NodeID": name,
            "Alive": alive,
            "NodeManagerHostname": "b.lan",
            "NodeManagerAddress": "10.0.0.2",
        }

    assert nodes_of(["b", "10.0.0.2"], [node("new", True), node("old", False)]) == {
        "b": "new",
        "10.0.0.2": "new",
    }
    with pytest.raises(NotFoundError, match=r"^c: no node of the Ray cluster has that name$") as caught:
        nodes_of(["b", "c"], [node("new", True)])
    assert "b.lan (10.0.0.2)" in (caught.value.hint or "")
