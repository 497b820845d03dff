"""What each IPU holds: every variable once, state and accumulators where the program says, and does it fit?"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podrun.compiler.compile import model_program
from podrun.compiler.program import AnchorSpec, InputSpec, Locations, ParameterSpec, Program
from podrun.core.errors import GraphMemoryAllocationError
from podrun.core.executable import TensorSpec
from podrun.costmodel.report_checks import check_report_fits
from podrun.costmodel.settings import Location

from .programs import Adam, mlp
from .test_sharding import chain


def held(program: Program) -> dict[int, Mapping[str, Any]]:
    """The memory section of each IPU of a program."""
    return {entry["ipu"]: entry["memory"] for entry in model_program(program)["ipus"]}


def scaled(elements: int, **fields: Any) -> Program:
    """``loss = sum(x * w)`` with a large weight in single precision and Adam's two states. Nothing is allocated."""

    def forward(p: Mapping[str, Any], inputs: Mapping[str, Any], key: Any) -> dict[str, Any]:
        with jax.named_scope("scale"):
            return {"loss": jnp.sum(p["w"] * inputs["x"])}

    settings: dict[str, Any] = {"replicas": 4, "accumulation_factor": 2, "update": Adam(), **fields}
    return Program(
        name="scaled",
        forward=forward,
        parameters={"w": ParameterSpec(TensorSpec("w", "float32", (elements,)), True)},
        inputs={"x": InputSpec(TensorSpec("x", "float32", (1,)))},
        anchors=(AnchorSpec("loss"),),
        loss="loss",
        **settings,
    )


def test_every_parameter_and_state_lies_on_one_ipu() -> None:
    program = replace(chain([0, 1, 2, 1], tied=True, accumulation_factor=8, pipelined=True), update=Adam())
    found = held(program)
    weights = sum(item.spec.nbytes for item in program.parameters.values())
    assert sum(memory["by_content"]["weights"] for memory in found.values()) == weights
    counters = 4 * len(program.parameters)
    states = sum(memory["by_content"]["optimizer_state"] for memory in found.values())
    assert states == 2 * weights + counters
    assert sum(memory["by_content"]["accumulators"] for memory in found.values()) == weights
    names = [item["scope"] for memory in found.values() for item in memory["largest"]]
    assert len([name for name in names if name in program.parameters]) == len(
        set(names) & set(program.parameters)
    )


def test_a_value_is_stashed_for_every_micro_batch_between_maker_and_reader() -> None:
    program = chain([0, 1, 2, 3], accumulation_factor=16, pipelined=True)
    activation = 4 * 5 * 4
    found = held(program)
    for ipu in range(1, 4):
        flight = 2 * (3 - ipu) + 1
        names = [item["scope"] for item in found[ipu]["largest"]]
        sizes = {item["scope"]: item["bytes"] for item in found[ipu]["largest"]}
        many = [name for name in names if name.endswith(f" x {flight}")]
        # What enters the stage and what it makes for its backward work; the last stage does both at once.
        assert many
        assert not any(name.startswith("value:") for name in many), "a stash is called by what makes it"
        assert sizes[many[0]] == flight * activation
    in_turn = held(replace(program, pipelined=False))
    assert in_turn[0]["by_content"]["stash"] < found[0]["by_content"]["stash"]


def test_gradients_wait_for_the_update_without_accumulation() -> None:
    once, often = (held(mlp(accumulation_factor=n, replicas=1))[0]["by_content"] for n in (1, 4))
    assert "accumulators" not in once
    assert often["accumulators"] > 0
    assert once["activations"] >= often["activations"]


ELEMENTS = 48_000_000
"""Weight and accumulator of 4 bytes an element fit an IPU; Adam's states of 8 more do not."""


def test_state_that_does_not_fit_is_named_and_fits_off_chip_or_sharded() -> None:
    with pytest.raises(GraphMemoryAllocationError) as caught:
        check_report_fits(model_program(scaled(ELEMENTS)))
    stem = re.match(r"Out of memory on tile (\d+): (\d+) bytes used, 638976 available", str(caught.value))
    assert stem
    assert int(stem[2]) > 638976
    assert "Largest contents: optimizer_state 384,000,004 B" in str(caught.value)
    assert "Accl1___w" in str(caught.value)
    assert caught.value.hint
    assert "shard optimizer state over replicas (optimizerStateTensorLocationSettings)" in caught.value.hint
    assert "keep optimizer state off chip" in caught.value.hint
    for place in (Location(off_chip=True, shards=4), Location(shards=4)):
        program = scaled(ELEMENTS, locations=Locations(optimizer_state=place))
        check_report_fits(model_program(program))


def test_advice_is_what_the_model_says_of_the_changed_program() -> None:
    report = model_program(scaled(ELEMENTS))
    promised = {entry["what"]: entry["max_tile_bytes"] for entry in report["remedies"]}
    places = {
        "shard optimizer state over replicas": Locations(optimizer_state=Location(shards=4)),
        "keep optimizer state off chip": Locations(optimizer_state=Location(off_chip=True)),
        "keep accumulators off chip": Locations(accumulators=Location(off_chip=True)),
        "keep weights off chip": Locations(weights=Location(off_chip=True)),
    }
    for what, where in places.items():
        (entry,) = model_program(scaled(ELEMENTS, locations=where))["ipus"]
        assert entry["memory"]["fits"] == (what in promised), what
        assert promised.get(what, entry["memory"]["max_tile_bytes"]) == entry["memory"]["max_tile_bytes"]
    assert "remedies" not in model_program(scaled(1000))


def test_where_no_setting_helps_none_is_advised() -> None:
    """A weight and its gradient exceed the IPU: the update needs both there."""
    with pytest.raises(GraphMemoryAllocationError) as caught:
        check_report_fits(model_program(scaled(400_000_000, accumulation_factor=1)))
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("No setting makes it fit: 'w' with its gradient")
    for useless in ("availableMemoryProportion", "off chip", "micro-batch", "pipeline"):
        assert useless not in caught.value.hint


def test_a_single_tensor_can_live_elsewhere() -> None:
    where = Locations(overrides={"Accl1___w": Location(off_chip=True)})
    plain, moved = (
        held(scaled(100_000, locations=places))[0]["by_content"] for places in (Locations(), where)
    )
    assert plain["optimizer_state"] - moved["optimizer_state"] == 400_000
    # One of the two states comes in for the update, when nothing else is alive.
    assert moved["activations"] >= 400_000
