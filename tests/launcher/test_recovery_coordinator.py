"""Recovery after failures: decided by a pure state machine, carried out on a service with fake machines."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from podrun.core.errors import ConfigError, ErrorCode, RecoveryAction, ServiceError
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.telemetry import IpuReport, MachineReport
from podrun.faults import FaultSpec, Struck, parse_fault, parse_faults
from podrun.launcher.launch_faults import not_planned, remaining
from podrun.launcher.launch_server import LaunchPauses, LaunchServer
from podrun.launcher.machine_work import done_by_all
from podrun.launcher.options import parse_command_line
from podrun.launcher.output import OutputMixer
from podrun.launcher.own_streams import Log
from podrun.launcher.partition import BETWEEN_ATTEMPTS_SECONDS, LaunchPartition
from podrun.launcher.plan import plan_launch
from podrun.launcher.process import Ended
from podrun.launcher.program import LaunchContext
from podrun.launcher.recovering import Restarts
from podrun.launcher.recovery import (
    Answer,
    Attempt,
    Coordinator,
    Damage,
    FailureKind,
    GoOnWithFewer,
    PowerCycleMachine,
    Recovery,
    RecoveryStep,
    ReplaceMachine,
    ResetThePartition,
    ResetTheseIpus,
    RestartPolicy,
    TakeSpare,
    Verdict,
    damage_of,
    read_policy,
)
from podrun.launcher.repair import Repairs
from podrun.launcher.spec import CurrentLaunch, LaunchSpec
from podrun.launcher.supervise import LaunchOutcome, Stopping
from podrun.partition.state.values import PartitionState
from tests.partition.conftest import Pod

ALL_WELL = Damage()
LINK = Damage(links=((2, 3),), words=("IPU-Link 2-3 down",))
LOST = Damage(lost=("ipum2",))


def reports(**changed: IpuReport | str) -> list[MachineReport]:
    """Reports of two machines, in some of which something is wrong: ``ipu5=IpuReport``, ``ipum2="lost"``."""
    found = []
    for index in range(2):
        agent = f"ipum{index + 1}"
        ipus = tuple(
            changed.get(f"ipu{4 * index + i}", IpuReport(4 * index + i, i))  # type: ignore[misc]
            for i in range(4)
        )
        state = MachineState(changed.get(agent, "up"))
        found.append(MachineReport(agent, state=state, machine_index=index, pid=7, ipus=ipus))
    return found


@pytest.mark.parametrize(
    ("changed", "damage", "kind"),
    [
        ({}, Damage(), FailureKind.PROGRAM),
        (
            {
                "ipu5": IpuReport(
                    5, 1, IpuErrorState.TILE_PARITY, ErrorCode.MEMORY_ERROR, RecoveryAction.IPU_RESET
                )
            },
            Damage(ipus=(5,), words=("tile parity error of IPU 5",)),
            FailureKind.IPU,
        ),
        (
            {
                "ipu5": IpuReport(
                    5, 1, IpuErrorState.OVERFLOW, ErrorCode.FLOATING_POINT_OVERFLOW, RecoveryAction.IPU_RESET
                )
            },
            Damage(tile_exceptions=(5,), words=("floating-point exception (overflow) of IPU 5",)),
            FailureKind.TILE_EXCEPTION,
        ),
        (
            {"ipu2": IpuReport(2, 2, links_down=(3,)), "ipu3": IpuReport(3, 3, links_down=(2,))},
            LINK,
            FailureKind.LINK,
        ),
        (
            {
                f"ipu{i}": IpuReport(
                    i, i % 4, IpuErrorState.POWER, ErrorCode.UNKNOWN, RecoveryAction.FULL_RESET
                )
                for i in range(4, 8)
            },
            Damage(power=("ipum2",), words=("power fault of machine ipum2",)),
            FailureKind.POWER,
        ),
        (
            {"ipu1": IpuReport(1, 1, IpuErrorState.UNRECOVERABLE, ErrorCode.UNKNOWN, None)},
            Damage(lost=("ipum1",), words=("unrecoverable error of machine ipum1",)),
            FailureKind.LOST,
        ),
        (
            {
                "ipu4": IpuReport(
                    4,
                    0,
                    IpuErrorState.STREAMING_MEMORY,
                    ErrorCode.MEMORY_ERROR,
                    RecoveryAction.PARTITION_RESET,
                )
            },
            Damage(partition=True, words=("streaming memory error of machine ipum2",)),
            FailureKind.LINK,
        ),
        ({"ipum2": "lost"}, Damage(lost=("ipum2",), words=("machine ipum2 lost",)), FailureKind.LOST),
        ({"ipum1": "no answer"}, Damage(lost=("ipum1",), words=("machine ipum1 lost",)), FailureKind.LOST),
        ({"ipu1": IpuReport(1, 1, IpuErrorState.NOT_READY)}, Damage(), FailureKind.PROGRAM),
    ],
)
def test_what_is_broken_is_read_from_reports(changed: Any, damage: Damage, kind: FailureKind) -> None:
    assert damage_of(reports(**changed)) == damage
    assert damage.kind is kind


def attempt(damage: Damage = ALL_WELL, batches: int = 3, code: int = 1) -> Attempt:
    return Attempt("instance 0 ended with exit code 1", code, damage, batches)


@pytest.mark.parametrize(
    ("damage", "ways"),
    [
        (ALL_WELL, ((),)),
        (Damage(ipus=(5,), tile_exceptions=(1,)), ((ResetTheseIpus((1, 5)),),)),
        (LINK, ((ResetThePartition(),),)),
        (Damage(partition=True), ((ResetThePartition(),),)),
        (Damage(power=("ipum1",), ipus=(5,)), ((PowerCycleMachine("ipum1"), ResetThePartition()),)),
        (LOST, ((TakeSpare(),), (ReplaceMachine("ipum2"), ResetThePartition()))),
        (
            replace(LOST, power=("ipum1",)),
            ((TakeSpare(),), (ReplaceMachine("ipum2"), PowerCycleMachine("ipum1"), ResetThePartition())),
        ),
    ],
)
def test_each_action_is_done_once_for_all_instances(damage: Damage, ways: Any) -> None:
    assert Coordinator(RestartPolicy(max_restarts=1)).failed(attempt(damage)) == Recovery(1, ways)


def test_as_often_as_allowed() -> None:
    coordinator = Coordinator(RestartPolicy(max_restarts=2))
    assert isinstance(coordinator.failed(attempt(batches=1)), Recovery)
    assert isinstance(coordinator.failed(attempt(LINK, batches=2)), Recovery)
    assert coordinator.failed(attempt(batches=1, code=9)) == Verdict(
        "2 restarts, as many as are allowed, did not help\n"
        "  attempt 1: instance 0 ended with exit code 1 after 1 batch\n"
        "  attempt 2: instance 0 ended with exit code 1 after 2 batches (IPU-Link 2-3 down)\n"
        "  attempt 3: instance 0 ended with exit code 1 after 1 batch"
    )


def test_a_crash_loop_ends_with_a_verdict() -> None:
    coordinator = Coordinator(RestartPolicy(max_restarts=100, crash_loop_after=3))
    assert isinstance(coordinator.failed(attempt(batches=17)), Recovery)
    for _ in range(2):
        assert isinstance(coordinator.failed(attempt(batches=2)), Recovery)
    verdict = coordinator.failed(attempt(batches=2))
    assert isinstance(verdict, Verdict)
    assert verdict.text.startswith("crash loop: the last 3 attempts ended alike\n  attempt 1: ")


def test_a_run_that_gets_further_each_time_is_no_crash_loop() -> None:
    """Each start does ten batches from its checkpoint on, and fails in the same way."""
    coordinator = Coordinator(RestartPolicy(max_restarts=100, crash_loop_after=3))
    for reached in (10, 20, 30, 40):
        assert isinstance(coordinator.failed(replace(attempt(batches=10), reached=reached)), Recovery)
    assert isinstance(coordinator.failed(replace(attempt(batches=7), reached=40)), Recovery)
    verdict = coordinator.failed(replace(attempt(batches=10), reached=40))
    assert isinstance(verdict, Verdict)
    assert verdict.text.startswith("crash loop: the last 3 attempts ended alike")


def test_a_policy_file_is_read_with_its_ways_for_each_fault(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(
        "version: 1\nmax-restarts: 5\ncrash-loop-after: 4\npause-seconds: 1.5\nmin-replicas: 4\n"
        "after:\n  program-error: stop\n  machine-lost: [spare, fewer-replicas, stop]\n"
    )
    policy = read_policy(path)
    assert policy == RestartPolicy(
        *(5, 4, 1.5, 4),
        {
            FailureKind.PROGRAM: (Answer.STOP,),
            FailureKind.LOST: (Answer.SPARE, Answer.FEWER, Answer.STOP),
        },
    )
    assert Coordinator(policy).failed(attempt()) == Verdict(
        "the policy stops after program-error\n  attempt 1: instance 0 ended with exit code 1 after 3 batches"
    )
    ways = ((TakeSpare(),), (GoOnWithFewer(4),))
    assert Coordinator(policy).failed(attempt(LOST)) == Recovery(1, ways, 1.5)
    path.write_text("version: 1\nafter:\n  link-down: reboot\n")
    with pytest.raises(ConfigError, match=r"policy.yaml:3: after.link-down: 'reboot' is not one of"):
        read_policy(path)


# --- carried out -----------------------------------------------------------------------------------------------


class World:
    """A launch's partition on a POD of fake machines."""

    def __init__(self, pod: Pod, words: str) -> None:
        self.pod = pod
        self.said = io.StringIO()
        where = ["--vipu-server-host=127.0.0.1", f"--vipu-server-port={pod.port}"]
        self._words = [*where, *words.split(), "true"]
        server = LaunchServer(CurrentLaunch(self.plan()), {}, Log(stream=self.said))
        self.partition = LaunchPartition(server, launch_id="1-2")
        server.connect()
        self.partition.prepare()
        self.partition.wait_active()
        self.repairs = Repairs(self.partition, Log(stream=self.said), self.plan)
        self.repairs.look()
        self.done: tuple[RecoveryStep, ...] | None = None

    def plan(self, replicas: int | None = None) -> LaunchSpec:
        line = parse_command_line(self._words)
        options = {**line.options, **({} if replicas is None else {"num-replicas": replicas, "fault": ()})}
        return plan_launch(options, line.program, LaunchContext({"PATH": os.defpath}, "/", "python"))

    def recover(self, policy: RestartPolicy) -> bool:
        damage, batches = self.repairs.look()
        decision = Coordinator(policy).failed(attempt(damage, batches))
        assert isinstance(decision, Recovery), decision
        self.done = self.repairs.carry_out(decision)
        if self.done is not None:
            self.partition.wait_again()
            self.repairs.plan_again()
        return self.done is not None

    @property
    def agents(self) -> tuple[str, ...]:
        return self.partition.client.get_partition(self.partition.name).agents


