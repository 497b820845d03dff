"""A flat jaxpr as a schedule of compute sets, and its segments, each on one IPU or pipeline stage without a break.

The schedule keeps the order of the trace. A chain is a run of element-wise equations of one named scope and
one size class; the views between them do not break it, any other equation does.

Data are not redistributed for their own sake: chains and reductions work where their largest operand lies, so work
after a product lasts as long as the tile with most of its outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import field, replace

from podrun.core.names import parse_scope
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel import planners, products
from podrun.costmodel.elementwise import OPS, plan_chain
from podrun.costmodel.equations import Equation, FlatJaxpr, FlatTensor, Plan
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.planners import PLANNERS, PRODUCTS, REDUCTIONS, VIEWS
from podrun.costmodel.settings import PlanOptions
from podrun.costmodel.splitting import DependencyGraph, Spot, earliest
from podrun.costmodel.target import Chip


@dataclass(frozen=True, slots=True)
class PlannedOperation:
    """One planned equation or chain: the values it reads and writes (by number), its scope, and its cost."""

    plan: Plan
    primitive: str
    scope: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    aliases: tuple[int, ...] = ()
    """Results that share their operand's memory, or never leave the vertex that makes them."""
    body: tuple[PlannedOperation, ...] = field(default=())
    outlined: bool = False


MAKERS = {
    "dot_general": products.of_dot,
    "conv_general_dilated": products.of_convolution,
    "product": products.of_sizes,
}
"""How each kind of product states its sizes."""


def make_schedule(chip: Chip, flat: FlatJaxpr, options: PlanOptions) -> list[PlannedOperation]:
    """Plan every equation of ``flat`` in order; one that no planner knows gets the stated bound."""
    flat = absorb(flat)
    last_use = _last_uses(flat)
    steps: list[PlannedOperation] = []
    shares: dict[int, float] = {}
    for position, group in _groups(flat):
        share = _share(group, shares)
        if group[0].primitive in OPS or len(group) > 1:
            steps.append(_chain_step(chip, group, position, last_use, share))
        else:
            steps.append(_single_step(chip, group[0], options, share))
        if group[0].outlined:
            steps[-1] = _calling(steps[-1])
        shares |= dict.fromkeys(_largest_results(group), steps[-1].plan.share)
    return steps


def _calling(step: PlannedOperation) -> PlannedOperation:
    """The step as a part of a call."""
    return replace(step, outlined=True, body=tuple(_calling(inner) for inner in step.body))


def _share(group: list[Equation], shares: Mapping[int, float]) -> float:
    """Part of a group's largest tensor on the fullest tile: on that of the first operand of that size."""
    largest = max((t.size for e in group for t in (*e.operands, *e.results)), default=0)
    operands = (pair for e in group for pair in zip(e.inputs, e.operands, strict=True))
    return next(
        (shares[n] for n, t in operands if n is not None and n in shares and t.size * 2 > largest), 0.0
    )


def _largest_results(group: list[Equation]) -> list[int]:
    """The largest results of a group; vectors beside them are spread evenly."""
    outputs = [pair for e in group for pair in zip(e.outputs, e.results, strict=True)]
    largest = max((t.size for _, t in outputs), default=0)
    return [number for number, tensor in outputs if tensor.size * 2 > largest]


def _last_uses(flat: FlatJaxpr) -> dict[int, int]:
    """Position of the last equation that reads each value; results of the jaxpr are read after the end."""
    last: dict[int, int] = {}
    for position, equation in enumerate(flat.equations):
        for number in equation.inputs:
            if number is not None:
                last[number] = position
    for number in flat.results:
        last[number] = len(flat.equations)
    return last


def _groups(flat: FlatJaxpr) -> Iterator[tuple[int, list[Equation]]]:
    """Equations in order, element-wise runs together; with the position just after each group."""
    chain: list[Equation] = []
    for position, equation in enumerate(flat.equations):
        if equation.primitive in OPS and (not chain or _joins(chain, equation)):
            chain.append(equation)
            continue
        if equation.primitive in VIEWS and chain and _joins(chain, equation):
            chain.append(equation)
            continue
        if chain:
            yield position, chain
            chain = []
        if equation.primitive in OPS:
            chain = [equation]
        else:
            yield position + 1, [equation]
    if chain:
        yield len(flat.equations), chain


