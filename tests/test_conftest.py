"""What tests start is as a user starts it, however the run of the tests was started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_commands_hear_signals_that_the_run_of_the_tests_ignores() -> None:
    """As under nohup, or from a background job; the run itself stays as deaf as it was."""
    numbers = (signal.SIGHUP, signal.SIGINT)
    program = (
        "import os, signal, subprocess\n"
        f"for number in {[int(n) for n in numbers]}:\n    signal.signal(number, signal.SIG_IGN)\n"
        "import tests.conftest\n"
        f"for number in {[int(n) for n in numbers]}:\n    os.kill(os.getpid(), number)\n"
        "print(subprocess.run(['grep', 'SigIgn', '/proc/self/status'], capture_output=True, text=True).stdout)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    ignored = int(done.stdout.split()[1], 16)
    assert [number for number in numbers if ignored >> (number - 1) & 1] == []
