"""Placement and segments: which IPU and pipeline stage each operator belongs to, and one traced piece cut there.

**Placement.** A front end places operators with name scopes ``ipu:i`` and ``stage:s``
(`podrun.compiler.program.Forward`). Differentiation keeps them, wrapped: ``transpose(jvp(ipu:1))/stage:1``. The
innermost scope of each kind counts. A sharded program has no stages. Where its front end knows how a pipeline of the
same operators would be cut, it says so with ``cut:c``: the pieces, hence what XLA fuses and the last bit, are then
those of the pipeline.

**Segments.** Each runs on one place: an IPU, or a pipeline stage. Backward work lands where its forward work is, as
differentiation keeps name scopes; `podrun.costmodel.splitting` says where everything else goes. What crosses between
segments has a name of its own. Between places it travels over IPU-Links; what returns to its own place is the stash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from podrun.compiler import jaxprs
from podrun.compiler.export import TracedPiece
from podrun.compiler.forward_trace import Trace
from podrun.compiler.program import PipelineOrder
from podrun.core.errors import UsageError
from podrun.core.names import CROSSING, is_local, parse_scope
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.splitting import DependencyGraph, Spot, earliest


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
        """This placement with its cuts as stages, so that each cut is a segment; itself if it has no cuts."""
        return replace(self, stages=self.cuts) if self.cuts else self

    def spot(self, equation: JaxprEqn) -> Spot | None:
        """Stage and cycle of an equation if there are stages, else its IPU; None if it has no place.

        Backward work of stage *s* comes in cycle ``2 * last - s``: the last stage goes forward and backward in one.
        If forward and backward work take turns, that of all others comes a cycle later, so that every stage does one
        of them in even cycles and the other in odd ones. Execution phases are counted the same way, over all IPUs.
        """
        return self.spot_of("/".join(jaxprs.name_scopes(equation)))

    def spot_of(self, scope: str) -> Spot | None:
        """`spot` of an equation in ``scope``."""
        said = parse_scope(scope)
        if not self.stages:
            return None if said.ipu is None else Spot(said.ipu)
        stage = said.cut if self.cuts else said.ipu if self.inferred else said.stage
        if stage is None:
            return None
        stages_per_phase = self.phase_places or 1
        rank, last = stage // stages_per_phase, max(self.stages) // stages_per_phase
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
        said = parse_scope("/".join(jaxprs.name_scopes(equation)))
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


SpotOfEquation = Callable[[JaxprEqn], Spot | None]


@dataclass(frozen=True, slots=True)
class PieceSegment:
    """A part of a piece that runs on one place without a break; ``rank`` is the lowest of its equations."""

    place: int
    rank: int
    piece: TracedPiece


def split_at_places(piece: TracedPiece, place: SpotOfEquation) -> tuple[PieceSegment, ...]:
    """The segments of ``piece`` in an order in which they can run, named ``NAME.0``, ``NAME.1`` ...

    Together they compute what the piece computes, equation for equation.
    """
    return _Splitter(piece, place).segments()


class _Splitter:
    def __init__(self, piece: TracedPiece, place: SpotOfEquation) -> None:
        self.piece = piece
        self.jaxpr = piece.jaxpr.jaxpr
        self.equations: list[JaxprEqn] = list(self.jaxpr.eqns)
        known = {v for equation in self.equations for v in equation.outvars}.union(self.jaxpr.invars)
        direct = [[v for v in e.invars if not isinstance(v, Literal)] for e in self.equations]
        self.graph = DependencyGraph[Var](
            direct,
            [equation.outvars for equation in self.equations],
            # Every segment recomputes constants and random keys (which have no form outside of a trace) where it
            # reads them.
            [
                not any(v in known for v in reads) or _anew(equation)
                for equation, reads in zip(self.equations, direct, strict=True)
            ],
        )
        # Gradients of a value meet where the last of them is made, whichever the program names last.
        sums = {i for i, equation in enumerate(self.equations) if equation.primitive.name == "add_any"}
        self.spots = self.graph.placed(lambda i: place(self.equations[i]), joins=sums)

    def segments(self) -> tuple[PieceSegment, ...]:
        groups = self._postponed(self.graph.groups(self.spots))
        where = {i: number for number, group in enumerate(groups) for i in group}
        crossing = self.graph.crossing(groups)
        outputs = self._outputs(groups, where)
        names = {v: f"{CROSSING}{n}" for n, v in enumerate(crossing)}
        pieces = []
        for number, group in enumerate(groups):
            computed = {v for i in group for v in self.equations[i].outvars}
            wanted = [(names[v], v) for v in crossing if v in computed] + outputs[number]
            pieces.append(self._segment(number, group, names, wanted))
        return tuple(pieces)

    @property
    def _changing(self) -> set[Var]:
        """Arguments that the piece also writes (accumulators). Read too early, they would have another moment's
        values.
        """
        written = set(self.piece.outputs)
        return {v for v, name in zip(self.jaxpr.invars, self.piece.inputs, strict=True) if name in written}

    def _postponed(self, groups: list[list[int]]) -> list[list[int]]:
        """The groups, in which values computed from changing arguments alone move to the first group that needs them.

        So an accumulator is read where it is added to. In a pipeline it changes meanwhile; and which operations XLA
        fuses, hence the last bit, does not depend on whether places have ranks.
        """
        reads = self.graph.reads
        where = {i: number for number, group in enumerate(groups) for i in group}
        consumers, movable = self.graph.consumers(), self._made_of_changing()
        for i in sorted(movable, key=lambda i: (i not in consumers, -i)):
            # What is only an output goes where the same arguments are read.
            alike = [k for k in movable if k != i and not set(reads[k]).isdisjoint(reads[i])]
            first = min(consumers.get(i) or alike, key=where.__getitem__, default=i)
            if self.spots[first].place == self.spots[i].place:
                where[i] = max(where[i], where[first])
        regrouped = [sorted(i for i in where if where[i] == number) for number in range(len(groups))]
        return [group for group in regrouped if group] or [[]]

    def _made_of_changing(self) -> list[int]:
        """Equations that read only arguments, changing ones among them, and equations that read such results."""
        fixed, computed = set(self.jaxpr.invars) - self._changing, set(self._changing)
        indices = []
        for i in self.graph.indices:
            reads = self.graph.reads[i]
            if not computed.isdisjoint(reads) and computed.union(fixed).issuperset(reads):
                indices.append(i)
                computed.update(self.equations[i].outvars)
        return indices

    def _outputs(self, groups: list[list[int]], where: Mapping[int, int]) -> list[list[tuple[str, Any]]]:
        """The piece's outputs, by the segment that gives them."""
        outputs: list[list[tuple[str, Any]]] = [[] for _ in groups]
        for name, atom in zip(self.piece.outputs, self.jaxpr.outvars, strict=True):
            producer = None if isinstance(atom, Literal) else self.graph.producer.get(atom)
            outputs[where.get(producer, 0) if producer is not None else 0].append((name, atom))
        return outputs

    def _segment(
        self, number: int, group: list[int], names: Mapping[Var, str], wanted: list[tuple[str, Any]]
    ) -> PieceSegment:
        atoms = [atom for _, atom in wanted]
        results = [atom for atom in atoms if not isinstance(atom, Literal)]
        equations = [self.equations[i] for i in self.graph.with_repeated(group, results)]
        computed = {v for equation in equations for v in equation.outvars}
        read = {
            v: None for e in equations for v in e.invars if not isinstance(v, Literal) and v not in computed
        }
        read |= {v: None for v in results if v not in computed}
        arguments = dict(zip(self.jaxpr.invars, self.piece.inputs, strict=True))
        inputs = [(name, v) for v, name in arguments.items() if v in read]
        inputs += [(name, v) for v, name in names.items() if v in read]
        closed = jaxprs.sub_jaxpr(self.piece.jaxpr, [v for _, v in inputs], equations, atoms)
        first = earliest(group, self.spots)
        traced = TracedPiece(
            f"{self.piece.name}.{number}",
            closed,
            tuple(name for name, _ in inputs),
            tuple(name for name, _ in wanted),
        )
        return PieceSegment(first.place, first.rank, traced)


def _anew(equation: JaxprEqn) -> bool:
    scopes = jaxprs.name_scopes(equation)
    return (bool(scopes) and is_local(scopes[-1])) or _makes_keys(equation)


def _makes_keys(equation: JaxprEqn) -> bool:
    dtypes = (getattr(variable.aval, "dtype", np.dtype(bool)) for variable in equation.outvars)
    return any(jax.numpy.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)
