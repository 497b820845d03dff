"""One fault of each class, from the command line to the recovery action that its error names."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Commands, tagged
from tests.copies import run_command
from tests.system.conftest import PARTITION, PROGRAMS

pytestmark = pytest.mark.system

SMALL = PROGRAMS / "small.py"
RUN = ("podrun", "--num-replicas=16", "--vipu-partition", PARTITION)
LOST = ("machine:1@batch=17:lost", "poplar_unrecoverable_runtime_error", "none", "lost")
"""A fault, its class, the recovery action and what gc-monitor says of it."""
REPAIRED = [("vipu-admin", "restart", "agent", "ipum2"), ("vipu", "reset", "partition", PARTITION)]


def machine_errors(pod: Commands) -> str:
    """The errors that gc-monitor shows."""
    shown = run_command(pod, "gc-monitor")
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def usable(pod: Commands) -> bool:
    """Whether a program can use the partition in its present state."""
    done = run_command(pod, *RUN, "--reset-partition=no", SMALL, "2")
    assert (done.returncode == 0) == ("done" in done.stdout)
    return done.returncode == 0


@pytest.mark.parametrize(
    ("fault", "kind", "action", "shown", "too_weak", "right"),
    [
        pytest.param(
            "ipu:5@batch=17:tile-parity",
            "poplar_recoverable_runtime_error",
            "IPU_RESET",
            "parity",
            [("gc-reset", "-d", "4")],
            [("gc-reset", "-d", "5")],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "link:2-3@batch=17:down",
            "poplar_recoverable_runtime_error",
            "PARTITION_RESET",
            "link",
            [("gc-reset", "-d", "2"), ("gc-reset", "-d", "3")],
            [("vipu", "reset", "partition", PARTITION)],
            marks=pytest.mark.slow,
        ),
        pytest.param(*LOST, [("vipu", "reset", "partition", PARTITION)], REPAIRED, marks=pytest.mark.slow),
        (*LOST, [], REPAIRED),
    ],
    ids=["tile-parity", "link-down", "machine-lost", "machine-lost-and-repaired-at-once"],
)
def test_each_fault_is_told_seen_and_repaired_as_documented(
    pod: Commands,
    fault: str,
    kind: str,
    action: str,
    shown: str,
    too_weak: list[tuple[str, ...]],
    right: list[tuple[str, ...]],
) -> None:
    done = run_command(pod, *RUN, "--num-instances=2", "--fault", fault, SMALL)
    assert done.returncode == 1
    for instance in range(2):
        said = [line for line in tagged(done.stdout, instance) if line.startswith("step ")]
        assert len(said) == 1, done.stdout + done.stderr
        step, name, what, seconds = re.fullmatch(r"step (\d+) (\w+) (\w+) ([\d.]+)", said[0]).groups()  # type: ignore[union-attr]
        assert (step, name, what) == ("17", kind, action)
        assert float(seconds) < 60
    assert kind in done.stderr
    assert shown in machine_errors(pod).lower()
    for words in too_weak:
        run_command(pod, *words)
    assert not too_weak or not usable(pod)
    for words in right:
        done = run_command(pod, *words)
        assert done.returncode == 0, done.stderr
    assert usable(pod)
    assert shown not in machine_errors(pod).lower()


@pytest.mark.slow
def test_a_fault_that_does_not_strike_fails_its_launch_and_spares_the_next(pod: Commands) -> None:
    fault = "ipu:5@batch=40:trap"
    late = pod.run(*RUN, "--fault", fault, SMALL, "5")
    assert late.returncode == 3, late.stderr
    assert f"podrun: a planned fault did not strike: {fault}" in late.stderr
    longer = pod.run(*RUN, "--reset-partition=no", SMALL, "60")
    assert longer.returncode == 0, longer.stderr
    assert pod.run(*RUN, "--fault", f"{fault}:optional", SMALL, "5").returncode == 0
