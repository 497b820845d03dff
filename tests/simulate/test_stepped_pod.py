"""Schedulers of others on a virtual POD: the stepped clock, and what the conformance suite says of them."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from podrun.core.cluster_file import load_cluster
from podrun.core.command_line import run_command
from podrun.core.documents import load_schema
from podrun.core.errors import ExhaustedError, UsageError
from podrun.partition.state.values import PartitionState, Requirements
from podrun.simulate.commands.simulate import simulate_verb
from podrun.simulate.conformance import (
    RuleVerdict,
    conformance_run,
    conformance_workloads,
    judged,
    verdicts_on,
)
from podrun.simulate.engine import SECOND
from podrun.simulate.jobs import TraceJob
from podrun.simulate.stepped_pod import SteppedPod, served_outcomes
from podrun.simulate.stepped_server import StepTaken, VirtualPodClient, virtual_pod_at

POD16 = load_cluster("pod16")
EXAMPLE = Path(__file__).parents[2] / "examples" / "schedulers" / "first_come.py"


def jobs_of(*rows: tuple[float, float, int]) -> list[TraceJob]:
    """Jobs from (submit, run, size)."""
    return [
        TraceJob(
            str(n), round(submit * SECOND), round(run * SECOND), round(2 * run * SECOND), size, line=n + 1
        )
        for n, (submit, run, size) in enumerate(rows)
    ]


Decide = Callable[[VirtualPodClient, StepTaken, list[tuple[str, int]]], None]


def released(pod: VirtualPodClient, names: tuple[str, ...]) -> None:
    for name in names:
        pod.remove_partition(name)
        pod.wait_for_state(name, {PartitionState.REMOVED}, 60)


def in_order(pod: VirtualPodClient, step: StepTaken, waiting: list[tuple[str, int]]) -> None:
    """First come, first served."""
    released(pod, step.ended)
    while waiting and pod.plan_partition(Requirements("x", waiting[0][1])).starts:
        pod.create_partition(Requirements(*waiting.pop(0)))


def greedy(pod: VirtualPodClient, step: StepTaken, waiting: list[tuple[str, int]]) -> None:
    """Asks for everything at once and forgets who was refused."""
    released(pod, step.ended)
    while waiting:
        try:
            pod.create_partition(Requirements(*waiting.pop(0)))
        except ExhaustedError:
            continue


def small_first(pod: VirtualPodClient, step: StepTaken, waiting: list[tuple[str, int]]) -> None:
    """The smallest first, so that a large one never comes."""
    released(pod, step.ended)
    for name, size in sorted(waiting, key=lambda job: job[1]):
        if pod.plan_partition(Requirements("x", size)).starts:
            pod.create_partition(Requirements(name, size))
            waiting.remove((name, size))


def careless(pod: VirtualPodClient, step: StepTaken, waiting: list[tuple[str, int]]) -> None:
    """Half of the IPUs, taken away from the second job before its end, and never given back."""
    while waiting and pod.plan_partition(Requirements("x", waiting[0][1])).starts:
        name, size = waiting.pop(0)
        pod.create_partition(Requirements(name, max(1, size // 2)))
    if step.now >= 10:
        names = {info.name for info in pod.list_partitions()}
        released(pod, tuple(names & {"job1"}))


def scheduled(jobs: list[TraceJob], decide: Decide) -> tuple[SteppedPod, dict[str, str]]:
    """Run a scheduler on jobs; the POD afterwards, and what each rule says."""
    virtual = SteppedPod(POD16, jobs)
    port = virtual.start()
    waiting: list[tuple[str, int]] = []
    try:
        with virtual_pod_at(f"127.0.0.1:{port}") as pod:
            while not (step := pod.advance()).done:
                waiting += [(job.name, job.size) for job in step.submitted]
                decide(pod, step, waiting)
    finally:
        virtual.stop()
    return virtual, {v.rule: v.broken for v in verdicts_on("w", virtual.record, virtual, "")}


def test_jobs_start_when_their_partition_is_there_and_end_in_virtual_time() -> None:
    virtual, rules = scheduled(jobs_of((100, 50, 8), (110, 20, 16), (120, 5, 3)), in_order)
    starts = [(o.job.name, o.start / SECOND, o.end / SECOND, o.size) for o in virtual.record.outcomes]
    assert starts == [("job0", 100, 150, 8), ("job1", 150, 170, 16), ("job2", 170, 175, 4)]
    assert not any(rules.values()), rules


def test_a_scheduler_that_asks_for_what_others_hold_and_forgets() -> None:
    _, rules = scheduled(jobs_of((0, 50, 16), (1, 50, 8)), greedy)
    assert rules["no IPU is owned twice"] == "1 asked for IPUs that others held: job1"
    assert rules["no request is lost"] == "1 never started: job1"
    assert not rules["IPUs are given back"]


@pytest.mark.slow
def test_a_scheduler_that_starves_the_large_job() -> None:
    stream = [(float(n), 3.0, 8) for n in range(80)]
    _, rules = scheduled(jobs_of((0.5, 5, 16), *stream), small_first)
    assert "job job0 was overtaken by" in rules["nobody starves"]
    assert not rules["no request is lost"]


def test_a_scheduler_that_is_careless() -> None:
    _, rules = scheduled(jobs_of((0, 5, 4), (0, 50, 4), (10, 5, 2)), careless)
    assert rules["each job has the IPUs it asked for"] == "3 got fewer: job0, job1, job2"
    assert rules["a job keeps its IPUs to its end"] == "1 lost them before: job1"
    assert "job0" in rules["IPUs are given back"]


def test_time_passes_for_as_long_as_asked_at_most() -> None:
    virtual = SteppedPod(POD16, jobs_of((0, 5, 4), (30, 5, 4)))
    with virtual_pod_at(f"127.0.0.1:{virtual.start()}") as pod:
        times = [pod.advance().now, pod.advance(10).now, pod.advance(10).now, pod.advance().now]
        with pytest.raises(UsageError, match="time cannot pass"):
            pod.advance(-1)
    virtual.stop()
    assert times == [0, 10, 20, 30]
    with pytest.raises(UsageError, match="no address"):
        virtual_pod_at("nowhere")


def test_jobs_are_served_by_a_scheduler_that_comes_to_the_port(capsys: pytest.CaptureFixture[str]) -> None:
    jobs = jobs_of((0, 5, 16), (1, 5, 16))
    outcomes: list[object] = []
    thread = threading.Thread(target=lambda: outcomes.extend(served_outcomes(POD16, jobs, 0, 60.0)))
    thread.start()
    address = ""
    for _ in range(5000):
        address += capsys.readouterr().out
        if address.endswith("\n"):
            break
        thread.join(0.02)
    waiting: list[tuple[str, int]] = []
    with virtual_pod_at(address.strip().rpartition("=")[2]) as pod:
        while not (step := pod.advance()).done:
            waiting += [(job.name, job.size) for job in step.submitted]
            in_order(pod, step, waiting)
    thread.join(60)
    assert len(outcomes) == 2


def test_workloads_fit_their_pod() -> None:
    for name, jobs in conformance_workloads(POD16).items():
        assert max(job.size for job in jobs) <= 16, name
        assert len(jobs) >= 30


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--conformance", "x", "--generate", "jobs=3"], "its own jobs"),
        (["--conformance", ""], "no command"),
        (["--conformance", "/nowhere/scheduler"], "cannot be started"),
        (["--generate", "jobs=3", "--processors", "4", "--serve", "0"], "serves a POD"),
    ],
)
def test_bad_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(simulate_verb, words) == 2
    assert message in capsys.readouterr().err


def test_the_report_of_the_suite_has_the_form_of_its_schema() -> None:
    from jsonschema import validate

    shown: list[str] = []
    command = f"{sys.executable} -S -c \"raise SystemExit('no POD for me')\""
    report, code = conformance_run(command, POD16, 20.0, shown.append)
    validate(report, load_schema("podrun.simulate", "conformance.schema.json"))
    assert (code, report["broken"] > 0) == (1, True)
    assert {verdict["rule"] for verdict in report["verdicts"]} == {v.rule for v in all_rules()}
    assert "exit code 1: no POD for me" in "".join(shown)


def all_rules() -> list[RuleVerdict]:
    virtual = SteppedPod(POD16, [])
    return verdicts_on("w", virtual.record, virtual, "")


@pytest.mark.slow
def test_the_example_keeps_all_rules(tmp_path: Path) -> None:
    from jsonschema import validate

    figures = tmp_path / "f.json"
    words = ["--conformance", f"{sys.executable} {EXAMPLE}", "--json", str(figures)]
    assert run_command(simulate_verb, words) == 0
    report = json.loads(figures.read_text())
    validate(report, load_schema("podrun.simulate", "conformance.schema.json"))
    assert report["broken"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (f'{sys.executable} -c "import time; time.sleep(100)"', "did not call Advance for 2 s"),
        ("sh -c 'sleep 100; true'", "did not call Advance for 2 s"),  # Of the shell the child is left.
        (f"{sys.executable} -c \"raise SystemExit('no POD for me')\"", "exit code 1: no POD for me"),
        ("false", "it ended with exit code 1"),
        ("true", "ended before the POD"),
    ],
)
def test_a_scheduler_that_never_answers(program: str, words: str) -> None:
    begin = time.monotonic()
    verdicts = judged(program, POD16, patience_s=2.0)
    assert time.monotonic() - begin < 60
    assert not any(v.broken.endswith(":") for v in verdicts)
    assert all(words in v.broken for v in verdicts if v.rule == "it answers")
    assert all(v.broken for v in verdicts if v.rule == "no request is lost")
