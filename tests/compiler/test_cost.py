"""The modelled step: its parts add up, pipelines overlap, and nothing about the emulation enters it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from podrun.compiler import cost
from podrun.compiler.compile import CompileOptions, compile_program, model_program
from podrun.compiler.program import AnchorSpec, Beside, Locations, Program, Transfers
from podrun.core.errors import InvalidOptionError
from podrun.costmodel.exchange import neighbour_seconds
from podrun.costmodel.settings import Location
from podrun.costmodel.target import chip

from .programs import Adam, Clipped, Sgd, mlp
from .test_groups import CONSECUTIVE, group_of, grouped
from .test_sharding import chain


def report(program: Program, target: str = "gc200") -> dict[str, Any]:
    """As compiling gives it, which `test_folding_does_not_enter_the_model` and the next one hold for some."""
    return model_program(program, target=target)


def test_the_hosts_data_take_time_where_a_program_arranges_it_and_hide_behind_micro_batches() -> None:
    def host(beside: Beside, factor: int) -> tuple[float, float]:
        transfers = Transfers(64, dict.fromkeys(("x", "y", "loss"), beside))
        causes = report(mlp(accumulation_factor=factor, transfers=transfers))["step"]["seconds_by_cause"]
        return causes["host"], causes["compute"]

    (one, _), (waited, compute) = host(Beside.NOTHING, 1), host(Beside.NOTHING, 4)
    assert waited == pytest.approx(4 * one)
    near, far = host(Beside.MICRO_BATCHES, 4)[0], host(Beside.BATCHES, 4)[0]
    assert near == pytest.approx(one + 3 * max(0.0, one - compute / 4))
    assert far == pytest.approx(4 * max(0.0, one - compute / 4))
    assert "host" not in report(mlp())["step"]["seconds_by_cause"]


def test_causes_add_up_and_the_report_is_plain_data() -> None:
    found = report(mlp(replicas=8, accumulation_factor=3))
    step = found["step"]
    assert step["seconds"] == pytest.approx(sum(step["seconds_by_cause"].values()))
    assert all(value >= 0 for value in step["seconds_by_cause"].values())
    assert step["cycles"] > 0
    assert step["seconds_by_cause"]["all_reduce"] > 0
    assert json.loads(json.dumps(found)) == found


def test_micro_batches_cost_alike_and_the_update_once() -> None:
    one, four = (report(mlp(accumulation_factor=n))["step"]["seconds_by_cause"] for n in (1, 4))
    assert four["compute"] == pytest.approx(4 * one["compute"])
    assert four["update"] == one["update"]
    assert one["all_reduce"] == one["copies"] == 0


def test_folding_does_not_enter_the_model() -> None:
    program = mlp(replicas=16, accumulation_factor=4)
    small = compile_program(program, options=CompileOptions(chunk_bytes=1))
    assert report(program) == compile_program(program).tile_report == small.tile_report


@pytest.mark.parametrize(
    "program",
    [
        chain([0, 1, 2], accumulation_factor=2, replicas=2, pipelined=True),
        replace(
            mlp(accumulation_factor=2, replicas=4, update=Adam()),
            locations=Locations(*3 * (Location(shards=4, min_sharded=1),)),
        ),
        grouped(mlp(accumulation_factor=2, replicas=4), {"w0": group_of(CONSECUTIVE, 4, 2)}),
    ],
    ids=["pipeline", "sharded state", "groups of replicas"],
)
@pytest.mark.parametrize("target", ["gc200", "bow"])
@pytest.mark.sample(2)
def test_a_compiled_program_has_the_report_of_the_model(program: Program, target: str) -> None:
    assert report(program, target) == compile_program(program, target=target).tile_report


@pytest.mark.parametrize(
    "program",
    [
        mlp(loss=None, anchors=(AnchorSpec("loss"), AnchorSpec("h0"))),
        replace(
            chain([0, 1, 2], accumulation_factor=2, dropout=True, skip=True, pipelined=True),
            loss=None,
            update=None,
        ),
    ],
    ids=["layers", "pipeline"],
)
def test_inference_costs_what_its_trace_evaluated_once_more_costs(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = report(program)
    asked: list[object] = []
    monkeypatch.setattr(cost, "has_exchange", lambda jaxpr: not asked.append(jaxpr))
    assert report(program) == found
    assert len(asked) == 1


@pytest.mark.slow
def test_a_full_pipeline_is_faster_than_its_stages_in_turn() -> None:
    program = chain([0, 1, 2, 3], accumulation_factor=64)
    in_turn = report(program)["step"]["seconds_by_cause"]["compute"]
    overlapped = report(replace(program, pipelined=True))["step"]["seconds_by_cause"]["compute"]
    assert in_turn / 4 < overlapped < in_turn / 2
    # A pipeline of one micro-batch cannot overlap anything.
    short = chain([0, 1, 2, 3], accumulation_factor=1, loss=None, update=None, anchors=(AnchorSpec("h3"),))
    assert report(replace(short, pipelined=True))["step"]["seconds"] == pytest.approx(
        report(short)["step"]["seconds"]
    )


def test_segments_name_their_ipus() -> None:
    found = report(chain([0, 1, 2], accumulation_factor=2, pipelined=True))
    assert [(s["ipu"], s["cycle"]) for s in found["segments"]] == [(0, 0), (1, 1), (2, 2), (1, 3), (0, 4)]
    assert all(s["sent_bytes"] > 0 for s in found["segments"][:-1])
    assert [u["ipu"] for u in found["update"]] == [0, 1, 2]


def test_a_faster_clock_takes_less_time() -> None:
    slow, fast = report(mlp())["step"], report(mlp(), target="bow")["step"]
    assert fast["seconds"] < slow["seconds"]


def test_unknown_targets_are_refused() -> None:
    with pytest.raises(InvalidOptionError, match="gc2000"):
        compile_program(mlp(), target="gc2000")


@pytest.mark.parametrize(
    ("places", "ipus"),
    [([0, 1], 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in (([0, 0], 4), ([0, 4], 8)))],
)
def test_clipping_by_a_norm_costs_its_sums_and_a_round_trip(places: list[int], ipus: int) -> None:
    """On each IPU the norm's part and the factor; between machines of a replica as between IPUs of one."""
    plain, clipped = (
        report(chain(places, ipus=ipus, accumulation_factor=2, update=update))["step"]["seconds_by_cause"]
        for update in (Sgd(), Clipped())
    )
    assert clipped["update"] > plain["update"]
    trip = 2 * neighbour_seconds(chip("gc200"), 4) if places[1] else 0.0
    assert clipped["copies"] - plain["copies"] == pytest.approx(trip)
