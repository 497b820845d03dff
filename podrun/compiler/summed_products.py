"""Sums over replicas of matrix products, as one product.

A gradient of weights is a product of a replica's samples with what reaches them, and training adds it over replicas.
Folded, that is a product for each replica and a sum; one product over the samples of all replicas of a machine reads
and writes the weights' size once. `SummedProducts` looks at equations as they are evaluated and knows how to sum a
product over its leading axis before it is computed; what is then no longer read is pruned by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Literal, Var


class SummedProducts:
    """The sums over the leading axis of variables that are products or sums, or transposed ones."""

    def __init__(self) -> None:
        self._sums: dict[Var, Callable[[], Any]] = {}

    def look(self, equation: JaxprEqn, operands: Sequence[Any]) -> None:
        """Remember how to sum the result of an equation, if that is a product or sum for each replica."""
        name, source = equation.primitive.name, equation.invars[0] if equation.invars else None
        if name == "dot_general":
            summed = _summed_product(operands, equation.params)
        elif name == "reduce_sum":
            summed = _summed_sum(operands, equation.params["axes"])
        elif name == "transpose" and isinstance(source, Var) and source in self._sums:
            summed = _turned(self._sums[source], equation.params["permutation"])
        elif name == "name" and isinstance(source, Var):  # `podrun.compiler.program.tap`
            summed = self._sums.get(source)
        else:
            return
        if summed is not None:
            self._sums[equation.outvars[0]] = summed

    def find(self, variable: Var | Literal) -> Any | None:
        """The sum of a variable over its leading axis; None for one that is neither product nor sum."""
        summed = self._sums.get(variable) if isinstance(variable, Var) else None
        return None if summed is None else summed()


def _summed_product(operands: Sequence[Any], params: Mapping[str, Any]) -> Callable[[], jax.Array] | None:
    (over_a, over_b), (batch_a, batch_b) = params["dimension_numbers"]
    if not batch_a:
        return None
    numbers = (((batch_a[0], *over_a), (batch_b[0], *over_b)), (batch_a[1:], batch_b[1:]))
    a, b = operands
    return lambda: lax.dot_general(
        a,
        b,
        numbers,
        precision=params["precision"],
        preferred_element_type=params["preferred_element_type"],
    )


def _summed_sum(operands: Sequence[Any], axes: Sequence[int]) -> Callable[[], Any] | None:
    """A sum over other axes (a gradient of biases) is one sum over all."""
    if 0 in axes:
        return None
    return lambda: operands[0].sum((0, *axes), dtype=operands[0].dtype)


def _turned(summed: Callable[[], Any], permutation: Sequence[int]) -> Callable[[], Any] | None:
    if permutation[0] != 0:
        return None
    return lambda: lax.transpose(summed(), [axis - 1 for axis in permutation[1:]])
