"""The head of a joined Ray is watched: one that ends or hangs is told in time, and nothing waits for it."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ServiceError
from podrun.partition.machines.ray_head import PATIENCE_SECONDS, HeadWatch
from podrun.partition.machines.ray_pool import RayMachinePool
from podrun.partition.machines.ray_session import RaySession


class Head:
    """A head that answers or does not, and a clock."""

    def __init__(self) -> None:
        self.says, self.now = "", 0.0

    def watch(self) -> HeadWatch:
        watch = HeadWatch("head:6379", lambda address, seconds: self.says, lambda: self.now)
        watch._watches = True  # Tests look themselves.
        return watch


def test_a_silent_head_is_lost_once_and_for_good(caplog: pytest.LogCaptureFixture) -> None:
    head = Head()
    watch = head.watch()
    head.says, head.now = "is slow", PATIENCE_SECONDS - 1
    watch.look()
    assert not watch.lost
    head.says = ""
    watch.look()
    head.says, head.now = "is slow", head.now + PATIENCE_SECONDS - 1
    watch.look()
    assert not watch.lost
    assert watch.call(lambda: 3) == 3
    head.now += 1
    with caplog.at_level(logging.ERROR):
        watch.look()
        watch.look()
    assert watch.lost
    assert [r.getMessage().partition(":6379")[0] for r in caplog.records] == ["the Ray cluster at head"]
    head.says = ""
    watch.look()
    with pytest.raises(ServiceError, match="head:6379 does not answer any more") as lost:
        watch.call(lambda: 3)
    assert "ray start" in str(lost.value.hint)


def test_the_head_of_podruns_own_ray_is_lost_when_its_process_ends(caplog: pytest.LogCaptureFixture) -> None:
    """Ray would wait for it a minute, and then end podrun with a message of its own."""
    says = [""]
    watch = HeadWatch("", lambda *_: says[0], own=True)
    watch.look()
    assert not watch.lost
    says[0] = "it ended"
    watch.look()
    assert watch.lost
    assert "podrun's own Ray has ended" in caplog.text
    with pytest.raises(ServiceError, match="podrun's own Ray has ended") as lost:
        watch.check()
    assert lost.value.hint == "Start again what used it: vipu-server, or the launch."


def test_who_waits_for_a_head_that_hangs_is_told() -> None:
    head, asked, never = Head(), threading.Event(), threading.Event()
    watch = head.watch()

    def hang() -> None:
        asked.set()
        head.says, head.now = "hangs", PATIENCE_SECONDS
        watch.look()
        never.wait(30)

    with pytest.raises(ServiceError, match="does not answer any more"):
        watch.call(hang)
    assert asked.is_set()
    never.set()


def test_an_error_of_ray_reaches_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        Head().watch().call(lambda: 1 // 0)


def test_a_pool_asks_a_lost_cluster_nothing_and_says_why_machines_ended() -> None:
    head = Head()
    watch = head.watch()
    session: Any = object.__new__(RaySession)
    session.head, session._keeper, session._core, session._owned = watch, None, (), False
    session.ray = SimpleNamespace(nodes=lambda: pytest.fail("Ray was asked"))
    pool = RayMachinePool(load_cluster("pod16"), address="head:6379")
    pool._session = session
    head.says, head.now = "hangs", PATIENCE_SECONDS
    watch.look()
    assert not session.alive
    with pytest.raises(ServiceError, match="head:6379"):
        pool.places.hosts()
    machine: Any = SimpleNamespace(handle=SimpleNamespace(actor=None), agent_id="ipum1", endpoint="h:1")
    assert pool._why_ended(machine).endswith("after the Ray cluster at head:6379 had stopped answering")


def test_a_command_whose_cluster_is_lost_ends_with_its_own_exit_code() -> None:
    """In a process of its own: its exit functions run, what it printed is written, and nothing is unloaded."""
    program = (
        "import atexit, sys\n"
        "from types import SimpleNamespace\n"
        "from podrun.commands import run\n"
        "from podrun.partition.machines.ray_head import leave_without_ray\n"
        "class Crashes:\n"
        "    def __del__(self): print('unloaded')\n"
        "kept = Crashes()\n"
        "shutdown = lambda: print('asked Ray')\n"
        "atexit.register(shutdown)\n"
        "atexit.register(print, 'cleared up')\n"
        "def main():\n"
        "    leave_without_ray(SimpleNamespace(shutdown=shutdown))\n"
        "    print('error')\n"
        "    return 3\n"
        "sys.exit(run(main))\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (3, "error\ncleared up\n")
