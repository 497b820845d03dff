"""A flat jaxpr as a schedule of compute sets: chains of element-wise equations fused, everything planned.

The schedule keeps the order of the trace. A chain is a run of element-wise equations of one named scope and
one size class; the views between them do not break it, any other equation does.

Nothing is spread anew for its own sake: chains and reductions work where their largest operand lies, so what follows a
product lasts as long as the tile with most of its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from podrun.device.target import Chip
from podrun.device.tiles import families, products
from podrun.device.tiles.elementwise import OPS, plan_chain
from podrun.device.tiles.flatten import Equation, FlatJaxpr
from podrun.device.tiles.fuse import absorb
from podrun.device.tiles.matmul import DEFAULT_PROPORTION, plan_product
from podrun.device.tiles.plan import Plan
from podrun.device.tiles.primitives import PLANNERS, PRODUCTS, REDUCTIONS, VIEWS


@dataclass(frozen=True, slots=True)
class Options:
    """How to plan: partials type and memory proportion of products.

    ``loop_trips``: turns assumed for a ``while`` loop, whose trip count a trace does not say.
    """

    partials_type: str = "float32"
    proportion: float = DEFAULT_PROPORTION
    loop_trips: int = 1
    product_type: str | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One planned equation or chain: what it reads and writes (value numbers), where it stands, what it
    costs."""

    plan: Plan
    primitive: str
    scope: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    aliases: tuple[int, ...] = ()
    """Results that share their operand's memory, or never leave the vertex that makes them."""
    body: tuple[Step, ...] = field(default=())


MAKERS = {
    "dot_general": products.of_dot,
    "conv_general_dilated": products.of_convolution,
    "product": products.of_sizes,
}
"""How each kind of product says its sizes."""


def make_schedule(chip: Chip, flat: FlatJaxpr, options: Options) -> list[Step]:
    """Plan every equation of ``flat`` in order; one that no planner knows gets the stated bound."""
    flat = absorb(flat)
    last_use = _last_uses(flat)
    steps: list[Step] = []
    shares: dict[int, float] = {}
    for position, group in _groups(flat):
        share = _share(group, shares)
        if group[0].primitive in OPS or len(group) > 1:
            steps.append(_chain_step(chip, group, position, last_use, share))
        else:
            steps.append(_single_step(chip, group[0], options, share))
        shares |= dict.fromkeys(_largest_results(group), steps[-1].plan.share)
    return steps


def _share(group: list[Equation], shares: Mapping[int, float]) -> float:
    """Part of a group's largest tensor on the fullest tile: where the first operand of that size lies."""
    largest = max((t.size for e in group for t in (*e.operands, *e.results)), default=0)
    operands = (pair for e in group for pair in zip(e.inputs, e.operands, strict=True))
    return next(
        (shares[n] for n, t in operands if n is not None and n in shares and t.size * 2 > largest), 0.0
    )


def _largest_results(group: list[Equation]) -> list[int]:
    """What a group makes of its largest size; vectors beside it are spread evenly."""
    made = [pair for e in group for pair in zip(e.outputs, e.results, strict=True)]
    largest = max((t.size for _, t in made), default=0)
    return [number for number, tensor in made if tensor.size * 2 > largest]


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
        return False  # A vertex of the library by itself.
    return equation.scope == chain[0].scope and len(chain) < 64


def _chain_step(chip: Chip, group: list[Equation], end: int, last_use: dict[int, int], share: float) -> Step:
    work = [e for e in group if e.primitive in OPS]
    made = [number for e in group for number in e.outputs]
    outside = {number for number in made if last_use.get(number, -1) >= end}
    reads = tuple(dict.fromkeys(n for e in group for n in e.inputs if n is not None and n not in set(made)))
    plan = plan_chain(chip, work, outside, share)
    inner = tuple(number for number in made if number not in outside)
    return Step(plan, "chain", group[0].scope, reads, tuple(made), inner)


def _single_step(chip: Chip, equation: Equation, options: Options, share: float) -> Step:
    reads = tuple(n for n in equation.inputs if n is not None)
    name = equation.primitive
    if name in VIEWS:
        return Step(
            Plan("view", share=share), name, equation.scope, reads, equation.outputs, equation.outputs
        )
    if equation.bodies:
        return _loop_step(chip, equation, options, reads)
    if name in PRODUCTS:
        product = MAKERS[name](equation, options.partials_type, options.proportion)
        if options.product_type:
            product = replace(product, input_type=options.product_type)
        plan = plan_product(chip, product)
    elif name in REDUCTIONS:
        plan = REDUCTIONS[name](chip, equation, share)
    elif name in PLANNERS:
        plan = PLANNERS[name](chip, equation)
    else:
        plan = families.plan_bound(chip, equation)
    return Step(plan, name, equation.scope, reads, equation.outputs)


def trips(equation: Equation, options: Options) -> int:
    """How often the body of a loop runs."""
    if equation.primitive == "scan":
        return int(equation.params["length"])
    return options.loop_trips if equation.primitive == "while" else 1


def _loop_step(chip: Chip, equation: Equation, options: Options, reads: tuple[int, ...]) -> Step:
    """A loop: its bodies' steps, each repeated; a branch costs its dearest arm."""
    bodies = [make_schedule(chip, body, options) for body in equation.bodies]
    if equation.primitive == "cond":
        bodies = [max(bodies, key=lambda steps: sum(s.plan.cycles(chip) for s in steps))]
    times = trips(equation, options)
    body = tuple(
        Step(
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
    return Step(plan, equation.primitive, equation.scope, reads, equation.outputs, (), body)
