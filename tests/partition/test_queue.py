"""The queue: the next request, overtaking, and answers to waiting requests; agents out of service."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.command_line import run_command
from podrun.core.errors import ConflictError, ExhaustedError, ExistsError, NotFoundError, UsageError
from podrun.core.telemetry import AttachedProcess
from podrun.partition.commands.vipu import vipu_command
from podrun.partition.commands.vipu_admin import vipu_admin_command
from podrun.partition.host.holders import steady_clock
from podrun.partition.host.leases import QUEUE_LEASE_S, SignsOfLife
from podrun.partition.server.views import SUSPECT_SECONDS, agent_health
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.explanations import explain_queue
from podrun.partition.state.orphans import HolderWatch
from podrun.partition.state.placement import ipus_of
from podrun.partition.state.values import PartitionState, Requirements

from .conftest import Pod

S = PartitionState
NOW = 1_000.0


@pytest.fixture
def core() -> Allocator:
    allocator = Allocator(load_cluster("pod16"))
    allocator.now = NOW
    return allocator


def make(core: Allocator, name: str, size: int, limit: float = 0.0, **needs: object) -> None:
    """Create a partition without the queue, and bring it up."""
    core.handle(ev.CreatePartition(Requirements(name, size, limit_s=limit, **needs), core.now))  # type: ignore[arg-type]
    bring_up(core)


def ask(
    core: Allocator, name: str, size: int, priority: int = 0, limit: float = 0.0, **needs: object
) -> None:
    core.handle(ev.Enqueue(Requirements(name, size, limit_s=limit, **needs), priority, core.now))  # type: ignore[arg-type]
    bring_up(core)


def bring_up(core: Allocator) -> None:
    for partition in list(core.partitions.values()):
        if partition.state in (S.PENDING, S.REMOVING):
            core.handle(ev.OperationSucceeded(partition.name, partition.operation))
    core.validate_state()


def remove(core: Allocator, name: str) -> None:
    core.handle(ev.RemovePartition(name))
    bring_up(core)
    bring_up(core)


def waiting(core: Allocator) -> list[str]:
    return [told.entry.needs.name for told in explain_queue(core)]


def test_a_request_that_fits_does_not_wait(core: Allocator) -> None:
    ask(core, "p", 8)
    assert core.partition("p").state is S.ACTIVE
    assert core.queue == {}


def test_priority_comes_first_and_then_who_came_first(core: Allocator) -> None:
    make(core, "all", 16)
    for name, priority in [("a", 0), ("b", 0), ("urgent", 5), ("later", -1)]:
        ask(core, name, 16, priority)
    assert waiting(core) == ["urgent", "a", "b", "later"]
    served = []
    for _ in range(4):
        remove(core, next(iter(core.partitions)))
        served.append(next(iter(core.partitions)))
    assert served == ["urgent", "a", "b", "later"]


def test_who_overtakes_delays_nobody(core: Allocator) -> None:
    make(core, "half", 8, limit=100.0)  # Ends at 1100.
    ask(core, "whole", 16)
    ask(core, "long", 4)  # Would hold IPUs of "whole" for ever.
    ask(core, "slow", 4, limit=150.0)
    ask(core, "quick", 4, limit=60.0)
    assert set(core.partitions) == {"half", "quick"}
    assert explain_queue(core)[0].latest == NOW + 100
    assert set(explain_queue(core)[0].blockers) == {"quick", "half"}
    assert waiting(core) == ["whole", "long", "slow"]


def test_nobody_overtakes_where_no_limit_is_known(core: Allocator) -> None:
    make(core, "half", 8)
    ask(core, "whole", 16)
    ask(core, "quick", 4, limit=1.0)
    (whole, quick) = explain_queue(core)
    assert (whole.position, whole.latest, whole.blockers) == (1, None, ("half",))
    assert (quick.position, quick.ahead) == (2, ("whole",))
    with pytest.raises(ExhaustedError, match="8 IPUs are, and 2 queued requests come first"):
        make(core, "sly", 4)


def test_other_ipus_are_free_for_all(core: Allocator) -> None:
    make(core, "a", 4)
    ask(core, "big", 16)
    core.handle(ev.LeaveQueue("big"))
    make(core, "b", 8)
    ask(core, "eight", 8)  # Waits for b, or for the half in which a is.
    ask(core, "four", 4)
    held = ipus_of(core.cluster, core.partition("four").slices) if "four" in core.partitions else ()
    told = explain_queue(core)[0]
    assert not (held and told.blockers == ("a",)), "an overtaker took IPUs of the place that is booked"


def test_a_limit_ends_a_partition_and_serves_the_next(core: Allocator) -> None:
    make(core, "p", 16, limit=30.0)
    ask(core, "q", 16)
    core.handle(ev.Tick(NOW + 29))
    assert core.partition("p").state is S.ACTIVE
    core.handle(ev.Tick(NOW + 30))
    assert core.partition("p").state is S.REMOVING
    core.now = NOW + 31
    bring_up(core)
    assert core.partition("q").created == NOW + 31


def test_impossible_and_double_requests_do_not_wait(core: Allocator) -> None:
    make(core, "p", 16)
    ask(core, "q", 16)
    for needs, error, message in [
        (Requirements("p", 4), ExistsError, "partition p exists already"),
        (Requirements("q", 4), ExistsError, "a request for partition q waits in the queue"),
        (Requirements("r", 3), UsageError, "power of two"),
        (Requirements("r", 4, allocation="no"), NotFoundError, "no allocation 'no'"),
        (Requirements("r", 4, reservation="no"), NotFoundError, "no reservation 'no'"),
    ]:
        with pytest.raises(error, match=message):
            core.handle(ev.Enqueue(needs, 0, NOW))
    with pytest.raises(NotFoundError, match="no queued request 'qq'"):
        core.handle(ev.LeaveQueue("qq"))
    core.handle(ev.RemovePartition("q"))
    assert core.queue == {}


def test_a_reservation_is_kept_free_and_used_by_name(core: Allocator) -> None:
    reservation = ev.Reservation("course", ("ipum1", "ipum2"), NOW + 100, NOW + 200)
    core.handle(ev.CreateReservation(reservation, NOW))
    make(core, "short", 4, limit=50.0)
    assert core.partition("short").slices[0].agent_id == "ipum1"  # It is gone in time.
    make(core, "long", 8)
    assert {part.agent_id for part in core.partition("long").slices} == {"ipum3", "ipum4"}
    with pytest.raises(ExhaustedError, match="which a reservation keeps"):
        make(core, "more", 4)
    ask(core, "lesson", 8, reservation="course")
    assert waiting(core) == ["lesson"]
    core.now = NOW + 100
    core.handle(ev.Tick(core.now))
    bring_up(core)
    core.handle(ev.Tick(core.now))
    bring_up(core)
    assert {part.agent_id for part in core.partition("lesson").slices} == {"ipum1", "ipum2"}
    core.handle(ev.Tick(NOW + 200))
    assert core.reservations == {}
    for agents, start, end, message in [
        (("ipum1",), 0.0, NOW - 1, "an end after its start"),
        ((), NOW, NOW + 9, "needs agents"),
        (("ipum9",), NOW, NOW + 999, "no agent 'ipum9'"),
        (("ipum3",), NOW, NOW + 999, "partition long may still hold ipum3"),
    ]:
        with pytest.raises(UsageError, match=message):
            core.handle(ev.CreateReservation(ev.Reservation("r", agents, start, end), NOW))


# --- agents out of service ----------------------------------------------------------------------------------------


def test_a_reason_that_fills_screens_is_refused(core: Allocator) -> None:
    with pytest.raises(UsageError, match="too long"):
        core.handle(ev.SetMaintenance("ipum1", False, NOW, reason="a" * 501))


def test_a_cordoned_agent_gets_nothing_new_and_keeps_what_it_has(core: Allocator) -> None:
    make(core, "p", 4)
    core.handle(ev.SetMaintenance("ipum1", False, NOW, reason="fan"))
    core.handle(ev.SetMaintenance("ipum2", False, NOW))
    make(core, "q", 4)
    assert core.partition("q").slices[0].agent_id == "ipum3"
    assert core.partition("p").state is S.ACTIVE
    make(core, "r", 4)
    with pytest.raises(ExhaustedError, match="agents out of service: ipum1, ipum2"):
        make(core, "s", 4)
    ask(core, "s", 4)
    core.handle(ev.EndMaintenance("ipum2", NOW))
    bring_up(core)
    assert core.partition("s").slices[0].agent_id == "ipum2"
    with pytest.raises(ConflictError, match="ipum2 is in service already"):
        core.handle(ev.EndMaintenance("ipum2", NOW))


def test_a_drain_ends_partitions_at_its_deadline(core: Allocator) -> None:
    make(core, "stays", 4)
    make(core, "moves", 4, relocatable=True)
    for agent in ("ipum1", "ipum2"):
        core.handle(ev.SetMaintenance(agent, True, NOW, 60.0))
    core.handle(ev.Tick(NOW + 59))
    assert {p.state for p in core.partitions.values()} == {S.ACTIVE}
    core.handle(ev.Tick(NOW + 60))
    assert core.partition("stays").state is S.REMOVING
    bring_up(core)
    moved = core.partition("moves")
    assert (moved.slices[0].agent_id, moved.generation, moved.state) == ("ipum3", 2, S.ACTIVE)
    core.validate_state()


def test_a_relocatable_partition_moves_when_its_machine_is_lost(core: Allocator) -> None:
    make(core, "p", 8, relocatable=True)
    make(core, "q", 4)
    core.handle(ev.AgentLost("ipum2", "its process ended"))
    assert core.partition("p").state is S.ERROR  # No 8 IPUs are left.
    core.handle(ev.RemovePartition("p"))
    bring_up(core)
    make(core, "r", 4, relocatable=True)
    before = core.partition("r").slices[0].agent_id
    core.handle(ev.AgentLost(before, "its process ended"))
    bring_up(core)
    assert core.partition("r").slices[0].agent_id not in (before, "ipum2")
    assert core.partition("r").story[-2].endswith("moved to other IPUs: a machine is lost")


# --- the service --------------------------------------------------------------------------------------------------


def test_a_client_waits_and_is_served(pod16: Pod) -> None:
    pod16.active("p", 16)
    asked = pod16.client.create_partition(Requirements("q", 8), wait=True, priority=3)
    assert asked.state is S.QUEUED
    (told,) = pod16.client.list_queue()
    assert (told.name, told.priority, told.position, told.blockers) == ("q", 3, 1, ("p",))
    pod16.client.remove_partition("p")
    pod16.client.wait_in_queue("q", 20)
    assert pod16.client.wait_for_state("q", {S.ACTIVE}, 60) is S.ACTIVE
    pod16.client.create_partition(Requirements("r", 16), wait=True)
    with pytest.raises(ConflictError, match="a request for partition r waits"):
        pod16.client.create_partition(Requirements("r", 16), wait=True)


def test_a_client_that_vanishes_leaves_the_queue(pod16: Pod) -> None:
    now = [0.0]
    pod16.service._holders = HolderWatch(SignsOfLife(lambda: now[0]))
    pod16.active("p", 16)
    for name in ("gone", "there"):
        pod16.client.create_partition(Requirements(name, 16), wait=True)
    now[0] = QUEUE_LEASE_S
    assert pod16.client.partition_state("there")[0] is S.QUEUED
    now[0] += 1
    pod16.service.look_around()
    assert [told.name for told in pod16.client.list_queue()] == ["there"]
    with pytest.raises(NotFoundError):
        pod16.client.wait_in_queue("gone", 1)


def test_the_order_is_the_same_after_a_restart(make_pod: Callable[..., Pod], tmp_path: Path) -> None:
    first = make_pod("pod16", tmp_path / "state")
    first.active("p", 16)
    for name, priority in [("a", 0), ("b", 1), ("c", 0)]:
        first.client.create_partition(Requirements(name, 16), wait=True, priority=priority)
    before = first.client.list_queue()
    assert [told.name for told in before] == ["b", "a", "c"]
    first.stop()
    second = make_pod("pod16", tmp_path / "state")
    assert second.client.list_queue() == before


def test_a_steady_clock_is_not_set() -> None:
    wall, monotonic = [5_000.0], [10.0]
    clock = steady_clock(lambda: wall[0], lambda: monotonic[0])
    wall[0], monotonic[0] = 9_999.0, 12.0
    assert clock() == 5_002.0


def test_a_partition_in_use_is_not_removed_without_force(pod16: Pod) -> None:
    pod16.active("p", 4)
    pod16.pool.machine("ipum1", "p").process = AttachedProcess(4711, "ada", "train.py")
    with pytest.raises(ConflictError, match=r"in use by process 4711 \(train.py\) of ada") as refused:
        pod16.client.remove_partition("p")
    assert "vipu remove partition p --force" in str(refused.value.hint)
    assert pod16.client.partition_state("p")[0] is S.ACTIVE
    pod16.client.remove_partition("p", force=True)
    assert pod16.client.wait_for_state("p", {S.REMOVED}, 60) is S.REMOVED


def test_health_and_the_last_answer_of_a_silent_machine(pod16: Pod) -> None:
    pod16.active("p", 8)
    machine = pod16.pool.machine("ipum2", "p")
    machine.process = AttachedProcess(os.getpid(), "ada", "train.py")
    pod16.service._ask_machines()
    machine.fail = "telemetry"
    answering, silent = pod16.client.machine_reports("p")
    assert (answering.state, answering.stale_seconds) == ("up", None)
    assert silent.state == "no answer"
    assert silent.stale_seconds is not None
    assert silent.ipus[0].process is not None
    assert silent.ipus[0].process.pid == os.getpid()  # As it said last.
    pod16.client.set_maintenance("ipum1", drain=True, deadline_s=60.0, reason="fan")
    pod16.client.set_maintenance("ipum3")
    pod16.pool.machine("ipum1", "p")
    agents = {info.agent_id: info for info in pod16.client.list_agents()}
    assert {name: info.health for name, info in agents.items()} == {
        "ipum1": "draining",
        "ipum2": "suspect",
        "ipum3": "cordoned",
        "ipum4": "up",
    }
    assert (agents["ipum1"].reason, agents["ipum1"].deadline) == ("fan", 1_700_000_060.0)
    assert agent_health(False, None, SUSPECT_SECONDS) == "unreachable"
    assert agent_health(True, None, None) == "failed"
    machine.fail = ""
    pod16.service._ask_machines()
    assert {info.agent_id: info.health for info in pod16.client.list_agents()}["ipum2"] == "up"


def test_the_commands_of_queue_and_maintenance(pod16: Pod, capsys: pytest.CaptureFixture[str]) -> None:
    def say(command: click.Command, *words: str) -> str:
        code = run_command(command, ["--api-host=127.0.0.1", f"--api-port={pod16.port}", *words])
        told = capsys.readouterr()
        assert code == 0, told.err
        return told.out

    pod16.active("p", 16)
    pod16.client.create_partition(Requirements("q", 8), wait=True)
    assert "| q         | 8    | 0" in say(vipu_command, "list", "queue")
    assert json.loads(say(vipu_command, "list", "queue", "--format=json"))["queue"][0]["blockers"] == ["p"]
    told = say(vipu_command, "explain", "q")
    assert "Position    | 1 of 1 (priority 0)" in told
    assert "not known: what is in the way has no time limit" in told
    assert "ACTIVE" in say(vipu_command, "explain", "p")
    assert say(vipu_command, "remove", "partition", "q") == "remove partition (q): success.\n"
    assert (
        say(vipu_admin_command, "cordon", "agent", "ipum1", "--reason=fan")
        == "cordon agent (ipum1): success.\n"
    )
    assert "cordoned, fan" in say(vipu_admin_command, "get", "agent", "ipum1")
    assert say(vipu_admin_command, "return", "agent", "ipum1") == "return agent (ipum1): success.\n"
    assert say(vipu_admin_command, "drain", "agent", "ipum2", "--deadline=60").endswith("success.\n")
    say(vipu_command, "remove", "partition", "p")
    reserve = ("create", "reservation", "r", "--agents=ipum3,ipum4", "--for=600")
    assert say(vipu_admin_command, *reserve) == "create reservation (r): success.\n"
    assert "| ipum3 ipum4 |" in say(vipu_command, "list", "reservations")
    assert say(vipu_admin_command, "remove", "reservation", "r").endswith("success.\n")
    assert run_command(vipu_command, ["create", "partition", "x", "--size=4", "--wait", "--no-wait"]) == 2
