"""A recorded launch beside its twin: the same fault plan on a virtual POD of the same kind, answered by the same code.

Incidents have to be the same in the same order: fault, batch, recovery, lost batches. Their times have to lie in the
interval of the timing model, which other launches have shown (`podrun.simulate.launch_times`): for how long the program
ran until a failure was known, and how long it then stood still. The interval holds all times of a launch at once with a
probability of 95 %.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from statistics import NormalDist
from typing import Any

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import text_table
from podrun.record.events import Record, read_record
from podrun.record.incidents import incidents_of
from podrun.simulate.campaign import Campaign
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.engine import SECOND
from podrun.simulate.intervals import CONFIDENCE
from podrun.simulate.launch_times import FittedTimes, LaunchLife, fitted_times, read_lives, steps_named
from podrun.simulate.rates import FailureRates
from podrun.simulate.streams import RandomStreams

REPLICATIONS = 100
"""Virtual launches from which intervals come."""
LONGEST_DAYS = 30.0


@dataclass(frozen=True, slots=True)
class LaunchIncident:
    """One incident, of a launch or of its twin. Seconds: for how long the program ran until the failure was known, and
    from there to its next run (None: it did not run again)."""

    fault: str
    batch: int
    steps: tuple[str, ...]
    lost_batches: int
    ran_s: float
    outage_s: float | None

    @property
    def decided(self) -> tuple[str, int, tuple[str, ...], int]:
        """What has to be the same."""
        return self.fault, self.batch, self.steps, self.lost_batches


def launch_beside_twin(path: Path, fits: Sequence[Path], setup: CampaignSetup) -> dict[str, Any]:
    """A recorded launch beside its twin, as JSON values. ``fits``: records of other launches, for the times; ``setup``:
    POD, job, restart and checkpoint policy. Raises PodrunError."""
    if not fits:
        raise UsageError(
            "the twin of a recorded launch takes its times from other launches",
            hint=f"podrun chaos --replay {path} --fit OTHER.record --fit THIRD.record",
        )
    record = read_record(path)
    model = fitted_times([read_lives(file) for file in fits])
    real = incidents_in(record, read_lives(path))
    for incident in real:
        model.check(incident.steps, incident.fault)
    twins = twin_incidents(setup, record, model)
    rows = [
        _row(one, [twin[place] for twin in twins if place < len(twin)], len(real))
        for place, one in enumerate(real)
    ]
    more = max(len(twin) for twin in twins) - len(real)
    return {
        "schema_version": 1,
        "fit": {
            "step_s": model.step_s,
            "detect_s": model.detect_s,
            "work_spread": model.work_spread,
            "spread": model.spread,
        },
        "incidents": rows,
        "only_in_twin": max(0, more),
        "different": sum(not row["equal"] for row in rows) + max(0, more),
        "outside": sum(
            not row[name]["inside"] for row in rows for name in ("ran_s", "outage_s") if row[name]
        ),
    }


def incidents_in(record: Record, lives: Sequence[LaunchLife]) -> list[LaunchIncident]:
    """The incidents of a launch that ended lives of it, in order. Raises UsageError if the program recovered by itself:
    what it does then is its own."""
    incidents = incidents_of(record)
    ended = [
        (life.began, life.known, after.began if after else None)
        for life, after in zip_longest(lives, lives[1:])
        if life.known is not None
    ]
    if len(ended) != len(incidents):
        raise UsageError(
            f"{len(incidents)} incidents ended {len(ended)} starts: a program that recovers by itself has no twin",
            hint="Record a launch that podrun starts again: podrun --max-restarts 3",
        )
    return [
        LaunchIncident(
            ", ".join(incident.faults),
            incident.batch,
            steps_named(incident.action),
            incident.lost_batches,
            known - began,
            None if again is None else again - known,
        )
        for incident, (began, known, again) in zip(incidents, ended, strict=True)
    ]


def twin_incidents(setup: CampaignSetup, record: Record, model: FittedTimes) -> list[list[LaunchIncident]]:
    """The incidents of virtual launches with the plan of a record. Each has durations of its own."""
    launches = []
    for seed in range(REPLICATIONS):
        factor = math.exp(model.work_spread * float(RandomStreams(seed).of("job", "steps").standard_normal()))
        planned = replace(
            setup,
            rates=FailureRates("plan of the launch", ()),
            days=LONGEST_DAYS,
            planned=record.header.faults,
            detect_s=model.detect_s * factor,
            step_s=round(model.step_s * factor, 9),  # Whole nanoseconds, so that batches are counted exactly.
            times=replace(model.times, spread=model.spread),
        )
        campaign = Campaign(planned, seed)
        campaign.run()
        launches.append(_virtual(campaign))
    return launches


def _virtual(campaign: Campaign) -> list[LaunchIncident]:
    step = campaign.setup.step_s * SECOND
    return [
        LaunchIncident(
            strike.fault.text,
            strike.batch,
            steps_named(strike.note.answer),
            round(strike.note.lost / step),
            (strike.known - strike.began) / SECOND,
            None if strike.again is None else (strike.again - strike.known) / SECOND,
        )
        for strike in campaign.planned.strikes
    ]


def _row(real: LaunchIncident, twins: Sequence[LaunchIncident], times: int) -> dict[str, Any]:
    decided = {twin.decided for twin in twins}
    first = twins[0] if twins else None
    outages = [twin.outage_s for twin in twins if twin.outage_s is not None]
    return {
        "launch": _plain(real),
        "twin": None if first is None else _plain(first),
        "equal": decided == {real.decided},
        "ran_s": _held_against(real.ran_s, [twin.ran_s for twin in twins], times),
        "outage_s": _held_against(real.outage_s, outages, times),
    }


def _plain(incident: LaunchIncident) -> dict[str, Any]:
    return {
        "fault": incident.fault,
        "batch": incident.batch,
        "recovery": list(incident.steps),
        "lost_batches": incident.lost_batches,
    }


def _held_against(seconds: float | None, drawn: Sequence[float], incidents: int) -> dict[str, Any] | None:
    """A time of the launch with the interval of the twins' (lognormal), one of twice as many as there are incidents."""
    if seconds is None or not drawn:
        return None
    logs = [math.log(max(one, 1e-9)) for one in drawn]
    mean = math.fsum(logs) / len(logs)
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in logs) / max(len(logs) - 1, 1))
    half = NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (4 * incidents)) * deviation
    low, high = math.exp(mean - half), math.exp(mean + half)
    return {"launch": seconds, "low": low, "high": high, "inside": low <= seconds <= high}


def shown_launch_twin(twin: Mapping[str, Any]) -> str:
    """The incidents beside their twins as text."""
    rows = []
    for row in twin["incidents"]:
        real, virtual = row["launch"], row["twin"] or {}
        same = "" if row["equal"] else f"differs: {virtual or 'none'}"
        recovery = ", ".join(real["recovery"]) or "started again"
        times = [_shown(row[name]) for name in ("ran_s", "outage_s")]
        rows.append((real["fault"], str(real["batch"]), recovery, str(real["lost_batches"]), *times, same))
    head = ("fault", "batch", "recovery", "lost", "ran s (twin)", "stood still s (twin)", "")
    said = f"{len(rows) - sum(not row['equal'] for row in twin['incidents'])} incidents equal"
    said += f", {twin['different']} different, {twin['outside']} times outside of their interval"
    return f"{text_table(head, rows)}\n{said}\n"


def _shown(held: Mapping[str, Any] | None) -> str:
    if held is None:
        return ""
    outside = "" if held["inside"] else " outside"
    return f"{held['launch']:.2f} ({held['low']:.2f} to {held['high']:.2f}){outside}"
