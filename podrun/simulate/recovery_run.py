"""A recovery in virtual time: the ways of the coordinator one after the other, step by step, on the real allocator."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from podrun.core.errors import ExhaustedError
from podrun.launcher.recording import step_in_words
from podrun.launcher.recovery import Damage, Recovery, RecoveryStep, ReplaceMachine, ResetThePartition
from podrun.launcher.repair_steps import ImpossibleRecoveryError, carry_out_step
from podrun.partition.state import events as ev

if TYPE_CHECKING:
    from podrun.simulate.campaign import Campaign


class RecoveryRun:
    """The recovery under way. ``under_way``: from its begin until the partition is active again."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self.under_way = False
        self._steps: list[RecoveryStep] = []
        self._waits = False
        self._damage = Damage()
        self.created, self.replans = True, True

    # --- the partition, as `carry_out_step` works on it -----------------------------------------------------

    @property
    def name(self) -> str:
        """The partition of the job."""
        return "job"

    @property
    def wanted(self) -> int:
        """IPUs of the job."""
        return self._campaign.size

    @property
    def replicas(self) -> int:
        """Replicas of the job now."""
        setup = self._campaign.setup
        whole = setup.replicas or setup.size
        return max(1, whole * self._campaign.size // setup.size)

    def usable_ipus(self) -> int:
        """IPUs of machines that are not lost and that no other partition holds."""
        pod = self._campaign.setup.pod
        return pod.ipu_count - 4 * len(self._campaign.allocator.lost)

    def reset_ipus(self, ipus: tuple[int, ...]) -> None:
        """Take the time of a reset."""
        self._campaign.plan(self._campaign.setup.times.ipu_reset_s, "step done")

    def replace_machine(self, agent: str) -> None:
        """Put a fresh machine in the place of an agent's, with a spare that the shop has given."""
        self._campaign.replaced(agent)
        self._restart_agent(agent)

    def power_cycle(self, agent: str) -> None:
        """Power-cycle an agent's machine."""
        campaign = self._campaign
        if agent not in campaign.allocator.lost:
            campaign.decide(ev.PowerCycleAgent(agent))
        campaign.plan(campaign.setup.times.power_cycle_s, "step done")

    def reset(self) -> None:
        """Reset the partition, or make it again if an earlier way of this recovery has removed it."""
        campaign = self._campaign
        if self.name not in campaign.allocator.partitions:
            self.make_anew()
            return
        campaign.decide(ev.ResetPartition(self.name))
        campaign.plan(campaign.setup.times.partition_reset_s, "step done")

    def make_anew(self) -> None:
        """Remove the partition and make it elsewhere. Raises ExhaustedError; the old one is gone by then."""
        self._make_anew(self._campaign.size)

    def make_anew_for(self, replicas: int) -> bool:
        """Make it for so many replicas; False if there is no room."""
        setup = self._campaign.setup
        try:
            self._make_anew(setup.size * replicas // (setup.replicas or setup.size))
        except ExhaustedError:
            self._campaign.refuse_shape()
            return False
        return True

    # --- ways -----------------------------------------------------------------------------------------------

    def begin(self, recovery: Recovery, damage: Damage) -> bool:
        """Begin with the first way that is possible; False if there is none."""
        self.under_way, self._waits, self._damage = True, False, damage
        for way in recovery.ways:
            try:
                self._steps = list(way)
                answer = answer_of(way)
                self._next()
            except (ExhaustedError, ImpossibleRecoveryError) as error:
                if isinstance(error, ExhaustedError):
                    self._campaign.refuse_shape()
                continue
            self._campaign.note_answer(answer)
            return True
        return False

    def step_done(self, _: object) -> None:
        """The machines have done a step."""
        if self._steps and isinstance(self._steps[0], ResetThePartition):
            self._campaign.machines_ready()
        self._steps = self._steps[1:]
        self._next()

    def _next(self) -> None:
        if not self._steps:
            self.under_way = False
            self._campaign.load()
            return
        step = self._steps[0]
        if isinstance(step, ReplaceMachine) and not self._campaign.shop.take():
            self._waits = True
            self._campaign.job.enter("repair_wait", self._campaign.engine.now)
            # Without a spare the lost machine itself is repaired and comes back.
            self._campaign.replaced(step.agent)
            return
        carry_out_step(step, self)

    def machine_came(self) -> None:
        """A machine was repaired: who waits for one goes on."""
        campaign = self._campaign
        if not self._waits or campaign.job.phase != "repair_wait" or not campaign.shop.take():
            return
        self._waits = False
        campaign.job.enter("restart", campaign.engine.now)
        step = self._steps[0]
        if isinstance(step, ReplaceMachine):
            self._restart_agent(step.agent)

    def _restart_agent(self, agent: str) -> None:
        self._campaign.restart_agent(agent)
        # Machines that are replaced together are replaced at the same time.
        together = sum(isinstance(step, ReplaceMachine) for step in self._steps)
        self._campaign.plan(self._campaign.setup.times.replace_s / max(together, 1), "step done")

    def _make_anew(self, size: int) -> None:
        self._campaign.drop_partition()
        self._campaign.make_partition(size)
        self._campaign.repair_what_is_left()
        self.begin_after_provision()

    def begin_after_provision(self) -> None:
        """A new partition is on its way; the job is loaded when it is active."""
        self.under_way = True
        self._steps = [ResetThePartition()]
        self._campaign.job.enter("provision", self._campaign.engine.now)
        self._campaign.plan(self._campaign.setup.times.provision_s, "step done")


_NAMED = re.compile(r"(?<=machine) \S+$|s? [\d, ]+$")
"""The machines and IPUs at the end of a step in words."""


def answer_of(way: tuple[RecoveryStep, ...]) -> str:
    """A way of a recovery in the words of a launch's record, without the machines."""
    words = [_general(step_in_words(step)) for step in way]
    return ", ".join(dict.fromkeys(words)) or "the instances were started again"


def _general(words: str) -> str:
    """A step without the machines or IPUs it names."""
    return words if words.startswith("go on") else _NAMED.sub("", words)
