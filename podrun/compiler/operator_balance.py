"""Cycles and parameter bytes of operators, and how they are spread over the IPUs of a replica."""

from __future__ import annotations

from collections.abc import Sequence

from jax.extend.core import JaxprEqn, Literal

from podrun.compiler import jaxprs
from podrun.compiler.anchors import classify
from podrun.compiler.arenas import plan_memory
from podrun.compiler.cost import micro_batch_segments
from podrun.compiler.forward_trace import fixed_numerics, trace_forward
from podrun.compiler.program import Program, layout_of
from podrun.compiler.segments import Placement
from podrun.core.errors import UsageError, present
from podrun.core.executable import TensorSpec
from podrun.core.names import parse_scope
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.cost import cost_jaxpr
from podrun.costmodel.splitting import lowest_bound


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """One operator: modelled cycles of its forward and backward work for one micro-batch, and the bytes of
    the parameters that it is the first to read.
    """

    name: str
    cycles: int
    parameter_bytes: int


def operator_costs(
    program: Program, operators: Sequence[str], *, target: str = "gc200"
) -> tuple[OperatorCost, ...]:
    """The cost of each of ``operators``, named by their scopes in the order of the graph.

    Work outside of all of them (joining gradients, for example) is not counted. Raises what `compile_program`
    raises for a program that cannot be traced, and InvalidOptionError for an unknown target.
    """
    with fixed_numerics():
        memory = plan_memory(program, layout_of(program), {})
        traced = trace_forward(program, classify(program, memory.variables))
        (whole,) = micro_batch_segments(program, traced, Placement({}, split=False))
    closed = whole.piece.jaxpr
    work: dict[str, list[JaxprEqn]] = {name: [] for name in operators}
    labels = frozenset(operators)
    for equation in closed.jaxpr.eqns:
        owner = parse_scope("/".join(jaxprs.name_scopes(equation))).within(labels)
        if owner is not None:
            work[owner].append(equation)
    parameters = dict(zip(closed.jaxpr.invars, traced.parameters, strict=False))
    counted: set[str] = set()
    costs = []
    for name, equations in work.items():
        computed = {v for equation in equations for v in equation.outvars}
        read = {
            v: None for e in equations for v in e.invars if not isinstance(v, Literal) and v not in computed
        }
        outer = [v for v in read if v not in closed.jaxpr.constvars]
        part = jaxprs.sub_jaxpr(closed, outer, equations, [v for e in equations for v in e.outvars])
        cycles = cost_jaxpr(part, target)["step"]["cycles"] if equations else 0
        first = {parameters[v] for v in outer if v in parameters} - counted
        counted |= first
        specs: list[TensorSpec] = [program.parameters[n].spec for n in first]
        costs.append(OperatorCost(name, int(cycles), sum(spec.nbytes for spec in specs)))
    return tuple(costs)


def balanced_places(
    costs: Sequence[OperatorCost], ratios: Sequence[float], *, room_bytes: int = 0
) -> tuple[int, ...]:
    """The IPU of each operator: contiguous, at least one on each, the fullest IPU as empty as can be.

    How full an IPU is: its share of all cycles or of all parameter bytes, whichever is larger, over its entry
    of ``ratios`` (the share of the work it is meant to get). Parameters of up to ``room_bytes`` on an IPU do not count:
    where memory is no worry, only cycles do. Raises UsageError if there are more IPUs than operators.
    """
    if len(costs) < len(ratios):
        raise UsageError(
            f"{len(costs)} operators cannot be spread over {len(ratios)} IPUs",
            hint=f"Give a replica at most {len(costs)} IPUs.",
        )
    cycles = max(1, sum(cost.cycles for cost in costs))
    nbytes = max(1, sum(cost.parameter_bytes for cost in costs))
    shares = [(cost.cycles / cycles, cost.parameter_bytes / nbytes) for cost in costs]
    room = room_bytes / nbytes
    low, high = 0.0, 1.001 / min(ratios)  # Shares may add up to a rounding error more than 1.
    places = lowest_bound(lambda bound: _balanced(shares, ratios, bound, room), low, high)
    return present(places, "the highest bound has room for all operators")


def _balanced(
    shares: Sequence[tuple[float, float]], ratios: Sequence[float], bound: float, room: float
) -> tuple[int, ...] | None:
    """Fill IPUs in turn up to ``bound`` times their ratio; None if operators are left over."""
    places: list[int] = []
    held, ipu = (0.0, 0.0), 0

    def is_full(now: tuple[float, float]) -> bool:
        most = bound * ratios[ipu]
        return now[0] > most or now[1] > max(most, room)

    for index, share in enumerate(shares):
        grown = (held[0] + share[0], held[1] + share[1])
        # Every IPU gets one operator, so the last ones must not run out.
        must_move = len(shares) - index <= len(ratios) - 1 - ipu
        if places and places[-1] == ipu and (is_full(grown) or must_move):
            ipu, grown = ipu + 1, share
        if ipu == len(ratios) or is_full(grown):
            return None
        held = grown
        places.append(ipu)
    return tuple(places)
