"""Determinism, conformance and training with another instruction set than this host's widest.

XLA and oneDNN read their limits once a process, so a process of its own runs a small set of the suite's tests again. A
host with AVX-512 stands for one with AVX2 there, one with AVX2 for one with AVX alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from podrun.device.xla.clients import processor_name
from tests.copies import run_copied

ROOT = Path(__file__).resolve().parents[2]
OTHER = {"avx512": "AVX2", "avx2": "AVX"}
TESTS = (
    "tests/device/test_clients.py::test_a_piece_of_either_size_computes_what_numpy_does",
    "tests/device/test_clients.py::test_bits_do_not_depend_on_the_cores_of_a_host",
    "tests/device/test_donated_arenas.py::test_runs_in_place_give_the_bits_of_runs_that_are_not",
    "tests/device/test_fused_updates.py",
    "tests/device/test_convolutions.py::test_gradients_of_a_network_are_kept",
    "tests/popart/test_popart_digits.py::test_a_seed_fixes_every_byte",
    "tests/conformance/test_bfloat16_attention.py",
)


@pytest.mark.system
def test_a_large_piece_is_computed_there():
    """The smallest part of what the slow test below runs."""
    level = processor_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"), {}).split("-")[0]
    if level not in OTHER:
        pytest.skip(f"there is no narrower kind than {level} that podrun is tried on")
    environment = {**os.environ, "XLA_FLAGS": f"--xla_cpu_max_isa={OTHER[level]}"}
    script = (
        "from podrun.device.xla.clients import instruction_set\n"
        "from tests.device import test_clients as t\n"
        "t.test_a_piece_of_either_size_computes_what_numpy_does(t.LARGE)\n"
        "print(instruction_set())\n"
    )
    done = run_copied(script, env=environment)
    assert done.stdout.startswith(f"{OTHER[level].lower()}-"), done.stderr


@pytest.mark.slow
@pytest.mark.system
def test_a_part_of_the_suite_passes_there():
    level = processor_name(Path("/proc/cpuinfo").read_text(encoding="utf-8"), {}).split("-")[0]
    if level not in OTHER:
        pytest.skip(f"there is no narrower kind than {level} that podrun is tried on")
    other = OTHER[level]
    environment = {
        **os.environ,
        "XLA_FLAGS": f"--xla_cpu_max_isa={other}",
        "ONEDNN_MAX_CPU_ISA": other,
    }
    said = "from podrun.device.xla.clients import instruction_set; print(instruction_set())"
    words = ["-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider", *TESTS]
    named = _run(["-c", said], environment, 30)
    assert named.stdout.startswith(f"{other.lower()}-"), named.stderr
    done = _run(words, environment, 300)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "deselected" not in done.stdout


def _run(words: list[str], environment: dict[str, str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
