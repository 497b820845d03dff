"""How long recorded launches took: what a twin in virtual time takes its durations from.

A launch that is started again after failures has lives; each begins with a start of the instances and ends with a
failure or the end. Durations of one purpose (a step, noticing a failure, a kind of recovery, loading) are taken to be
lognormal with a mean of their own and one spread in common, relative to the means.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist

from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.record.events import TimedEvent, read_record
from podrun.record.timeline import timed_events
from podrun.simulate.campaign_setup import RecoveryTimes
from podrun.simulate.intervals import student_quantile

_HINT = "Record a launch that is started again: podrun --max-restarts 3 --fault ... --record FILE PROGRAM"
RECOVERY_STEPS = (
    "reset IPU",
    "replace machine",
    "power-cycle machine",
    "reset the partition",
    "make the partition anew on other machines",
    "go on with fewer replicas",
    "not started again",
    "the launch ended",
)
"""What a recovery may say that it did, in the words of a launch's record."""


def steps_named(action: str) -> tuple[str, ...]:
    """The steps of a recovery that an action names, in one form for launches and simulations."""
    return tuple(words for words in RECOVERY_STEPS if words in action)


@dataclass(frozen=True, slots=True)
class LaunchLife:
    """One life of a launch, in seconds since the launch began. ``runs``: when instance 0 began each run; ``known``:
    when its failure was known, None if it ended well; ``steps``: of the recovery after it."""

    runs: tuple[float, ...]
    known: float | None
    steps: tuple[str, ...]

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a batch but for the first; None if there are none."""
        return (self.runs[-1] - self.runs[1]) / (len(self.runs) - 2) if len(self.runs) > 2 else None

    @property
    def began(self) -> float:
        """When the program ran at its speed: what the first batch takes longer than others is a part of starting."""
        step = self.step_s
        return self.runs[0] if step is None else self.runs[1] - step


def lives_of(events: Sequence[TimedEvent]) -> list[LaunchLife]:
    """The lives of a launch, in order; those in which instance 0 ran nothing are left out."""
    begin = min((timed.seconds for timed in events), default=0.0)
    lives = []
    for number in sorted({timed.event.life for timed in events}):
        own = [timed for timed in events if timed.event.life == number]
        runs = [t.seconds - begin for t in own if (t.event.actor, t.event.kind) == ("instance 0", "run")]
        failures = [t.seconds - begin for t in own if t.event.kind in ("error", "ended")]
        again = next((t for t in own if t.event.kind == "restart"), None)
        if runs:
            lives.append(
                LaunchLife(
                    tuple(sorted(runs)),
                    min(failures, default=None),
                    () if again is None else steps_named(str(again.event.data.get("text", ""))),
                )
            )
    return lives


def read_lives(file: Path) -> list[LaunchLife]:
    """The lives of a recorded launch; its times lie beside the record. Raises PodrunError for what is no record."""
    events = timed_events(read_record(file), file.with_name(f"{file.name}.times.json"))
    return lives_of(events)


@dataclass(frozen=True, slots=True)
class FittedTimes:
    """What recorded launches took. ``work_spread``: of a step and of noticing a failure, ``spread``: of an outage, each
    as the deviation of a logarithm, widened for the few samples that it is known from; ``recoveries``: the kinds of
    recovery that the launches had."""

    step_s: float
    detect_s: float
    times: RecoveryTimes
    work_spread: float
    spread: float
    recoveries: frozenset[tuple[str, ...]]

    def check(self, steps: tuple[str, ...], text: str) -> None:
        """Raise UsageError for a recovery whose duration no launch has shown."""
        if steps not in self.recoveries:
            what = " and ".join(steps) or "a start without a repair"
            raise UsageError(
                f"no launch of --fit shows how long {what} takes, as after {text}",
                hint="Record a launch with such a fault, and name it too: --fit FILE",
            )


def fitted_times(launches: Sequence[Sequence[LaunchLife]]) -> FittedTimes:
    """The times of launches. Raises ConfigError if they say too little."""
    lives = [life for launch in launches for life in launch]
    steps = [life.step_s for life in lives if life.step_s]
    detected = [max(life.known - life.runs[-1], 1e-4) for life in lives if life.known is not None]
    outages: dict[tuple[str, ...], list[float]] = {}
    for launch in launches:
        for life, after in pairwise(launch):
            if life.known is not None:
                outages.setdefault(life.steps, []).append(after.began - life.known)
    if not outages or not steps:
        raise ConfigError("no instances were started again in the launches of --fit", hint=_HINT)
    return FittedTimes(
        step_s=_mean(steps),
        detect_s=_mean(detected),
        times=_recovery_times({steps: _mean(seconds) for steps, seconds in outages.items()}),
        work_spread=_spread([steps, detected]),
        spread=_spread(list(outages.values())),
        recoveries=frozenset(outages),
    )


def _recovery_times(outages: Mapping[tuple[str, ...], float]) -> RecoveryTimes:
    """Durations of the steps: what an outage takes longer than that of a start without a repair. In each the instances
    end and start again."""
    again = outages.get((), 0.0)
    reset = outages.get(("reset the partition",), again)
    known = {
        "ipu_reset_s": outages.get(("reset IPU",), again) - again,
        "partition_reset_s": reset - again,
        "replace_s": outages.get(("replace machine", "reset the partition"), reset) - reset,
        "power_cycle_s": outages.get(("power-cycle machine", "reset the partition"), reset) - reset,
        "provision_s": outages.get(("make the partition anew on other machines",), again) - again,
    }
    durations = {name: max(seconds, 0.0) for name, seconds in known.items()}
    return RecoveryTimes(**durations, load_s=0.0, diagnose_s=again, settle_s=0.0, grace_s=0.0)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(groups: Sequence[Sequence[float]]) -> float:
    """The deviation that durations of several kinds have in common, on a logarithmic scale, as a prediction from so few
    samples has it."""
    freedom = sum(len(values) - 1 for values in groups)
    if freedom < 1:
        raise ConfigError("one outage of each kind says nothing of its spread", hint=_HINT + ", twice")
    squares = 0.0
    for values in groups:
        logs = [math.log(value) for value in values]
        squares += math.fsum((one - _mean(logs)) ** 2 for one in logs)
    fewest = min(len(values) for values in groups)
    wide = student_quantile(freedom, 0.975) / NormalDist().inv_cdf(0.975)
    return math.sqrt(squares / freedom * (1 + 1 / fewest)) * wide
