"""Export: pieces (numerical functions over named buffers) as StableHLO, in the form that XLA computes fast on a CPU.

A piece becomes one Computation of the Executable. The bytes depend only on what is computed: source locations and the
names of Python functions never enter them. Two rewrites of the jaxpr come before.

**Matrix products.** Weight gradients are products that sum over the first axes of both operands, and the XLA of
``constraints.txt`` has two weaknesses there:

* A folded chunk sums over replicas and samples. XLA copies one operand into another order for a product that sums
  over several axes; the same product over the two as one, which costs nothing to express, needs no copy.
* If one operand is narrow (the gradient of a classifier's last layer), the product is up to ten times slower with
  the narrow operand as columns of the result than as rows, and XLA moves it there. An optimization barrier keeps it
  where it is fast, and the result, which is small, is transposed.

On 784-512-512-10 with 4 replicas of 32 samples the two save a seventh of a machine's batch.

**Materialised values.** XLA fuses element-wise operations into the loops of their readers, and computes a value that
has several readers once in each. A residual network in float16 is one such chain from its first layer to its last:
every product reads a widened copy, which fuses, so nothing is ever stored in memory, and each layer's loops compute all
layers before it. Time to compile and time to run grow with the square of the depth: 12 layers of a transformer took
91 s of processor time to compile and 0.52 s for a batch; with materialised values 9 s and 0.16 s.

A value is materialised by a call of the identity that XLA is told not to inline: its readers load it from memory. (XLA
removes ``optimization_barrier`` before it fuses.) A value that several equations read is materialised once a reader
would otherwise recompute more than `LONGEST` equations (a small one: `LONGEST_OF_SMALL`), those that a call makes
included. No program of few layers has one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from podrun.compiler import jaxprs
from podrun.compiler.jaxprs import buffer
from podrun.compiler.random_words import FORMULAS
from podrun.core import executable_file
from podrun.core.executable import Computation
from podrun.core.quick_dataclass import dataclass
from podrun.private_apis import jax as private_jax
from podrun.private_apis.jax_exports import export_for_cpu, without_locations

_NARROW = 64
"""Columns up to which an operand is narrow, if the other has four times as many: measured, with 32 to 1024 rows."""
_BODIES = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "scan", "while", "cond"}
"""Primitives whose parameters hold jaxprs that mean the same with equal equations in them."""


def evaluate_for_export(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Evaluate, with products in the form above, also inside of loops and branches."""
    taps = dict.fromkeys(walled(closed.jaxpr), wall)
    return jaxprs.evaluate(closed.jaxpr, closed.consts, arguments, taps, _apply)


def _apply(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    if equation.primitive.name == "dot_general":
        return _product(equation, *operands)
    if equation.primitive.name in _BODIES and any(map(_to_do, equation.params.values())):
        parameters = {name: _rewritten(value) for name, value in equation.params.items()}
        equation = equation.replace(params=parameters)
    return private_jax.bind_equation(equation, operands)


def _product(equation: JaxprEqn, left: jax.Array, right: jax.Array) -> Any:
    parameters = equation.params
    if _mergeable(parameters["dimension_numbers"]):
        left, right, numbers = _merge(left, right, parameters["dimension_numbers"])
        parameters = {**parameters, "dimension_numbers": numbers}
    if parameters["dimension_numbers"] == _BY_ROWS and left.ndim == right.ndim == 2:
        if _narrow(left, right):
            return _held(lax.dot_general_p.bind(left, right, **parameters))
        if _narrow(right, left):
            return _held(lax.dot_general_p.bind(right, left, **parameters)).T
    return lax.dot_general_p.bind(left, right, **parameters)


def _held(value: jax.Array) -> Any:
    """The value behind an optimization barrier."""
    return lax.optimization_barrier(value)  # type: ignore[no-untyped-call]


_BY_ROWS = (((0,), (0,)), ((), ()))


def _narrow(operand: jax.Array, other: jax.Array) -> bool:
    return bool(operand.shape[1] <= _NARROW and 4 * operand.shape[1] <= other.shape[1])


ProductAxes = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]
"""Of a product: the axes that it sums over, and those of the batch, of each operand."""


def _mergeable(numbers: ProductAxes) -> bool:
    """True iff a product sums over several axes that lie side by side, in the same order, in both operands."""
    (left, right), _ = numbers
    return len(left) > 1 and _side_by_side(left) and _side_by_side(right)


