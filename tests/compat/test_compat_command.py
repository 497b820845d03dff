"""``python -m podrun.compat``: options before the program, and errors with the program's own frames."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import podrun.popart as popart
from podrun.compat import COMPAT_PATH
from podrun.compat.__main__ import Request, main, request_of
from podrun.compat._error_reports import install, lines, report, report_of_thread, report_unraisable
from podrun.core.errors import PodrunError
from podrun.popart.values.exceptions import surfaced

COMMAND = [sys.executable, "-m", "podrun.compat"]


def run(
    *words: str, text: str = "", path: Path | None = None, entry: str = ""
) -> subprocess.CompletedProcess[str]:
    if path is not None:
        path.write_text(text)
        words = (*words, str(path))
    return subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=60, input=entry)


def test_options_stand_before_the_program_and_the_programs_own_behind() -> None:
    assert request_of(["--num-replicas", "4", "a.py", "--replicas", "2", "-m", "x"]) == Request(
        "script", "a.py", ("--replicas", "2", "-m", "x"), replicas=4
    )
    assert request_of(["--ipus-per-replica=2", "-m", "pytest", "-q"]) == Request(
        "-m", "pytest", ("-q",), ipus_per_replica=2
    )
    assert request_of(["-i"]) == Request(interactive=True)


def _keep_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the process back its path, arguments, hooks and variables after ``main``."""
    for owner, name in (
        *((sys, name) for name in ("argv", "excepthook", "unraisablehook")),
        (threading, "excepthook"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setenv("PYTHONPATH", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--replicas", "4", "a.py"],
            ["no such option '--replicas'", "'--num-replicas'", "compat SCRIPT --replicas"],
        ),
        (["--num-replicas", "none", "a.py"], ["invalid value for '--num-replicas': 'none'"]),
        (["--num-replicas"], ["option '--num-replicas' requires an argument"]),
        (["--ipus-per-replica", "0", "a.py"], ["0 is not in the range x>=1"]),
        (["-c"], ["-c needs the text of a program", "compat -c 'import popart"]),
        (["-x", "a.py"], ["hint: Options of the program follow its name"]),
        (["not_there.py"], ["there is no script not_there.py"]),
        (["."], [". is a folder without __main__.py"]),
        (["-m", "not_there.at_all"], ["there is no module not_there.at_all"]),
        (
            ["-m", "podrun.runtime"],
            ["podrun.runtime is a package without __main__", "-m podrun.runtime.MODULE"],
        ),
    ],
)
def test_wrong_options_are_refused(
    words: list[str], said: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_surroundings(monkeypatch)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("podrun compat: error: ")
    for part in said:
        assert part in error


def test_print_path_gives_a_folder_that_programs_import_from(capsys: pytest.CaptureFixture[str]) -> None:
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
        (
            "import popxl.ops\n",
            1,
            "podrun does not have the SDK's popxl: make the model with popart.Builder()",
        ),
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
@pytest.mark.sample(2)
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


def _shown(program: Callable[[], object]) -> str:
    try:
        program()
    except BaseException as error:
        return "".join(lines(error, error.__traceback__))
    raise AssertionError("no error")


def test_what_is_hidden_is_said_unless_the_message_says_all() -> None:
    inside: dict[str, Any] = {}
    place = str(Path(COMPAT_PATH).parent / "session/inside.py")
    exec(compile("def fail(): {}['a']", place, "exec"), inside)  # noqa: S102 - a line of podrun's that fails
    shown = _shown(lambda: inside["fail"]())
    assert "PODRUN_TRACEBACK=full" in shown
    assert "inside.py" not in shown
    assert _shown(lambda: popart.Builder().saveModelProto("/not/there/m.onnx")).endswith(
        "'/not/there/m.onnx'\n"
    )
    shown = _shown(lambda: popart.Builder().aiOnnx.matmull)
    assert "Did you mean 'matmul'" in shown
    assert "PODRUN_TRACEBACK" not in shown
    assert "opsets.py" not in shown


def test_errors_in_groups_have_the_programs_own_frames() -> None:
    def several() -> None:
        found = []
        for name in "ab":
            try:
                popart.Builder().aiOnnx.relu([name])
            except popart.popart_exception as error:
                error.hint = f"Add {name}."
                found.append(error)
        raise ExceptionGroup("two", found)

    shown = _shown(several)
    assert "'a' is not an input" in shown
    assert "graph_builder.py" not in shown
    assert shown.endswith("hint: Add a.\nhint: Add b.\n")


def test_the_hint_of_a_cause_is_shown() -> None:
    def wrapped() -> None:
        try:
            raise popart.popart_exception("no weight", hint="Add one.")
        except popart.popart_exception as error:
            raise RuntimeError("my model failed") from error

    assert _shown(wrapped).endswith("RuntimeError: my model failed\nhint: Add one.\n")


def test_frames_of_the_standard_library_are_shown_where_the_program_calls_it() -> None:
    assert "decoder.py" in _shown(lambda: json.loads("{"))
    key = {"a": 1}.__getitem__
    shown = _shown(lambda: surfaced_twice(lambda: key("b")))
    assert "KeyError: 'b'" in shown
    assert "contextlib.py" not in shown


def surfaced_twice(work: Callable[[], object]) -> None:
    with surfaced(), surfaced():
        work()


def test_a_thread_and_a_finalizer_show_the_programs_own_frames(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_surroundings(monkeypatch)
    monkeypatch.setattr(threading, "excepthook", report_of_thread)
    monkeypatch.setattr(sys, "unraisablehook", report_unraisable)

    def work() -> None:
        popart.Builder().aiOnnx.relu(["nothing"])

    for target in (work, sys.exit):
        thread = threading.Thread(target=target, name="reader")
        thread.start()
        thread.join()
    finalizer = weakref.finalize(error := popart.popart_exception("x"), work)
    finalizer.atexit = False
    del error
    shown = capsys.readouterr().err
    assert shown.startswith("Exception in thread reader:\nTraceback")
    assert shown.count("'nothing' is not an input or output tensor") == 2
    assert "Exception ignored in" in shown
    assert "graph_builder.py" not in shown
    assert "threading.py" not in shown


def test_what_is_no_program_is_refused_and_other_forms_of_programs_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_surroundings(monkeypatch)
    binary = tmp_path / "binary.py"
    binary.write_bytes(b"x\x00")
    assert main([str(binary)]) == 2
    assert f"{binary} is no Python program" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stdin", io.StringIO("import sys; print(sys.argv, __name__)"))
    assert main(["-", "a"]) == 0
    assert capsys.readouterr().out == "['-', 'a'] __main__\n"
    (tmp_path / "__main__.py").write_text("print('a folder')")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "a folder\n"
    package = tmp_path / "broken_package"
    package.mkdir()
    (package / "__init__.py").write_text("import not_there_at_all")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_there_at_all"):
        main(["-m", "broken_package.inside"])


def test_the_terminal_has_the_names_of_a_program_that_failed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _keep_surroundings(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO("print(x + 1)\n"))
    assert main(["-i", "-c", "x = 1\ndef f(): x / 0\nf()"]) == 0
    shown = capsys.readouterr()
    assert "2" in shown.out
    assert 'File "<string>", line 3, in <module>' in shown.err
    assert "ZeroDivisionError" in shown.err


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ("popart.SDG", "module 'popart' has no attribute 'SDG'. Did you mean 'SGD'?"),
        (
            "popart.Builder().addInputTenso",
            "has no attribute 'addInputTenso'. Did you mean: 'addInputTensor'?",
        ),
        ("popart.Builder().aiOnnx.matmull", "has no operator 'matmull'. Did you mean 'matmul'?"),
        ("popart.SessionOptions().enablePipelinin", "'enablePipelinin'. Did you mean 'enablePipelining'?"),
        ("popart.Patterns().PostNRep", "Patterns has no attribute 'PostNRep'. Did you mean 'PostNRepl'?"),
        ("poprt", "name 'poprt' is not defined. Did you mean: 'popart'?"),
        ("popart.qqqq", "module 'popart' has no attribute 'qqqq'"),
    ],
)
def test_a_misspelt_name_gets_one_guess_and_no_word_about_podruns_inside(
    text: str, last: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        eval(text, {"popart": popart})  # noqa: S307
    except (AttributeError, NameError) as error:
        report(type(error), error, error.__traceback__)
    assert capsys.readouterr().err.rstrip().splitlines()[-1].endswith(last)


def test_a_cell_of_a_notebook_shows_its_own_frames_and_the_hint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[list[str], int | None]] = []

    class Shell:
        custom_exceptions: tuple[type, ...] = ()

        def set_custom_exc(self, kinds: tuple[type, ...], handler: Callable[..., None]) -> None:
            self.custom_exceptions, self.handler = kinds, handler

        def showtraceback(self, error: Any, tb_offset: int | None = None) -> None:
            found = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error[2])]
            shown.append((found, tb_offset))

    shell = Shell()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    _keep_surroundings(monkeypatch)
    install()
    assert shell.custom_exceptions == (PodrunError,)
    for words, wanted in (("", [__file__]), ("full", None)):
        monkeypatch.setenv("PODRUN_TRACEBACK", words)
        try:
            popart.Builder().aiOnnx.relu(["nothing"])
        except popart.popart_exception as error:
            error.hint = "Name an input."
            shell.handler(shell, type(error), error, error.__traceback__, tb_offset=1)
        files, offset = shown.pop()
        assert offset == (0 if wanted else 1)
        assert files == wanted if wanted else any("graph_builder" in file for file in files)
        assert capsys.readouterr().err == "hint: Name an input.\n"


def test_pytest_runs_without_a_word_about_podrun(tmp_path: Path) -> None:
    """podrun is imported before its plugin for pytest is."""
    (tmp_path / "test_one.py").write_text("def test_one():\n    import popart\n    assert popart.Builder\n")
    words = [*COMMAND, "-m", "pytest", "-p", "no:cacheprovider", "test_one.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout
    assert "podrun-" in done.stdout  # The plugin is there.
    assert "warning" not in done.stdout + done.stderr
