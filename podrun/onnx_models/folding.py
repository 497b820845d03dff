"""Work that an inference does once instead of for each input: folded normalisations, and values that depend on weights
alone.

A normalisation by known statistics is folded into the weights of the convolution before it:

``(x * w + b - mean) * factor + bias`` is ``x * (w * factor) + ((b - mean) * factor + bias)``: one product with other
weights and one addition, which the convolution's call does too. Rounding differs, in the last digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

from podrun.core.quick_dataclass import dataclass

_AFFINE = {lax.add_p, lax.sub_p, lax.mul_p, lax.div_p}

ConstantValues = dict[Any, Any]
WorkOut = Callable[[ConstantValues], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Stands among variables for an array that is computed from known ones. Equal to itself only."""

    aval: Any


@dataclass(frozen=True, slots=True)
class _Chain:
    """A convolution and the following additions and multiplications by known values of its channels."""

    convolution: Any
    links: list[tuple[Any, Any]]
    """Equation and its known operand, in order."""

    def weights(self, environment: ConstantValues) -> Any:
        w = _value(environment, self.convolution.invars[1])
        return w * self._line(environment)[0].reshape((-1,) + (1,) * (w.ndim - 1))

    def shift(self, environment: ConstantValues) -> Any:
        return self._line(environment)[1]

    def _line(self, environment: ConstantValues) -> tuple[Any, Any]:
        """Factor and addend of each channel, ``[1, M, 1, ...]``."""
        image = self.convolution.outvars[0].aval
        shape = (1, image.shape[1]) + (1,) * (len(image.shape) - 2)
        scale, shift = jnp.ones(shape, image.dtype), jnp.zeros(shape, image.dtype)
        for equation, operand in self.links:
            value = _value(environment, operand)
            if equation.primitive in (lax.mul_p, lax.div_p):
                scale = equation.primitive.bind(scale, jnp.broadcast_to(value, shape))
            shift = equation.primitive.bind(shift, jnp.broadcast_to(value, shape))
        return scale, shift


def fold(equations: list[Any], known: set[Any], outputs: set[Any]) -> tuple[list[Any], dict[Made, WorkOut]]:
    """Equations with the same results, and functions that compute their inputs other than ``known``.

    ``outputs`` are variables whose values are needed, so that equations that make them stay.
    """
    readers: dict[Any, list[Any]] = {}
    for equation in equations:
        for variable in equation.invars:
            if not isinstance(variable, Literal):
                readers.setdefault(variable, []).append(equation)
    changed: dict[int, list[Any]] = {}
    products: dict[Made, WorkOut] = {}
    for equation in equations:
        if not _is_plain(equation, known):
            continue
        passed, links = _links(equation, readers, known, outputs)
        if not any(link.primitive in (lax.mul_p, lax.div_p) for link, _ in links):
            continue
        chain = _Chain(equation, links)
        result = equation.outvars[0].aval
        weights = Made(equation.invars[1].aval)
        shift = Made(result.update(shape=(1, result.shape[1]) + (1,) * (len(result.shape) - 2)))
        products[weights], products[shift] = chain.weights, chain.shift
        changed.update({id(e): [] for e in passed})
        changed[id(equation)] = [equation.replace(invars=[equation.invars[0], weights])]
        last = links[-1][0]
        addition = last.replace(primitive=lax.add_p, invars=[equation.outvars[0], shift], params={})
        changed[id(last)] = [addition]
    return [kept for e in equations for kept in changed.get(id(e), [e])], products


def _is_plain(equation: Any, known: set[Any]) -> bool:
    """True iff this is a float32 convolution, channels second, by known weights."""
    if equation.primitive is not lax.conv_general_dilated_p:
        return False
    numbers = equation.params["dimension_numbers"]
    orders = (numbers.rhs_spec, numbers.out_spec)
    return (
        not isinstance(equation.invars[1], Literal)
        and equation.invars[1] in known
        and equation.params["batch_group_count"] == 1
        and all(order == tuple(range(len(order))) for order in orders)
        and str(equation.outvars[0].aval.dtype) == "float32"
    )


