"""`vipu-server check` lists the problems of a state file; `repair` keeps the consistent part, and the old file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from podrun.core.command_line import run_command
from podrun.core.errors import NotFoundError
from podrun.partition.commands.vipu_server import vipu_server_command
from podrun.partition.state.values import PartitionState, Requirements

from .conftest import Pod

S = PartitionState


@pytest.fixture
def file(tmp_path: Path, make_pod: Callable[..., Pod]) -> Path:
    """Partitions p and q of four IPUs, a queued request, an agent that is cordoned, a reservation."""
    path = tmp_path / "state.sqlite"
    pod = make_pod("pod16", path)
    pod.active("p", 4)
    pod.active("q", 4)
    pod.client.create_reservation("r", ["ipum3"], begin_in_s=1e6, for_s=60)
    pod.client.set_maintenance("ipum4", reason="fan")
    pod.client.create_partition(Requirements("waits", 8), wait=True)
    pod.stop()
    return path


def change(path: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(path) as db:
        db.execute(statement, values)
    db.close()


def ask(capsys: pytest.CaptureFixture[str], verb: str, path: Path, *more: str) -> tuple[int, list[str]]:
    code = run_command(vipu_server_command, [verb, f"--state-file={path}", *more])
    told = capsys.readouterr()
    return code, (told.out + told.err).splitlines()


def test_a_file_in_order_is_left_alone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    line = f"{file}: 0 problems; it keeps 2 partitions, 1 queued request"
    assert ask(capsys, "check", file) == (0, [line])
    assert ask(capsys, "repair", file, "--yes") == (0, [line])
    assert file.read_bytes() == before


DAMAGES = [
    (("UPDATE partitions SET data = '{' WHERE name = 'q'",), "partition q cannot be read: ", {"p"}),
    (
        ("UPDATE partitions SET data = replace(data, 'ipum2', 'ipum1') WHERE name = 'q'",),
        "partition q: IPU 0 belongs to partitions p and q: it is left out",
        {"p"},
    ),
    (
        ("UPDATE partitions SET data = replace(data, 'ipum2', 'ipum9') WHERE name = 'q'",),
        "partition q: ",
        {"p"},
    ),
    (("INSERT INTO lost VALUES ('ipum9')",), "lost agent ipum9 is unknown: it is forgotten", {"p", "q"}),
    (
        ("INSERT INTO lost VALUES ('ipum2')",),
        "partition q is ACTIVE as it cannot be: it is set to ERROR",
        {"p", "q"},
    ),
    (("UPDATE plans SET data = '[]' WHERE kind = 'queue'",), "queue waits cannot be read", {"p", "q"}),
    (("UPDATE pod SET fingerprint = 'other'",), "another description of pod16", {"p", "q"}),
    (("DELETE FROM pod",), "it names no POD: it becomes a file of pod16", {"p", "q"}),
    (("DROP TABLE lost",), "lost: no such table: lost: what could be read is kept", {"p", "q"}),
]


@pytest.mark.parametrize(("damage", "words", "kept"), DAMAGES, ids=[words for _, words, _ in DAMAGES])
def test_what_holds_together_is_kept(
    file: Path,
    make_pod: Callable[..., Pod],
    capsys: pytest.CaptureFixture[str],
    damage: tuple[str, ...],
    words: str,
    kept: set[str],
) -> None:
    for statement in damage:
        change(file, statement)
    before = file.read_bytes()
    code, told = ask(capsys, "check", file)
    assert code == 1
    assert any(words in line for line in told), told
    assert ask(capsys, "repair", file)[0] == 1
    assert file.read_bytes() == before  # It has only said what it would do.
    code, told = ask(capsys, "repair", file, "--yes")
    assert code == 0
    backup = Path(told[-1].removeprefix("repaired; the file as it was: "))
    assert backup.read_bytes() == before
    assert ask(capsys, "check", file)[0] == 0
    pod = make_pod("pod16", file)
    assert {info.name for info in pod.client.list_partitions()} >= kept
    assert pod.service.wait_idle(60)


@pytest.mark.parametrize("content", [b"", b"no SQLite at all" * 300], ids=["empty", "garbage"])
def test_what_cannot_be_read_at_all_is_kept_aside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(content)
    assert ask(capsys, "check", path)[0] == 1
    assert path.read_bytes() == content
    assert ask(capsys, "repair", path, "--yes")[0] == 0
    assert (tmp_path / "state.sqlite.before-repair-1").read_bytes() == content
    assert ask(capsys, "check", path) == (
        0,
        [f"{path}: 0 problems; it keeps 0 partitions, 0 queued requests"],
    )


def test_a_file_that_is_not_damaged_but_another_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str], make_pod: Callable[..., Pod]
) -> None:
    assert "holds the state of pod16, not of pod64" in ask(capsys, "check", file, "--cluster=pod64")[1][0]
    assert "there is no state file" in ask(capsys, "check", file.with_name("none"))[1][0]
    pod = make_pod("pod16", file)
    change_while_used = ask(capsys, "check", file)
    assert change_while_used[0] == 0
    pod.stop()
    change(file, "PRAGMA user_version = 99")
    assert "newer podrun (schema 99" in ask(capsys, "repair", file, "--yes")[1][0]


def test_options_before_a_verb_are_the_verbs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`vipu-server --port 9000 stop` stops no server at another port."""
    asked: list[tuple[int | None, str | None]] = []

    def choose(entries: object, port: int | None, cluster: str | None) -> None:
        asked.append((port, cluster))
        raise NotFoundError("no server")

    monkeypatch.setattr("podrun.partition.commands.stop.choose_server", choose)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path / "run"))
    for line in (
        ["--port", "9000", "--cluster", "pod64", "stop"],
        ["stop", "--port", "9000"],
        ["-v", "stop"],
    ):
        assert run_command(vipu_server_command, line) == 2
    assert asked == [(9000, "pod64"), (9000, None), (None, None)]
    missing = str(tmp_path / "missing")
    capsys.readouterr()
    assert run_command(vipu_server_command, ["--state-file", missing, "check"]) == 2
    assert f"there is no state file {missing}" in capsys.readouterr().err
    assert run_command(vipu_server_command, ["check", "--state-file", str(tmp_path)]) == 2
    assert f"{tmp_path} is no file" in capsys.readouterr().err
    for line in (["stop", "--state-file", missing], ["--prestart", "stop"]):
        assert run_command(vipu_server_command, line) == 2
        assert "vipu-server stop has no option --" in capsys.readouterr().err
