"""Splitting a traced inference into what depends on the weights alone, done once, and the rest, done for every input.

XLA on CPUs wants convolution weights with channels last and transposes them at every call; a normalisation works its
factors out anew every time. Here all equations that only parameters feed go into *prepare*, and weights of
convolutions are laid out there as XLA wants them, with the factors of a normalisation that follows in them
(`podrun.popart.lowering.folding`). For inference on the host only: on the device
weights are variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax
from jax.extend.core import Literal

from podrun.popart.lowering.folding import fold

__all__ = ["Hoisted", "hoist"]


@dataclass(frozen=True, slots=True)
class Hoisted:
    """``prepare(parameters)`` gives arrays to keep; ``run(kept, inputs, key)`` gives what the function returned."""

    prepare: Callable[[Mapping[str, Any]], list[Any]]
    run: Callable[[list[Any], Mapping[str, Any], Any], Any]
    operations: int
    """Floating point operations of ``run`` in convolutions and products, those in loops aside."""


def hoist(function: Callable[..., Any], parameters: Any, inputs: Any, key: Any) -> Hoisted:
    """Trace ``function(parameters, inputs, key)`` and split it. Arguments may be arrays or abstract values."""
    closed, shape = jax.make_jaxpr(function, return_shape=True)(parameters, inputs, key)
    jaxpr = closed.jaxpr
    count = len(jax.tree.leaves(parameters))
    tree = jax.tree.structure(shape)
    known = {*jaxpr.invars[:count], *jaxpr.constvars}
    before, after = [], []
    for equation in jaxpr.eqns:
        if not equation.effects and all(isinstance(v, Literal) or v in known for v in equation.invars):
            known.update(equation.outvars)
            before.append(equation)
        else:
            after.append(equation)
    after, folded = fold(after, known, {v for v in jaxpr.outvars if not isinstance(v, Literal)})
    known.update(folded)
    reads = [v for e in after for v in e.invars] + list(jaxpr.outvars)
    kept = list(dict.fromkeys(v for v in reads if not isinstance(v, Literal) and v in known))
    weights = _kernels(after, known)

    def prepare(values: Mapping[str, Any]) -> list[Any]:
        environment = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        environment.update(zip(jaxpr.invars[:count], jax.tree.leaves(values), strict=True))
        _evaluate(before, environment)
        environment.update({made: work_out(environment) for made, work_out in folded.items()})
        return [_channels_last(environment[v]) if v in weights else environment[v] for v in kept]

    def run(held: list[Any], values: Mapping[str, Any], key: Any) -> Any:
        environment = dict(zip(kept, held, strict=True))
        environment.update(zip(jaxpr.invars[count:], jax.tree.leaves((values, key)), strict=True))
        _evaluate(after, environment, weights)
        found = [v.val if isinstance(v, Literal) else environment[v] for v in jaxpr.outvars]
        return jax.tree.unflatten(tree, found)

    return Hoisted(prepare, run, 2 * sum(map(_products, after)))


def _products(equation: Any) -> int:
    """Multiplications of a convolution or a product of matrices; 0 of anything else."""
    if equation.primitive is lax.dot_general_p:
        (summed, _), _ = equation.params["dimension_numbers"]
        each: int = math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
    elif equation.primitive is lax.conv_general_dilated_p:
        weights = equation.invars[1].aval.shape
        each = math.prod(weights) // weights[equation.params["dimension_numbers"].rhs_spec[0]]
    else:
        return 0
    made: int = math.prod(equation.outvars[0].aval.shape)
    return made * each


def _channels_last(weights: Any) -> Any:
    """``[out, in, *kernel]`` as ``[*kernel, in, out]``."""
    return weights.transpose((*range(2, weights.ndim), 1, 0))


def _kernels(equations: list[Any], known: set[Any]) -> set[Any]:
    """Known variables that are read only as plain ``[out, in, *kernel]`` weights of convolutions."""
    kernels: set[Any] = set()
    others: set[Any] = set()
    for equation in equations:
        for place, variable in enumerate(equation.invars):
            if isinstance(variable, Literal) or variable not in known:
                continue
            plain = equation.primitive is lax.conv_general_dilated_p and place == 1
            order = equation.params["dimension_numbers"].rhs_spec if plain else ()
            (kernels if plain and order == tuple(range(len(order))) else others).add(variable)
    return kernels - others


def _evaluate(
    equations: list[Any], environment: dict[Any, Any], weights: set[Any] | frozenset[Any] = frozenset()
) -> None:
    """Run equations in order; convolutions whose weights lie channels last are told so."""
    for equation in equations:
        values = [v.val if isinstance(v, Literal) else environment[v] for v in equation.invars]
        bound = equation.primitive.get_bind_params(equation.params)
        parts, options = bound if isinstance(bound, tuple) else ((), dict(bound))  # by JAX's version
        last = equation.primitive is lax.conv_general_dilated_p and equation.invars[1] in weights
        if last:
            numbers = options["dimension_numbers"]
            rank = len(numbers.rhs_spec)
            options["dimension_numbers"] = numbers._replace(rhs_spec=(rank - 1, rank - 2, *range(rank - 2)))
        made = equation.primitive.bind(*parts, *values, **options)
        results = made if equation.primitive.multiple_results else [made]
        environment.update(zip(equation.outvars, results, strict=True))