def _joins(chain: list[Equation], equation: Equation) -> bool:
    if "alone" in chain[0].params or "alone" in equation.params:
        return False  # A vertex of the library that runs by itself.
    same = (equation.scope, equation.outlined) == (chain[0].scope, chain[0].outlined)
    return same and len(chain) < 64


def _chain_step(
    chip: Chip, group: list[Equation], end: int, last_use: dict[int, int], share: float
) -> PlannedOperation:
    work = [e for e in group if e.primitive in OPS]
    outputs = [number for e in group for number in e.outputs]
    outside = {number for number in outputs if last_use.get(number, -1) >= end}
    reads = tuple(
        dict.fromkeys(n for e in group for n in e.inputs if n is not None and n not in set(outputs))
    )
    plan = plan_chain(chip, work, outside, share)
    inner = tuple(number for number in outputs if number not in outside)
    return PlannedOperation(plan, "chain", group[0].scope, reads, tuple(outputs), inner)


def _single_step(chip: Chip, equation: Equation, options: PlanOptions, share: float) -> PlannedOperation:
    reads = tuple(n for n in equation.inputs if n is not None)
    name = equation.primitive
    if name in VIEWS:
        return PlannedOperation(
            Plan("view", share=share), name, equation.scope, reads, equation.outputs, equation.outputs
        )
    if equation.bodies:
        return _loop_step(chip, equation, options, reads)
    if name in PRODUCTS:
        own = options.convolution_partials if name == "conv_general_dilated" else None
        product = MAKERS[name](equation, own or options.partials_type, options.proportion_in(equation.scope))
        if options.product_type:
            product = replace(product, input_type=options.product_type)
        plan = plan_product(chip, product)
    elif name in REDUCTIONS:
        plan = REDUCTIONS[name](chip, equation, share)
    elif name in PLANNERS:
        plan = PLANNERS[name](chip, equation)
    else:
        plan = planners.plan_bound(chip, equation)
    return PlannedOperation(plan, name, equation.scope, reads, equation.outputs)


def trips(equation: Equation, options: PlanOptions) -> int:
    """How often the body of a loop runs."""
    if equation.primitive == "scan":
        return int(equation.params["length"])
    return options.loop_trips if equation.primitive == "while" else 1


def _loop_step(
    chip: Chip, equation: Equation, options: PlanOptions, reads: tuple[int, ...]
) -> PlannedOperation:
    """A loop: its bodies' steps, each repeated; a branch costs as much as its dearest arm. Scopes in a body begin at
    the loop, so the loop's own proportion is that of its products.
    """
    inner = replace(options, proportion=options.proportion_in(equation.scope))
    bodies = [make_schedule(chip, body, inner) for body in equation.bodies]
    if equation.primitive == "cond":
        bodies = [max(bodies, key=lambda steps: sum(s.plan.cycles(chip) for s in steps))]
    times = trips(equation, options)
    body = tuple(
        PlannedOperation(
            step.plan.repeated(times),
            step.primitive,
            "/".join(part for part in (equation.scope, step.scope) if part),
            step.reads,
            step.writes,
            step.aliases,
            step.body,
        )
        for steps in bodies
        for step in steps
    )
    temporary = max((step.plan.temporary_bytes for step in body), default=0.0)
    plan = Plan("loop", temporary_bytes=temporary, detail=f"{equation.primitive} x {times}")
    return PlannedOperation(plan, equation.primitive, equation.scope, reads, equation.outputs, (), body)


SUMS = frozenset({"reduce_sum", "reduce_max", "reduce_min"})


def _may_vanish(equation: Equation) -> bool:
    if equation.primitive in ("convert_element_type", "square"):
        return True
    if equation.primitive == "integer_pow":
        return equation.params.get("y") == 2
    inputs = equation.inputs
    return equation.primitive == "mul" and len(inputs) == 2 and inputs[0] == inputs[1] is not None


def absorb(flat: FlatJaxpr) -> FlatJaxpr:
    """``flat`` without the casts and squares that only reductions read."""
    readers: dict[int, list[Equation]] = {}
    for equation in flat.equations:
        for number in set(equation.inputs):
            if number is not None:
                readers.setdefault(number, []).append(equation)
    kept_results = set(flat.results)
    source: dict[int, tuple[int, FlatTensor]] = {}
    gone: set[int] = set()
    for index in range(len(flat.equations) - 1, -1, -1):
        equation = flat.equations[index]
        if not _may_vanish(equation) or equation.inputs[0] is None:
            continue
        number = equation.outputs[0]
        users = readers.get(number, [])
        if number in kept_results or not users:
            continue
        if all(user.primitive in SUMS or user.outputs[0] in source for user in users):
            source[number] = (equation.inputs[0], equation.operands[0])
            gone.add(index)
    if not gone:
        return flat
    equations = [
        _redirect(equation, source) for index, equation in enumerate(flat.equations) if index not in gone
    ]
    return replace(flat, equations=equations)


