"""What tests start is as a user starts it, however the run of the tests was started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import pytest_collection_modifyitems

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


def test_what_a_test_starts_leaves_no_folder(tmp_path: Path) -> None:
    """A process of multiprocessing ends as here, without what Python does at the end of a program."""
    program = "import os, tests.conftest; os._exit(os.environ['HOME'] != os.environ[tests.conftest.OF_A_RUN])"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=60,
        check=False,
    )
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_of_a_sampled_test_every_nth_case_runs_by_default() -> None:
    class Case:
        def __init__(self, nodeid: str, every: int | None) -> None:
            self.nodeid, self.every, self.slow = nodeid, every, False

        def get_closest_marker(self, name: str) -> object:
            return None if self.every is None else pytest.mark.sample(self.every).mark

        def add_marker(self, mark: pytest.MarkDecorator) -> None:
            self.slow = mark.name == "slow"

    cases = [Case(f"a.py::one[{n}]", 3) for n in range(5)] + [Case(f"a.py::two[{n}]", 2) for n in range(3)]
    cases.append(Case("a.py::three[0]", None))
    pytest_collection_modifyitems(cases)  # type: ignore[arg-type]
    assert [c.nodeid for c in cases if not c.slow] == [
        *("a.py::one[0]", "a.py::one[3]", "a.py::two[0]", "a.py::two[2]", "a.py::three[0]")
    ]
