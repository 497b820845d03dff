"""Copies of a process, as tests start them: their ends, output and errors."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.copies import COMPAT, CopiedProcess, run_copied

pytestmark = pytest.mark.system
SECONDS = 120.0
C_STDOUT = (
    "import ctypes, sys; c = ctypes.CDLL(None); c.setvbuf(ctypes.c_void_p.in_dll(c, 'stdout'), None, 0, 4096)"
)
ASLEEP = "import time; print('asleep', flush=True); time.sleep(1000)"


def test_each_process_has_its_own_exit_code() -> None:
    codes = [CopiedProcess("import sys; sys.exit(int(sys.argv[1]))", [str(n)]) for n in (3, 4)]
    asleep = CopiedProcess(ASLEEP)
    try:
        assert asleep.stdout.readline() == "asleep\n"
        with pytest.raises(TimeoutError, match=f"process {asleep.pid} has not ended within"):
            asleep.wait(0.001)
        assert [process.wait(SECONDS) for process in reversed(codes)] == [4, 3]
    finally:
        for process in (asleep, *codes):
            process.kill()
            process.communicate(SECONDS)
    assert asleep.returncode == -signal.SIGKILL


def test_output_of_any_length_comes_back() -> None:
    done = run_copied("import sys; print('x' * 200_000); print('y', file=sys.stderr)", timeout=SECONDS)
    assert (done.returncode, len(done.stdout), done.stderr) == (0, 200_001, "y\n")


def test_a_copy_ends_after_its_threads_and_what_is_to_run_at_its_exit() -> None:
    code = "import atexit, sys, threading\natexit.register(print, 'exit')\n"
    code += "def last():\n    threading.main_thread().join()\n    print('thread')\n"
    code += "threading.Thread(target=last).start()\nsys.exit('why')\n"
    done = run_copied(code, timeout=SECONDS)
    assert (done.returncode, done.stdout, done.stderr) == (1, "thread\nexit\n", "why\n")


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.stdout.close(); sys.exit(3)",
        "import sys; sys.stdout = None; sys.exit(3)",
        f"{C_STDOUT}; c.puts(b'of C'); sys.exit(3)",
        "print('lost'); import os, sys; os.close(1)",
        "import sys; sys.stderr = None; sys.exit('not of standard output')",
    ],
)
def test_a_copy_ends_as_python_does_whatever_its_output_has_become(code: str) -> None:
    words = [sys.executable, "-c", code]
    alone = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    copied = run_copied(code, timeout=SECONDS)
    assert (copied.returncode, copied.stdout) == (alone.returncode, alone.stdout)
    if "stderr" in code:
        assert copied.stderr == alone.stderr


def test_what_a_process_said_that_does_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, said = CopiedProcess.wait, tmp_path / "said"
    os.mkfifo(said)

    def once_it_has_said_it(process: CopiedProcess, timeout: float | None = None) -> int:
        if timeout == 0.01:
            said.read_text()
        return real(process, timeout)

    monkeypatch.setattr(CopiedProcess, "wait", once_it_has_said_it)
    code = "import os, sys, time; os.write(1, b'out '); os.write(2, b'err'); open(sys.argv[1], 'w').close()"
    with pytest.raises(TimeoutError, match=r"has not ended within 0.01 s: out err"):
        run_copied(f"{code}; time.sleep(1000)", [str(said)], timeout=0.01)


def test_random_numbers_differ() -> None:
    code = "import numpy; print(numpy.random.random(4))"
    assert len({run_copied(code, timeout=SECONDS).stdout for _ in range(2)}) == 2


def test_an_error_of_a_program_is_shown_as_python_m_podrun_compat_does(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("def inner():\n    raise ValueError('wrong')\n\n\ninner()\n")
    words = [sys.executable, "-m", "podrun.compat", str(program)]
    alone = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False)
    copied = run_copied(COMPAT, [str(program)], timeout=SECONDS)
    shown = copied.stderr.replace('  File "<copy>", line 1, in <module>\n', "")
    assert (copied.returncode, copied.stdout, shown) == (1, "", alone.stderr)


@pytest.mark.slow
def test_copies_that_nobody_ends_end_with_who_asked_for_them() -> None:
    code = f"from tests.copies import CopiedProcess\nprocess = CopiedProcess({ASLEEP!r})\nprint(process.pid)"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)
