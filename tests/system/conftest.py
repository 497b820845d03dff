"""One POD for all system tests: a `vipu-server` whose machines are up, as on a host that is used all day."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from podrun.partition.host.discovery import Registry
from tests.conftest import Commands, run_and_check_for_leaks, wait_until

PROGRAMS = Path(__file__).parent / "programs"
PARTITION = "p16"
START_SECONDS = 90.0


@pytest.fixture(scope="session")
def server() -> Iterator[Commands]:
    """A `vipu-server` of a POD16 with the partition p16; leaks are checked when it has stopped."""
    home = Path(tempfile.mkdtemp(prefix="pod-"))
    try:
        for commands in run_and_check_for_leaks(home):
            process = commands.start("vipu-server", "--cluster=pod16", "--port=0", "--no-state", "--prestart")
            wait_until(
                lambda: process.poll() is not None or _listens(commands),  # noqa: B023
                START_SECONDS,
                "vipu-server starts",
            )
            assert process.poll() is None, process.communicate()
            created = commands.run(
                "vipu",
                "create",
                "partition",
                PARTITION,
                "--size=16",
                "--no-ipuof-files",
                timeout=START_SECONDS,
            )
            assert created.returncode == 0, created.stderr
            yield commands
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, out + err
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture
def pod(server: Commands, tmp_path: Path) -> Iterator[Commands]:
    """Commands beside the running server; every process that a test starts must be gone at its end."""
    with nothing_left(server):
        yield server


@contextlib.contextmanager
def nothing_left(server: Commands) -> Iterator[None]:
    """Fails if what starts in the meantime leaves processes, or a launch its entry."""
    before, there = set(server.processes()), _published(server)
    yield
    wait_until(lambda: set(server.processes()) <= before | _machines(server), 60, "the test's processes end")
    assert _published(server) <= there, "a launch left its entry behind"


def _published(commands: Commands) -> set[str]:
    """Entries of launches."""
    return {path.name for path in commands.runtime.glob("podrun-*.json")}


def _listens(commands: Commands) -> bool:
    """Whether its entry gives its port: it publishes itself without a port first."""
    return commands.runtime.exists() and Registry(commands.runtime).find() is not None


def _machines(commands: Commands) -> set[int]:
    """Processes of the server: they may change when a machine is replaced."""
    return {pid for pid, words in commands.processes().items() if "ray" in words}
