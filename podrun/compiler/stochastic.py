"""Stochastic rounding of what operators compute: a float16 result is one of two neighbours, the nearer the likelier.

The forward jaxpr is evaluated with every float16 value held as float32, on the grid of the halves. What computes
(products, sums, functions) computes in float32 and is then rounded onto the grid with bits of its own; what only moves
or picks elements leaves them on it. The rounding's derivative rounds in the same way what comes back through it, so
gradients are halves as well, rounded once they are summed over their uses. Weights are halves on entering, and their
gradients, summed over the replicas and micro-batches of a chunk, are rounded when they leave.

Bits are a hash of the element's number, of the equation's place and of the key of the replica and micro-batch: the
same for any number of processes, others for each place, replica, micro-batch, iteration and step. Operators whose
inside has no float32 form here (scatters, custom derivatives) round to nearest inside and stochastically at their edge.

A result is rounded where its operator lies, and so is its gradient. What belongs to no operator (the states that bits
come from, arguments in float32) is made anew by all that read it, wherever they are (`podrun.core.names.LOCAL`).

Source: Graphcore's "AI-Float" white paper (stochastic rounding of every float16 result); hash: a 32-bit mixer of two
multiplications (C. Wellons, "Prospecting for hash functions", 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from podrun.compiler import jaxprs
from podrun.compiler.grid_rounding import HALF, StateRow, mixed, own_row, rounded, through
from podrun.core.names import CLIPPED, LOCAL

Apply = Callable[[JaxprEqn, Sequence[Any]], Any]

_STREAM = 0x52
"""Separates the bits that round from the random numbers of the same key."""
_BACK = 0xB4
"""Separates the bits that round a gradient from those that round its value."""


def has_half(jaxpr: Jaxpr) -> bool:
    """True iff a value in a jaxpr, or in the jaxprs that it runs, is float16."""
    return any(
        any(_is_half(v) for v in (*e.invars, *e.outvars)) or any(has_half(j) for j in jaxprs.inner_jaxprs(e))
        for e in jaxpr.eqns
    )


def _is_half(atom: Var | Literal) -> bool:
    return getattr(atom.aval, "dtype", None) == HALF


# --- rounding --------------------------------------------------------------------------------------------------------


def start(key: jax.Array) -> Any:
    """The state of a replica's micro-batch, uint32 ``[2]``, from its key data."""
    return state_at(key.astype(jnp.uint32), _STREAM)


def state_at(state: jax.Array, place: jax.Array | int) -> Any:
    """The random state of operator number ``place`` inside the operator whose state is ``state``."""
    with jax.named_scope(LOCAL):
        return _below(state, place if isinstance(place, jax.Array) else np.uint32(place))


@jax.jit
def _below(state: jax.Array, place: jax.Array | np.uint32) -> Any:
    number = place.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    high = mixed(state[..., 0] ^ number)
    return jnp.stack([high, mixed(state[..., 1] + high)], axis=-1)


class Places:
    """The states of ``count`` places below one state, made as a few tables.

    Place ``i`` has the state ``state_at(state, i)``; the first result of an equation there, ``state_at(state_at(state,
    i), 0)``; the gradient of either, the state `_BACK` below. A hash for each would be half of a program's equations.
    """

    def __init__(self, state: jax.Array, count: int) -> None:
        with jax.named_scope(LOCAL):
            self._tables = tables(state, np.arange(count, dtype=np.uint32))
        self._taken = 0

    def take(self) -> int:
        """The next place."""
        self._taken += 1
        return self._taken - 1

    def state(self, place: int) -> Any:
        """The state of a place."""
        with jax.named_scope(LOCAL):
            return lax.index_in_dim(self._tables[0], place, axis=0, keepdims=False)

    def row(self, place: int) -> StateRow:
        """The state of a place where it lies."""
        return StateRow(self._tables[0], place)

    def back(self, place: int) -> StateRow:
        """The state of the gradient of what has the place's state."""
        return StateRow(self._tables[1], place)

    def of_result(self, place: int, result: int) -> tuple[StateRow, StateRow]:
        """The states of an equation's result and of its gradient."""
        if result == 0:
            return StateRow(self._tables[2], place), StateRow(self._tables[3], place)
        state = state_at(self.state(place), result)
        return own_row(state), own_row(state_at(state, _BACK))


