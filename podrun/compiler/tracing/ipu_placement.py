"""Placement: which IPU of a replica, and which pipeline stage, each operator belongs to.

A front end places operators with name scopes ``ipu:i`` and ``stage:s`` (`podrun.compiler.program.Forward`).
Differentiation keeps them, wrapped: ``transpose(jvp(ipu:1))/stage:1``. The innermost scope of each kind
counts.

A sharded program has no stages. Where its front end knows how a pipeline of the same operators would be cut, it says
so with ``cut:c``: the pieces, hence what XLA fuses and the last bit, are then those of the pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jax.extend.core import JaxprEqn

from podrun.compiler import jaxprs
from podrun.compiler.program import PipelineOrder
from podrun.compiler.tracing.forward_trace import Trace
from podrun.core.errors import UsageError
from podrun.core.scopes import parse
from podrun.costmodel.splitting import Spot


@dataclass(frozen=True, slots=True)
class Placement:
    """Where operators lie. ``stages``: the IPU of each pipeline stage; empty if operators have no stages."""

    stages: Mapping[int, int]
    split: bool
    """True iff the work of a micro-batch is cut: operators lie on more than one place, or in stages of a pipeline."""
    inferred: bool = False
    """True iff stages are IPUs, because a pipelined program named none."""
    schedule: PipelineOrder = PipelineOrder.GROUPED
    phase_places: int = 0
    """Places of an execution phase (IPUs of a replica); 0: places are no phases."""
    cuts: Mapping[int, int] = field(default_factory=dict)
    """The IPU of each cut of a program without stages; empty if its front end names none."""

    def cutting(self) -> Placement:
        """The placement whose places are segments of their own: with cuts as stages, if there are any."""
        return replace(self, stages=self.cuts) if self.cuts else self

    def spot(self, equation: JaxprEqn) -> Spot | None:
        """Stage and cycle of an equation if there are stages, else its IPU; None if it has no place.

        Backward work of stage *s* comes in cycle ``2 * last - s``: the last stage goes forward and backward in one.
        If forward and backward work take turns, that of all others comes a cycle later, so that every stage does one
        of them in even cycles and the other in odd ones. Execution phases are counted the same way, over all IPUs.
        """
        return self.spot_of("/".join(jaxprs.name_scopes(equation)))

    def spot_of(self, scope: str) -> Spot | None:
        """The same, of an equation in ``scope``."""
        said = parse(scope)
        if not self.stages:
            return None if said.ipu is None else Spot(said.ipu)
        stage = said.cut if self.cuts else said.ipu if self.inferred else said.stage
        if stage is None:
            return None
        each = self.phase_places or 1
        rank, last = stage // each, max(self.stages) // each
        if said.backward and rank < last:
            rank = 2 * last + self.schedule.period - 1 - rank
        return Spot(stage, rank, late=said.restored)

    def ipu(self, place: int) -> int:
        """The IPU of a place."""
        return self.stages.get(place, 0) if self.stages else place


def placement_of(
    traced: Trace,
    ipus_per_replica: int,
    *,
    pipelined: bool,
    schedule: PipelineOrder = PipelineOrder.GROUPED,
    phased: bool = False,
) -> Placement:
    """Read the placement from the forward trace. A pipelined program without stages has one on each IPU.

    Raises UsageError that names an operator on an IPU that a replica does not have, a stage on two IPUs, or
    an operator without a stage where others have one.
    """
    ipus: set[int] = set()
    stages: dict[int, int] = {}
    cuts: dict[int, int] = {}
    for equation in traced.jaxpr.jaxpr.eqns:
        said = parse("/".join(jaxprs.name_scopes(equation)))
        ipu, stage = said.ipu, said.stage
        if stage is not None and ipu is None:
            ipu = stage
        if ipu is None:
            continue
        _check_ipu(equation, ipu, ipus_per_replica)
        ipus.add(ipu)
        if stage is not None and stages.setdefault(stage, ipu) != ipu:
            raise UsageError(
                f"pipeline stage {stage} lies on IPU {stages[stage]} and on IPU {ipu}",
                hint="Place all operators of a stage on one IPU.",
            )
        if said.cut is not None:
            cuts[said.cut] = ipu
    inferred = pipelined and not stages and len(ipus) > 1
    if inferred:
        stages = {ipu: ipu for ipu in ipus}
    several = len(ipus) > 1 or len(stages) > 1 or (pipelined and bool(stages))
    places = ipus_per_replica if phased else 0
    return Placement(dict(sorted(stages.items())), several, inferred, schedule, places, cuts)


def _check_ipu(equation: JaxprEqn, ipu: int, ipus_per_replica: int) -> None:
    if ipu >= ipus_per_replica:
        scopes = "/".join(jaxprs.name_scopes(equation))
        raise UsageError(
            f"{equation.primitive.name} in {scopes!r} is placed on IPU {ipu}, but a replica has "
            f"{ipus_per_replica} IPU(s)",
            hint=f"Place it on an IPU below {ipus_per_replica}, or give each replica more IPUs.",
        )
