"""A Ray that does not start leaves nothing behind, and a busy host is given a second attempt."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from podrun.errors import ServiceError
from podrun.partition import ray_session, ray_worker
from podrun.partition.discovery import ProcessId
from podrun.partition.ray_parts import RayletEnded, raylet_command
from podrun.partition.ray_session import RaySession, _end, _started_for


def test_what_a_failed_start_has_started_is_found_and_ended(tmp_path: Path) -> None:
    waiting = [sys.executable, "-c", "input()"]
    told = subprocess.Popen([*waiting, f"--session-dir={tmp_path}/r"], stdin=subprocess.PIPE)
    other = subprocess.Popen(waiting, stdin=subprocess.PIPE)  # Such as an instance.
    try:
        found = list(_started_for(tmp_path))
        assert found == [ProcessId.of(told.pid)]
        _end(tuple(found), patience=0.0)
        assert told.wait(10) == -9
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
        session.directory = ray_session.scratch_directory(lambda path: None)
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


def test_a_ray_that_was_too_slow_is_started_once_more_from_nothing(
    begin: Any, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = Attempts(SLOW, (3.0, None))
    session = begin(attempts)
    first, second = attempts.directories
    assert not first.exists()
    assert session.directory == second
    assert attempts.parts[0] is attempts.parts[1] is ray_session.only_what_machines_need
    assert [record.getMessage() for record in caplog.records] == [
        "Ray did not start: not there after 30 s (this host is very busy); trying once more"
    ]
    session.close()
    assert not second.exists()


def test_a_raylet_that_ends_is_started_once_more_with_all_that_ray_starts(begin: Any) -> None:
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
def test_attempts_end(begin: Any, outcomes: Any, wanted: bool, tried: int) -> None:
    attempts = Attempts(*outcomes)
    with pytest.raises(ServiceError, match="Ray did not start: "):
        begin(attempts, wanted=lambda: wanted)
    assert len(attempts.directories) == tried
    assert not any(directory.exists() for directory in attempts.directories)


def test_a_raylet_is_told_of_no_agents_and_of_our_worker() -> None:
    command = [
        "raylet",
        "--metrics-agent-port=0",
        "--runtime_env_agent_port=7001",
        "--num_prestart_python_workers=2",
        "--python_worker_command=python setup.py /ray/workers/default_worker.py --metrics-agent-port=0",
        "--dashboard_agent_command=python agent.py --listen-port=0",
        "--runtime_env_agent_command=python main.py",
    ]
    ours = subprocess.list2cmdline([ray_worker.__file__])
    assert raylet_command(command) == [
        "raylet",
        "--metrics-agent-port=1",
        "--runtime_env_agent_port=7001",
        "--num_prestart_python_workers=0",
        f"--python_worker_command=python setup.py {ours} --metrics-agent-port=0",
        "--dashboard_agent_command= ",
        "--runtime_env_agent_command= ",
        "--dashboard_agent_listen_port=1",
    ]
    quoted = '--python_worker_command=python "/with a space/default_worker.py" --x'
    assert raylet_command([quoted])[0] == f"--python_worker_command=python {ours} --x"


PRETENDED_RAY = {
    "ray/__init__.py": "import requests, jsonschema",
    "ray/util/__init__.py": "",
    "ray/util/serialization_addons.py": "def apply(context): raise AssertionError('Arrow is imported')",
    "ray/_private/__init__.py": "",
    "ray/_private/workers/__init__.py": "",
    "ray/_private/workers/default_worker.py": """
import gc, sys
import ray
from ray.util import serialization_addons
serialization_addons.apply(None)
print("requests.get:", ray.requests.get)
print(__name__, sys.argv[1:], gc.isenabled())
""",
    "requests.py": "print('requests is read')\nget = 7",
    "jsonschema.py": "print('jsonschema is read')",
}


def test_our_worker_is_rays_without_what_machines_never_use(tmp_path: Path) -> None:
    for name, text in PRETENDED_RAY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "-B", ray_worker.__file__, "--node-ip-address=here"],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout.splitlines(), done.stderr) == (
        ["requests is read", "requests.get: 7", "__main__ ['--node-ip-address=here'] False"],
        "",
    )
