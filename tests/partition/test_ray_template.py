"""The template that starts before it is known whether machines are needed."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from podrun.partition.host.discovery import VIPU_SERVER, Registry, ServiceEntry, own_process_id
from podrun.partition.machines import ray_template as early


class PretendedTemplate:
    """Notes whether it was ended."""

    def __init__(self, defaults: dict[str, str], own_workers: bool) -> None:
        self.defaults, self.own_workers = defaults, own_workers
        self.ended = False

    def end(self) -> None:
        """See `WorkerTemplate`."""
        self.ended = True


@pytest.fixture(autouse=True)
def pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(early, "WorkerTemplate", PretendedTemplate)


def test_a_session_takes_over_the_template_that_waits() -> None:
    with early.early_template({}):
        (waiting,) = early._waiting
        taken, other = early.take_template(), early.take_template()
    assert taken is waiting
    assert other is not waiting
    assert isinstance(taken, PretendedTemplate)
    assert isinstance(other, PretendedTemplate)
    assert (taken.own_workers, other.own_workers) == (True, False)
    assert not taken.ended
    assert taken.defaults["MALLOC_ARENA_MAX"] == "1"


@pytest.mark.parametrize("by_launch", [True, False])
def test_a_template_that_no_session_takes_ends(by_launch: bool) -> None:
    with early.early_template({}):
        (waiting,) = early._waiting
        assert isinstance(waiting, PretendedTemplate)
        if by_launch:
            early.end_early_template()
            assert waiting.ended
    assert waiting.ended
    assert not early._waiting


@pytest.mark.parametrize("variable", early.SERVER_VARIABLES)
def test_no_template_waits_if_a_server_is_named(variable: str) -> None:
    with early.early_template({variable: "somewhere"}):
        assert not early._waiting


def test_no_template_waits_if_a_server_runs_here() -> None:
    publication = Registry().publish(ServiceEntry(VIPU_SERVER, "127.0.0.1", 4321, own_process_id()))
    try:
        with early.early_template({}):
            assert not early._waiting
    finally:
        publication.withdraw()


def test_no_template_waits_if_somebody_listens_at_the_port_for_the_server() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with early.early_template({}, port):
            assert early._waiting
        taken.listen()
        with early.early_template({}, port):
            assert not early._waiting
