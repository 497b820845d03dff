"""``podrun replay``, ``shrink``, ``diff`` and ``incidents``, with a function in place of launches."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from podrun.core.errors import ApplicationRuntimeError, ConflictError, ErrorCause, NotFoundError, UsageError
from podrun.faults import parse_fault
from podrun.launcher.commands.click_verbs import RecordCommand, RecordContext, verb_command
from podrun.launcher.commands.verb_names import RECORD_VERBS
from podrun.launcher.options import parse_command_line
from podrun.launcher.recording import LaunchRecording, check_file, step_in_words, words_of
from podrun.launcher.recovery import GoOnWithFewer, PowerCycleMachine, ResetThePartition, ResetTheseIpus
from podrun.launcher.relaunch import fresh_partition, words_in
from podrun.record.events import Event, LaunchHeader, Record, read_record, to_lines
from podrun.record.recorder import EventRecorder

FAULTS = ("ipu:0@batch=1:overflow", "ipu:1@batch=2:trap:optional", "link:0-1@batch=3:down")


class FakeLaunches:
    """A launch fails if the two faults ``needed`` are planned. Writes records as `podrun` does."""

    def __init__(self, *needed: str) -> None:
        self.needed = needed
        self.started: list[tuple[Sequence[str], str]] = []
        self.loss = "same"
        self.gets_ipus: list[bool] = []

    def __call__(self, words: Sequence[str], environ: Mapping[str, str], folder: str) -> int:
        self.started.append((words, folder))
        assert "PODRUN_FAULTS" not in environ
        line = parse_command_line(words)
        faults = tuple(line.options.get("fault", ()))
        fails = set(self.needed) <= {fault.removesuffix(":optional") for fault in faults}
        events = [Event("instance 0", 0, 0, "run", {"loss": self.loss})]
        if self.gets_ipus and self.gets_ipus.pop(0):
            events.insert(0, Event("instance 0", 0, 0, "attach", {"owned": "0-3"}))
        events += [Event("launch", 0, n, "fault", {"fault": fault}) for n, fault in enumerate(faults)]
        if fails:
            data = {"during": "run", "error": "application_runtime_error", "message": "m"}
            events.append(Event("instance 0", 0, 1, "error", data))
        events.append(Event("launch", 0, 9, "end", {"code": int(fails)}))
        header = LaunchHeader(
            words_of(line.options, line.program), folder, tuple(parse_fault(text) for text in faults)
        )
        Path(line.options["record"]).write_text("\n".join(to_lines(Record(header, tuple(events)))) + "\n")
        return int(fails)


def record_command(verb: str) -> RecordCommand:
    command = verb_command(verb)
    assert isinstance(command, RecordCommand)
    return command


@pytest.fixture
def launches(tmp_path: Path) -> FakeLaunches:
    """A record ``r`` of a launch that fails by two of its three faults."""
    fake = FakeLaunches(FAULTS[0], FAULTS[1].removesuffix(":optional"))
    words = [f"--record={tmp_path / 'r'}", *(f"--fault={fault}" for fault in FAULTS), "--num-replicas=4"]
    fake([*words, "--", "train.py", "--epochs", "3"], {}, str(tmp_path))
    fake.started.clear()
    return fake


Run = Callable[..., int]


@pytest.fixture
def run(launches: FakeLaunches, tmp_path: Path) -> Run:
    def call(verb: str, *words: str | Path) -> int:
        context = RecordContext({"PODRUN_FAULTS": "ipu:0@batch=9:trap"}, launches)
        return record_command(verb).run_words([str(word) for word in words], context)

    return call


def test_a_replay_repeats_words_faults_and_folder(
    run: Run, launches: FakeLaunches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("replay", tmp_path / "r", "--record", tmp_path / "new") == 0
    ((words, folder),) = launches.started
    assert words[1:] == [
        *(f"--fault={fault}" for fault in FAULTS),
        *("--num-replicas=4", "--", "train.py", "--epochs", "3"),
    ]
    assert folder == str(tmp_path)
    assert read_record(tmp_path / "new") == read_record(tmp_path / "r")
    assert capsys.readouterr().out == "replay: the same 3 incidents\n"
    launches.loss = "other"
    assert run("replay", tmp_path / "r", f"--directory={tmp_path}") == 0
    assert "otherwise: event 1 differs in data.loss" in capsys.readouterr().out
    launches.needed = ("never",)
    assert run("replay", tmp_path / "r") == 1
    assert "the incidents differ\nevent 1 differs" in capsys.readouterr().out


def test_a_folder_for_a_replay_is_made(run: Run, launches: FakeLaunches, tmp_path: Path) -> None:
    assert run("replay", tmp_path / "r", "--directory", tmp_path / "a/fresh") == 0
    assert launches.started[-1][1] == str(tmp_path / "a/fresh")
    assert run("shrink", tmp_path / "r", "--directory", tmp_path / "b") == 0
    assert {Path(folder).parent for _, folder in launches.started[1:]} == {tmp_path / "b"}
    with pytest.raises(UsageError, match="r is no folder to launch in: File exists"):
        run("replay", tmp_path / "r", "--directory", tmp_path / "r")


def test_a_replay_without_ipus_compares_nothing(run: Run, launches: FakeLaunches, tmp_path: Path) -> None:
    """As on a partition shared with others, whose IPUs no launch resets."""
    launches.gets_ipus = [True, False]
    launches([f"--record={tmp_path / 'r'}", "--vipu-partition=shared", "--", "train.py"], {}, str(tmp_path))
    with pytest.raises(ConflictError, match="got no IPUs this time") as caught:
        run("replay", tmp_path / "r")
    assert (
        f"vipu reset partition shared (or gc-reset -d ID, for one IPU); then: podrun replay {tmp_path / 'r'}"
        in str(caught.value.hint)
    )


def test_a_plan_is_shrunk_to_the_faults_it_needs(
    run: Run, launches: FakeLaunches, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("shrink", tmp_path / "r", "--record", tmp_path / "small") == 0
    last = capsys.readouterr().out.splitlines()[-1]
    wanted = [f"{FAULTS[0]}:optional", FAULTS[1]]
    assert last == (
        f"the smallest plan that still fails has 2 of 3 faults: --fault {wanted[0]} --fault {wanted[1]}"
    )
    assert read_record(tmp_path / "small").header.faults == tuple(parse_fault(text) for text in wanted)
    assert len(launches.started) < 12


def test_each_launch_of_a_shrink_finds_a_partition_that_was_reset(
    run: Run, launches: FakeLaunches, tmp_path: Path
) -> None:
    """Else what the launch before it broke would count as what its faults did."""
    assert run("shrink", tmp_path / "r") == 0
    assert all("--reset-partition=yes" in words for words, _ in launches.started)
    assert fresh_partition(["--reset-partition=no", "--num-replicas=4"]) == [
        "--reset-partition=yes",
        "--num-replicas=4",
    ]


def test_a_script_is_found_from_another_folder(run: Run, launches: FakeLaunches, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "policy.yaml").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert run("replay", tmp_path / "r", "--directory", elsewhere) == 0
    ((words, folder),) = launches.started
    assert words[-3:] == [str(tmp_path / "train.py"), "--epochs", "3"]
    assert folder == str(elsewhere)
    header = LaunchHeader(("--restart-policy=policy.yaml", "--", "train.py", "new"), str(tmp_path))
    (elsewhere / "train.py").write_text("")
    assert words_in(header, str(elsewhere)) == [
        *(f"--restart-policy={tmp_path / 'policy.yaml'}", "--"),
        *("train.py", "new"),
    ], "a file of the new folder comes first"
    assert words_in(header, str(tmp_path)) == list(header.words)


def test_what_cannot_be_shrunk_says_why(run: Run, launches: FakeLaunches, tmp_path: Path) -> None:
    launches.needed = ("never",)
    with pytest.raises(UsageError, match="does not fail in the same way again"):
        run("shrink", tmp_path / "r")
    assert run("replay", tmp_path / "r", "--record", tmp_path / "good") == 1
    with pytest.raises(UsageError, match="did not fail"):
        run("shrink", tmp_path / "good")


def test_records_are_compared_and_told(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_record(tmp_path / "r")
    other = Record(record.header, record.events[:-1])
    (tmp_path / "other").write_text("\n".join(to_lines(other)) + "\n")
    assert run("diff", tmp_path / "r", tmp_path / "r") == 0
    assert run("diff", tmp_path / "r", tmp_path / "other") == 1
    assert "B: (the record ends)" in capsys.readouterr().out
    assert run("incidents", tmp_path / "r") == 0
    assert "incident-1-" in capsys.readouterr().out
    assert run("incidents", "--json", tmp_path / "r") == 0
    assert '"schema_version": 1' in capsys.readouterr().out


@pytest.mark.parametrize("verb", RECORD_VERBS)
def test_usage_errors_show_the_usage(verb: str, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: podrun {verb} ")
    assert all(option in shown for option in re.findall(r"--\w+", record_command(verb).usage))
    for words in ([], ["a", "b", "c"], ["--no-such", "a"]):
        with pytest.raises(UsageError) as refusal:
            run(verb, *words)
        assert refusal.value.hint == record_command(verb).usage
    with pytest.raises(NotFoundError, match="there is no record"):
        run(verb, *["no-such-file"] * (2 if verb == "diff" else 1))


def test_words_give_the_options_again() -> None:
    words = ["-vv", "--num-repl", "4", "--debug=yes", "--fault", FAULTS[0], "--record=x", "train.py", "--x"]
    line = parse_command_line(words)
    again = parse_command_line(words_of(line.options, line.program))
    assert again.program == line.program
    assert dict(again.options) == {k: v for k, v in line.options.items() if k not in ("fault", "record")}


def test_steps_of_a_recovery_in_words() -> None:
    assert step_in_words(ResetThePartition()) == "reset the partition"
    assert step_in_words(ResetTheseIpus((1,))) == "reset IPU 1"
    assert step_in_words(ResetTheseIpus((1, 2))) == "reset IPUs 1, 2"
    assert step_in_words(PowerCycleMachine("ipum2")) == "power-cycle machine ipum2"
    assert step_in_words(GoOnWithFewer(2)) == "go on with fewer replicas, at least 2"


def test_a_record_that_cannot_be_written_is_refused_before_the_launch(tmp_path: Path) -> None:
    check_file(tmp_path / "r")
    for place in (tmp_path, tmp_path / "none" / "r"):
        with pytest.raises(NotFoundError, match="cannot be written"):
            check_file(place)


def test_a_launch_that_ran_nothing_leaves_a_record(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    recording = LaunchRecording(
        tmp_path / "parts", str(tmp_path / "r"), LaunchHeader((), "", (parse_fault(FAULTS[0]),))
    )
    recording.note("end", code=1)
    found = recording.finish(frozenset(parse_fault(text) for text in FAULTS))
    assert found.lines == []
    assert [event.kind for event in read_record(tmp_path / "r").events] == ["end"]


def test_what_instances_see_after_ctrl_c_is_no_incident(tmp_path: Path) -> None:
    """An instance that takes its time after SIGTERM sees the others end."""
    for signalled, incidents in ((100.0, 0), (300.0, 1)):
        folder = tmp_path / str(incidents)
        folder.mkdir()
        seen = EventRecorder(folder / "instance-0.0.1.jsonl", "instance 0", 0, lambda: 200.0)
        seen.note_error(ApplicationRuntimeError("process 7 ended", cause=ErrorCause(instances=(1,))), "run")
        seen.close()
        recording = LaunchRecording(folder, None, LaunchHeader((), ""))
        assert len(recording.finish(frozenset(), signalled=signalled).incidents) == incidents
