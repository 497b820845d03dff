"""The figures of a campaign over replications, sweeps and knobs, as JSON values and as text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from podrun import __version__
from podrun.core.quick_dataclass import dataclass
from podrun.core.terminal import text_table
from podrun.simulate.campaign import Campaign, CampaignResult
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.chaos_setup import KNOBS, knob_value
from podrun.simulate.engine import SECOND
from podrun.simulate.intervals import mean_interval, rate_interval
from podrun.simulate.virtual_job import BINS

SCHEMA_VERSION = 1
TORNADO_KNOBS = (
    "rate-factor",
    "checkpoint-seconds",
    "detect-seconds",
    "load-seconds",
    "replace-seconds",
    "partition-reset-seconds",
    "diagnose-seconds",
    "spares",
)


@dataclass(frozen=True, slots=True)
class Replication:
    """What is kept of one replication; small, so that it may come from another process."""

    seed: int
    wall_s: float
    bins_s: Mapping[str, float]
    failures: int
    kinds: Mapping[str, int]
    answers: Mapping[str, int]
    spares_used: tuple[int, ...]
    refused: int
    verdicts: int
    events: int
    incidents: tuple[Mapping[str, Any], ...] = ()

    @property
    def ettr(self) -> float:
        """Useful time per wall time."""
        return self.bins_s["useful"] / self.wall_s


def replicate(setup: CampaignSetup, seed: int, *, incidents: bool = False) -> Replication:
    """Run one replication."""
    result = Campaign(setup, seed).run()
    return replication_of(result, setup, seed, incidents=incidents)


def replication_of(
    result: CampaignResult, setup: CampaignSetup, seed: int, *, incidents: bool
) -> Replication:
    """What is kept of a result."""
    told = (
        tuple(note.plain(n, setup.step_s) for n, note in enumerate(result.incidents, 1)) if incidents else ()
    )
    return Replication(
        seed,
        result.wall / SECOND,
        {name: spent / SECOND for name, spent in result.bins.items()},
        result.failures,
        dict(sorted(result.kinds.items())),
        dict(sorted(result.answers.items())),
        tuple(result.spares_used),
        result.refused_for_shape,
        result.verdicts,
        result.events,
        told,
    )


Runner = Callable[[Sequence[tuple[CampaignSetup, int]]], Iterable[Replication]]
"""Runs replications, perhaps in other processes; results in the order of what is asked."""


def run_here(tasks: Sequence[tuple[CampaignSetup, int]]) -> list[Replication]:
    """Run replications one after the other."""
    return [replicate(setup, seed) for setup, seed in tasks]


def campaign_figures(replications: Sequence[Replication]) -> dict[str, Any]:
    """The figures of replications: each at the top, and with its interval under ``intervals``."""
    wall = sum(entry.wall_s for entry in replications)
    failures = sum(entry.failures for entry in replications)
    rate = rate_interval(failures, wall / 3600)
    figures: dict[str, list[float]] = {"ettr": [entry.ettr for entry in replications]}
    for name in BINS:
        figures[f"{name}_share"] = [entry.bins_s[name] / entry.wall_s for entry in replications]
    figures["failures"] = [float(entry.failures) for entry in replications]
    for place, name in enumerate(("p50", "p95", "p99", "max")):
        figures[f"spares_used_{name}"] = [float(entry.spares_used[place]) for entry in replications]
    figures["refused_for_shape"] = [float(entry.refused) for entry in replications]
    figures["given_up"] = [float(entry.verdicts) for entry in replications]
    intervals = {name: mean_interval(values).as_json() for name, values in figures.items()}
    hours = {"mean": 1 / rate.mean if failures else None, "low": 1 / (rate.high or 1.0)}
    hours |= {"high": 1 / rate.low if rate.low else None, "replications": len(replications)}
    return {
        **{name: interval["mean"] for name, interval in intervals.items()},
        "mttf_hours": hours["mean"],
        "intervals": {**intervals, "mttf_hours": hours},
        "incidents_by_kind": _counts([entry.kinds for entry in replications]),
        "incidents_by_answer": _counts([entry.answers for entry in replications]),
    }


def _counts(counts: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    names = sorted({name for entry in counts for name in entry})
    return {name: mean_interval([float(entry.get(name, 0)) for entry in counts]).as_json() for name in names}


def campaign_inputs(setup: CampaignSetup, seed: int, replications: int) -> dict[str, Any]:
    """What the figures are of; the digest covers rates and policies."""
    text = repr((setup.rates, setup.restart, setup.checkpoint, setup.times))
    return {
        "pod": setup.pod.name,
        "ipus": setup.size,
        "machines": len(setup.pod.agents),
        "days": setup.days,
        "rates": setup.rates.name,
        "carried_over": setup.rates.carried_over or None,
        "notes": list(setup.rates.notes),
        "failures_per_day": setup.rates.per_hour(setup.pod) * 24,
        "spares": setup.spares,
        "checkpoint_seconds": setup.rhythm().work / SECOND or None,
        "write_seconds": setup.checkpoint.blocking_s,
        "seed": seed,
        "replications": replications,
        "digest": hashlib.sha256(text.encode()).hexdigest(),
    }


def sweep_rows(
    setup: CampaignSetup, knob: str, values: Sequence[float], seeds: Sequence[int], run: Runner
) -> list[dict[str, Any]]:
    """The figures for each value of a knob, with the same failures."""
    tasks = [(KNOBS[knob](setup, value), seed) for value in values for seed in seeds]
    results = list(run(tasks))
    return [
        {"knob": knob, "value": value, **campaign_figures(results[i * len(seeds) : (i + 1) * len(seeds)])}
        for i, value in enumerate(values)
    ]


def tornado_rows(setup: CampaignSetup, seeds: Sequence[int], run: Runner) -> list[dict[str, Any]]:
    """ETTR with each knob at half and at twice its value (no spares: 0 and 16), the widest first. Same failures."""
    ends: list[tuple[str, float, float]] = []
    for knob in TORNADO_KNOBS:
        value = knob_value(setup, knob)
        low, high = (value / 2, value * 2) if value else (0.0, 16.0 if knob == "spares" else 60.0)
        ends.append((knob, low, high))
    tasks = [(KNOBS[knob](setup, v), seed) for knob, low, high in ends for v in (low, high) for seed in seeds]
    results = list(run(tasks))
    rows, count = [], len(seeds)
    for place, (knob, low, high) in enumerate(ends):
        first = results[2 * place * count : (2 * place + 1) * count]
        second = results[(2 * place + 1) * count : (2 * place + 2) * count]
        change = mean_interval([b.ettr - a.ettr for a, b in zip(first, second, strict=True)])
        rows.append(
            {
                "knob": knob,
                "low": low,
                "high": high,
                "ettr_low": sum(r.ettr for r in first) / count,
                "ettr_high": sum(r.ettr for r in second) / count,
                "change": change.as_json(),
            }
        )
    return sorted(rows, key=lambda row: (-abs(row["ettr_high"] - row["ettr_low"]), row["knob"]))


def campaign_report(setup: CampaignSetup, seed: int, replications: Sequence[Replication]) -> dict[str, Any]:
    """The whole report."""
    return {
        "schema_version": SCHEMA_VERSION,
        "podrun_version": __version__,
        **campaign_figures(replications),
        "inputs": campaign_inputs(setup, seed, len(replications)),
        "replications": [
            {"seed": entry.seed, "ettr": entry.ettr, "failures": entry.failures, "wall_s": entry.wall_s}
            | {"bins_s": dict(entry.bins_s), "events": entry.events}
            for entry in replications
        ],
        "sweeps": [],
        "tornado": [],
    }


def incident_lines(incidents: Iterable[Mapping[str, Any]]) -> str:
    """``incidents.jsonl``: one incident a line, in the form of a launch's."""
    return "".join(f"{json.dumps(incident, sort_keys=True)}\n" for incident in incidents)


