"""A small fixed part of the stress of dense training steps: `make stress` goes on for as long as one likes."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from podrun.device.xla import convolutions, dense_steps
from tests.conftest import ROOT
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)
from tests.stress import dense

pytestmark = pytest.mark.skipif(not convolutions.available(), reason="no oneDNN here")


@pytest.fixture
def any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_steps, "BIG_MAP", dense_steps.BIG_MAP)


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["", "AVX2"])
def test_random_dense_steps_are_right_and_stay_inside_of_their_buffers(instructions: str) -> None:
    environment = {**os.environ, **({"ONEDNN_MAX_CPU_ISA": instructions} if instructions else {})}
    command = [sys.executable, "-m", "tests.stress.dense", "--cases", "12"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "12 steps, 0 wrong\n"


@pytest.mark.usefixtures("any_size")
def test_values_that_lie_on_one_another_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All values of an arena at one place: a step is wrong."""
    case = dense.random_case(1, 0)
    values = case.values(0)
    right = dense.exact(case, values)

    def is_right() -> bool:
        program = dense.program_of(case, values)
        assert program is not None
        results = program.bound()(*values.values())
        return all(
            np.allclose(a, b.reshape(a.shape), rtol=0, atol=1e-4 * max(np.abs(b).max(), 1e-3))
            for a, b in zip(results, right, strict=True)
        )

    assert is_right()
    monkeypatch.setattr(
        dense_steps,
        "_arena",
        lambda steps, first: (dict.fromkeys((id(s.to) for s in steps), 16 * (1 + first // 16)), 1 << 20),
    )
    assert not is_right()
