"""One job on a POD that fails, in virtual time: what breaks is answered by podrun's own recovery.

A failure of a unit becomes the damage that machines report for that kind of fault; the launcher's `Coordinator` answers
it by the restart policy; `carry_out_step` does each step, and the partition service's `Allocator` decides with
the POD's own places. Only durations are drawn (`RecoveryTimes`). A fault during a recovery is an attempt
that failed too. When no recovery helps, people start the job again after a while.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import field, replace

from podrun.core.errors import ExhaustedError, PodrunError
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.recovery import (
    Attempt,
    Coordinator,
    Damage,
    Verdict,
    without_partition,
)
from podrun.launcher.repair_steps import ImpossibleRecoveryError
from podrun.partition.state import events as ev
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.values import PartitionState, Requirements
from podrun.simulate.campaign_setup import UNLIMITED, CampaignSetup
from podrun.simulate.damage import IncidentNote, damage_by, slowdown_by
from podrun.simulate.engine import SECOND, Order, VirtualEngine, nanoseconds
from podrun.simulate.failures import FailureProcess
from podrun.simulate.planned_faults import PlannedStrikes
from podrun.simulate.rates import FailureSource, RepairTimes
from podrun.simulate.recovery_run import RecoveryRun
from podrun.simulate.repair_shop import RepairShop
from podrun.simulate.streams import RandomStreams
from podrun.simulate.virtual_job import VirtualJob

JOB = "job"


@dataclass(slots=True)
class CampaignResult:
    """What happened in a simulated training campaign. ``bins``: nanoseconds by what they were spent on; they sum up to
    ``wall``.
    """

    wall: int
    bins: dict[str, int]
    failures: int
    incidents: list[IncidentNote]
    kinds: Counter[str]
    answers: Counter[str]
    spares_used: list[int]
    refused_for_shape: int
    verdicts: int
    events: int

    @property
    def ettr(self) -> float:
        """Useful time per wall time."""
        return self.bins["useful"] / self.wall if self.wall else 0.0


@dataclass(slots=True)
class _Counters:
    kinds: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    failures: int = 0
    refused: int = 0
    verdicts: int = 0


class Campaign:
    """One replication. `run` to the end, or `run_to` a time; `fork` is a copy that goes on by itself."""

    def __init__(self, setup: CampaignSetup, seed: int) -> None:
        self.setup, self.seed = setup, seed
        self.engine, self.streams = VirtualEngine(), RandomStreams(seed)
        self.allocator = Allocator(setup.pod)
        self.job = VirtualJob(setup.rhythm())
        self.shop = RepairShop(self.engine, self.streams, setup.spares)
        self.count = _Counters()
        self.incidents: list[IncidentNote] = []
        self.recovery = RecoveryRun(self)
        self.coordinator = Coordinator(setup.restart)
        self.members: set[int] = set()
        self.sent: set[str] = set()
        self.first_ipu = 0
        self.size = setup.size
        self._damage = Damage()
        self._damaged_by = ""
        self._pending = 0
        self._slow_until: list[tuple[int, float]] = []
        self._processes = [
            FailureProcess(self.engine, self.streams, setup.pod, source, number)
            for number, source in enumerate(setup.rates.sources)
        ]
        self._agents = [agent.id for agent in setup.pod.agents]
        self._index = {agent: index for index, agent in enumerate(self._agents)}
        for number, process in enumerate(self._processes):
            self.engine.on(f"failure {number}", _Struck(self, number))
            process.start()
        self.planned = PlannedStrikes(self)
        self.engine.on("planned fault", self.planned.strike)
        self.engine.on("detected", self._detected)
        self.engine.on("answered", self._answered)
        self.engine.on("step done", self.recovery.step_done)
        self.engine.on("loaded", self._loaded)
        self.engine.on("submitted", self._submitted)
        self.engine.on("repaired", self._repaired)
        self.engine.on("speed", self._speed)
        self.engine.at(0, Order.SUBMISSION, "submitted")

    # --- running --------------------------------------------------------------------------------------------

    def run(self) -> CampaignResult:
        """Run for the days that the setup asks for; returns what happened."""
        self.run_to(self.setup.days)
        self.job.finish(self.engine.now)
        self.shop.note(self.engine.now)
        return CampaignResult(
            self.job.wall,
            dict(self.job.bins),
            self.count.failures,
            self.incidents,
            self.count.kinds,
            self.count.answers,
            self.shop.usage(self.engine.now),
            self.count.refused,
            self.count.verdicts,
            self.engine.handled,
        )

    def run_to(self, days: float) -> None:
        """Run until so many days of virtual time have passed."""
        self.engine.run(until=nanoseconds(days * 86_400))

    def fork(self) -> Campaign:
        """A copy that goes on by itself: a snapshot. The POD, which never changes, is shared."""
        shared = (self.setup, self.setup.pod, self._agents, self._index)
        return copy.deepcopy(self, {id(entry): entry for entry in shared})

    def decide(self, event: ev.Event) -> tuple[ev.MachineOrder, ...]:
        """Let the allocator decide on an event now."""
        self.allocator.now = self.engine.now / SECOND
        return tuple(self.allocator.handle(event))

    def drawn(self, seconds: float, purpose: str) -> int:
        """A duration in nanoseconds around so many seconds."""
        spread = self.setup.times.spread
        if not spread or not seconds:
            return nanoseconds(seconds)
        sigma = math.sqrt(math.log(1 + spread * spread))
        normal = float(self.streams.of(JOB, purpose).standard_normal())
        return nanoseconds(seconds * math.exp(sigma * normal - sigma * sigma / 2))

    def plan(self, seconds: float, name: str) -> None:
        """Plan what comes next of the job; a failure takes it back."""
        self._pending = self.engine.after(self.drawn(seconds, name), Order.END, name)

    # --- the job comes and starts ---------------------------------------------------------------------------

    def _submitted(self, _: object) -> None:
        """People start the job: its partition is made."""
        self.job.enter("provision", self.engine.now)
        self.coordinator = Coordinator(self.setup.restart)
        self._damage = Damage()
        try:
            self.make_partition(self.size)
        except PodrunError:
            self.count.refused += 1
            self.job.enter("repair_wait", self.engine.now)
            self.plan(self.setup.times.resubmit_s, "submitted")
            return
        self.recovery.begin_after_provision()

    def make_partition(self, size: int) -> None:
        """Make the partition of the job. Raises ExhaustedError if there is no room."""
        domain = self.setup.pod.topology.ild_ipus
        needs = Requirements(JOB, size, num_gcds=max(1, size // domain), owner=0)
        self.decide(ev.CreatePartition(needs, self.engine.now / SECOND))
        self.size = size
        slices = self.allocator.partitions[JOB].slices
        self.members = {self._index[part.agent_id] for part in slices}
        self.first_ipu = self.setup.pod.agents_by_id[slices[0].agent_id].first_ipu

    def machine_at(self, place: int) -> int:
        """The machine, by its index in the POD, at a place of the job's partition."""
        return self._index[self.allocator.partitions[JOB].slices[place].agent_id]

    def drop_partition(self) -> None:
        """Give the partition of the job back at once."""
        if JOB not in self.allocator.partitions:
            return
        for instruction in self.decide(ev.RemovePartition(JOB)):
            if isinstance(instruction, ev.ReleaseMachines):
                self.decide(ev.OperationSucceeded(JOB, instruction.operation))

    def machines_ready(self) -> None:
        """The machines of the partition have done what they were told."""
        partition = self.allocator.partitions[JOB]
        self.decide(ev.OperationStarted(JOB, partition.operation))
        self.decide(ev.OperationSucceeded(JOB, partition.operation))

    def load(self) -> None:
        """The partition is active: the program and the checkpoint are loaded."""
        self.job.enter("load", self.engine.now)
        self.plan(self.setup.times.load_s + self.setup.checkpoint.reading_s, "loaded")

    def _loaded(self, _: object) -> None:
        self._pending = 0
        self.job.begin(self.engine.now, self._factor())
        self.planned.begin()

    def _factor(self) -> float:
        """By what factor work takes longer now."""
        slow = max((factor for _, factor in self._slow_until), default=1.0)
        return slow * self.setup.size / self.size

    # --- failures -------------------------------------------------------------------------------------------

    def struck(self, number: int, unit: int) -> None:
        """A source strikes a unit."""
        self.strike(self.setup.rates.sources[number], self._processes[number].struck(unit), unit)

    def strike(self, source: FailureSource, machines: Sequence[int], unit: int) -> None:
        """A fault strikes a unit, which is or lies on these machines."""
        inside = tuple(machine for machine in machines if machine in self.members)
        if not inside:
            return
        slow = slowdown_by(source)
        if slow is not None:
            self._slow_down(*slow)
            return
        self.count.failures += 1
        self.count.kinds[f"{source.target}:{source.kind}"] += 1
        now = self.engine.now
        agents = tuple(self._agents[machine] for machine in inside)
        ipu = max(0, (unit if source.unit == "ipu" else inside[0] * 4) - self.first_ipu)
        self._damage = damage_by(self._damage, source.target, source.kind, agents, ipu)
        self._damaged_by = f"{source.target}:{source.kind}"
        was = self.job.phase
        lost = self.job.broken(now) if was == "running" else 0
        self.planned.end()
        if was not in ("running", "undetected"):
            self.job.enter("undetected", now)
        where = ipu if source.target == "ipu" else inside[0] - self.first_ipu // 4
        self.incidents.append(IncidentNote(now, source, where, agents, lost, was))
        if was != "undetected":
            self._take_back()
            self.plan(source.detect_s, "detected")

    def _take_back(self) -> None:
        if self._pending:
            self.engine.cancel(self._pending)
            self._pending = 0

    def _slow_down(self, factor: float, seconds: float) -> None:
        self._slow_until.append((self.engine.now + nanoseconds(seconds), factor))
        self.engine.after(nanoseconds(seconds), Order.END, "speed")
        self._speed(None)

    def _speed(self, _: object) -> None:
        self._slow_until = [entry for entry in self._slow_until if entry[0] > self.engine.now]
        if self.job.phase == "running":
            self.job.slowed(self.engine.now, self._factor())

    def _detected(self, _: object) -> None:
        self.job.enter("restart", self.engine.now)
        self.planned.noticed()
        for agent in self._damage.lost:
            self.decide(ev.AgentLost(agent, self._damaged_by))
        times = self.setup.times
        self.plan(
            times.diagnose_s + times.settle_s + times.grace_s + self.setup.restart.pause_seconds, "answered"
        )

    def _answered(self, _: object) -> None:
        """The coordinator answers what is broken, when the partition is at rest."""
        self._pending = 0
        partition = self.allocator.partitions.get(JOB)
        if partition is not None and partition.state not in (PartitionState.ACTIVE, PartitionState.ERROR):
            self.machines_ready()
        damage, self._damage = self._damage_now(), Damage()
        again = self.recovery.under_way
        attempt = Attempt(self._damaged_by, 1, damage, reached=len(self.incidents), in_recovery=again)
        answer = self.coordinator.failed(attempt)
        if isinstance(answer, Verdict) or not self.recovery.begin(answer, damage):
            self.give_up()
        if self.setup.restart.max_restarts >= UNLIMITED.max_restarts:
            del self.coordinator.attempts[:-2]  # A month has thousands; without a limit none of them counts.

    def _damage_now(self) -> Damage:
        """What is broken: the last failures, and what an earlier recovery has not come to."""
        lost = {agent for agent in self.allocator.lost if JOB in self.allocator.partitions_on(agent)}
        left = tuple(sorted(lost - set(self._damage.lost)))
        damage = replace(self._damage, lost=(*self._damage.lost, *left)) if left else self._damage
        partition = self.allocator.partitions.get(JOB)
        if partition is None or partition.state is PartitionState.ERROR:
            return without_partition(damage, "the partition is gone or in state ERROR")
        return damage

    def give_up(self) -> None:
        """No recovery helps: people start the job again."""
        self.count.verdicts += 1
        self.note_answer("given up")
        self.drop_partition()
        self.size = self.setup.size
        self.recovery.under_way = False
        for agent in sorted(self.allocator.lost):
            self.replaced(agent)
            self.restart_agent(agent)
        self.job.enter("queue", self.engine.now)
        self.plan(self.setup.times.resubmit_s, "submitted")

    def _repair_of(self, agent: str) -> RepairTimes:
        struck = [note.source for note in reversed(self.incidents) if agent in note.agents]
        return next((source.repair for source in (*struck, *self.setup.rates.sources)), RepairTimes())

    def replaced(self, agent: str) -> None:
        """The machine of an agent goes to the repair shop, once, and a fresh one is to stand in its place."""
        if agent in self.sent:
            return
        self.sent.add(agent)
        machine = self._index[agent]
        self.shop.send(machine, self._repair_of(agent))
        for process in self._processes:
            process.renew(machine)

    def restart_agent(self, agent: str) -> None:
        """A fresh machine stands in an agent's place."""
        self.sent.discard(agent)
        self.decide(ev.RestartAgent(agent))

    def repair_what_is_left(self) -> None:
        """Lost machines outside of the job's partition are repaired, and fresh ones from the shelf take their places.
        Nobody does so during a launch whose plan is followed."""
        if self.setup.planned:
            return
        for agent in sorted(self.allocator.lost):
            self.replaced(agent)
        self._fill_places()

    def _fill_places(self) -> None:
        for agent in sorted(self.allocator.lost):
            if JOB not in self.allocator.partitions_on(agent) and self.shop.take():
                self.restart_agent(agent)

    def _repaired(self, _: object) -> None:
        self.shop.repaired()
        self.recovery.machine_came()
        self._fill_places()

    def note_answer(self, answer: str) -> None:
        """Note what was done about the last incident."""
        self.count.answers[answer] += 1
        if self.incidents:
            self.incidents[-1].answer = answer

    def refuse_shape(self) -> None:
        """There are IPUs enough, and no place of that shape."""
        self.count.refused += 1


class _Struck:
    """What happens at a failure of one source; an object of its own, so that a fork takes it along."""

    def __init__(self, campaign: Campaign, number: int) -> None:
        self._campaign, self._number = campaign, number

    def __call__(self, unit: int) -> None:
        self._campaign.struck(self._number, unit)


NO_PLACE = (ExhaustedError, ImpossibleRecoveryError)
"""Why a way of a recovery is impossible."""
