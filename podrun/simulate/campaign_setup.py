"""What a campaign is of: the POD, the job, how often what fails, how it is answered, how long that takes."""

from __future__ import annotations

import math

from podrun.checkpoint.policy import CheckpointPolicy
from podrun.core.cluster import Cluster
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec
from podrun.launcher.recovery import ENDING_TIMES, RestartPolicy
from podrun.simulate.engine import nanoseconds
from podrun.simulate.failures import HOUR_S
from podrun.simulate.rates import FailureRates
from podrun.simulate.virtual_job import RunRhythm


@dataclass(frozen=True, slots=True)
class RecoveryTimes:
    """Seconds that machines and people take. ``spread``: of each as the coefficient of variation of a lognormal; 0:
    exactly so. ``settle_s`` and ``grace_s`` are those of the launcher's supervisor."""

    provision_s: float = 120.0
    load_s: float = 180.0
    diagnose_s: float = 30.0
    ipu_reset_s: float = 20.0
    partition_reset_s: float = 60.0
    power_cycle_s: float = 300.0
    replace_s: float = 600.0
    release_s: float = 5.0
    resubmit_s: float = 1800.0
    settle_s: float = ENDING_TIMES.settle
    grace_s: float = ENDING_TIMES.grace
    spread: float = 0.0


UNLIMITED = RestartPolicy(max_restarts=1 << 30, crash_loop_after=1 << 30)
"""Recover as long as it helps."""
HOURLY = CheckpointPolicy()
"""A checkpoint each hour that costs nothing."""


@dataclass(frozen=True, slots=True)
class CampaignSetup:
    """A job on a POD. ``ipus``: of its partition (0: the whole POD); ``spares``: fresh machines on the shelf;
    ``step_s``: seconds of a batch; ``replicas``: of the job, for policies that go on with fewer; ``planned``: faults
    that strike in a batch of the program, as a launch plans them; ``detect_s``: until one of these is known."""

    pod: Cluster
    rates: FailureRates
    days: float = 30.0
    ipus: int = 0
    spares: int = 16
    step_s: float = 1.0
    replicas: int = 0
    restart: RestartPolicy = UNLIMITED
    checkpoint: CheckpointPolicy = HOURLY
    times: RecoveryTimes = RecoveryTimes()
    planned: tuple[FaultSpec, ...] = ()
    detect_s: float = 0.0

    @property
    def size(self) -> int:
        """IPUs of the job."""
        return self.ipus or self.pod.ipu_count

    def mttf_s(self) -> float:
        """Mean seconds between failures of the job."""
        share = self.size / self.pod.ipu_count
        rate = self.rates.per_hour(self.pod) * share
        return HOUR_S / rate if rate else math.inf

    def rhythm(self) -> RunRhythm:
        """When checkpoints are written."""
        policy = self.checkpoint
        work = policy.interval_s(self.step_s, self.mttf_s(), self.days * 86_400)
        if math.isinf(work):
            return RunRhythm(0, 0)
        return RunRhythm(nanoseconds(work), nanoseconds(policy.blocking_s), nanoseconds(policy.durable_s))
