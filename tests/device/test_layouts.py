"""Generated layouts on machines, in every dimension at once: how and where a program runs changes no bit.

The reference runs the same stages in sequence, in one instance on one host, with everything on chip and nothing
recomputed. It is compared with a drawn schedule, number of instances and hosts, location of variables and
recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podrun.collectives import create, join_group
from podrun.compiler.compile import compile_program
from podrun.compiler.program import AnchorSpec, Locations, PipelineOrder, Program
from podrun.core.executable import Reduction
from podrun.costmodel.settings import ON_CHIP, Location, Recompute
from podrun.device import job
from podrun.device.host.client import InProcessMachines
from podrun.device.program import program_memory
from podrun.device.xla.pieces import PieceCache
from tests.compiler.programs import Adam, Clipped, Momentum, NormScaled, Sgd
from tests.compiler.test_sharding import chain

from .test_spanning import assert_same, outcome

pytestmark = pytest.mark.usefixtures("no_threads_left")
FEW = settings(
    max_examples=2,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MANY = settings(FEW, max_examples=60, derandomize=False)
ANCHORS = (AnchorSpec("loss"), AnchorSpec("h0"), AnchorSpec("Gradient___w0"), AnchorSpec("w1"))
STAGES = [
    (1, (0, 0)),
    (2, (0, 1)),
    (2, (0, 1, 0)),
    (4, (3, 0, 1)),
    (4, (0, 1, 2, 3)),
    (8, (0, 4, 5)),
    (8, (1, 6, 1)),
]
RULES = [Sgd(), Momentum(), Adam(), NormScaled(), Clipped()]


@dataclass(frozen=True)
class Run:
    """How and where a program runs. ``hosts``: its machines' hosts, by letters; ``reduced_whole``: bytes of the largest
    arena that one machine reduces for all."""

    schedule: PipelineOrder | None
    instances: int
    hosts: str
    location: Location
    recompute: Recompute
    reduced_whole: int = 0

    def of(self, program: Program) -> Program:
        """The program, run so."""
        kinds = ("weights", "optimizer_state", "accumulators", "activations")
        return replace(
            program,
            pipelined=self.schedule is not None,
            pipeline_schedule=self.schedule or PipelineOrder.GROUPED,
            locations=Locations(**dict.fromkeys(kinds, self.location)),
            recompute=self.recompute,
        )


@dataclass(frozen=True)
class Case:
    """A program of a chain of layers, and two ways to run it."""

    ipus: int
    places: tuple[int, ...]
    options: dict[str, Any]
    plain: Run
    drawn: Run

    @property
    def program(self) -> Program:
        stages = len(set(self.places)) > 1
        return chain(list(self.places), ipus=self.ipus, stages=stages, anchors=ANCHORS, **self.options)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ipus, places = draw(st.sampled_from(STAGES))
    replicas = draw(
        st.sampled_from(
            [n for n in (1, 2, 4, 8, 16) if n * ipus <= 16 and (n * ipus <= 4 or n * ipus % 4 == 0)]
        )
    )
    in_flight = len(places) > 1 and ipus > 1 and draw(st.booleans())
    options: dict[str, Any] = {
        "replicas": replicas,
        "accumulation_factor": draw(st.integers(2 * len(places) - 1, 9))
        if in_flight
        else draw(st.integers(1, 6)),
        "dropout": draw(st.booleans()),
        "skip": draw(st.booleans()),
        "tied": not in_flight and len(places) > 2 and draw(st.booleans()),
        "update": draw(st.sampled_from(RULES[: 4 if in_flight else 5])),
        "updates_each_micro_batch": in_flight,
        "reduction": Reduction.SUM if in_flight else draw(st.sampled_from([Reduction.SUM, Reduction.MEAN])),
    }
    machines = max(1, replicas * ipus // 4)
    pipeline = PipelineOrder.GROUPED if in_flight else None
    orders = [pipeline] if in_flight or ipus == 1 else [None, *PipelineOrder]
    drawn = Run(
        draw(st.sampled_from(orders)),
        draw(st.sampled_from([n for n in (1, 2, 4) if replicas % n == 0])),
        draw(st.sampled_from(["a" * machines, "ab" * machines, "aabb"]))[:machines],
        draw(
            st.sampled_from(
                [ON_CHIP, Location(off_chip=True), Location(off_chip=True, shards=replicas, min_sharded=1)]
            )
        ),
        draw(st.sampled_from([Recompute(rule) for rule in ("none", "standard", "pipeline", "all")])),
        draw(st.sampled_from([0, program_memory.REDUCED_WHOLE])),
    )
    return Case(ipus, places, options, Run(pipeline, 1, "a" * machines, ON_CHIP, Recompute("none")), drawn)


def ran(case: Case, run: Run, pieces: PieceCache) -> Any:
    """Anchors and variables of `outcome`; machines meet as if they were on ``run.hosts``."""
    program = run.of(case.program)
    executable = compile_program(program)
    twin = InProcessMachines(executable.layout.ipus, pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program_memory, "REDUCED_WHOLE", run.reduced_whole)
        if len(set(run.hosts)) > 1:

            def joined(token: Any, rank: int, **more: Any) -> Any:
                return join_group(token, rank, host=run.hosts[rank], **more)

            patch.setattr(job, "create", partial(_created, run.hosts[0]))
            patch.setattr(job, "join_group", joined)
        return outcome(lambda: twin.connect(threaded=True), program, executable, run.instances)


def _created(host: str, size: int, *, timeout: float, address: str | None) -> Any:
    return create(size, timeout=timeout, address="127.0.0.1", host=host)


@pytest.mark.slow
@FEW
@given(case=cases())
def test_no_layout_changes_a_bit(pieces: PieceCache, case: Case) -> None:
    assert_same(ran(case, case.drawn, pieces), ran(case, case.plain, pieces))


@pytest.mark.slow
@MANY
@given(case=cases())
def test_many_layouts_change_no_bit(pieces: PieceCache, case: Case) -> None:
    assert_same(ran(case, case.drawn, pieces), ran(case, case.plain, pieces))
