"""The programs whose end one machine carries out for all."""

from __future__ import annotations

import pytest

from podrun.core.executable import (
    AllGather,
    AllReduce,
    Compute,
    Instruction,
    ReduceScatter,
    Reduction,
    StoreStream,
    Sync,
    SyncScope,
)
from podrun.device.program.fused_tail import fused_tail_of

STEP = Compute("step")
ONE = (ReduceScatter("g"), Compute("u"), AllGather("w"))
TWO = (ReduceScatter("h", Reduction.MEAN), Compute("v"), AllGather("x"), AllGather("state"))


def test_a_list_ends_with_reductions_updates_and_gathers() -> None:
    found = fused_tail_of((Sync(SyncScope.HOST), STEP, *ONE, *TWO))
    assert found is not None
    assert (found.first, found.updates) == (2, ("u", "v"))
    assert found.reductions == {"g": Reduction.SUM, "h": Reduction.MEAN}


@pytest.mark.parametrize(
    "instructions",
    [
        (),
        (STEP,),
        (STEP, *ONE, StoreStream("anchor", "out", 0, 1)),
        (STEP, *ONE, Compute("advance")),
        (STEP, *ONE, Compute("scale"), *TWO),
        (STEP, *ONE, *ONE),
        (STEP, ReduceScatter("g"), AllGather("w"), Compute("u")),
        (STEP, ReduceScatter("g"), ReduceScatter("h"), Compute("u"), Compute("v")),
        (STEP, ReduceScatter("g", Reduction.LOCAL), Compute("u"), AllGather("w")),
        (STEP, ReduceScatter("g")),
        (STEP, AllReduce("g"), Compute("u")),
        (STEP, ReduceScatter("g"), Compute("u")),
        (STEP, ReduceScatter("g"), Compute("u"), ReduceScatter("h"), Compute("v")),
    ],
    ids=repr,
)
def test_other_ends_are_each_machines_own(instructions: tuple[Instruction, ...]) -> None:
    assert fused_tail_of(instructions) is None
