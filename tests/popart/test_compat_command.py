"""``python -m podrun.compat``: options before the program, and errors with the program's own frames."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.compat import COMPAT_PATH
from podrun.compat.__main__ import Request, main, parse
from podrun.compat._start import lines

COMMAND = [sys.executable, "-m", "podrun.compat"]


def run(
    *words: str, text: str = "", path: Path | None = None, entry: str = ""
) -> subprocess.CompletedProcess[str]:
    if path is not None:
        path.write_text(text)
        words = (*words, str(path))
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, input=entry)


def test_options_stand_before_the_program_and_the_programs_own_behind() -> None:
    assert parse(["--num-replicas", "4", "a.py", "--replicas", "2", "-m", "x"]) == Request(
        "script", "a.py", ("--replicas", "2", "-m", "x"), replicas=4
    )
    assert parse(["--ipus-per-replica=2", "-m", "pytest", "-q"]) == Request(
        "-m", "pytest", ("-q",), ipus_per_replica=2
    )
    assert parse(["-i"]) == Request(interactive=True)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--replicas", "4", "a.py"], ["no option --replicas", "Did you mean --num-replicas?"]),
        (["--num-replicas", "none", "a.py"], ["--num-replicas must be a number of at least 1, not 'none'"]),
        (["--num-replicas"], ["not ''"]),
        (["--ipus-per-replica", "0", "a.py"], ["at least 1, not '0'"]),
        (["-c"], ["-c needs the text of a program"]),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("podrun compat: error: ")
    for part in said:
        assert part in error


def test_print_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--print-path"]) == 0
    path = capsys.readouterr().out.strip()
    assert path == COMPAT_PATH
    environ = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", "import popdist"], env=environ, timeout=60, check=False)
    assert done.returncode == 0


ASKS = "import popdist; print(popdist.getNumTotalReplicas(), popdist.getNumIpusPerReplica(), popdist.getNumInstances())"


def test_popdist_answers_what_the_options_say(tmp_path: Path) -> None:
    done = run("--num-replicas", "4", "--ipus-per-replica", "2", "-c", ASKS)
    assert (done.stdout, done.stderr, done.returncode) == ("4 2 1\n", "", 0)


def test_replicas_that_nobody_asks_for_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    done = run("--num-replicas", "4", text="print('trained')", path=tmp_path / "mlp.py")
    assert (done.stdout, done.returncode) == ("trained\n", 0)
    assert "--num-replicas 4 had no effect" in done.stderr


def test_the_terminal_reads_python_and_shows_errors_without_podruns_frames() -> None:
    done = run(
        "-i", entry="import popart\nprint(popart.Builder().getInputTensorIds())\npopart.Builder(b'no')\n"
    )
    assert "[]" in done.stdout
    assert "popart_exception: Failed to load a ModelProto" in done.stderr
    assert "model_loader.py" not in done.stderr


MISSPELT = (
    "import popart\n\ndef build(builder):\n    return builder.aiOnnx.matmull([])\n\nbuild(popart.Builder())\n"
)


@pytest.mark.parametrize(
    ("text", "frames", "last"),
    [
        ("def f():\n    raise ValueError('mine')\nf()\n", 2, "ValueError: mine"),
        ("import not_there_at_all\n", 1, "ModuleNotFoundError: No module named 'not_there_at_all'"),
        (MISSPELT, 2, "matmull"),
        ("import popart\npopart.Buildr()\n", 1, "Buildr"),
        ("def f(:\n", 0, "SyntaxError"),
        (
            "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\nwhile True: pass\n",
            1,
            "KeyboardInterrupt",
        ),
    ],
)
def test_a_traceback_has_the_programs_own_frames(tmp_path: Path, text: str, frames: int, last: str) -> None:
    done = run(text=text, path=tmp_path / "script.py")
    shown = done.stderr
    files = [line for line in shown.splitlines() if line.startswith("  File ") and ", in " in line]
    assert len(files) == frames, shown
    assert all("script.py" in line for line in files)
    assert last in shown
    assert "runpy" not in shown
    assert done.returncode == (-signal.SIGINT if last == "KeyboardInterrupt" else 1)


def test_causes_stay_if_they_are_the_programs(tmp_path: Path) -> None:
    text = "try:\n    {}['a']\nexcept KeyError as error:\n    raise ValueError('mine') from error\n"
    shown = run(text=text, path=tmp_path / "script.py").stderr
    assert "KeyError: 'a'" in shown
    assert "direct cause" in shown
    assert shown.rstrip().endswith("ValueError: mine")


def test_what_is_hidden_is_said() -> None:
    import podrun.popart as popart

    try:
        popart.Builder().aiOnnx.matmull  # noqa: B018
    except AttributeError as error:
        shown = "".join(lines(error, error.__traceback__))
    assert "PODRUN_TRACEBACK=full" in shown
    assert "opsets.py" not in shown