@jax.jit
def tables(state: jax.Array, places: jax.Array) -> tuple[Any, Any, Any, Any]:
    """For each of the places four states of the random generator: its own, its gradient's, its first result's, and that
    result's gradient's.
    """
    rows = jax.vmap(_below, in_axes=(None, 0))(state, places)
    first = _below(rows, np.uint32(0))
    return rows, _below(rows, np.uint32(_BACK)), first, _below(first, np.uint32(_BACK))


def entering(value: jax.Array, state: jax.Array) -> Any:
    """A half as float32; its gradient is rounded onto the halves, with the state `_BACK` below ``state``."""
    return _entered(value, own_row(state_at(state, _BACK)))


def _entered(value: jax.Array, back: StateRow) -> Any:
    with jax.named_scope(LOCAL):
        return through(value.astype(jnp.float32), back)


def entered(values: Mapping[str, Any], keys: jax.Array) -> dict[str, Any]:
    """Tensors with their halves `entering`, each with bits of its own that follow from the first of the keys."""
    with jax.named_scope(LOCAL):
        state = start(keys[0])
    places = Places(state, len(values))
    return {
        name: _entered(value, places.back(index)) if value is not None and value.dtype == HALF else value
        for index, (name, value) in enumerate(sorted(values.items()))
    }


# --- equations -------------------------------------------------------------------------------------------------------