def _redirect(equation: Equation, source: dict[int, tuple[int, FlatTensor]]) -> Equation:
    if not any(number in source for number in equation.inputs if number is not None):
        return equation
    inputs, operands = list(equation.inputs), list(equation.operands)
    for position in range(len(inputs)):
        number = inputs[position]
        while number is not None and number in source:
            number, operands[position] = source[number]
        inputs[position] = number
    return replace(equation, inputs=tuple(inputs), operands=tuple(operands))


KEYS = frozenset(
    {"random_wrap", "random_seed", "random_fold_in", "random_split", "random_clone", "random_unwrap"}
)


@dataclass(frozen=True, slots=True)
class FlatSegment:
    """A part of a step: ``flat.arguments`` is all it reads of others, ``flat.outputs`` all that others read, then the
    results of the whole step that it makes. ``crossing``: those outputs that other segments read.
    """

    place: int
    rank: int
    flat: FlatJaxpr
    crossing: tuple[int, ...]


def split_flat(flat: FlatJaxpr, spot: Callable[[str], Spot | None]) -> tuple[FlatSegment, ...]:
    """The segments of a step in an order in which they can run; together they are the step, equation for equation.

    ``spot(scope)``: the place and rank that a scope says, None if it says none.
    """
    return _FlatSplitter(flat, spot).segments()


class _FlatSplitter:
    def __init__(self, flat: FlatJaxpr, spot: Callable[[str], Spot | None]) -> None:
        self.flat, self.equations = flat, flat.equations
        computed = {n for equation in self.equations for n in equation.outputs}
        known = computed.union(flat.arguments)
        self.graph = DependencyGraph[int](
            [[n for n in e.inputs if n is not None] for e in self.equations],
            [e.outputs for e in self.equations],
            [
                e.primitive in KEYS or e.primitive in VIEWS or not any(n in known for n in e.inputs)
                for e in self.equations
            ],
        )
        self._hold_back()
        said = {e.scope: spot(e.scope) for e in self.equations}
        self.spots = self.graph.placed(lambda i: said[self.equations[i].scope])

    def _hold_back(self) -> None:
        """Let copies of forward work wait for the backward work before them. Otherwise all copies would be made at
        once, and kept.
        """
        last: int | None = None
        for i, equation in enumerate(self.equations):
            if self.graph.repeated[i] or not parse_scope(equation.scope).backward:
                continue
            if parse_scope(equation.scope).recomputed:
                if last is not None:
                    self.graph.add_dependency(i, last)
            elif self.graph.producers[i]:
                last = i

    def segments(self) -> tuple[FlatSegment, ...]:
        graph = self.graph
        groups = graph.groups(self.spots)
        where = {i: number for number, group in enumerate(groups) for i in group}
        crossing: list[list[int]] = [[] for _ in groups]
        for value in graph.crossing(groups):
            crossing[where[graph.producer[value]]].append(value)
        owned: list[list[int]] = [[] for _ in groups]
        for output in self.flat.outputs:
            if output is not None:
                makers = [graph.producer[n] for n in graph.sources(output) if n in graph.producer]
                owned[max((where[m] for m in makers), default=0)].append(output)
        return tuple(
            self._segment(group, tuple(sorted(crossing[number])), owned[number])
            for number, group in enumerate(groups)
        )

    def _segment(self, group: list[int], crossing: tuple[int, ...], owned: list[int]) -> FlatSegment:
        results = [*crossing, *owned]
        equations = [self.equations[i] for i in self.graph.with_repeated(group, results)]
        computed = {n for equation in equations for n in equation.outputs}
        read = {n: None for e in equations for n in e.inputs if n is not None and n not in computed}
        read |= {n: None for n in owned if n not in computed}
        constants = [n for n in self.flat.constants if n in read]
        fixed = set(constants)
        part = replace(
            self.flat,
            arguments=[n for n in read if n not in fixed],
            constants=constants,
            results=results,
            outputs=list(results),
            equations=equations,
        )
        first = earliest(group, self.spots)
        return FlatSegment(first.place, first.rank, part, crossing)
