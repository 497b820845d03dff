"""Partitions and requests end with the process that asked for them, whoever dies first."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import NotFoundError, UsageError
from podrun.partition.client import partition_calls
from podrun.partition.client.connection import NoServerError
from podrun.partition.client.partition_calls import SERVER_PATIENCE_S
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import ProcessId
from podrun.partition.host.holders import Holder, here, lives, parse_holder, this_holder
from podrun.partition.host.leases import HOLD_LEASE_S, SignsOfLife
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.orphans import HolderWatch
from podrun.partition.state.values import PartitionState, Requirements

from .conftest import Pod
from .test_take_over import left_by

S = PartitionState
MakePod = Callable[..., Pod]
ME = str(this_holder())
GONE = str(Holder(*here(), ProcessId(os.getpid(), this_holder().process.start_ticks - 1)))
"""A process that had the number of this one earlier."""
ELSEWHERE = str(Holder("other-host", "", "", ProcessId(1, 2)))


def test_a_holder_is_a_process_of_a_host() -> None:
    assert parse_holder(ME) == this_holder()
    assert (lives(ME), lives(GONE), lives(ELSEWHERE)) == (True, False, None)
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # A zombie from here on.
        ended = str(Holder(*here(), ProcessId(process.pid, 1)))
        assert lives(ended) is False
    assert lives(ended) is False
    for text in ("", "host", "h:b:n:1:2:3", "h:::x:1", "a b:::1:1", "h" * 300 + ":::1:1"):
        with pytest.raises(ValueError, match="names no process"):
            parse_holder(text)


def test_signs_of_life_count_for_holders_that_are_not_seen() -> None:
    now = [0.0]
    signs = SignsOfLife(lambda: now[0], {"alive": True, "dead": False, "far": None}.get)
    held = {"a": "alive", "d": "dead", "f": "far"}
    assert signs.orphans(held) == ["d"]
    assert signs.absent({**held, "nobody": ""}) == {"d", "f", "nobody"}
    now[0] = HOLD_LEASE_S
    signs.note("f")
    now[0] += HOLD_LEASE_S
    assert signs.orphans(held) == ["d"]
    assert signs.absent(held) == {"d"}
    now[0] += 1
    assert signs.orphans(held) == ["d", "f"]
    assert signs.vanished(held) == ["a", "d", "f"]  # In the queue a client has to ask.
    signs.forget(())
    assert signs.orphans(held) == ["d"]


# --- decisions --------------------------------------------------------------------------------------------------


@pytest.fixture
def core() -> Allocator:
    allocator = Allocator(load_cluster("pod16"))
    allocator.handle(ev.CreatePartition(Requirements("p", 16, holder=GONE), 0.0))
    for name in "abcde":
        allocator.handle(ev.Enqueue(Requirements(name, 16, holder=GONE if name < "d" else ME), 0, 0.0))
    return allocator


def finish(core: Allocator) -> None:
    for partition in list(core.partitions.values()):
        core.handle(ev.OperationSucceeded(partition.name, partition.operation))
        core.validate_state()


def test_absent_clients_keep_their_places_and_get_nothing(core: Allocator) -> None:
    core.absent = frozenset("abc")
    core.handle(ev.RemovePartition("p"))
    finish(core)
    assert (core.partitions, list(core.queue)) == ({}, list("abcde"))
    core.absent = frozenset("ac")
    core.handle(ev.Tick(1.0))
    assert list(core.partitions) == []  # a comes before b.
    core.absent = frozenset("c")
    core.handle(ev.Tick(2.0))
    assert list(core.partitions) == ["a"]


def test_all_that_belongs_to_gone_holders_ends_in_one_decision(core: Allocator) -> None:
    gone = ev.HoldersGone(dict.fromkeys("abc", GONE) | {"x": GONE, "e": GONE}, {"p": GONE, "y": GONE})
    (release,) = core.handle(gone)
    assert isinstance(release, ev.ReleaseMachines)
    assert list(core.queue) == ["d", "e"]  # That of e is another one by now.
    finish(core)
    assert list(core.partitions) == ["d"]
    core.handle(ev.HoldersGone({}, {"d": GONE}))
    assert core.partition("d").state is not S.REMOVING


def test_what_is_kept_stays(core: Allocator) -> None:
    core.handle(ev.KeepPartition("p", ME))
    assert core.partition("p").holder == GONE
    for name in "pa":
        core.handle(ev.KeepPartition(name, GONE))
    assert (core.partition("p").holder, core.queue["a"].needs.holder) == ("", "")
    with pytest.raises(NotFoundError):
        core.handle(ev.KeepPartition("none", GONE))


# --- the service --------------------------------------------------------------------------------------------------


def test_a_partition_ends_with_its_holder(pod16: Pod) -> None:
    now, alive = [0.0], {ME: True, ELSEWHERE: None}
    pod16.service._holders = HolderWatch(SignsOfLife(lambda: now[0], alive.get))
    for name, holder in [("mine", ME), ("kept", ME), ("far", ELSEWHERE), ("free", "")]:
        pod16.active(name, 4, holder=holder)
    assert pod16.client.get_partition("mine").holder == ME
    pod16.client.hold_partition("kept", ME, keep=True)
    pod16.client.hold_partition("far", GONE, keep=True)  # Another's: nothing changes.
    now[0] = HOLD_LEASE_S
    pod16.client.hold_partition("far", ELSEWHERE)
    now[0] += 1
    pod16.service.look_around()
    assert all(info.state is S.ACTIVE for info in pod16.client.list_partitions())
    alive[ME] = False
    pod16.service.look_around()
    assert pod16.client.wait_for_state("mine", {S.REMOVED}, 60)
    now[0] += HOLD_LEASE_S
    pod16.service.look_around()
    assert pod16.client.wait_for_state("far", {S.REMOVED}, 60)
    assert [info.name for info in pod16.client.list_partitions()] == ["free", "kept"]
    with pytest.raises(UsageError, match="'nobody' names no process"):
        pod16.client.create_partition(Requirements("q", 1, holder="nobody"))


def test_a_client_that_waits_for_machines_gives_signs_of_life(pod16: Pod) -> None:
    now = [0.0]
    pod16.service._holders = HolderWatch(SignsOfLife(lambda: now[0], lambda text: None))
    pod16.active("p", 4, holder=ELSEWHERE)
    pod16.pool.machine("ipum1", "p").die()
    assert pod16.client.wait_for_state("p", {S.ERROR}, 60) is S.ERROR
    now[0] = HOLD_LEASE_S + 1
    assert pod16.client.partition_state("p")[0] is S.ERROR
    pod16.service.look_around()
    assert pod16.client.partition_state("p")[0] is S.ERROR
    now[0] += HOLD_LEASE_S + 1
    pod16.service.look_around()
    assert pod16.client.wait_for_state("p", {S.REMOVED}, 60) is S.REMOVED


def test_a_server_that_starts_sweeps(
    make_pod: MakePod, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_pod("pod16", tmp_path / "state")
    watch = HolderWatch(SignsOfLife(see=lambda text: True))  # They die while no server runs.
    first.service._holders = watch
    first.active("launch", 16, holder=GONE)
    for name, holder in [("a", GONE), ("b", GONE), ("c", ME), ("d", GONE), ("e", ME)]:
        first.client.create_partition(Requirements(name, 16, holder=holder), wait=True)
    with caplog.at_level(logging.INFO, "podrun.partition"):
        second = make_pod("pod16", tmp_path / "state", left=left_by(first), keep_spares=True)
        assert second.client.wait_for_state("c", {S.ACTIVE}, 60) is S.ACTIVE
    assert [info.name for info in second.client.list_partitions()] == ["c"]
    assert [entry.name for entry in second.client.list_queue()] == ["e"]
    assert [text for text in caplog.messages if text.endswith(": created")] == ["partition c: created"]
    assert "partition launch is removed: process" in caplog.text


def test_requests_of_clients_that_are_not_seen_wait_for_a_sign_of_life(
    make_pod: MakePod, tmp_path: Path
) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 16)
    for name, holder in [("far", ELSEWHERE), ("old", "")]:
        first.client.create_partition(Requirements(name, 8, holder=holder), wait=True)
    second = make_pod("pod16", tmp_path / "state", left=left_by(first), keep_spares=True)
    second.client.remove_partition("p")
    assert second.client.wait_for_state("p", {S.REMOVED}, 60)
    second.service.look_around()
    assert [entry.name for entry in second.client.list_queue()] == ["far", "old"]
    second.client.hold_partition("far", ELSEWHERE)
    assert second.client.partition_state("old")[0] is S.QUEUED
    second.service.look_around()
    assert second.client.list_queue() == []


# --- clients ------------------------------------------------------------------------------------------------------


def test_who_waits_lets_the_server_start_again(pod16: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [S.QUEUED, NoServerError("none"), NoServerError("none"), S.QUEUED, S.ACTIVE]

    def next_answer(client: VipuClient, name: str) -> tuple[PartitionState, str]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, PartitionState)
        return answer, ""

    monkeypatch.setattr(VipuClient, "partition_state", next_answer)
    pod16.client.wait_in_queue("q", sleep=lambda seconds: None)
    assert answers == []
    now = [0.0]
    answers = [NoServerError("none")] * 1000

    def sleep(seconds: float) -> None:
        now[0] += seconds

    with pytest.raises(NoServerError):
        pod16.client.wait_for_state("q", {S.ACTIVE}, 999, clock=lambda: now[0], sleep=sleep)
    assert now[0] == pytest.approx(SERVER_PATIENCE_S, abs=partition_calls.QUEUE_POLL_S)