def _side_by_side(axes: Sequence[int]) -> bool:
    return tuple(axes) == tuple(range(axes[0], axes[0] + len(axes)))


def _merge(
    left: jax.Array, right: jax.Array, numbers: ProductAxes
) -> tuple[jax.Array, jax.Array, ProductAxes]:
    (left_axes, right_axes), (left_batch, right_batch) = numbers
    contracting = (left_axes[0],), (right_axes[0],)
    batch = _moved(left_batch, left_axes), _moved(right_batch, right_axes)
    return _merged(left, left_axes), _merged(right, right_axes), (contracting, batch)


def _merged(operand: jax.Array, axes: Sequence[int]) -> jax.Array:
    """The operand with its summed axes merged into one."""
    first, stop = axes[0], axes[-1] + 1
    shape = operand.shape
    return lax.reshape(operand, (*shape[:first], math.prod(shape[first:stop]), *shape[stop:]))


def _moved(batch: Sequence[int], merged: Sequence[int]) -> tuple[int, ...]:
    """The position of the batch axes after the other axes are merged."""
    return tuple(axis if axis < merged[0] else axis - len(merged) + 1 for axis in batch)


def _to_do(value: object) -> bool:
    """Whether a parameter of an equation holds jaxprs with products."""
    if isinstance(value, tuple | list):
        return any(map(_to_do, value))
    jaxpr = value.jaxpr if isinstance(value, ClosedJaxpr) else value
    if not isinstance(jaxpr, Jaxpr):
        return False
    return any(
        equation.primitive.name == "dot_general"
        or (equation.primitive.name in _BODIES and any(map(_to_do, equation.params.values())))
        for equation in jaxpr.eqns
    )


def _rewritten(value: Any) -> Any:
    if isinstance(value, tuple | list) and any(map(_to_do, value)):
        return type(value)(map(_rewritten, value))
    if not _to_do(value):
        return value
    closed = value if isinstance(value, ClosedJaxpr) else ClosedJaxpr(value, [])

    def body(*arguments: object) -> list[Any]:
        return evaluate_for_export(closed, arguments)

    inputs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in closed.in_avals]  # type: ignore[no-untyped-call]
    again = jax.make_jaxpr(body)(*inputs)
    return again if isinstance(value, ClosedJaxpr) else again.jaxpr


LONGEST = 64
"""Most equations that a reader of a value may recompute."""
SMALLEST = 1 << 10
"""Fewest elements of a value that is worth a place in memory at that length; smaller ones are at `LONGEST_OF_SMALL`."""
LONGEST_OF_SMALL = 2 * LONGEST
"""As `LONGEST`, for values that are cheap to compute again but not to compile again: a recurrent state of 8 samples
over 80 steps would be computed from the first step in every step's loops."""
_TABLES = "tables"
"""The function whose results are the states of many roundings (`podrun.compiler.stochastic`)."""
_ROWS = 8
"""Most readers of such a table that may compute their rows again."""
_HELD = frozenset(
    {
        "dot_general",
        "conv_general_dilated",
        "scan",
        "while",
        "cond",
        "sort",
        "top_k",
        "scatter",
        "scatter-add",
        "custom_call",
        "ffi_call",
        "on_grid",
        "rounded_on_grid",
        "random_bits",
        "threefry2x32",
    }
)
"""Primitives whose results lie in memory whoever reads them."""
_SUMS = ("reduce_", "arg", "cum")
"""Prefixes of the names of further such primitives."""


def walled(jaxpr: Jaxpr) -> frozenset[Var]:
    """The variables of an exported piece that are stored before they are read, walls for XLA's fusions: those with more
    than one reader behind a long chain of elementwise operations, which every reader would compute again.
    """
    readers: Counter[Any] = Counter()
    for equation in jaxpr.eqns:
        readers.update(_reads(equation))
    # The equations of each chain, one bit for each; those inside a call count as well.
    chains: dict[Any, int] = {}
    variables, first = [], 0
    for equation in jaxpr.eqns:
        if equation.params.get("name") == _TABLES:
            variables += [v for v in equation.outvars if readers[v] > _ROWS]
            continue
        chain = 0
        if not _ends_chains(equation):
            count = _size(equation)
            chain, first = ((1 << count) - 1) << first, first + count
            for atom in equation.invars:
                if not isinstance(atom, Literal):
                    chain |= chains.get(atom, 0)
        for variable in equation.outvars:
            longest = LONGEST if _elements(variable) >= SMALLEST else LONGEST_OF_SMALL
            if readers[variable] > 1 and chain.bit_count() > longest:
                variables.append(variable)
            else:
                chains[variable] = chain
    return frozenset(variables)