def _links(
    convolution: Any, readers: dict[Any, list[Any]], known: set[Any], outputs: set[Any]
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    """The equations that are the only readers of one another's results, up to the last affine one, and of them those
    that are affine with their known operand."""
    channels = convolution.outvars[0].aval.shape[1]
    variable, length = convolution.outvars[0], 0
    passed: list[Any] = []
    links: list[tuple[Any, Any]] = []
    while variable not in outputs and len(readers.get(variable, [])) == 1:
        equation = readers[variable][0]
        if equation.primitive in _AFFINE:
            operand = _known_operand(equation, variable, known, channels)
            if operand is None:
                break
            links.append((equation, operand))
            length = len(passed) + 1
        elif equation.primitive.name != "name":
            break
        passed.append(equation)
        variable = equation.outvars[0]
    return passed[:length], links


def _known_operand(equation: Any, variable: Any, known: set[Any], channels: int) -> Any:
    """The operand that is known and the same over all axes but the channels'; None if there is none."""
    first, second = equation.invars
    if first is variable:
        operand = second
    elif equation.primitive in (lax.add_p, lax.mul_p):
        operand = first
    else:
        return None
    shape = operand.aval.shape
    fits = all(size == 1 or (axis == 1 and size == channels) for axis, size in enumerate(shape))
    is_known = isinstance(operand, Literal) or operand in known
    return operand if is_known and fits and equation.outvars[0].aval.shape == variable.aval.shape else None


def _value(environment: ConstantValues, variable: object) -> Any:
    return variable.val if isinstance(variable, Literal) else environment[variable]


__all__ = ["Hoisted", "hoist"]


@dataclass(frozen=True, slots=True)
class Hoisted:
    """``prepare(parameters)`` returns arrays to keep; ``run(kept, inputs, key)`` returns the function's results."""

    prepare: Callable[[Mapping[str, Any]], list[Any]]
    run: Callable[[list[Any], Mapping[str, Any], Any], Any]
    operations: int
    """Floating point operations of ``run`` in convolutions and products, those in loops aside."""


def hoist(function: Callable[..., Any], parameters: object, inputs: object, key: object) -> Hoisted:
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
        environment.update({variable: work_out(environment) for variable, work_out in folded.items()})
        return [_channels_last(environment[v]) if v in weights else environment[v] for v in kept]

    def run(held: list[Any], values: Mapping[str, Any], key: object) -> Any:
        environment = dict(zip(kept, held, strict=True))
        environment.update(zip(jaxpr.invars[count:], jax.tree.leaves((values, key)), strict=True))
        _evaluate(after, environment, weights)
        results = [v.val if isinstance(v, Literal) else environment[v] for v in jaxpr.outvars]
        return jax.tree.unflatten(tree, results)

    return Hoisted(prepare, run, 2 * sum(map(_products, after)))


def _products(equation: Any) -> int:
    """Multiplications of a convolution or a product of matrices; 0 for any other equation."""
    if equation.primitive is lax.dot_general_p:
        (summed, _), _ = equation.params["dimension_numbers"]
        terms: int = math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
    elif equation.primitive is lax.conv_general_dilated_p:
        weights = equation.invars[1].aval.shape
        terms = math.prod(weights) // weights[equation.params["dimension_numbers"].rhs_spec[0]]
    else:
        return 0
    elements: int = math.prod(equation.outvars[0].aval.shape)
    return elements * terms


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
    """Run equations in order. Convolutions whose weights lie channels last get a matching layout."""
    for equation in equations:
        values = [v.val if isinstance(v, Literal) else environment[v] for v in equation.invars]
        bound = equation.primitive.get_bind_params(equation.params)
        parts, options = (
            bound if isinstance(bound, tuple) else ((), dict(bound))
        )  # The name differs by JAX's version.
        last = equation.primitive is lax.conv_general_dilated_p and equation.invars[1] in weights
        if last:
            numbers = options["dimension_numbers"]
            rank = len(numbers.rhs_spec)
            options["dimension_numbers"] = numbers._replace(rhs_spec=(rank - 1, rank - 2, *range(rank - 2)))
        output = equation.primitive.bind(*parts, *values, **options)
        results = output if equation.primitive.multiple_results else [output]
        environment.update(zip(equation.outvars, results, strict=True))
