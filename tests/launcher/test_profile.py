"""``podrun profile``: its own options beside podrun's, the environment it gives, what it shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from podrun.core.errors import ConfigError, InvalidOptionError, UsageError
from podrun.core.telemetry import IpuReport, MachineReport
from podrun.launcher import cli
from podrun.launcher.commands.profile import environment_with_reports, main, read_words
from podrun.launcher.spec import LaunchLayout
from podrun.launcher.summary import launch_summary
from podrun.report.document import write_report
from tests.report.profiles import pipeline_profile

PROGRAM = """
import popart
builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 8]))
y = builder.aiOnnx.relu([x], "positive")
builder.addOutputTensor(y)
device = popart.DeviceManager().createOfflineIPUDevice({"numIPUs": 1})
popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device).prepareDevice()
"""


def test_without_a_program_it_says_how_to_profile_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--num-replicas", "4"]) == 2
    assert "podrun profile --num-replicas 16 train.py" in capsys.readouterr().err


def test_own_options_stand_anywhere_before_the_program() -> None:
    words = [
        "--num-replicas",
        "2",
        "--compare=a.json",
        "-v",
        "--report-directory",
        "out",
        "train.py",
        "--compare",
        "b",
    ]
    line, reports, compared = read_words(words)
    assert (reports, compared) == ("out", "a.json")
    assert dict(line.options) == {"num-replicas": 2, "verbose": 1}
    assert line.program == ("train.py", "--compare", "b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--compare"], "needs a value"),
        (["--report-directory="], "needs a value"),
        (["--compare", "a", "--compare", "b", "x.py"], "given twice"),
        (["--num-replicsa", "2", "x.py"], "unknown option"),
    ],
)
def test_words_that_cannot_be_right(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_words(words)


def test_engine_options_of_the_user_stay(tmp_path: Path) -> None:
    own = {"debug.allowOutOfMemory": "true", "autoReport.directory": str(tmp_path / "mine")}
    environ = {"POPLAR_ENGINE_OPTIONS": json.dumps(own)}
    told, directory = environment_with_reports(environ, None)
    assert directory == tmp_path / "mine"
    given = json.loads(told["POPLAR_ENGINE_OPTIONS"])
    assert given["autoReport.all"] == given["debug.allowOutOfMemory"] == "true"
    assert environment_with_reports(environ, str(tmp_path / "other"))[1] == tmp_path / "other"


def test_what_cannot_be_right_is_said_before_anything_starts(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("raise SystemExit('started')", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        main(["--compare", str(tmp_path / "none.json"), str(script)], {})
    with pytest.raises(InvalidOptionError, match="JSON"):
        main([str(script)], {"POPLAR_ENGINE_OPTIONS": "{"})


def test_two_reports_are_shown_side_by_side_without_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = pipeline_profile()
    before, after = write_report(profile, tmp_path / "a"), write_report(profile, tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    words = ["--compare", str(before), "--report-directory", "out", str(after.with_name("profile.json"))]
    assert main(words, {}) == 0
    assert "Side by side: out/comparison.html" in capsys.readouterr().out
    assert (tmp_path / "out/comparison.html").read_text().count("<section><h2>") == 2
    with pytest.raises(ConfigError, match="cannot be read"):
        main(["--compare", str(before), "gone.json"], {})
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        main(["--compare", str(before), "--report-directory", "file", str(after)], {})


def test_help_names_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", "--help"]) == 0
    assert "--report-directory" in capsys.readouterr().out


def test_a_dry_run_starts_and_reports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    assert cli.main(["profile", "--offline-mode=yes", "--dry-run", "program.py"]) == 0
    assert "program.py" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["program.py"]


@pytest.mark.parametrize(
    ("plans", "place"), [("on", "that of the user, /c/programs\n"), ("off", "one for the launch alone\n")]
)
def test_a_dry_run_says_where_programs_are_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    plans: str,
    place: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").touch()
    monkeypatch.setenv("PODRUN_CACHE_DIR", "/c")
    monkeypatch.setenv("PODRUN_PLAN_CACHE", plans)
    assert cli.main(["profile", "--offline-mode=yes", "--dry-run", "program.py"]) == 0
    assert f"cache:      {place}" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.system
def test_a_program_is_profiled_compared_and_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    Path("idle.py").write_text("", encoding="utf-8")
    command = ["profile", "--offline-mode=yes", "--report-directory", "out"]
    assert cli.main([*command, "program.py"]) == 0
    folder = tmp_path / "out__instance_0" / "inference"
    assert "inference on gc200" in (shown := capfd.readouterr().out)
    assert "positive" in shown
    assert (folder / "trace.json").is_file()
    before = str(folder / "profile.json")
    assert cli.main([*command, "--compare", before, "program.py"]) == 0
    assert "Compared with inference" in capfd.readouterr().out
    assert 'id="compare"' in (folder / "profile.html").read_text(encoding="utf-8")
    assert cli.main([*command, "idle.py"]) == 2
    assert "left no report" in capfd.readouterr().err


@pytest.mark.parametrize(("used", "said"), [(1, True), (4, False), (0, False)])
def test_ipus_that_a_program_does_not_use_are_said(used: int, said: bool) -> None:
    ipus = tuple(IpuReport(i, i, batches_done=3 if i < used else 0) for i in range(4))
    lines = launch_summary(LaunchLayout(4, 1, 1, ("localhost",)), [MachineReport("ipum1", ipus=ipus)], 1.0)
    assert ("the program used 1 of 4 IPUs" in lines[-1]) is said


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("import poptorch\n", "popdist.poptorch.Options()"),
        ("import popart\n", "popdist.popart.configureSession"),
        ("from tensorflow.python import ipu\n", "popdist.tensorflow.set_ipu_config(config"),
        ("import tensorflow as tf\nimport poptorch\n", "popdist.poptorch.Options()"),
    ],
)
def test_advice_names_the_front_end_of_the_program(tmp_path: Path, text: str, advice: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    ipus = tuple(IpuReport(i, i, batches_done=3 if i < 2 else 0) for i in range(4))
    reports = [MachineReport("ipum1", ipus=ipus)]
    lines = launch_summary(LaunchLayout(4, 1, 1, ("localhost",)), reports, 1.0, ("python", str(script)))
    assert advice in lines[1]
