"""Recorded launches beside their twins: the same plan of faults in virtual time, and the times that launches took."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from podrun.checkpoint.policy import CheckpointPolicy, Spacing
from podrun.core.cluster_file import load_cluster
from podrun.core.command_line import run_command
from podrun.core.documents import load_schema
from podrun.core.error_codec import cause_to_dict
from podrun.core.errors import ConfigError, UsageError
from podrun.faults import cause_of, parse_fault
from podrun.record.events import AT_END, Event, LaunchHeader, Record, TimedEvent, ordered, to_lines
from podrun.record.strikes import with_faults
from podrun.record.timeline import times_text
from podrun.simulate import launch_twin
from podrun.simulate.campaign import Campaign
from podrun.simulate.campaign_setup import CampaignSetup
from podrun.simulate.commands.chaos import chaos_verb
from podrun.simulate.launch_times import fitted_times, lives_of
from podrun.simulate.planned_faults import source_of
from podrun.simulate.rates import FailureRates

POLICY = "version: 1\nmax-restarts: 8\ncheckpoint: {every-batches: 5, mode: background}\n"
WORDS = {
    "tile-parity": "reset IPU 5",
    "down": "reset the partition",
    "power": "power-cycle machine ipum3, reset the partition",
}


def launch(plan: Sequence[str], outage_s: float, step_s: float = 0.1) -> list[TimedEvent]:
    """A launch of 30 batches with a checkpoint each five, in which the faults of a plan strike one after the other."""
    events, now, batch = [TimedEvent(Event("launch", 0, 0, "start", {}), 0.0)], 5.0, 0

    def add(kind: str, life: int, clock: int, actor: str = "instance 0", **data: object) -> None:
        events.append(TimedEvent(Event(actor, life, clock, kind, data), now))

    for life, text in enumerate([*plan, ""]):
        done = 0
        if life:
            batch = batch // 5 * 5
            add("resumed", life, done, batch=batch)
        fault = parse_fault(text) if text else None
        last = batch + (30 - batch if fault is None else fault.batch)
        while batch < last:
            add("run", life, done, batch=done, inputs={})
            now += step_s
            add("ran", life, done, batch=done, batches=1)
            done, batch = done + 1, batch + 1
        if fault is not None:
            add("run", life, done, batch=done, inputs={})
            now += 0.02
            cause = cause_to_dict(cause_of(fault, fault.batch))
            add("error", life, done, during="run", error="e", message="m", cause=cause)
            now += outage_s
            words = f"{WORDS[fault.kind]}, instances started again (restart {life + 1})"
            add("restart", life, AT_END, "launch", text=words)
    return with_faults(ordered(events), map(parse_fault, plan))


def written(path: Path, plan: Sequence[str], outage_s: float) -> Path:
    events = launch(plan, outage_s)
    header = LaunchHeader((), "", tuple(map(parse_fault, plan)))
    record = Record(header, tuple(timed.event for timed in events))
    path.write_text("\n".join(to_lines(record)) + "\n")
    path.with_name(f"{path.name}.times.json").write_text(times_text(events))
    return path


PLAN = ("ipu:5@batch=7:tile-parity", "link:2-3@batch=8:down", "machine:2@batch=9:power")


def test_a_launch_and_its_twin_have_the_same_incidents_in_times_that_others_showed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from jsonschema import validate

    monkeypatch.setattr(launch_twin, "REPLICATIONS", 10)
    real = written(tmp_path / "real", PLAN, 4.0)
    fits = [written(tmp_path / f"fit{n}", PLAN, outage) for n, outage in enumerate((3.5, 4.5))]
    policy, file = tmp_path / "p.yaml", tmp_path / "twin.json"
    policy.write_text(POLICY)
    words = ["--pod", "pod16", "--policy", str(policy), "--replay", str(real), "--json", str(file)]
    fit_words = [word for fit in fits for word in ("--fit", str(fit))]
    assert run_command(chaos_verb, [*words, *fit_words]) == 0
    twin = json.loads(file.read_text())
    validate(twin, load_schema("podrun.simulate", "twin.schema.json"))
    assert (twin["different"], twin["outside"], twin["only_in_twin"]) == (0, 0, 0)
    assert [(row["twin"]["batch"], row["twin"]["lost_batches"]) for row in twin["incidents"]] == [
        (7, 2),
        (13, 3),
        (19, 4),
    ]
    assert twin["fit"]["step_s"] == pytest.approx(0.1)
    assert "3 incidents equal, 0 different, 0 times outside" in capsys.readouterr().out
    slow = written(tmp_path / "slow", PLAN, 400.0)
    assert run_command(chaos_verb, [*words[:5], str(slow), *words[6:], *fit_words]) == 0
    assert json.loads(file.read_text())["outside"] == 3
    policy.write_text(POLICY.replace("5", "4"))
    assert run_command(chaos_verb, [*words, *fit_words]) == 0
    assert json.loads(file.read_text())["different"] == 3
    policy.write_text(POLICY + "after: {ipu-error: stop}\n")
    assert run_command(chaos_verb, [*words, *fit_words]) == 0
    assert json.loads(file.read_text())["different"] > 0


def test_what_a_twin_cannot_be_made_of_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real = written(tmp_path / "real", PLAN, 4.0)
    other = written(tmp_path / "other", PLAN[:1] * 2, 4.0)
    alone = written(tmp_path / "alone", (), 4.0)
    for words, message in (
        (["--replay", str(real)], "takes its times from other launches"),
        (
            ["--replay", str(real), "--fit", str(other)],
            "no launch of --fit shows how long reset the partition",
        ),
        (["--replay", str(real), "--fit", str(alone)], "no instances were started again"),
        (["--replay", str(real), "--fit", str(tmp_path / "none")], "there is no record"),
        (["--fit", str(real)], "--fit goes with --replay"),
    ):
        assert run_command(chaos_verb, ["--pod", "pod16", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ConfigError, match="says nothing of its spread"):
        fitted_times([lives_of(launch(PLAN[:1], 3.0))])


@pytest.mark.parametrize(
    "fault",
    ["instance:0@batch=3:killed", "ipu:0@batch=3:slow", "ipu:0@time=3:trap", "ipu:0@batch=3,repeat=2:trap"],
)
def test_a_fault_without_a_twin_is_refused(fault: str) -> None:
    with pytest.raises(UsageError, match="has no twin in virtual time"):
        source_of(parse_fault(fault), 0.0)


def test_a_life_begins_when_the_program_runs_at_its_speed() -> None:
    first, second, third = lives_of(launch(PLAN[:2], 3.0))
    assert first.began == pytest.approx(5.0)
    assert (first.step_s, second.known) == (pytest.approx(0.1), pytest.approx(5 + 0.72 + 3 + 0.82))
    assert (first.steps, second.steps, third.steps) == (("reset IPU",), ("reset the partition",), ())
    assert third.known is None
    slow_start = lives_of(
        [TimedEvent(Event("instance 0", 0, n, "run", {}), at) for n, at in enumerate((0.0, 2.0, 2.1, 2.2))]
    )
    assert slow_start[0].began == pytest.approx(1.9)


def test_a_lost_machine_is_left_out_until_somebody_repairs_it() -> None:
    """Two halves of a POD16: the spare half is the last place without a repair, and then only fresh machines help."""
    plan = tuple(map(parse_fault, ("machine:1@batch=6:lost", "machine:0@batch=8:lost")))
    setup = CampaignSetup(
        load_cluster("pod16"), FailureRates("plan", ()), 1.0, ipus=8, planned=plan,
        checkpoint=CheckpointPolicy(Spacing.BATCHES, 5),
    )  # fmt: skip
    campaign = Campaign(setup, 1)
    campaign.run()
    assert [note.answer for note in campaign.incidents] == [
        "make the partition anew on other machines",
        "replace machine, reset the partition",
    ]
    assert [strike.batch for strike in campaign.planned.strikes] == [6, 13]
    assert math.isclose(sum(campaign.job.bins.values()), 86_400e9)