# --- text ----------------------------------------------------------------------------------------------------------


def shown_report(report: Mapping[str, Any]) -> str:
    """The report as text."""
    inputs, said = report["inputs"], report["intervals"]
    lines = [
        f"{inputs['ipus']:,} IPUs of {inputs['pod']} for {inputs['days']:g} days, rates {inputs['rates']}"
        + (f" ({inputs['carried_over']})" if inputs["carried_over"] else ""),
        f"failures         {_shown(said['failures'], 1)} in all, {inputs['failures_per_day']:.1f} a day on the POD",
        f"MTTF seen        {_shown(said['mttf_hours'], 3)} h",
        f"ETTR             {_shown(said['ettr'], 4)}",
    ]
    rows = [(name, _shown(said[f"{name}_share"], 4)) for name in BINS]
    text = "\n".join(lines) + "\n\n" + text_table(("where time went", "share"), rows) + "\n"
    for title, key in (("incidents by kind", "incidents_by_kind"), ("by answer", "incidents_by_answer")):
        text += (
            "\n" + text_table((title, "count"), [(n, _shown(v, 1)) for n, v in report[key].items()]) + "\n"
        )
    used = [f"{said[f'spares_used_{name}']['mean']:.1f}" for name in ("p50", "p95", "p99", "max")]
    text += f"\nspares used      p50 {used[0]}, p95 {used[1]}, p99 {used[2]}, most {used[3]} of {inputs['spares']}\n"
    text += f"refused for shape {report['refused_for_shape']:.1f}, given up {report['given_up']:.1f}\n"
    for rows_ in report["sweeps"]:
        cells = [(f"{row['value']:g}", _shown(row["intervals"]["ettr"], 4)) for row in rows_]
        text += "\n" + text_table((rows_[0]["knob"], "ETTR"), cells) + "\n"
    if report["tornado"]:
        cells3 = [
            (
                row["knob"],
                f"{row['low']:g} .. {row['high']:g}",
                f"{row['ettr_low']:.4f} .. {row['ettr_high']:.4f}",
            )
            for row in report["tornado"]
        ]
        text += "\n" + text_table(("knob", "from .. to", "ETTR"), cells3) + "\n"
    return text


def _shown(interval: Mapping[str, Any], digits: int) -> str:
    if interval["mean"] is None:
        return "none seen"
    text = f"{interval['mean']:,.{digits}f}"
    if interval["low"] is None or interval["high"] is None:
        return text
    return f"{text} ({interval['low']:,.{digits}f} to {interval['high']:,.{digits}f})"
