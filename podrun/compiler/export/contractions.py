"""Matrix products in the form that XLA computes fast on a CPU.

Weight gradients are products that sum over the first axes of both operands, and XLA (of the version in
``constraints.txt``) has two weaknesses there:

* A folded chunk sums over replicas and samples. XLA copies one operand into another order for a product that sums
  over several axes; the same product over the two as one, which costs nothing to say, needs no copy.
* If one operand is narrow (the gradient of a classifier's last layer), the product is up to ten times slower with
  the narrow operand as columns of the result than as rows, and XLA moves it there. It is held where it is fast, and
  the result, which is small, is transposed.

On 784-512-512-10 with 4 replicas of 32 samples the two take a seventh of a machine's step away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from podrun.compiler import jax_internals
from podrun.compiler.abstract import buffer
from podrun.compiler.export.walls import wall, walled

_NARROW = 64
"""Columns up to which an operand is narrow, if the other has four times as many: measured, with 32 to 1024 rows."""
_BODIES = {"jit", "pjit", "closed_call", "checkpoint", "remat2", "scan", "while", "cond"}
"""Primitives whose parameters hold jaxprs that mean the same with equal equations in them."""


def evaluate(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    """Evaluate, with products in the form above, also inside of loops and branches."""
    taps = dict.fromkeys(walled(closed.jaxpr), wall)
    return jax_internals.evaluate(closed.jaxpr, closed.consts, arguments, taps, _apply)


def _apply(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    if equation.primitive.name == "dot_general":
        return _product(equation, *operands)
    if equation.primitive.name in _BODIES and any(map(_to_do, equation.params.values())):
        parameters = {name: _rewritten(value) for name, value in equation.params.items()}
        equation = equation.replace(params=parameters)
    return jax_internals.bind(equation, operands)


def _product(equation: JaxprEqn, left: Any, right: Any) -> Any:
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


def _held(value: Any) -> Any:
    """The value, with a wall around it for XLA's rearrangements."""
    return lax.optimization_barrier(value)  # type: ignore[no-untyped-call]


_BY_ROWS = (((0,), (0,)), ((), ()))


def _narrow(operand: Any, other: Any) -> bool:
    return bool(operand.shape[1] <= _NARROW and 4 * operand.shape[1] <= other.shape[1])


def _mergeable(numbers: Any) -> bool:
    """True iff a product sums over several axes that lie side by side, in the same order, in both operands."""
    (left, right), _ = numbers
    return len(left) > 1 and _side_by_side(left) and _side_by_side(right)


def _side_by_side(axes: Sequence[int]) -> bool:
    return tuple(axes) == tuple(range(axes[0], axes[0] + len(axes)))


def _merge(left: Any, right: Any, numbers: Any) -> tuple[Any, Any, Any]:
    (left_axes, right_axes), (left_batch, right_batch) = numbers
    contracting = (left_axes[0],), (right_axes[0],)
    batch = _moved(left_batch, left_axes), _moved(right_batch, right_axes)
    return _merged(left, left_axes), _merged(right, right_axes), (contracting, batch)


def _merged(operand: Any, axes: Sequence[int]) -> Any:
    """The operand with the axes as one."""
    first, stop = axes[0], axes[-1] + 1
    shape = operand.shape
    return lax.reshape(operand, (*shape[:first], math.prod(shape[first:stop]), *shape[stop:]))


def _moved(batch: Sequence[int], merged: Sequence[int]) -> tuple[int, ...]:
    """Where the batch axes are once the others are one axis."""
    return tuple(axis if axis < merged[0] else axis - len(merged) + 1 for axis in batch)


def _to_do(value: Any) -> bool:
    """Whether a parameter of an equation holds products."""
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

    def body(*arguments: Any) -> list[Any]:
        return evaluate(closed, arguments)

    again = jax.make_jaxpr(body)(*(buffer(a.shape, str(a.dtype)) for a in closed.in_avals))
    return again if isinstance(value, ClosedJaxpr) else again.jaxpr
