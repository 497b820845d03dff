"""Campaigns: bins, closed forms, common random numbers, recovery by podrun's own decisions, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podrun.checkpoint import CheckpointError, Checkpoints
from podrun.checkpoint.checkpoints import OneInstance
from podrun.checkpoint.policy import (
    CheckpointPolicy,
    Spacing,
    WriteMode,
    checkpoint_policy_of,
    periodic_efficiency,
)
from podrun.core.cluster_file import load_cluster
from podrun.core.command_line import run_command
from podrun.core.documents import load_schema
from podrun.core.errors import ConfigError, NotFoundError, PodrunError, UsageError
from podrun.faults import parse_fault
from podrun.launcher.recovery import Answer, FailureKind, RestartPolicy
from podrun.simulate.campaign import Campaign, CampaignResult
from podrun.simulate.campaign_setup import CampaignSetup, RecoveryTimes
from podrun.simulate.chaos_report import campaign_figures, replicate
from podrun.simulate.chaos_setup import check_setup, with_policy
from podrun.simulate.commands.chaos import chaos_verb
from podrun.simulate.damage import IncidentNote
from podrun.simulate.engine import SECOND
from podrun.simulate.rates import (
    FailureRates,
    FailureSource,
    RepairTimes,
    preset_names,
    read_rates,
    unit_count,
)
from podrun.simulate.virtual_job import RunRhythm, VirtualJob
from tests.simulate.closed_forms import expected_rollback

POD64 = load_cluster("pod64")
QUICK = RecoveryTimes(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)


def rates(per_hour: float, kind: str = "streaming-memory", **more: object) -> FailureRates:
    """One source on machines, noticed at once."""
    source = FailureSource("machine", kind, per_hour / 16, detect_s=0.0, **more)  # type: ignore[arg-type]
    return FailureRates("test", (source,))


def run(setup: CampaignSetup, seed: int = 1) -> CampaignResult:
    return Campaign(setup, seed).run()


def test_every_nanosecond_is_in_one_bin() -> None:
    for name in preset_names():
        setup = CampaignSetup(load_cluster("pod256"), read_rates(name).scaled(30), 20.0)
        result = run(setup)
        assert sum(result.bins.values()) == round(20 * 86_400 * SECOND), name
        assert result.failures > 10


def test_without_failures_only_writes_cost() -> None:
    policy = CheckpointPolicy(value=1800.0, cost_s=200.0)
    result = run(CampaignSetup(POD64, rates(0.0), 100 * 2000 / 86_400, checkpoint=policy, times=QUICK))
    assert result.ettr == pytest.approx(1 / (1 + 200 / 1800), abs=1e-12)


@pytest.mark.slow
def test_efficiency_is_the_exact_formula() -> None:
    """Row O12, with restores and pauses that fail too."""
    cost, mttf, restore, down = 600.0, 24_060.1, 600.0, 60.0
    policy = CheckpointPolicy(value=5000.0, cost_s=cost, restore_s=restore)
    setup = CampaignSetup(
        POD64, rates(3600 / mttf), 500.0, checkpoint=policy, times=replace(QUICK, diagnose_s=down)
    )
    exact = periodic_efficiency(5000 + cost, cost, mttf, restore, 0.0)
    shares = [run(setup, seed).ettr for seed in range(5)]
    half = 3 * np.std(shares, ddof=1) / math.sqrt(5)
    assert np.mean(shares) == pytest.approx(exact, abs=half + 0.004)


@pytest.mark.slow
def test_the_mean_rollback_is_that_of_the_formula() -> None:
    """Row O13: given a failure within an interval."""
    policy = CheckpointPolicy(value=3600.0)
    setup = CampaignSetup(POD64, rates(3600 / 11_134.6), 1300.0, checkpoint=policy, times=QUICK)
    result = run(setup)
    assert result.failures > 9000
    mean = result.bins["lost"] / SECOND / result.failures
    assert mean == pytest.approx(expected_rollback(3600, 11_134.6), rel=0.02)


def test_a_write_in_the_background_is_there_later() -> None:
    rhythm = RunRhythm(work=100, hold=10, durable=30)
    assert [rhythm.kept(t) for t in (110, 139, 140, 249, 250)] == [0, 0, 110, 110, 220]
    assert [rhythm.worked(t) for t in (0, 100, 105, 110, 150)] == [0, 100, 100, 100, 140]


def test_a_slow_unit_costs_what_it_adds() -> None:
    job = VirtualJob(RunRhythm(0, 0))
    job.begin(0)
    job.slowed(100, 2.0)
    job.slowed(300, 1.0)
    job.finish(400)
    assert (job.bins["useful"], job.bins["degraded"]) == (300, 100)


def test_the_same_seed_gives_the_same_and_a_fork_too() -> None:
    setup = CampaignSetup(load_cluster("pod128"), read_rates("llama3").scaled(200), 10.0)
    whole = run(setup)
    campaign = Campaign(setup, 1)
    campaign.run_to(4.0)
    fork = campaign.fork()
    assert fork.run() == campaign.run() == whole
    assert run(setup, 2).bins != whole.bins


def test_a_changed_policy_meets_the_same_failures() -> None:
    setup = CampaignSetup(POD64, rates(2.0), 20.0, times=QUICK)
    other = replace(setup, checkpoint=CheckpointPolicy(value=600.0), times=replace(QUICK, load_s=300.0))
    times = [[note.at for note in run(s).incidents] for s in (setup, other)]
    assert times[0] == times[1]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_twice_the_units_at_half_the_rate_are_the_same(seed: int) -> None:
    few = run(CampaignSetup(POD64, rates(1.0), 30.0), seed).failures
    half = FailureRates("x", (FailureSource("machine", "streaming-memory", 1 / 64, detect_s=0.0),))
    many = run(CampaignSetup(load_cluster("pod256"), half, 30.0), seed).failures
    assert few == many


@pytest.mark.slow
def test_pooled_units_and_units_with_an_age_agree_without_memory() -> None:
    pooled = np.mean([run(CampaignSetup(POD64, rates(1.0), 60.0), s).failures for s in range(3)])
    aged = np.mean(
        [run(CampaignSetup(POD64, rates(1.0, shape=1.0000001), 60.0), s).failures for s in range(3)]
    )
    assert aged == pytest.approx(pooled, rel=0.06)


@pytest.mark.slow
def test_more_spares_never_lower_ettr() -> None:
    repair = RepairTimes(24.0, 48.0)
    setup = CampaignSetup(POD64, rates(0.05, "lost", repair=repair), 60.0)
    shares = [np.mean([run(replace(setup, spares=n), s).ettr for s in range(5)]) for n in (0, 4, 40)]
    assert shares[0] < shares[1] < shares[2]
    assert run(replace(setup, spares=0)).bins["repair_wait"] > 0
    assert run(replace(setup, spares=400)).bins["repair_wait"] == 0


def test_the_answer_is_that_of_the_restart_policy() -> None:
    setup = CampaignSetup(POD64, rates(0.05, "lost"), 40.0, ipus=32)
    elsewhere = run(setup)
    assert "make the partition anew on other machines" in elsewhere.answers
    replace_first = RestartPolicy(1 << 30, 1 << 30, after={FailureKind.LOST: (Answer.REPLACE,)})
    assert all("replace machine" in answer for answer in run(replace(setup, restart=replace_first)).answers)
    stops = RestartPolicy(1 << 30, 1 << 30, after={FailureKind.LOST: (Answer.STOP,)})
    stopped = run(replace(setup, restart=stops))
    assert stopped.verdicts == stopped.failures
    assert stopped.bins["queue"] > 0


def test_a_place_elsewhere_is_refused_for_its_shape() -> None:
    """Two halves, one of which is broken: 31 other IPUs of the other half are no place for 32."""
    source = FailureSource("pod", "lost", 0.01, detect_s=0.0)
    setup = CampaignSetup(POD64, FailureRates("x", (source,)), 40.0, ipus=32)
    assert run(setup).failures > 0


def test_fewer_replicas_work_on_at_a_cost() -> None:
    fewer = RestartPolicy(1 << 30, 1 << 30, after={FailureKind.LOST: (Answer.FEWER, Answer.REPLACE)})
    result = run(CampaignSetup(POD64, rates(0.01, "lost"), 20.0, replicas=4, restart=fewer))
    assert result.bins["degraded"] > 0


@pytest.mark.parametrize("name", preset_names())
def test_presets_say_where_they_come_from(name: str) -> None:
    preset = read_rates(name)
    assert preset.carried_over
    assert all(source.source for source in preset.sources)


@pytest.mark.parametrize("name", preset_names())
def test_incidents_of_presets_name_faults_that_a_replay_takes(name: str) -> None:
    for source in read_rates(name).sources:
        note = IncidentNote(10**12, source, 5, ("ipum2",), 10**9, "running", "reset the partition")
        (text,) = note.plain(1, 2.0)["faults"]
        assert parse_fault(text).kind == source.kind


def test_presets_have_the_published_rates() -> None:
    pod = load_cluster("pod64k")
    assert unit_count(pod, "ipu") == 65_536
    daily = {name: read_rates(name).per_hour(pod) * 24 for name in ("llama3", "rsc1", "rsc2")}
    assert daily == pytest.approx({"llama3": 31.04, "rsc1": 53.25, "rsc2": 19.17}, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("version: 1\nsources:\n  - {unit: rack, kind: lost, fit: 1}\n", "f:3: there is no unit 'rack'"),
        (
            "version: 1\nsources:\n  - {unit: machine, kind: lost, fit: 1, per-year: 2}\n",
            "exactly one rate, .* fit and per-year",
        ),
        ("version: 1\nsources:\n  - {unit: machine, kind: lost}\n", "exactly one rate, and here is none"),
        ("version: 1\nsources:\n  - {unit: machine, kind: melts, fit: 1}\n", "machine has no fault 'melts'"),
        ("version: 1\nsources:\n  - {unit: machine, kind: lost, fit: -1}\n", "fit is -1"),
        ("version: 1\nsources:\n  - {unit: machine, kind: lost, mtbf-hours: 0}\n", "above 0"),
        ("version: 1\nsources:\n  - {unit: machine, kind: lost, fit: 1, repair: {fails: 1}}\n", "never ends"),
        ("version: 1\nsources: 3\n", "a list of what fails"),
        ("version: 2\n", "version: 1 and sources"),
    ],
)
def test_bad_rates_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "f"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_rates(str(path))


def test_unknown_rates_list_the_presets() -> None:
    with pytest.raises(NotFoundError) as raised:
        read_rates("llama9")
    assert "llama3" in (raised.value.hint or "")


def test_a_trace_strikes_when_it_says(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("1.5 3\n2.5 0\n")
    path = tmp_path / "rates.yaml"
    path.write_text("version: 1\nsources:\n  - {unit: machine, kind: power, trace: t, detect-seconds: 0}\n")
    result = run(CampaignSetup(POD64, read_rates(str(path)), 1.0))
    assert [note.at / SECOND / 3600 for note in result.incidents] == [1.5, 2.5]
    (tmp_path / "t").write_text("2.5 3\n1.5 0\n")
    with pytest.raises(ConfigError, match="t:2: the clock runs backwards"):
        read_rates(str(path))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"every-batches": 5, "interval": "young"}, "every-batches and interval are two intervals"),
        ({"interval": "daly"}, "writes cost nothing"),
        ({"size-bytes": 1e9}, "a size needs write-bytes-per-second"),
        ({"size-bytes": 1e9, "write-bytes-per-second": 1e9, "mode": "peers"}, "peers writes need copy-bytes"),
        ({"size-bytes": 1e9, "write-bytes-per-second": 1, "cost-seconds": 3}, "given twice"),
        ({"every-seconds": 0}, "every 0 seconds is none"),
        ({"every-batches": 1.5}, "no whole number"),
        ({"often": 1}, "no key 'often'"),
        ({"interval": "weekly"}, "young or daly"),
        ({"keep": "all"}, "not a number"),
    ],
)
def test_a_policy_that_contradicts_itself(values: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checkpoint_policy_of(values)


def test_costs_of_checkpoints() -> None:
    sizes = {"size_bytes": 1e12, "write_bytes_s": 1e10, "copy_bytes_s": 1e11, "latency_s": 1.0}
    blocking, background, peers = (CheckpointPolicy(mode=mode, **sizes) for mode in WriteMode)
    assert (blocking.blocking_s, blocking.durable_s, blocking.reading_s) == (101, 0, 101)
    assert (background.blocking_s, background.durable_s) == (11, 101)
    assert (peers.blocking_s, peers.durable_s, peers.reading_s) == (11, 0, 11)


def test_when_a_checkpoint_is_due() -> None:
    assert [CheckpointPolicy(Spacing.BATCHES, 3).due(n, 0.0) for n in (0, 2, 3)] == [False, False, True]
    assert [CheckpointPolicy(value=60.0).due(n, 7.0 * n) for n in (8, 9)] == [False, True]
    young = CheckpointPolicy(Spacing.YOUNG, cost_s=20.0)
    assert not young.due(600, 600.0, mttf_s=11_134.6)
    assert young.due(668, 668.0, mttf_s=11_134.6)
    assert CheckpointPolicy(Spacing.COUNT, 3).due(25, 1.0, total_batches=100)


def test_a_policy_file_sets_spares_times_and_the_job(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(
        "version: 1\npause-seconds: 5\ncheckpoint: {interval: daly, cost-seconds: 20}\nspares: 3\n"
        "times: {load-seconds: 60}\njob: {ipus: 32, step-seconds: 2}\n"
    )
    setup = with_policy(CampaignSetup(POD64, rates(1.0)), path)
    assert (setup.spares, setup.ipus, setup.step_s, setup.times.load_s) == (3, 32, 2.0, 60.0)
    assert (setup.restart.pause_seconds, setup.restart.max_restarts) == (5.0, 1 << 30)
    assert setup.checkpoint.spacing is Spacing.DALY
    for line, message in (
        ("spares: -1", "p.yaml:2: spares is -1"),
        ("times: {naps: 3}", "p.yaml:2: times is a table"),
        ("after: {rain: stop}", "p.yaml:2"),
        ("checkpoint: {interval: daly}", "p.yaml:2: the checkpoint policy contradicts itself"),
    ):
        path.write_text(f"version: 1\n{line}\n")
        with pytest.raises(ConfigError, match=message):
            with_policy(setup, path)


def test_what_cannot_come_forward_is_refused_with_the_formula() -> None:
    with pytest.raises(UsageError, match=r"cannot come forward: .*\(T - C\) / \(\(M \+ D\) exp\(R/M\)"):
        check_setup(CampaignSetup(POD64, rates(60.0)))
    with pytest.raises(UsageError, match="a job of 128 IPUs is no partition of pod64"):
        check_setup(CampaignSetup(POD64, rates(0.1), ipus=128))


def chaos(*words: str) -> int:
    return run_command(chaos_verb, [*words, "--workers", "1"])


def test_podrun_chaos_writes_figures_incidents_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jsonschema import validate

    files = [tmp_path / name for name in ("a.json", "b.json", "i.jsonl", "page.html")]
    words = [
        "--pod",
        "pod256",
        "--rates",
        "rsc1",
        "--replications",
        "3",
        "--sweep",
        "spares=0,8",
        "--tornado",
    ]
    assert chaos(*words, "--json", str(files[0]), "--incidents", str(files[2]), "--html", str(files[3])) == 0
    assert chaos(*words, "--json", str(files[1])) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    report = json.loads(files[0].read_text())
    validate(report, load_schema("podrun.simulate", "chaos.schema.json"))
    assert report["inputs"]["carried_over"] == "A100 rates carried over"
    assert [len(rows) for rows in report["sweeps"]] == [2]
    assert report["intervals"]["ettr"]["low"] < report["ettr"] < report["intervals"]["ettr"]["high"]
    page = files[3].read_text()
    assert page.count("<svg") == 4
    assert "http" not in page
    assert "A100 rates carried over" in capsys.readouterr().out
    assert chaos("--pod", "pod256", "--replay", str(files[2]), "--json", str(files[1])) == 0
    twin = json.loads(files[1].read_text())
    assert twin["different"] == 0 < twin["equal_recovery"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--replications", "0"], "is not in the range 1<=x<=100000"),
        (["--replications", "9" * 20], "is not in the range 1<=x<=100000"),
        (["--pod", "nothing"], ", pod64k."),
        (["--sweep", "luck=1"], "'luck=1' sweeps no knob"),
        (["--sweep", "spares=a"], "'a' are no numbers"),
        (["--days", "0"], "more than 0 and at most 3650 days, not 0"),
        (["--spares", "-1"], "-1 spares"),
        (["--ipus", "3"], "a job of 3 IPUs"),
        (["--replay", "/nowhere"], "nowhere"),
    ],
)
def test_bad_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert chaos(*words) == 2
    assert message in capsys.readouterr().err


def test_figures_that_go_to_a_folder_are_refused_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chaos("--pod", "pod16", "--days", "0.1", "--json", str(tmp_path)) == 2
    said, hint = capsys.readouterr().err.splitlines()
    assert said.endswith(f"{tmp_path} cannot be written: Is a directory")
    assert "Name a file" in hint


@pytest.mark.parametrize("option", ["--json", "--incidents", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("podrun.simulate.commands.chaos.run_chaos", lambda *_: pytest.fail("it has run"))
    assert chaos(option, str(tmp_path / "none" / "f")) == 2
    assert "f cannot be written: No such file" in capsys.readouterr().err


def test_intervals_come_from_replications() -> None:
    setup = CampaignSetup(POD64, rates(0.5), 10.0)
    report = campaign_figures([replicate(setup, seed) for seed in range(4)])
    assert report["intervals"]["ettr"]["replications"] == 4
    with pytest.raises(PodrunError):
        check_setup(replace(setup, days=-1))


# --- the policy in a training loop ---


class Program:
    """Something that can be saved."""

    def _checkpoint_state(self) -> tuple[dict[str, np.ndarray], dict[str, object]]:
        return {"w": np.zeros(2)}, {}

    def _restore_checkpoint(self, tensors: object, values: object) -> None:
        pass


def test_a_training_loop_saves_when_the_policy_says(tmp_path: Path) -> None:
    now = [0.0]
    policy = CheckpointPolicy(value=50.0, keep=3)
    with Checkpoints(
        tmp_path, instances=OneInstance(), environ={}, policy=policy, clock=lambda: now[0]
    ) as checkpoints:
        saved = []
        for batch in range(1, 21):
            now[0] += 10.0
            if checkpoints.save_if_due(Program(), batch):
                saved.append(batch)
        assert saved == [5, 10, 15, 20]
        assert checkpoints.batches() == [20, 15, 10]
    without = Checkpoints(tmp_path / "none", instances=OneInstance(), environ={})
    with pytest.raises(CheckpointError, match="no policy"):
        without.save_if_due(Program(), 1)
