"""Logs of all formats: what they become, and what is said of lines that make no sense."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podrun.core.command_line import run_command
from podrun.core.documents import load_schema
from podrun.core.errors import ConfigError, PodrunError
from podrun.simulate.commands.simulate import simulate_verb
from podrun.simulate.engine import SECOND
from podrun.simulate.jobs import as_swf, moments
from podrun.simulate.traces.lines import JobLog
from podrun.simulate.traces.reading import packed_log, read_trace
from podrun.simulate.workload import TraceGenerator

SWF = "; MaxProcs: 8\n" + "".join(
    f"{n} {n * 10} 5 {60 + n} 4 -1 -1 {4 if n % 2 else -1} 100 -1 1 {n % 3} 1 -1 -1 -1 -1 -1\n"
    for n in range(1, 41)
)


def written(tmp_path: Path, text: str, name: str = "log.swf") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def rows(trace: JobLog) -> list[tuple[int, int, int, int]]:
    return [(j.submit // SECOND, j.run // SECOND, j.requested // SECOND, j.size) for j in trace.jobs]


def test_logs_in_the_standard_workload_format_are_read(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, SWF))
    assert rows(trace)[:2] == [(0, 61, 100, 4), (10, 62, 100, 4)]
    assert trace.header == {"MaxProcs": "8"}
    assert {job.user for job in trace.jobs} == {"0", "1", "2"}


def test_a_run_ends_at_the_time_asked_for_and_without_one_the_run_counts(tmp_path: Path) -> None:
    text = "1 0 0 500 4 -1 -1 4 100 -1 1 1 1 -1 -1 -1 -1 -1\n2 5 0 50 4 -1 -1 4 -1 -1 1 1 1 -1 -1 -1 -1 -1\n"
    assert rows(read_trace(written(tmp_path, text))) == [(0, 100, 100, 4), (5, 50, 50, 4)]


def test_a_packed_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.swf.gz"
    path.write_bytes(packed_log(SWF))
    assert len(read_trace(path).jobs) == 40


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("41 500 5 x 4 -1 -1 4 100 -1 1 1 1 -1 -1 -1 -1 -1", "the run time is 'x', not a number"),
        ("41 500 5", "it has 3 columns, not 18"),
        ("41 20 5 9 4 -1 -1 4 100 -1 1 1 1 -1 -1 -1 -1 -1", "the clock runs backwards"),
        (
            "41 500 5 9 4 -1 -1 64 100 -1 1 1 1 -1 -1 -1 -1 -1",
            "job 41 asks for 64 processors, and there are 8",
        ),
        ("41 500 5 9 4 -1 -1 1e999 100 -1 1 1 1 -1 -1 -1 -1 -1", "not a number"),
        (
            "41 500 5 1e300 4 -1 -1 4 1e300 -1 1 1 1 -1 -1 -1 -1 -1",
            "the run time is '1e300', more than 1e+15",
        ),
    ],
)
def test_a_broken_line_is_counted_and_named_and_many_are_refused(tmp_path: Path, line: str, why: str) -> None:
    path = written(tmp_path, f"{SWF}{line}\n")
    trace = read_trace(path, largest=8)
    assert len(trace.jobs) == 40
    (broken,) = trace.broken
    assert broken[0] == 42
    assert why in broken[1]
    with pytest.raises(ConfigError, match=r"log.swf:42: .* 1 of 41 jobs .* make no sense"):
        read_trace(path, largest=8, most_broken=0.01)


def test_logs_of_slurms_sacct_are_read(tmp_path: Path) -> None:
    text = (
        "JobIDRaw|User|Submit|Eligible|Start|End|Timelimit|State|NNodes|AllocTRES\n"
        "1|ann|2024-01-01T00:00:00|2024-01-01T00:01:00|2024-01-01T00:02:00|2024-01-01T01:02:00|1-12:00:00|COMPLETED|2|"
        "billing=4,gres/gpu:a100=8\n"
        "2_3|bob|2024-01-01T00:03:00|Unknown|2024-01-01T00:04:00|2024-01-01T00:05:00|UNLIMITED|CANCELLED by 1000|1|"
        "gres/gpu=4\n"
        "3|bob|2024-01-01T00:03:00|None|None|2024-01-01T00:05:00|5:00|CANCELLED|1|gres/gpu=4\n"
    )
    trace = read_trace(written(tmp_path, text, "sacct.txt"))
    assert trace.format == "sacct"
    assert rows(trace) == [(0, 3600, 36 * 3600, 8), (120, 60, 60, 4)]
    assert [job.status for job in trace.jobs] == ["COMPLETED", "CANCELLED"]
    assert dict(trace.dropped) == {"never ran": 1}


def test_logs_of_philly_are_read(tmp_path: Path) -> None:
    attempts = [
        {
            "start_time": "2017-10-01 00:10:00",
            "end_time": "2017-10-01 00:20:00",
            "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu0"]}],
        },
        {"start_time": "2017-10-01 01:00:00", "end_time": "None", "detail": []},
    ]
    jobs = [
        {
            "status": "Pass",
            "vc": "v",
            "jobid": "a",
            "attempts": attempts,
            "submitted_time": "2017-10-01 00:00:00",
        },
        {
            "status": "Killed",
            "vc": "v",
            "jobid": "b",
            "attempts": [],
            "submitted_time": "2017-10-01 00:00:00",
        },
    ]
    trace = read_trace(written(tmp_path, json.dumps(jobs), "cluster_job_log"))
    assert rows(trace) == [(0, 600, 600, 3)]
    assert sum(trace.dropped.values()) == 1


def test_helios_and_acme(tmp_path: Path) -> None:
    head = "job_id,user,vc,gpu_num,cpu_num,node_num,state,submit_time,start_time,end_time,duration,queue\n"
    row = "7,u1,vc1,8,64,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:30,2020-04-01 00:01:30,60,30\n"
    none = "8,u1,vc1,0,64,1,COMPLETED,2020-04-01 00:00:00,2020-04-01 00:00:30,2020-04-01 00:01:30,60,30\n"
    helios = read_trace(written(tmp_path, head + row + none, "cluster_log.csv"))
    assert (helios.format, rows(helios)) == ("helios", [(0, 60, 60, 8)])
    assert helios.dropped["asked for no GPU"] == 1
    head = (
        "job_id,user,node_num,gpu_num,cpu_num,type,state,submit_time,start_time,end_time,duration,gpu_time\n"
    )
    row = "k1,u,2,16,32,sft,FAILED,2023-07-01 00:00:00+08:00,2023-07-01 00:05:00+08:00,2023-07-01 00:15:00+08:00,9,1\n"
    acme = read_trace(written(tmp_path, head + row, "trace_kalos.csv"))
    assert (acme.format, rows(acme)) == ("acme", [(0, 600, 600, 16)])


def test_logs_of_alibaba_are_read(tmp_path: Path) -> None:
    head = "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"
    pai = read_trace(written(tmp_path, head + "j,worker,3,Terminated,100,400,600,20,50,V100\n", "task.csv"))
    assert (pai.format, rows(pai)) == ("alibaba", [(0, 300, 300, 2)])
    head = (
        "name,cpu_milli,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
    )
    openb = read_trace(written(tmp_path, head + "p,1000,2,1000,,LS,Running,0,12537496,10\n", "pods.csv"))
    assert (openb.format, rows(openb)) == ("openb", [(0, 12537486, 12537486, 2)])


def test_a_plain_table_and_a_clock_that_runs_backwards(tmp_path: Path) -> None:
    table = "submit_s,run_s,size,user\n0,10,2,ann\n5,-1,2,ann\n"
    with pytest.raises(ConfigError, match=r"t.csv:3: the clock runs backwards.*1 of 2 jobs"):
        read_trace(written(tmp_path, table, "t.csv"))
    assert rows(read_trace(written(tmp_path, table, "t.csv"), most_broken=0.5)) == [(0, 10, 10, 2)]


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"x:1: this is the first line of no known log"):
        read_trace(written(tmp_path, "hello\n", "x"))
    with pytest.raises(PodrunError, match="nowhere"):
        read_trace(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"empty\.csv is empty"):
        read_trace(written(tmp_path, "\n", "empty.csv"))
    with pytest.raises(ConfigError, match="has no job that ran"):
        read_trace(written(tmp_path, "; only a header\n"))


def test_a_drawn_log_has_the_stated_moments(tmp_path: Path) -> None:
    generator = TraceGenerator(jobs=30_000)
    jobs = generator.draw(1)
    drawn, stated = moments(jobs), generator.expected()
    for name, tolerance in (
        ("mean_gap_s", 0.03),
        ("mean_size", 0.03),
        ("median_run_s", 0.05),
        ("mean_run_s", 0.1),
    ):
        assert drawn[name] == pytest.approx(stated[name], rel=tolerance), name
    few = TraceGenerator(jobs=300)
    assert few.draw(1) == few.draw(1) != few.draw(2)
    again = read_trace(written(tmp_path, as_swf(jobs[:200])))
    assert [j.size for j in again.jobs] == [j.size for j in jobs[:200]]


def run(*words: str) -> int:
    return run_command(simulate_verb, words)


def test_the_command_writes_the_same_bytes_each_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = written(tmp_path, SWF)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        assert run(str(log), "--processors", "8", "--policy", "easy", "--json", str(file)) == 0
    assert files[0].read_bytes() == files[1].read_bytes()
    report = json.loads(files[0].read_text())
    assert report["jobs"] == 40
    assert report["mean_wait_s"] > 0 < report["mean_bounded_slowdown"]
    assert "mean bounded slowdown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one log is needed"),
        (["log.swf"], "either counted processors or a POD"),
        (["log.swf", "--processors", "0"], "a pool of 0 processors runs nothing"),
        (["log.swf", "--processors", "8", "--scale", "-1"], "cannot be scaled by -1"),
        (["log.swf", "--pod", "pod16", "--policy", "easy"], "podrun's own queue, not by easy"),
        (["log.swf", "--processors", "8", "--policy", "podrun"], "--pod pod128"),
        (["--generate", "size=3", "--processors", "8"], "'size=3' says nothing"),
        (["--generate", "jobs=x", "--processors", "8"], "jobs is 'x', not a number"),
        (["--generate", "largest=64", "--processors", "8"], "jobs of up to 64 do not fit 8"),
        (["--generate", "median-run-s=9,mean-run-s=3", "--processors", "8"], "have no mean of 3 s"),
    ],
)
def test_bad_options_are_refused(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*words) == 2
    assert message in capsys.readouterr().err


def test_a_pod_places_partitions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, file = written(tmp_path, SWF), tmp_path / "pod.json"
    assert run(str(log), "--pod", "pod16", "--json", str(file)) == 0
    report = json.loads(file.read_text())
    assert (report["policy"], report["jobs"], report["processors"]) == ("podrun", 40, 16)
    assert 0 <= report["mean_fragmentation"] < 1
    assert "fragmentation" in capsys.readouterr().out


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--generate", "jobs=3", "--processors", "64", "--json", str(tmp_path / "none" / "f.json")]
    assert run_command(simulate_verb, words) == 2
    assert "f.json cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize("where", [("--processors", "16"), ("--pod", "pod16")])
def test_figures_have_the_form_of_their_schema(where: tuple[str, str], tmp_path: Path) -> None:
    from jsonschema import validate

    file = tmp_path / "f.json"
    assert run("--generate", "jobs=30,largest=16", *where, "--json", str(file)) == 0
    validate(json.loads(file.read_text()), load_schema("podrun.simulate", "simulate.schema.json"))