@pytest.fixture
def world() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(words: str, pod: str = "pod16") -> World:
        made.append(World(Pod(pod), words))
        return made[-1]

    yield make
    for each in made:
        each.partition.close()
        each.pod.stop()


TWICE = RestartPolicy(max_restarts=2)


def test_a_link_is_retrained_by_one_reset(world: Callable[..., World]) -> None:
    here = world("--num-replicas 16 --num-instances 2")
    here.pod.pool.machine("ipum1", here.partition.name).links_down = {3}
    assert here.recover(TWICE)
    assert here.partition.client.get_partition(here.partition.name).generation == 2
    assert here.repairs.look()[0] == Damage()


def test_a_lost_machine_is_replaced_where_there_is_no_spare(world: Callable[..., World]) -> None:
    here = world("--num-replicas 16")
    before = here.agents
    here.pod.pool.machine("ipum2", here.partition.name).die()
    assert here.recover(TWICE)
    assert here.agents == before
    assert "not possible: the POD has no spare machine" in here.said.getvalue()
    assert here.done == (ReplaceMachine("ipum2"), ResetThePartition()), (
        "what was done, not what was tried first"
    )


def test_a_partition_in_error_needs_a_reset(world: Callable[..., World]) -> None:
    """A second fault during the reset leaves the partition in ERROR, with machines that report nothing."""
    here = world("--num-replicas 16")
    machine = here.pod.pool.machine("ipum1", here.partition.name)
    machine.links_down, machine.fail = {3}, "reset_links"
    with pytest.raises(ServiceError, match="in state ERROR"):
        here.recover(TWICE)
    machine.links_down, machine.fail = set(), ""
    damage, _ = here.repairs.look()
    assert damage == Damage(partition=True, words=(f"partition {here.partition.name} in state ERROR",))
    assert here.recover(TWICE)
    assert here.repairs.look()[0] == Damage()


