"""Normalisations by known statistics, folded into the weights of the convolutions before them.

``(x * w + b - mean) * factor + bias`` is ``x * (w * factor) + ((b - mean) * factor + bias)``: one product with other
weights and one addition, which the convolution's call does too. Rounding differs, in the last digits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import Literal

_AFFINE = {lax.add_p, lax.sub_p, lax.mul_p, lax.div_p}

Environment = dict[Any, Any]
WorkOut = Callable[[Environment], Any]


@dataclass(frozen=True, slots=True, eq=False)
class Made:
    """Stands among variables for an array that is worked out of known ones. Equal to itself only."""

    aval: Any


@dataclass(frozen=True, slots=True)
class _Chain:
    """A convolution and the additions and multiplications by known values of its channels that follow."""

    convolution: Any
    links: list[tuple[Any, Any]]
    """Equation and its known operand, in order."""

    def weights(self, environment: Environment) -> Any:
        w = _value(environment, self.convolution.invars[1])
        return w * self._line(environment)[0].reshape((-1,) + (1,) * (w.ndim - 1))

    def shift(self, environment: Environment) -> Any:
        return self._line(environment)[1]

    def _line(self, environment: Environment) -> tuple[Any, Any]:
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
    """Equations with the same results, and how to work out what they read besides ``known``.

    ``outputs`` are variables whose values are asked for, so that equations that make them stay.
    """
    readers: dict[Any, list[Any]] = {}
    for equation in equations:
        for variable in equation.invars:
            if not isinstance(variable, Literal):
                readers.setdefault(variable, []).append(equation)
    changed: dict[int, list[Any]] = {}
    made: dict[Made, WorkOut] = {}
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
        made[weights], made[shift] = chain.weights, chain.shift
        changed.update({id(e): [] for e in passed})
        changed[id(equation)] = [equation.replace(invars=[equation.invars[0], weights])]
        last = links[-1][0]
        addition = last.replace(primitive=lax.add_p, invars=[equation.outvars[0], shift], params={})
        changed[id(last)] = [addition]
    return [kept for e in equations for kept in changed.get(id(e), [e])], made


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
    there = isinstance(operand, Literal) or operand in known
    return operand if there and fits and equation.outvars[0].aval.shape == variable.aval.shape else None


def _value(environment: Environment, variable: Any) -> Any:
    return variable.val if isinstance(variable, Literal) else environment[variable]
