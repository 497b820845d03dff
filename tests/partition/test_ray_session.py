"""A failed start of Ray leaves nothing behind; a slow one is repeated once."""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.core.errors import ServiceError
from podrun.partition.host.discovery import ProcessId, scratch_directory
from podrun.partition.machines import ray_obstacles, ray_session
from podrun.partition.machines.ray_session import RaySession, _end, _keeping_sigterm, _started_for
from podrun.private_apis.ray import RayletEnded


def test_processes_of_a_failed_start_are_ended(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "input()"]
    told = subprocess.Popen([*waiting, f"--session-dir={tmp_path}/r"], stdin=subprocess.PIPE)
    other = subprocess.Popen(waiting, stdin=subprocess.PIPE)  # Such as an instance.
    try:
        found = list(_started_for(tmp_path))
        assert found == [ProcessId.of(told.pid)]
        _end(tuple(found), patience=0.0)
        assert told.wait(60) == -9
        assert other.poll() is None
    finally:
        for process in (told, other):
            process.kill()
            process.communicate()


class Attempts:
    """Stands for Ray's start: each attempt takes some seconds of a pretended clock, and fails if it is to."""

    def __init__(self, *outcomes: tuple[float, Exception | None]) -> None:
        self.left = list(outcomes)
        self.now = 0.0
        self.parts: list[Any] = []
        self.directories: list[Path] = []

    def start(self, session: RaySession, num_cpus: int | None, parts: Any) -> None:
        seconds, error = self.left.pop(0)
        self.now += seconds
        self.parts.append(parts)
        session.ray = SimpleNamespace(shutdown=lambda: None)
        session.directory = scratch_directory(lambda path: None)
        self.directories.append(session.directory)
        if error is not None:
            raise error


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    caplog.set_level(logging.WARNING, "podrun.partition")
    monkeypatch.setattr(ray_session, "_initialized", lambda: False)
    sessions = []

    def make(attempts: Attempts, **options: Any) -> RaySession:
        monkeypatch.setattr(RaySession, "_start", lambda *given: attempts.start(*given))
        sessions.append(RaySession(clock=lambda: attempts.now, **options))
        return sessions[-1]

    with contextlib.ExitStack() as stack:
        yield make
        for session in sessions:
            stack.callback(session.close)


SLOW = (30.5, Exception("The current node timed out during startup."))


def test_a_start_of_ray_that_was_too_slow_is_repeated_once(
    begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = Attempts(SLOW, (3.0, None))
    session = begin(attempts)
    first, second = attempts.directories
    assert not first.exists()
    assert session.directory == second
    assert attempts.parts[0] is attempts.parts[1] is ray_session.only_what_machines_need
    assert [record.getMessage() for record in caplog.records] == [
        "Ray did not start: not up after 30 s (this host is very busy); trying once more"
    ]
    session.close()
    assert not second.exists()


def test_a_raylet_that_ends_is_started_once_more_with_all_parts(begin: Any) -> None:
    attempts = Attempts((0.2, RayletEnded("its raylet ended with exit code 1")), (3.0, None))
    begin(attempts)
    assert attempts.parts == [ray_session.only_what_machines_need, contextlib.nullcontext]


@pytest.mark.parametrize(
    ("outcomes", "wanted", "tried"),
    [
        ([SLOW, SLOW], True, 2),
        ([SLOW], False, 1),
        ([(0.2, ValueError("not this host's address"))], True, 1),
    ],
    ids=["slow twice", "nobody waits any more", "wrong"],
)
def test_attempts_to_start_ray_end_with_an_error(begin: Any, outcomes: Any, wanted: bool, tried: int) -> None:
    attempts = Attempts(*outcomes)
    with pytest.raises(ServiceError, match="Ray did not start: "):
        begin(attempts, wanted=lambda: wanted)
    assert len(attempts.directories) == tried
    assert not any(directory.exists() for directory in attempts.directories)


def test_a_limit_of_file_sizes_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda what: (10_240, 10_240))
    with pytest.raises(ServiceError, match=r"a file may have 10240 bytes here \(ulimit -f\)") as caught:
        RaySession()
    assert "ulimit -f unlimited" in str(caught.value.hint)


def test_a_path_that_the_locale_cannot_write_is_named() -> None:
    path = b"/home/\xc3\xa4 dir".decode("ascii", "surrogateescape")
    with pytest.raises(ServiceError, match="cannot write the path /home/ä dir") as caught:
        ray_obstacles.check_paths(["/home", path])
    assert "PYTHONUTF8=1" in str(caught.value.hint)


def test_ray_replaces_no_handler_of_sigterm() -> None:
    """As `ray.init` does in the main thread: a server with --keep-machines joins the Ray of its keeper there."""
    stopped: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        with _keeping_sigterm():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped == [signal.SIGTERM]
