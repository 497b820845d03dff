"""A state file has one owner, holds all of a change or none of it, and is refused when it is inconsistent."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ConfigError, ConflictError, PodrunError, ServiceError
from podrun.partition.state.file_lock import LOCAL_FILE_SYSTEMS, file_system_of
from podrun.partition.state.repair import read_rows
from podrun.partition.state.store import Store
from podrun.partition.state.values import PartitionState, Requirements

from .conftest import Pod

S = PartitionState


@pytest.fixture
def file(tmp_path: Path, make_pod: Callable[..., Pod]) -> Path:
    """A state file in which partitions p and q hold four IPUs each."""
    path = tmp_path / "state.sqlite"
    pod = make_pod("pod16", path)
    pod.active("p", 4)
    pod.active("q", 4)
    pod.stop()
    return path


def change(path: Path, statement: str, *values: object) -> None:
    db = sqlite3.connect(path)
    with db:
        db.execute(statement, values)
    db.close()


def load(path: Path) -> None:
    store = Store(path, "pod16")
    try:
        store.load(load_cluster("pod16"))
    finally:
        store.close()


def refusal(path: Path) -> ConfigError:
    before = path.read_bytes()
    with pytest.raises(ConfigError) as refused:
        load(path)
    assert path.read_bytes() == before
    assert refused.value.hint
    return refused.value


# --- one owner --------------------------------------------------------------------------------------------------


def test_two_servers_do_not_share_a_state_file(tmp_path: Path, make_pod: Callable[..., Pod]) -> None:
    path = tmp_path / "state.sqlite"
    first = make_pod("pod16", path)
    first.active("p", 16)
    with pytest.raises(ConflictError, match=rf"{path} is in use by process \d+ on ") as refused:
        Store(path, "pod16")
    assert "--state-file FILE" in str(refused.value.hint)
    first.stop()
    load(path)


@pytest.mark.parametrize("kind", ["symbolic", "folder", "dangling", "hard"])
def test_another_name_of_a_state_file_is_the_same_file(
    tmp_path: Path, make_pod: Callable[..., Pod], kind: str
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    path, other = tmp_path / "a/state.sqlite", tmp_path / "b/other.sqlite"
    if kind == "folder":
        (tmp_path / "c").symlink_to(tmp_path / "a")
        other = tmp_path / "c/state.sqlite"
    elif kind != "hard":
        other.symlink_to(path)
    pod = make_pod("pod16", other if kind == "dangling" else path)
    if kind == "hard":
        if file_system_of(path) not in LOCAL_FILE_SYSTEMS:
            pytest.skip(f"no lock of an inode on {file_system_of(path)!r}")
        os.link(path, other)
    pod.active("p", 16)
    for name in (path, other):
        with pytest.raises(ConflictError, match=rf"{name} is in use by "):
            Store(name, "pod16")
    assert other.is_symlink() or kind in ("hard", "folder"), "the link was replaced by a file"
    pod.stop()
    load(other)


def test_locks_of_inodes_are_for_file_systems_of_this_host(tmp_path: Path) -> None:
    device = tmp_path.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "21 1 0:99 / /proc rw shared:2 - proc proc rw\n"
        f"22 1 {os.major(device)}:{os.minor(device)} / /home rw shared:1 - nfs4 host:/home rw\n"
    )
    assert file_system_of(tmp_path, mounts) == "nfs4"
    assert file_system_of(tmp_path / "none", mounts) == ""
    assert file_system_of(tmp_path, tmp_path / "none") == ""


def test_a_killed_owner_gives_its_file_up(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    code = (
        "import pathlib, sys; from podrun.partition.state.store import Store; "
        "store = Store(pathlib.Path(sys.argv[1]), 'pod16'); print('open', flush=True); input()"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "open\n"
        with pytest.raises(ConflictError, match=f"in use by process {owner.pid} on "):
            load(path)
    finally:
        owner.kill()
        owner.communicate(timeout=60)
    load(path)


# --- a disk that is full ----------------------------------------------------------------------------------------


def fill(store: Store) -> None:
    """Let SQLite take no further page of its file system."""
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute(f"PRAGMA max_page_count = {store._db.execute('PRAGMA page_count').fetchone()[0]}")


def make_room(store: Store) -> None:
    store._db.execute("PRAGMA max_page_count = 1000000")


def fill_while(pod: Pod, work: Callable[[str], object]) -> ServiceError:
    """The error of the first of many calls that no longer fits."""
    fill(pod.service.store)
    for number in range(16):
        try:
            work(f"x{number:03}-{'long' * 10}")
        except ServiceError as error:
            return error
    raise AssertionError("everything fits")


def test_a_full_disk_changes_nothing(tmp_path: Path, make_pod: Callable[..., Pod]) -> None:
    path = tmp_path / "state.sqlite"
    pod = make_pod("pod16", path)
    held = []

    def create(name: str) -> None:
        pod.client.create_partition(Requirements(name, 1))
        held.append(name)

    error = fill_while(pod, create)
    assert "cannot be written: database or disk is full; nothing was changed" in error.message
    assert "Make room" in str(error.hint)
    assert [info.name for info in pod.client.list_partitions()] == held
    make_room(pod.service.store)
    assert pod.service.wait_idle(60)
    assert [info.state for info in pod.client.list_partitions()] == [S.ACTIVE] * len(held)
    pod.active("later", 1)


def test_reports_that_a_full_disk_held_up_are_recorded_when_there_is_room(
    tmp_path: Path, make_pod: Callable[..., Pod], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("podrun.partition.server.service.REPORT_AGAIN_S", 0.01)
    pod = make_pod("pod16", tmp_path / "state.sqlite")
    commit = pod.service.store.commit
    full: list[object] = []

    def refuse_some(stored: object) -> None:
        if len(full) < 3 and pod.service._allocator.partitions:
            full.append(stored)
            raise ServiceError("the state file cannot be written")
        commit(stored)  # type: ignore[arg-type]

    monkeypatch.setattr(pod.service.store, "commit", refuse_some)
    pod.active("p", 4)
    assert len(full) == 3
    assert pod.client.get_partition("p").state is S.ACTIVE


# --- damage -----------------------------------------------------------------------------------------------------


def test_an_empty_file_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "state.sqlite"
    path.touch()
    error = refusal(path)
    assert "is empty" in error.message
    assert f"rm {path}" in str(error.hint)


def test_a_damaged_page_is_named(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4096:] = b"\xa5" * (len(data) - 4096)
    file.write_bytes(data)
    error = refusal(file)
    assert f"{file} is damaged" in error.message
    assert f"vipu-server check --cluster pod16 --state-file {file}" in str(error.hint)


def test_another_database_is_no_state_file(tmp_path: Path) -> None:
    path = tmp_path / "other.sqlite"
    change(path, "CREATE TABLE things (name TEXT)")
    assert "is damaged or no state file: it has no version" in refusal(path).message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ("no json", "Expecting value"),
        ("[]", "partition p: it is a list, not an object"),
        ("{}", "partition p: allocation is missing"),
        ('{"state": "FROZEN"}', "partition p: state is the text 'FROZEN', not one of PENDING"),
    ],
)
def test_a_row_that_is_no_partition_is_named(file: Path, data: str, words: str) -> None:
    change(file, "UPDATE partitions SET data = ? WHERE name = 'p'", data)
    assert words in refusal(file).message


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("slices", [{"agent_id": "ipum2", "first_slot": 0, "count": 4}], "belongs to partitions"),
        ("slices", [{"agent_id": "ipum9", "first_slot": 0, "count": 4}], "unknown agent ipum9"),
        ("slices", [{"agent_id": "ipum1", "first_slot": 2, "count": 4}], "ipum1 has no such IPUs"),
        ("size", 8, "holds 4 IPUs, not 8"),
        ("allocation", "gone", "is in no allocation"),
        ("state", "REMOVED", "is removed but recorded"),
        ("error", "broken", "error and state disagree"),
    ],
)
def test_a_state_that_does_not_hold_together_is_refused(
    file: Path, key: str, value: object, words: str
) -> None:
    db = sqlite3.connect(file)
    data = json.loads(db.execute("SELECT data FROM partitions WHERE name = 'p'").fetchone()[0])
    db.close()
    change(file, "UPDATE partitions SET data = ? WHERE name = 'p'", json.dumps(data | {key: value}))
    assert words in refusal(file).message


# --- whose file it is -------------------------------------------------------------------------------------------


def test_a_state_file_of_another_pod_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be kept in") as caught:
        Store(Path("/proc/nowhere/s"), "pod16")
    assert "--no-state" in str(caught.value.hint)
    Store(tmp_path / "s", "pod16").close()
    with pytest.raises(ConfigError, match="holds the state of pod16, not of pod64"):
        Store(tmp_path / "s", "pod64")
    (tmp_path / "t").write_text("not a database, but long enough to be looked at" * 10)
    with pytest.raises(ConfigError, match="no state file"):
        Store(tmp_path / "t", "pod16")


def test_a_pod_of_the_same_name_with_other_agents_is_refused(file: Path) -> None:
    pod16 = load_cluster("pod16")
    fewer = replace(
        pod16,
        agents=pod16.agents[:2],
        allocations=(replace(pod16.allocations[0], agents=("ipum1", "ipum2")),),
    )
    store = Store(file, "pod16")
    with pytest.raises(ConfigError, match="another description of pod16: its agents or links changed"):
        store.load(fewer)
    store.close()


@pytest.mark.parametrize("version", [1, 6])
def test_a_state_file_of_a_schema_that_was_never_released_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "old.sqlite"
    Store(path, "pod16").close()
    change(path, f"PRAGMA user_version = {version}")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"an unreleased podrun \(schema {version}; this one reads 7"):
        load(path)
    with pytest.raises(ConfigError, match="unreleased podrun"):
        read_rows(path)
    assert path.read_bytes() == before


ROW = json.dumps(
    {
        "name": "p",
        "allocation": "pod16",
        "size": 4,
        "reconfigurable": False,
        "num_gcds": 1,
        "num_ilds": 1,
        "sync_type": "POD_NATIVE_DEFAULT",
        "auto_reset": True,
        "created": 1.0,
        "faults": [],
        "slices": [{"agent_id": "ipum1", "first_slot": 0, "count": 4}],
        "state": "ACTIVE",
        "error": "",
        "generation": 1,
        "operation": 1,
        "story": ["created"],
    }
)
"""A partition as all schemas so far hold it."""


def test_a_state_file_of_a_newer_podrun_is_refused(file: Path) -> None:
    change(file, "PRAGMA user_version = 99")
    with pytest.raises(PodrunError, match=r"newer podrun \(schema 99"):
        load(file)