# fmt: off
_COMPUTE = frozenset((
    "add", "add_any", "sub", "mul", "div", "rem", "pow", "integer_pow", "exp", "exp2", "log", "expm1",
    "log1p", "tanh", "logistic", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh",
    "acosh", "atanh", "erf", "erfc", "erf_inv", "sqrt", "rsqrt", "cbrt", "square", "atan2", "reduce_sum",
    "reduce_prod", "cumsum", "cumprod", "cumlogsumexp", "dot_general", "conv_general_dilated", "lgamma",
    "digamma",
))
# fmt: on
"""Primitives that compute. In float32 they take the same parameters, except a type of partial sums."""
# fmt: off
_MOVE = frozenset((
    "reshape", "broadcast_in_dim", "transpose", "squeeze", "expand_dims", "slice", "dynamic_slice",
    "dynamic_update_slice", "concatenate", "pad", "rev", "select_n", "copy", "copy_p", "neg", "abs", "max",
    "min", "sign", "reduce_max", "reduce_min", "clamp", "sort", "floor", "ceil", "round", "name", "split",
    "eq", "ne", "lt", "le", "gt", "ge", "is_finite", "argmax", "argmin", "cummax", "cummin", "gather",
    "optimization_barrier", "stack", "unstack", "with_clipped_gradient", CLIPPED,
))
# fmt: on
"""Primitives whose results are elements of their operands (or no halves)."""
_CALLS = {"pjit": "jaxpr", "jit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}


def evaluate_rounded(
    closed: ClosedJaxpr,
    arguments: Sequence[Any],
    state: jax.Array,
    taps: Mapping[Var, Callable[[Any], Any]],
    apply: Apply,
) -> list[Any]:
    """The results of a jaxpr, halves as halves. Arguments that are halves may also come as float32 on the grid."""
    places = Places(state, 1 + len(arguments))
    opened = [
        _entered(value, places.back(index)) if value is not None and value.dtype == HALF else value
        for index, value in enumerate(arguments, start=1)
    ]
    return _results(closed.jaxpr, _Evaluation(closed, apply, taps).run(opened, places.state(0)))


def _results(jaxpr: Jaxpr, values: Sequence[Any]) -> list[Any]:
    return [
        value.astype(HALF) if _is_half(atom) and value.dtype != HALF else value
        for atom, value in zip(jaxpr.outvars, values, strict=True)
    ]


class _Evaluation:
    """One jaxpr being evaluated: half values are float32 on the grid."""

    def __init__(self, closed: ClosedJaxpr, apply: Apply, taps: Mapping[Var, Callable[[Any], Any]]) -> None:
        self.closed = closed
        self.apply = apply
        self.taps = taps

    def run(self, arguments: Sequence[Any], state: jax.Array) -> list[Any]:
        return self._placed(arguments, Places(state, _places(self.closed.jaxpr)))

    def _placed(self, arguments: Sequence[Any], places: Places) -> list[Any]:
        """Each equation takes the next place, and those of a called function the ones behind their call's."""

        def step(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
            return self._equation(equation, operands, places, places.take())

        consts = [_wide(c) for c in self.closed.consts]
        return jaxprs.evaluate(self.closed.jaxpr, consts, list(arguments), dict(self.taps), step)

    def _equation(self, equation: JaxprEqn, operands: Sequence[Any], places: Places, place: int) -> Any:
        inner = any(has_half(j) for j in jaxprs.inner_jaxprs(equation))
        if not inner and not any(_is_half(v) for v in (*equation.invars, *equation.outvars)):
            return self.apply(equation, operands)
        name = equation.primitive.name
        values = [_wide(v) if _is_half(a) else v for a, v in zip(equation.invars, operands, strict=True)]
        if name in _CALLS:
            return self._inside(equation.params[_CALLS[name]])._placed(values, places)
        if name in ("scan", "cond", "while"):
            return getattr(self, f"_{name}")(equation, values, places.state(place))
        if name == "convert_element_type":
            return self._converted(equation, values[0], places, place)
        if name in _MOVE or name in _COMPUTE:
            result = _bound(equation, values)
        else:
            halves = [
                v.astype(HALF) if _is_half(a) else v for a, v in zip(equation.invars, values, strict=True)
            ]
            result = self.apply(equation, halves)
        if name in _MOVE:
            return result
        results = result if equation.primitive.multiple_results else [result]
        drawn = [
            rounded(_wide(value), *places.of_result(place, index)) if _is_half(variable) else value
            for index, (variable, value) in enumerate(zip(equation.outvars, results, strict=True))
        ]
        return drawn if equation.primitive.multiple_results else drawn[0]

    def _converted(self, equation: JaxprEqn, value: jax.Array, places: Places, place: int) -> Any:
        wanted, value = equation.params["new_dtype"], jnp.asarray(value)  # A literal is a Python number.
        if wanted != HALF:
            return value.astype(wanted)
        return rounded(value.astype(jnp.float32), places.row(place), places.back(place))

    def _inside(self, closed: ClosedJaxpr) -> _Evaluation:
        return _Evaluation(closed, self.apply, {})

    def _scan(self, equation: JaxprEqn, values: Sequence[Any], state: jax.Array) -> Any:
        params = equation.params
        constants, carried = params["num_consts"], params["num_carry"]
        body, fixed = self._inside(params["jaxpr"]), list(values[:constants])

        def step(carry: Any, slices: Any) -> Any:
            index, held = carry
            results = body.run([*fixed, *held, *slices], state_at(state, index))
            return (index + 1, tuple(results[:carried])), tuple(results[carried:])

        first = (jnp.zeros((), jnp.int32), tuple(values[constants : constants + carried]))
        (_, held), stacked = lax.scan(
            step,
            first,
            tuple(values[constants + carried :]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*held, *stacked]

    def _while(self, equation: JaxprEqn, values: Sequence[Any], state: jax.Array) -> Any:
        params = equation.params
        first, second = params["cond_nconsts"], params["body_nconsts"]
        test, body = self._inside(params["cond_jaxpr"]), self._inside(params["body_jaxpr"])
        asked, fixed = list(values[:first]), list(values[first : first + second])

        def more(carry: Any) -> Any:
            return test.run([*asked, *carry[1]], state_at(state_at(state, 1), carry[0]))[0]

        def step(carry: Any) -> Any:
            return carry[0] + 1, tuple(body.run([*fixed, *carry[1]], state_at(state_at(state, 2), carry[0])))

        start_ = (jnp.zeros((), jnp.int32), tuple(values[first + second :]))
        return list(lax.while_loop(more, step, start_)[1])

    def _cond(self, equation: JaxprEqn, values: Sequence[Any], state: jax.Array) -> Any:
        sides = [self._inside(branch) for branch in equation.params["branches"]]
        index, *branch_operands = values
        runs = [lambda *v, side=side: tuple(side.run(list(v), state)) for side in sides]
        return list(lax.switch(index, runs, *branch_operands))


def _places(jaxpr: Jaxpr) -> int:
    """How many places a jaxpr's equations have at most, with those of the functions that it calls."""
    called = [e.params[_CALLS[e.primitive.name]].jaxpr for e in jaxpr.eqns if e.primitive.name in _CALLS]
    return len(jaxpr.eqns) + sum(map(_places, called))


def _wide(value: jax.Array) -> Any:
    dtype = getattr(value, "dtype", None)
    return jnp.asarray(value).astype(jnp.float32) if dtype == HALF else value


def _bound(equation: JaxprEqn, values: Sequence[Any]) -> Any:
    """The primitive on float32 in place of halves."""
    params = dict(equation.params)
    if params.get("preferred_element_type") == HALF:
        params["preferred_element_type"] = np.dtype(np.float32)
    return equation.primitive.bind(*values, **params)  # type: ignore[no-untyped-call]
