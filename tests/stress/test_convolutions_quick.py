"""A small fixed part of the stress of convolutions: `make stress` goes on for as long as one likes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.conftest import ROOT
from tests.stress.cases import case
from tests.stress.convolutions import Verdict, started, verdict

SEED, FIRST = 26, 6


@pytest.mark.slow  # By default `tests/device/test_convolutions.py` compares such calls with float64 and with XLA.
@pytest.mark.system
@pytest.mark.parametrize(("first", "count"), [(FIRST + 2, 2), (FIRST, 4)])
def test_some_cases_are_right(first: int, count: int) -> None:
    """One and two threads, machines side by side in a process and in several, forward and training."""
    chosen = [case(SEED, first + k) for k in range(count)]
    assert {c.threads for c in chosen} == {1, 2}
    assert {c.training for c in chosen} == {False, True}
    assert {c.machines > 1 for c in chosen} == {c.processes > 1 for c in chosen} == {False, True}
    words = ("--seed", SEED, "--first", first, "--cases", count)
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.convolutions", *map(str, words)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(rf"{count} in \d+ s, [1-9]\d* with the library's convolutions, 0 wrong", done.stdout), (
        done.stdout
    )


def test_what_goes_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that dies, one that hangs, a wrong number and differing bits: none passes as right."""
    chosen = replace(case(SEED, FIRST), processes=2)

    def found(words: str, deadline: float = 60.0) -> Verdict:
        monkeypatch.setattr(
            "tests.stress.convolutions._fork", lambda _: started([sys.executable, "-c", words])
        )
        return verdict(chosen, deadline=deadline)

    import_os = "import os, sys, time;"
    assert "died by SIGABRT" in found(import_os + "os.abort()").wrong
    assert "deadline" in found(import_os + "time.sleep(60)", deadline=0.2).wrong
    assert "without an answer" in found(import_os + "sys.exit(3)").wrong
    assert found('print(\'{"wrong": "off", "library": 1}\')') == Verdict("off", 1)
    different = 'import os; print(\'{"wrong": "", "library": 1, "digest": %d}\' % os.getpid())'
    assert "different bits" in found(different).wrong
    assert found('print(\'{"wrong": "", "library": 2, "digest": 1}\')') == Verdict("", 2)


def test_a_case_is_the_same_whenever_it_is_asked() -> None:
    assert case(7, 3) == case(7, 3)
    assert case(7, 3) != case(7, 4)
    one, two = case(7, 3).arrays(), case(7, 3).arrays()
    assert all((a == b).all() for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize(
    ("cases", "instructions"),
    [(120, ""), *(pytest.param(600, some, marks=pytest.mark.slow) for some in ("", "AVX2"))],
)
def test_the_library_stays_inside_of_its_buffers(cases: int, instructions: str) -> None:
    done = _guarded("-m", "tests.stress.guarded", "--cases", str(cases), instructions=instructions)
    assert done.returncode == 0, done.stdout + done.stderr
    computed = re.search(r"(\d+) cases by [12]\d algorithms, 0 crashes", done.stdout)
    assert computed is not None, done.stdout
    assert int(computed[1]) >= cases // 6


def test_the_guard_finds_why_strided_gradients_of_1x1_weights_are_thinned() -> None:
    """The call as the library would have it, of 3 channels, dies in the library. If not, `_thinned` can go."""
    words = """if True:
        from tests.stress import guarded
        from podrun.device.xla.convolutions import ConvolutionCall, Kind
        made = ConvolutionCall(Kind.OF_WEIGHTS, (8, 40, 40, 3), (8, 20, 40, 4), (1, 1), (2, 1), (1, 1), (0, 0), 1)
        chosen = guarded.GuardedCase(made, (0, 1, 2, 3), (False,) * 3, 1)
        guarded.run(guarded.native(), chosen, [guarded.GuardedMemory(1 << 20) for _ in range(3)])
    """
    assert _guarded("-c", words, instructions="AVX2").returncode == -signal.SIGSEGV


def _guarded(*words: str, instructions: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": instructions} if instructions else {})}
    command = [sys.executable, *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
@pytest.mark.system
def test_a_gradient_that_xla_dies_of_is_computed() -> None:
    """One column of pixels, and a kernel of which one column meets them."""
    narrow = case(20261124, 262)
    assert (narrow.size, narrow.kernel, narrow.strides, narrow.training) == ((14, 1), (2, 2), (2, 2), True)
    assert verdict(narrow, fresh=True).wrong == ""
