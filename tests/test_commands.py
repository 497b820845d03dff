"""Work that comes before a command's own code."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from podrun import commands

ROOT = Path(__file__).resolve().parent.parent


def test_every_installed_command_has_its_entry_point() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    for target in scripts.values():
        module, _, name = target.partition(":")
        assert module == "podrun.commands"
        assert callable(getattr(commands, name))


def test_closed_standard_streams_are_opened() -> None:
    code = (
        "from podrun.commands import open_standard_streams as o; o(); import os, sys;"
        "print('nobody reads this'); print('nor this', file=sys.stderr); assert sys.stdin.read() == '';"
        "os._exit(os.open('/dev/null', 0))"  # The first free number.
    )
    done = subprocess.run(["/bin/sh", "-c", f'exec {sys.executable} -c "$0" <&- >&- 2>&-', code], check=False)
    assert done.returncode == 3


def test_ctrl_c_during_the_import_ends_a_command_without_a_word(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGINT)")
    code = "from podrun import commands; commands._run('slow')"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_during_the_first_imports_ends_a_command_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "podrun").write_text(
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'functools':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.modules.pop('functools')\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from podrun.commands import podrun\n"
    )
    done = subprocess.run(
        [sys.executable, str(tmp_path / "podrun")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


@pytest.mark.parametrize("collects", [True, False])
def test_the_command_itself_gets_python_s_ctrl_c_and_its_imports_no_looks_for_garbage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, collects: bool
) -> None:
    (tmp_path / "seen.py").write_text(
        "import gc, signal\nBEFORE, LOOKS = signal.getsignal(signal.SIGINT), [gc.isenabled()]\n"
        "def main():\n    LOOKS.append(gc.isenabled())\n"
        "    return 7 * (signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(sys, stream, getattr(sys, stream))  # A command replaces them.
    before, threshold = signal.signal(signal.SIGINT, signal.default_int_handler), gc.get_threshold()
    if not collects:
        gc.disable()
    try:
        assert commands._run("seen") == 7
        assert [False, collects] == sys.modules["seen"].LOOKS
        assert gc.get_threshold() == threshold
        assert sys.modules["seen"].BEFORE is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGINT, before)
        gc.enable()
        sys.modules.pop("seen", None)


@pytest.mark.parametrize(
    ("where", "code", "said"), [("gone", 0, ""), ("/dev/full", 1, "No space left on device")]
)
def test_output_that_nobody_takes_is_dropped_without_a_complaint(
    where: str, code: int, said: str, tmp_path: Path
) -> None:
    """A command goes on, whether its reader left before the first word or the disk is full."""
    (tmp_path / "chatty.py").write_text(
        "import sys\ndef main():\n    print('many words ' * 2000, flush=True)\n    print('a few more')\n"
        f"    open({str(tmp_path / 'done')!r}, 'w').close()\n    sys.exit(0)\n"
    )
    words = ["-c", "import sys; from podrun import commands; sys.exit(commands._run('chatty'))"]
    done = unheard(where, *words, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == code
    assert (said in done.stderr) if said else (done.stderr == "")
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    ("module", "code"),
    [
        ("podrun.compat", 0),
        ("podrun.estimate", 1),
        pytest.param("podrun.report", 1, marks=pytest.mark.slow),
        pytest.param("podrun.collectives.perf", 1, marks=pytest.mark.slow),
    ],
)
def test_modules_that_are_commands_say_once_that_a_disk_is_full(module: str, code: int) -> None:
    done = unheard("/dev/full", "-m", module, "--help")
    assert done.stderr == f"{module}: output from here on is lost: No space left on device\n"
    assert done.returncode == code


def test_a_script_that_runs_alone_goes_on_without_a_reader(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint('many words ' * 2000, flush=True)\nprint('more')\nsys.exit(3)\n")
    done = unheard("gone", "-m", "podrun.compat", str(script))
    assert (done.returncode, done.stderr) == (3, "")


@pytest.mark.parametrize(
    ("error", "said", "hint"),
    [
        (
            OSError(errno.ENAMETOOLONG, "File name too long", "xxx"),
            "File name too long: xxx",
            "Check the path.",
        ),
        (PermissionError(errno.EACCES, "Permission denied", "/secret/x"), "denied: /secret/x", "ls -ld"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device\n", "df -h"),
        (OSError("odd"), "odd", "podrun doctor"),
    ],
)
def test_what_the_host_refuses_is_said_in_the_form_of_all_errors(
    error: OSError, said: str, hint: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def main() -> int:
        raise error

    for stream in ("stdout", "stderr"):  # `run` replaces them.
        monkeypatch.setattr(sys, stream, getattr(sys, stream))
    assert commands.run(main, command="podrun") == 1
    sys.stderr.flush()
    shown = capfd.readouterr().err
    assert shown.startswith("podrun: error: the host refuses: ")
    assert said in shown
    assert hint in shown.splitlines()[1]
    with pytest.raises(OSError, match="|".join((error.strerror or "odd",))):
        commands.run(main, hosts_program=True)


def unheard(where: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python with its output going to a file, or to a pipe that nobody reads any more (``gone``)."""
    if where == "gone":
        reader, output = os.pipe()
        os.close(reader)
    else:
        output = os.open(where, os.O_WRONLY)
    try:
        return subprocess.run(
            [sys.executable, *words],
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(output)
