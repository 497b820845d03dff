"""Replicated tensor sharding: the same bits wherever variables live, and the effects on modelled memory and time."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from podrun.collectives.timing import all_gather_time, all_reduce_time, reduce_scatter_time
from podrun.compiler.collective_times import Shards, shards_of, update_spec
from podrun.compiler.compile import compile_program
from podrun.compiler.program import Locations, Program
from podrun.costmodel.exchange import fabric_of
from podrun.costmodel.settings import Location
from podrun.costmodel.target import chip
from podrun.device.program.buffers import Buffers

from ..collectives.collective_ranks import on_all, ranks
from .programs import Adam, compiled, inputs_for, mlp, modelled, weights_for
from .reference_interpreter import Pod
from .test_groups import CONSECUTIVE, group_of, grouped

CUT = Location(shards=16, min_sharded=64)
OFF = Location(off_chip=True)
SIZES = (256, 512, 16)


@functools.cache
def network(replicas: int = 16, accumulation: int = 4, **where: Any) -> Program:
    program = mlp(sizes=SIZES, replicas=replicas, accumulation_factor=accumulation, update=Adam())
    return replace(program, locations=Locations(**where))


def causes(program: Program) -> dict[str, float]:
    return dict(modelled(program)["step"]["seconds_by_cause"])


def by_content(program: Program) -> dict[str, int]:
    entry = modelled(program)["ipus"][0]
    return dict(entry["memory"]["by_content"])


@pytest.mark.parametrize(
    "where",
    [
        {"weights": CUT, "optimizer_state": CUT, "accumulators": CUT},
        {
            "weights": OFF,
            "optimizer_state": replace(CUT, off_chip=True),
            "accumulators": OFF,
            "activations": OFF,
        },
    ],
    ids=["sharded", "off chip"],
)
@pytest.mark.parametrize(("replicas", "accumulation"), [(4, 3), (16, 1)])
@pytest.mark.sample(6)
def test_no_bit_depends_on_where_variables_live(where: Any, replicas: int, accumulation: int) -> None:
    found = []
    for locations in (Locations(), Locations(**where)):
        program = mlp(sizes=(16, 20, 3), replicas=replicas, accumulation_factor=accumulation, update=Adam())
        program = replace(program, locations=locations)
        pod = Pod(compile_program(program))
        pod.write_variables(weights_for(program))
        losses = pod.run(2, inputs_for(program, 2))["loss"]
        found.append([np.array(losses), *(pod.read_variable(n) for n in sorted(pod.executable.variables))])
    for first, second in zip(*found, strict=True):
        np.testing.assert_array_equal(first, second)


def test_what_is_cut() -> None:
    program = network(weights=CUT, optimizer_state=replace(CUT, shards=4), accumulators=CUT)
    assert shards_of(program, "w0") == Shards(16, 4, 16)
    assert shards_of(program, "b1") == Shards(1, 1, 1)  # 16 elements: below the limit
    assert update_spec(program, "w0").shape == (256 * 512 // 16,)
    assert update_spec(program, "b1").shape == (16,)
    assert shards_of(network(accumulation=1, accumulators=CUT), "w0").accumulator == 1
    apart = grouped(network(weights=CUT), {"w0": group_of(CONSECUTIVE, 16, 4)})
    assert shards_of(apart, "w0").weight == 4  # not over replicas that do not share it


def test_sharded_state_takes_a_part_of_the_memory_and_of_the_update() -> None:
    whole, cut = network(), network(optimizer_state=CUT)
    assert by_content(cut)["optimizer_state"] < by_content(whole)["optimizer_state"] / 12
    assert causes(cut)["update"] < causes(whole)["update"]
    assert causes(cut)["all_reduce"] == pytest.approx(causes(whole)["all_reduce"])  # scatter and gather


def test_sharded_weights_are_gathered_for_each_micro_batch_and_gradients_only_scattered() -> None:
    whole, cut = network(), network(weights=replace(CUT, min_sharded=1))
    before, after = by_content(whole), by_content(cut)
    assert after["weights"] < before["weights"] / 12
    fabric = fabric_of(chip("gc200"))
    moved = sum(p.spec.nbytes for p in cut.parameters.values())
    assert causes(cut)["collectives"] == pytest.approx(4 * all_gather_time(moved, 16, fabric).seconds)
    assert causes(cut)["all_reduce"] < causes(whole)["all_reduce"]
    assert causes(cut)["all_reduce"] == pytest.approx(reduce_scatter_time(moved, 16, fabric).seconds)


def test_a_gathered_weight_is_there_whole_while_it_is_used() -> None:
    entry = modelled(network(weights=CUT))["ipus"][0]["memory"]
    visiting = {item["scope"]: item["bytes"] for item in entry["largest"]}.get("weight")
    assert visiting == 256 * 512 * 4 - 256 * 512 * 4 // 16


def test_sharded_accumulators_scatter_for_each_micro_batch() -> None:
    often, rarely = network(accumulation=8, accumulators=CUT), network(accumulation=2, accumulators=CUT)
    assert causes(often)["all_reduce"] > 2 * causes(rarely)["all_reduce"]
    assert by_content(often)["accumulators"] < by_content(network(accumulation=8))["accumulators"] / 12


def test_a_small_domain_reduces_its_shards_with_the_others() -> None:
    four = replace(CUT, shards=4, min_sharded=1)
    program, fabric = network(weights=four), fabric_of(chip("gc200"))
    moved = sum(p.spec.nbytes for p in program.parameters.values())
    expected = reduce_scatter_time(moved, 4, fabric).seconds + all_reduce_time(moved / 4, 4, fabric).seconds
    assert causes(program)["all_reduce"] == pytest.approx(expected)
    assert by_content(program)["weights"] > by_content(network(weights=CUT))["weights"]


def test_off_chip_variables_stream() -> None:
    assert "streaming" not in causes(network())
    state = causes(network(optimizer_state=OFF))["streaming"]
    both = causes(network(optimizer_state=OFF, weights=OFF))["streaming"]
    assert 0 < state < both
    cut = causes(network(optimizer_state=replace(CUT, off_chip=True)))["streaming"]
    assert cut == pytest.approx(state / 16, rel=0.05)


def test_a_host_keeps_one_copy_of_weights_and_state() -> None:
    """What one machine writes of its slice all machines of the host see; gradients are each machine's own."""
    executable = compiled(network())
    with ranks(4) as groups:
        machines = on_all(groups, lambda group: Buffers(executable, group))
        for name, arena in executable.arenas.items():
            for number, machine in enumerate(machines):
                machine.arenas[name].own[machine.arenas[name].mine] = number + 1
            seen = [set(np.unique(machine.arenas[name].own)) for machine in machines]
            if arena.shared:
                assert seen == [{1, 2, 3, 4}] * 4, name
            else:
                assert [found - {0} for found in seen] == [{1}, {2}, {3}, {4}], name
        shared = {name.split(".")[0] for name, arena in executable.arenas.items() if arena.shared}
        assert shared >= {"weights", "state"}
