"""Collectives inside of loops and branches: what is around them is written out.

Machines meet between Computations, so a collective has to stand in the main line of a trace. A loop with one inside is
written out, iteration by iteration; of a branch with one inside both sides are computed and one is taken: all replicas
take part in both sides' collectives, whatever their own condition says (on a real system they must agree). Results are
those of the loop or branch. A loop whose end only data know cannot be written out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from podrun.compiler import jaxprs
from podrun.compiler.model_collectives import has_exchange
from podrun.core.errors import UnsupportedError
from podrun.private_apis import jax as private_jax

MOST_ITERATIONS = 1024
"""A loop with a collective inside is refused beyond this: each iteration is code of its own."""


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with every collective in its main line; itself where all are there already.

    Raises UnsupportedError for a loop that cannot be written out.
    """
    if not any(_hides(equation) for equation in closed.jaxpr.eqns):
        return closed
    specs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in closed.in_avals]  # type: ignore[no-untyped-call]
    return jax.make_jaxpr(lambda *arguments: _run(closed, arguments))(*specs)


def _hides(equation: JaxprEqn) -> bool:
    return any(has_exchange(inner) for inner in jaxprs.inner_jaxprs(equation))


def _run(closed: ClosedJaxpr, arguments: Sequence[Any]) -> list[Any]:
    return jaxprs.evaluate(closed.jaxpr, closed.consts, arguments, {}, _apply)


def _apply(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    if not _hides(equation):
        return private_jax.bind(equation, operands)
    kind = equation.primitive.name
    if kind not in _WRITERS:
        raise UnsupportedError(
            f"a collective between replicas inside of {kind!r}: how often it runs is not known before it has begun, "
            "and machines could not agree on it",
            hint="Give the loop a constant trip count, or use the collective outside of it.",
        )
    return _WRITERS[kind](equation.params, operands)


def _scan(params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    length, consts, carried = params["length"], params["num_consts"], params["num_carry"]
    if length > MOST_ITERATIONS:
        raise UnsupportedError(
            f"a collective between replicas inside of a loop of {length} iterations: at most {MOST_ITERATIONS} can be "
            "written out",
            hint="Use the collective outside of the loop.",
        )
    fixed, values = list(operands[:consts]), list(operands[consts : consts + carried])
    rows = operands[consts + carried :]
    stacks: list[list[Any]] = [[] for _ in params["jaxpr"].out_avals[carried:]]
    for i in reversed(range(length)) if params["reverse"] else range(length):
        elements = [lax.index_in_dim(row, i, keepdims=False) for row in rows]
        results = _run(params["jaxpr"], [*fixed, *values, *elements])
        values = results[:carried]
        for stack, value in zip(stacks, results[carried:], strict=True):
            stack.append(value)
    if params["reverse"]:
        for stack in stacks:
            stack.reverse()
    avals = params["jaxpr"].out_avals[carried:]
    empty = [jnp.zeros((0, *aval.shape), aval.dtype) for aval in avals]
    return values + [jnp.stack(s) if s else e for s, e in zip(stacks, empty, strict=True)]


def _cond(params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    index, *rest = operands
    sides = [_run(branch, rest) for branch in params["branches"]]
    return [lax.select_n(index, *values) for values in zip(*sides, strict=True)]


def _inlined(params: Mapping[str, Any], operands: Sequence[Any]) -> list[Any]:
    return _run(params["jaxpr"], operands)


_WRITERS: Mapping[str, Callable[[Mapping[str, Any], Sequence[Any]], list[Any]]] = {
    "scan": _scan,
    "cond": _cond,
    "jit": _inlined,
    "pjit": _inlined,
}
