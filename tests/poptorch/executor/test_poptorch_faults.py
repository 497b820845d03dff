"""Errors of the system reach the program as PopTorch's exceptions, and recovery code runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from podrun import poptorch
from podrun.core import errors
from podrun.popart.values import exceptions
from podrun.poptorch.errors import translated
from tests.conftest import ROOT, Commands

PROGRAM = Path(__file__).parents[1] / "programs" / "recovering.py"


@pytest.mark.parametrize(
    ("raised", "kind", "type_name"),
    [
        (
            exceptions.poplar_recoverable_runtime_error(
                "a", recovery_action=errors.RecoveryAction.LINK_RESET, hint="do this"
            ),
            "RecoverableError",
            "poplar_recoverable_runtime_error",
        ),
        (
            exceptions.poplar_unrecoverable_runtime_error("a"),
            "UnrecoverableError",
            "poplar_unrecoverable_runtime_error",
        ),
        (exceptions.poplar_unknown_runtime_error("a"), "UnrecoverableError", "poplar_unknown_runtime_error"),
        (exceptions.poplar_application_runtime_error("a"), "Error", "poplar_application_runtime_error"),
        (exceptions.OutOfMemoryException("a"), "Error", "poplar_graph_memory_allocation_error"),
        (exceptions.popart_internal_exception("a"), "Error", "popart_internal_exception"),
        (exceptions.popart_runtime_error("a", hint="do this"), "Error", "popart_exception"),
        (errors.UsageError("a"), "Error", "popart_exception"),
    ],
)
def test_errors_arrive_with_type_location_and_action(raised: Any, kind: str, type_name: str) -> None:
    with pytest.raises(poptorch.Error) as caught, translated("training"), translated("running the model"):
        raise raised
    error = caught.value
    assert type(error) is getattr(poptorch, kind)
    assert (error.message, error.type, error.location) == ("a", type_name, "running the model\ntraining")
    assert str(error).startswith(f"'{type_name}': a")
    if raised.hint:
        assert raised.hint in str(error)
    if kind == "RecoverableError":
        assert error.recovery_action == "LINK_RESET"


@pytest.mark.system
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("ipu:0@batch=3:tile-parity", "RecoverableError poplar_recoverable_runtime_error IPU_RESET"),
        ("machine:0@batch=3:power", "RecoverableError poplar_recoverable_runtime_error FULL_RESET"),
        ("machine:0@batch=3:unrecoverable", "UnrecoverableError poplar_unrecoverable_runtime_error None"),
        ("ipu:0@batch=3:overflow", "Error poplar_application_runtime_error None"),
    ],
)
def test_injected_faults_reach_a_program_that_recovers(commands: Commands, fault: str, told: str) -> None:
    words = (sys.executable, "-m", "podrun.compat", PROGRAM)
    done = commands.run(*words, env={"PODRUN_FAULTS": fault}, timeout=120)
    assert told in done.stdout, done.stderr
    if "_RESET" in told and "FULL" not in told:
        assert "trained after recovery: True" in done.stdout


@pytest.mark.system
@pytest.mark.slow
def test_the_guides_program_has_the_losses_of_a_run_without_errors(commands: Commands) -> None:
    """In a partition, where IPUs in error are given to the process that met the error alone."""
    program = ROOT / "examples" / "poptorch" / "recover.py"
    losses = []
    for words in ((), ("--fault", "ipu:2@batch=7:tile-parity")):
        done = commands.run("podrun", "--num-replicas", "4", *words, program, timeout=180)
        assert done.returncode == 0, done.stderr
        assert ("IPU_RESET" in done.stdout) == bool(words)
        losses.append(next(line for line in done.stdout.splitlines() if "losses" in line))
    assert losses[0] == losses[1]


def test_advice_about_memory_names_poptorchs_options() -> None:
    advice = "keep weights off chip (weightTensorLocationSettings): 1 B; or recompute activations (autoRecomputation)"
    with pytest.raises(poptorch.Error) as caught, translated():
        raise exceptions.OutOfMemoryException("Out of memory on tile 0", hint=advice)
    assert "(options.TensorLocations.setWeightLocation)" in caught.value.advice
    assert '_Popart.set("autoRecomputation", 1)' in caught.value.advice
