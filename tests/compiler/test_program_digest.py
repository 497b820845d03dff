"""Everything of a program that decides its executable is part of the name under which it is kept."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from podrun.compiler.cache import FUNCTIONS_OF_PROGRAM, CompileOptions, executable_digest
from podrun.compiler.program import (
    AnchorSpec,
    AutomaticScaling,
    Beside,
    InputSpec,
    Locations,
    ParameterSpec,
    Phases,
    PipelineOrder,
    Program,
    Transfers,
)
from podrun.core.errors import InternalError
from podrun.core.executable import Reduction, Retrieval, TensorSpec
from podrun.costmodel.settings import Location, PlanOptions, Recompute

WEIGHT = ParameterSpec(TensorSpec("w", "float32", (4,)), False)
MEAN = ParameterSpec(TensorSpec("m", "float32", (4,)), False)
IN = InputSpec(TensorSpec("x", "float32", (2, 4)))


def forward(*values: Any) -> dict[str, Any]:
    raise AssertionError("a digest needs no trace")


PROGRAM = Program("p", forward, {"w": WEIGHT, "m": MEAN}, {"x": IN}, (AnchorSpec("y"),))
SCALING = AutomaticScaling(("y",), 0.125, 1e-7)
OTHERS: dict[str, list[Any]] = {
    "name": ["q"],
    "parameters": [{"w": WEIGHT}, {"w": replace(WEIGHT, spec=TensorSpec("w", "float16", (4,))), "m": MEAN}],
    "inputs": [{"x": replace(IN, broadcast=True)}],
    "anchors": [(), (AnchorSpec("y", Retrieval.SUM),), (AnchorSpec("y", Retrieval.EVERY_N, 2),)],
    "replicas": [2],
    "ipus_per_replica": [2],
    "accumulation_factor": [2],
    "loss": ["y"],
    "loss_scaling": [2.0, "scale"],
    "reduction": [Reduction.MEAN],
    "automatic_scaling": [SCALING, replace(SCALING, period=2), replace(SCALING, most=4.0)],
    "state_updates": [{"m": "y"}],
    "shared_state": [frozenset({"m"})],
    "uses_random": [True],
    "rounds_stochastically": [True],
    "pipelined": [True],
    "pipeline_schedule": [PipelineOrder.INTERLEAVED],
    "updates_each_micro_batch": [True],
    "phases": [Phases(2, False), Phases(2, True), Phases(2, True, True)],
    "recompute": [Recompute("all"), Recompute(outlined=False), Recompute(kept=frozenset({"a", "b"}))],
    "locations": [Locations(weights=Location(off_chip=True)), Locations(overrides={"w": Location(True)})],
    "plans": [PlanOptions(proportion=0.1), PlanOptions(proportions=(("a", 0.1),))],
    "transfers": [Transfers(), Transfers(4), Transfers(0, {"x": Beside.BATCHES})],
    "unsent": [frozenset({"x"})],
    "metadata": [{"steps": 1}, {"steps": "1"}, {"steps": [1, 2]}],
}


def digest(program: Program) -> str:
    return executable_digest(program, "gc200", CompileOptions(), [b"the same function"])


def test_each_field_of_a_program_decides() -> None:
    """A field that is added later is part of the digest too; this test asks for a value of it."""
    assert {item.name for item in fields(Program)} == {*OTHERS, *FUNCTIONS_OF_PROGRAM}
    programs = [PROGRAM, *(replace(PROGRAM, **{n: v}) for n, values in OTHERS.items() for v in values)]
    digests = [digest(program) for program in programs]
    assert len(set(digests)) == len(programs)
    assert [digest(replace(program)) for program in programs] == digests


def test_a_value_without_a_digest_is_refused() -> None:
    with pytest.raises(InternalError, match="no digest can be made"):
        digest(replace(PROGRAM, metadata={"what": object()}))