def _size(equation: JaxprEqn) -> int:
    """The equations that an equation comes to, those of a call included."""
    return max(1, sum(_size(e) for jaxpr in jaxprs.inner_jaxprs(equation) for e in jaxpr.eqns))


def _reads(equation: JaxprEqn) -> Counter[Any]:
    """How many equations read each variable: of a call, those inside."""
    counts: Counter[Any] = Counter({a for a in equation.invars if not isinstance(a, Literal)})
    (inner, *more) = (*jaxprs.inner_jaxprs(equation), None)
    if isinstance(inner, Jaxpr) and not any(more) and len(inner.invars) == len(equation.invars):
        inside: Counter[Any] = Counter()
        for inner_equation in inner.eqns:
            inside.update(_reads(inner_equation))
        for outer, own in zip(equation.invars, inner.invars, strict=True):
            if not isinstance(outer, Literal):
                counts[outer] = max(counts[outer], inside[own])
    return counts


def wall(value: jax.Array) -> Any:
    """The value itself, behind a function that XLA does not inline: it is computed and kept before what reads it."""
    with set_xla_metadata(inlineable="false"):  # type: ignore[no-untyped-call]
        return _same(value)


@jax.jit
def _same(value: jax.Array) -> Any:
    return value


def _elements(variable: Var) -> int:
    return math.prod(getattr(variable.aval, "shape", ()))


def _ends_chains(equation: JaxprEqn) -> bool:
    """Whether the equation's results lie in memory whoever reads them."""
    name = equation.primitive.name
    if name in _HELD or name.startswith(_SUMS):
        return True
    inner = list(jaxprs.inner_jaxprs(equation))
    return any(_ends_chains(e) for jaxpr in inner for e in jaxpr.eqns)


@dataclass(frozen=True, slots=True)
class PieceFunction:
    """``function(buffers) -> buffers``, by name; ``inputs`` gives what each buffer it reads holds, in order."""

    name: str
    function: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    outputs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TracedPiece:
    """A piece as a jaxpr: positional arguments ``inputs``, results ``outputs``, by buffer name."""

    name: str
    jaxpr: ClosedJaxpr
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def trace_piece(piece: PieceFunction) -> TracedPiece:
    """Trace the piece, without the inputs and equations that no output needs."""

    def flat(*arguments: object) -> tuple[Any, ...]:
        results = piece.function(dict(zip(piece.inputs, arguments, strict=True)))
        return tuple(results[name] for name in piece.outputs)

    closed = jaxprs.pruned(jax.make_jaxpr(flat)(*piece.inputs.values()))
    read = jaxprs.read_arguments(closed.jaxpr)
    named = zip(piece.inputs, closed.jaxpr.invars, strict=True)
    kept = [(name, variable) for name, variable in named if variable in read]
    variables = [variable for _, variable in kept]
    narrow = jaxprs.sub_jaxpr(closed, variables, closed.jaxpr.eqns, closed.jaxpr.outvars)
    return TracedPiece(piece.name, narrow, tuple(name for name, _ in kept), piece.outputs)


def export_traced(traced: TracedPiece) -> Computation:
    """The piece as StableHLO for the CPU."""
    closed = traced.jaxpr

    def run(*arguments: object) -> tuple[Any, ...]:
        return tuple(evaluate_for_export(closed, arguments))

    # The name is all of the function that reaches the bytes: one for all, so that pieces which compute the same are
    # equal to the byte, and compiled once.
    run.__name__ = "piece"
    specs = [buffer(aval.shape, str(aval.dtype)) for aval in closed.in_avals]
    with without_locations():
        exported = export_for_cpu(run, specs, FORMULAS)
    data = bytes(exported.serialize())
    executable_file.note_exported_piece(data)
    return Computation(traced.name, data, traced.inputs, traced.outputs)


def export_piece(piece: PieceFunction) -> Computation:
    """Trace and export."""
    return export_traced(trace_piece(piece))