def test_a_partition_that_is_gone_is_made_anew(world: Callable[..., World]) -> None:
    here = world("--num-replicas 16")
    here.partition.client.remove_partition(here.partition.name, force=True)
    assert here.repairs.look()[0].partition
    assert here.recover(TWICE)
    assert here.repairs.look()[0] == Damage()


def test_a_service_that_is_away_may_come_back(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = world("--num-replicas 16")
    client, now = here.partition.client, [0.0]
    real, away = client.wait_for_state, [ServiceError("nobody answers")] * 4

    def wait_for_state(*args: Any, **options: Any) -> Any:
        if away:
            raise away.pop()
        return real(*args, **options)

    monkeypatch.setattr(client, "wait_for_state", wait_for_state)
    monkeypatch.setattr(LaunchPauses, "pause", lambda pauses, seconds: now.append(now.pop() + seconds))
    assert here.partition.state_at_rest(lambda: now[0]) is PartitionState.ACTIVE
    assert now[0] == pytest.approx(4 * BETWEEN_ATTEMPTS_SECONDS)
    assert here.said.getvalue().count("waiting for the partition service") == 1
    away += [ServiceError("nobody answers")] * 1000
    with pytest.raises(ServiceError, match="nobody answers"):
        here.partition.state_at_rest(lambda: now[0])
    assert now[0] < 2 * here.partition.current.spec.server.timeout


def test_a_recovery_that_breaks_off_is_tried_again_while_restarts_remain(world: Callable[..., World]) -> None:
    """The partition service ends, or a second fault strikes, while the partition is reset."""
    here = world("--num-replicas 16 --max-restarts 3")
    machine = here.pod.pool.machine("ipum1", here.partition.name)
    failures = [
        ServiceError("the server went away"),
        ServiceError("partition p is in state ERROR: a second fault"),
    ]

    class BrokenTwice(Repairs):
        def carry_out(self, recovery: Recovery) -> tuple[RecoveryStep, ...] | None:
            if failures:
                raise failures.pop(0)
            return super().carry_out(recovery)

    def recover() -> bool:
        machine.links_down = {3}
        outcome = LaunchOutcome(failed=Ended(0, 1))
        log = Log(stream=here.said)
        repairs = BrokenTwice(here.partition, log)
        restarts = Restarts(coordinator, Stopping(lambda number: None), log, here.partition, repairs)
        return restarts.recover(outcome, OutputMixer(1, lambda channel, data: None), 1.0)

    coordinator = Coordinator(RestartPolicy(max_restarts=3))
    assert recover()
    assert [each.cause for each in coordinator.attempts] == [
        "instance 0 ended with exit code 1",
        "the recovery failed: the server went away",
        "the recovery failed: partition p is in state ERROR: a second fault",
    ]
    assert "error:" not in here.said.getvalue()  # The launch goes on.
    here.partition.wait_again()
    assert machine.links_down == set()
    failures += [ServiceError("the server went away")] * 9
    coordinator = Coordinator(RestartPolicy(max_restarts=2))
    assert not recover()
    assert len(coordinator.attempts) == 3
    assert "not started again: 2 restarts, as many as are allowed" in here.said.getvalue()
    assert here.said.getvalue().count("error: the server went away") == 1


def test_a_spare_is_taken_for_a_lost_machine(world: Callable[..., World]) -> None:
    here = world("--num-replicas 16", "pod64")
    before = here.agents
    here.pod.pool.machine(before[1], here.partition.name).die()
    assert here.recover(TWICE)
    assert before[1] not in here.agents
    assert len(here.agents) == 4


def test_a_partition_that_was_there_before_is_kept(world: Callable[..., World]) -> None:
    pod = Pod("pod64")
    pod.active("mine", 16)
    here = World(pod, "--num-replicas 16 --vipu-partition mine")
    before = here.agents
    here.pod.pool.machine(before[1], "mine").die()
    assert here.recover(TWICE)
    assert here.agents == before
    here.partition.close()
    pod.stop()


def test_fewer_replicas_go_on_where_asked(world: Callable[..., World]) -> None:
    here = world("--num-replicas 16 --num-instances 2 --fault ipu:0@batch=9:trap --fault ipu:9@batch=9:trap")
    for machine in here.pod.pool.started:
        machine.planned = parse_faults("ipu:0@batch=9:trap:launch=1-2 ipu:9@batch=9:trap:launch=1-2")
    here.pod.pool.machine("ipum2", here.partition.name).die()
    policy = replace(TWICE, after={FailureKind.LOST: (Answer.FEWER,)})
    assert here.recover(policy)
    assert here.partition.current.spec.layout.replicas == 8
    assert [spec.text for spec in here.partition.faults.planned] == ["ipu:0@batch=9:trap"]
    assert here.partition.address().target_options["instanceSize"] == "4"
    assert here.agents == ("ipum3", "ipum4")


def test_no_machine_is_left(world: Callable[..., World]) -> None:
    here = world("--num-replicas 16")
    here.pod.pool.machine("ipum2", here.partition.name).die()
    policy = replace(TWICE, min_replicas=16, after={FailureKind.LOST: (Answer.SPARE, Answer.FEWER)})
    assert not here.recover(policy)


def test_faults_that_have_still_to_strike() -> None:
    texts = [
        "ipu:0@batch=9:trap",
        "ipu:1@batch=9:trap",
        "machine:1@batch=9:lost",
        "ipu:5@batch=8:trap",
        "ipu:5@batch=20:trap",
    ]
    faults = [parse_fault(text) for text in texts]
    found = reports(ipum2="lost")
    found[0] = replace(found[0], planned_faults=(faults[0],))
    assert [spec.text for spec in remaining(faults, found)] == [texts[0], texts[4]]


def test_what_strikes_in_the_recovery_itself_is_not_planned_again() -> None:
    def report(agent: str, planned: Sequence[FaultSpec] = (), struck: Sequence[str] = ()) -> MachineReport:
        history = tuple(Struck(parse_fault(text), "l-1", 0, 1.0) for text in struck)
        return MachineReport(agent, planned_faults=tuple(planned), struck_faults=history)

    reset = "service:vipu@during=ResetPartition:slow"
    link = "link:2-4@during=partition-reset,repeat=2:flapping"
    there, lost = "ipu:9@batch=30:trap", "ipu:5@batch=40:trap"
    faults = [replace(parse_fault(text), launch="l-1") for text in (reset, link, there, lost)]
    before = [
        report("a1", faults[:2], ["ipu:0@batch=1:trap"]),
        report("a2", faults[1:]),
        report("a3", faults[2:3]),
    ]
    now = [report("a1", (), [reset, link]), report("a2", (), [link]), report("a3", faults[2:3])]
    found = not_planned(faults, before, now)
    assert [spec.text for spec in found] == ["link:2-4@during=partition-reset:flapping", lost]


def test_a_batch_is_done_when_all_machines_of_the_launch_have_done_it() -> None:
    def report(machine: int, batches: int, state: MachineState = MachineState.UP) -> MachineReport:
        return MachineReport(f"a{machine}", machine_index=machine, batches_done=batches, state=state)

    before = [report(k, 30) for k in range(4)]
    now = [report(0, 43), report(1, 42), report(2, 0, MachineState.LOST), report(3, 30)]
    assert done_by_all(before, now, {0, 1, 2}) == 12
    assert done_by_all(before, now, {2}) is None


def test_batches_that_no_machine_is_left_to_tell_are_not_made_up() -> None:
    lost = Damage(lost=("a0",), words=("machine a0 lost",))
    cause = "instance 0 ended with exit code 1"
    unknown = Attempt(cause, 1, lost, batches=None)
    assert unknown.text == f"{cause} (machine a0 lost)"
    assert replace(unknown, reached=10).text == f"{cause} at batch 10 of the training (machine a0 lost)"
    assert replace(unknown, batches=0).text == f"{cause} after 0 batches (machine a0 lost)"
    assert not unknown.is_like(unknown)  # Nobody knows whether the second came further than the first.
