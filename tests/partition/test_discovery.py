"""Services are found by others and swept when their process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.core.errors import UsageError
from podrun.partition.host.discovery import (
    DEFAULT_PORT,
    LAUNCHER,
    VIPU_SERVER,
    ProcessId,
    Registry,
    ServiceEntry,
    own_process_id,
    runtime_directory,
    scratch_directory,
)
from podrun.partition.host.guardian import Guardian


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(runtime_directory({"PODRUN_RUNTIME_DIR": str(tmp_path / "run")}))


def test_publish_find_withdraw(registry: Registry) -> None:
    me = own_process_id()
    one = registry.publish(ServiceEntry(LAUNCHER, "127.0.0.1", 5001, me, "pod16", "p1"))
    two = registry.publish(ServiceEntry(VIPU_SERVER, "127.0.0.1", 8090, me, "pod64"))
    assert registry.entries() == [two.entry, one.entry]
    assert registry.find() == two.entry
    assert registry.find(partition="p1") == one.entry
    one.update(partition="p2")
    found = registry.find(partition="p2")
    assert found is not None
    assert found.port == 5001
    one.withdraw()
    one.withdraw()
    two.withdraw()
    assert registry.find() is None
    assert list(registry.directory.iterdir()) == []


def test_entries_of_dead_owners_are_swept_with_what_they_left(registry: Registry, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    left = ProcessId.of(child.pid)
    assert left is not None
    scratch = scratch_directory(lambda path: None, tmp_path)
    (scratch / "file").touch()
    precious = tmp_path / "precious"
    precious.mkdir()
    dead = ProcessId(os.getpid(), own_process_id().start_ticks - 1)  # Our number, but an earlier process.
    entry = ServiceEntry(LAUNCHER, "h", 1, dead, processes=(left,), directories=(str(scratch), str(precious)))
    registry.publish(entry)
    assert registry.find() is None
    assert registry.sweep() == [entry]
    assert child.wait(timeout=60) == -9
    assert not scratch.exists()
    assert precious.exists()
    assert registry.sweep() == []


WRITER = "import sys; f = open(sys.argv[1], sys.argv[2]); print(flush=True); sys.stdin.read()"


def test_a_sweep_ends_writers_but_not_readers_of_a_directory(registry: Registry, tmp_path: Path) -> None:
    scratch = scratch_directory(lambda path: None, tmp_path)
    (scratch / "log").touch()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(scratch / "log"), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        for mode in ("a", "r")
    ]
    for child in children:
        assert child.stdout is not None
        child.stdout.readline()
    registry.publish(ServiceEntry(LAUNCHER, "h", 1, ProcessId(os.getpid(), 1), directories=(str(scratch),)))
    registry.sweep()
    assert children[0].wait(timeout=60) == -9
    assert children[1].poll() is None
    assert not scratch.exists()
    children[1].communicate(timeout=60)


def test_a_process_of_the_same_number_is_not_touched(registry: Registry) -> None:
    dead = ProcessId(os.getpid(), 1)
    other = ProcessId(os.getpid(), 2)
    registry.publish(ServiceEntry(LAUNCHER, "h", 1, dead, processes=(other,)))
    swept = registry.sweep()  # Would end this very test.
    assert [entry.processes for entry in swept] == [(other,)]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"kind": 1}', '{"owner": 3}'])
def test_an_entry_that_cannot_be_read_is_removed(registry: Registry, text: str) -> None:
    (registry.directory / "x.json").write_text(text)
    assert registry.entries() == []
    assert list(registry.directory.iterdir()) == []


def test_the_directory_is_private(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir(mode=0o755)
    assert runtime_directory({"PODRUN_RUNTIME_DIR": str(path)}).stat().st_mode & 0o777 == 0o700
    assert runtime_directory({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "podrun"
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be used"):
        runtime_directory({"PODRUN_RUNTIME_DIR": str(tmp_path / "file")})


OWNER = """
import subprocess, sys
from podrun.partition.host.discovery import ProcessId
from podrun.partition.host.guardian import Guardian
guardian = Guardian()
child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
guardian.watch_process(child.pid, ProcessId.of(child.pid).start_ticks)
guardian.watch_directory(sys.argv[1])
print(child.pid, guardian.pid, flush=True)
if sys.argv[2] == "dismiss":
    guardian.dismiss()
    child.stdin.close()
    child.wait()
else:
    sys.stdin.read()
"""


def test_a_guardian_cleans_up_after_kill_nine(tmp_path: Path) -> None:
    scratch = scratch_directory(lambda path: None, tmp_path)
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(scratch), "wait"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout is not None
    child, guardian = map(int, owner.stdout.readline().split())
    watched = [os.pidfd_open(child), os.pidfd_open(guardian)]
    owner.kill()
    owner.wait()
    import select

    for fd in watched:
        assert select.select([fd], [], [], 20)[0], "still there"
        os.close(fd)
    assert not scratch.exists()


def test_a_dismissed_guardian_does_nothing(tmp_path: Path) -> None:
    scratch = scratch_directory(lambda path: None, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", OWNER, str(scratch), "dismiss"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == "" or "EOFError" in done.stderr
    assert scratch.exists()


def test_dismiss_twice() -> None:
    guardian = Guardian()
    guardian.dismiss()
    guardian.dismiss()
    assert ProcessId.of(guardian.pid) is None


def test_the_server_at_the_default_port_comes_first(registry: Registry) -> None:
    for port in (8091, DEFAULT_PORT, 8092):
        registry.publish(ServiceEntry(VIPU_SERVER, "127.0.0.1", port, own_process_id()))
    assert registry.entries()[0].port == DEFAULT_PORT
