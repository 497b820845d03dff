"""Files in ~/.ipuof.conf.d go with the partitions that they describe, whoever ends them."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from podrun.partition.commands.create import write_ipuof_files
from podrun.partition.host.discovery import ProcessId
from podrun.partition.host.holders import Holder, here, this_holder
from podrun.partition.host.ipuof_files import read_mark, remove_dead
from podrun.partition.server.config_folder import IpuofFiles
from podrun.partition.state import events as ev
from podrun.partition.state.values import PartitionState

from .conftest import Pod
from .test_take_over import left_by

S = PartitionState
MakePod = Callable[..., Pod]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / ".ipuof.conf.d"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def with_files(pod: Pod, folder: Path) -> Pod:
    path = pod.service.store.path
    aside = None if path is None else path.with_name("aside")
    pod.service.files = IpuofFiles(folder, aside, pod.service.id)
    return pod


def make(pod: Pod, name: str, size: int, **needs: object) -> None:
    pod.active(name, size, **needs)
    write_ipuof_files(pod.client, pod.client.get_partition(name))


def test_a_file_says_whose_it_is(pod16: Pod, folder: Path) -> None:
    make(pod16, "p", 8, num_gcds=2)
    mark = read_mark(folder / "p_gcd1_ipuof.conf")
    assert mark is not None
    assert (mark.service, mark.partition, mark.gcd) == (str(this_holder()), "p", 1)
    assert mark.epoch == f"{mark.service}/1700000000.000000"
    for text in ("", "{", "[]", "{}", '{"attributes": {"GCD Id": "0"}}', "{" * 10_000):
        (folder / "own.conf").write_text(text)
        assert read_mark(folder / "own.conf") is None
    assert pod16.pool.machine("ipum1", "p").configured["epoch"] == mark.epoch


@pytest.mark.parametrize("who", ["user", "limit", "drain", "holder"])
def test_files_go_with_their_partition(
    pod16: Pod, folder: Path, who: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_files(pod16, folder)
    now = [1_700_000_000.0]
    pod16.service._clock = lambda: now[0]
    make(pod16, "p", 4, limit_s=30.0 if who == "limit" else 0.0)
    make(pod16, "q", 4)
    (folder / "own.conf").write_text("{}")
    if who == "user":
        pod16.client.remove_partition("p")
    elif who == "holder":
        pod16.service.handle(ev.HoldersGone({}, {"p": ""}))
    elif who == "drain":
        pod16.client.set_maintenance("ipum1", drain=True, deadline_s=10.0)
    now[0] += 31
    pod16.service.look_around()
    assert pod16.client.wait_for_state("p", {S.REMOVED}, 60) is S.REMOVED
    assert names(folder) == ["own.conf", "q_ipuof.conf"]


def test_a_stopped_server_puts_files_aside_and_the_next_one_writes_them_anew(
    make_pod: MakePod, tmp_path: Path, folder: Path
) -> None:
    first = with_files(make_pod("pod16", tmp_path / "state"), folder)
    make(first, "p", 4)
    before = json.loads((folder / "p_ipuof.conf").read_text())
    first.stop()
    assert (names(folder), names(tmp_path / "aside")) == ([], ["p_ipuof.conf"])
    second = make_pod("pod16", tmp_path / "state")
    with_files(second, folder)
    assert second.service.wait_idle(60)
    second.client.reset_partition("p")  # `make_pod` starts the service before it has files.
    assert second.service.wait_idle(60)
    after = json.loads((folder / "p_ipuof.conf").read_text())
    assert (after["attributes"]["Epoch"], after["attributes"]["Generation"]) == (
        before["attributes"]["Epoch"],
        "3",
    )
    assert not (tmp_path / "aside").exists()


def test_a_partition_that_comes_up_while_its_server_stops_leaves_no_file(
    make_pod: MakePod, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = with_files(make_pod("pod16", tmp_path / "state"), folder)
    make(pod, "p", 4)
    finishing, closing = threading.Event(), threading.Event()
    report, close = pod.service._report, pod.pool.close

    def late(event: ev.Event) -> None:
        if isinstance(event, ev.OperationSucceeded):
            finishing.set()
            assert closing.wait(60)
        report(event)

    monkeypatch.setattr(pod.service._workers, "_report", late)
    monkeypatch.setattr(pod.pool, "close", lambda **given: (close(**given), closing.set()))
    pod.client.reset_partition("p")
    assert finishing.wait(60)
    pod.stop()
    assert pod.service.partition("p").state is S.ACTIVE
    assert names(folder) == []


def test_files_stay_with_machines_that_outlive_their_server(
    make_pod: MakePod, tmp_path: Path, folder: Path
) -> None:
    first = with_files(make_pod("pod16", tmp_path / "state"), folder)
    make(first, "p", 4)
    make(first, "gone", 4)
    left = left_by(first)
    assert names(folder) == ["gone_ipuof.conf", "p_ipuof.conf"]
    second = make_pod("pod16", tmp_path / "state", left=left)
    assert second.service.id == first.service.id
    files = with_files(second, folder).service.files
    files.sweep({second.client.ipuof_config("p").attributes["Epoch"]})
    assert names(folder) == ["gone_ipuof.conf", "p_ipuof.conf"]  # The clock of `Pod` stands still: one epoch.
    files.sweep({"another"})
    assert names(folder) == []


def test_two_services_of_one_host_leave_each_others_files_alone(
    make_pod: MakePod, tmp_path: Path, folder: Path
) -> None:
    one = with_files(make_pod("pod16", tmp_path / "one"), folder)
    two = with_files(make_pod("pod16", tmp_path / "two"), folder)
    one.active("p", 4)
    make(two, "p", 4)
    make(one, "q", 4)
    one.client.remove_partition("p")
    assert one.client.wait_for_state("p", {S.REMOVED}, 60) is S.REMOVED
    assert names(folder) == ["p_ipuof.conf", "q_ipuof.conf"]
    two.stop()
    assert names(folder) == ["q_ipuof.conf"]


def test_files_of_a_server_that_was_killed_go_when_the_next_one_starts(pod16: Pod, folder: Path) -> None:
    make(pod16, "p", 4)
    text = (folder / "p_ipuof.conf").read_text()
    dead = str(Holder(*here(), ProcessId(os.getpid(), 1)))
    (folder / "k_ipuof.conf").write_text(text.replace(pod16.service.id, dead))
    (folder / "far_ipuof.conf").write_text(text.replace(pod16.service.id, "other-host:::1:1"))
    (folder / "stored_ipuof.conf").write_text(text.replace(pod16.service.id, "0123456789abcdef"))
    remove_dead(folder)
    assert names(folder) == ["far_ipuof.conf", "p_ipuof.conf", "stored_ipuof.conf"]
