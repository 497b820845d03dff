"""Collectives inside a model: values of other replicas within a micro-batch.

A forward function runs for one replica, but may use `all_reduce`, `reduce_scatter` and `all_gather` over groups of
replicas. In the trace they are made of one primitive, ``exchange``, of three kinds:

* SUM: the sum of the operand over the group, in order of replicas, halves in float32. It is its own transpose: the
  gradient of a sum over replicas is the sum of the gradients.
* GATHER: the operands of the group, stacked in order of replicas; its transpose sums and takes the replica's own slot.
* POSITION: the replica's place in its group.

Everything else (means, products, extremes) is ordinary arithmetic on these, so gradients are JAX's. Folding turns an
exchange into a ``folded_exchange`` of all replicas of a machine at once; `podrun.compiler.collective_cuts` turns
that into arithmetic on the folded axis, and, where replicas lie on several machines, into AllGathers of these in the
middle of a step.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters import ad, batching

from podrun.compiler import jaxprs
from podrun.core.errors import UsageError
from podrun.private_apis import jax as private_jax

CollectiveGroups = tuple[tuple[int, ...], ...]
"""Disjoint groups of equally many replicas that hold each replica once, as of `podrun.core.layout.replica_groups`."""


class ExchangeKind(enum.Enum):
    """Which collective of the program's own an equation is (see the module docstring)."""

    SUM = "sum"
    GATHER = "gather"
    POSITION = "position"


class Combination(enum.Enum):
    """How a reduction combines the values of a group (PopART's CollectiveOperator, by its meaning)."""

    ADD = 0
    MEAN = 1
    MUL = 2
    MIN = 3
    MAX = 4
    LOGICAL_AND = 5
    LOGICAL_OR = 6
    SQUARE_ADD = 7
    """The sum of the squares."""
    LOCAL = 8
    """Each replica's own value: nothing is combined."""


# --- What a forward function calls ---------------------------------------------------------------------------


def all_reduce(x: jax.Array, operator: Combination, groups: CollectiveGroups) -> Any:
    """``x`` combined over the replicas of each group; the shape and dtype of ``x``. Halves are combined in float32 and
    rounded once.

    Raises UsageError for an operator that has no meaning for the dtype.
    """
    size = len(groups[0])
    _check(x, operator)
    if size == 1 or operator is Combination.LOCAL:
        return _of_one(x, operator)
    wide = _wide(x)
    if operator is Combination.ADD:
        return _exchange(x, ExchangeKind.SUM, groups)
    if operator is Combination.MEAN:
        return (_exchange(wide, ExchangeKind.SUM, groups) / size).astype(x.dtype)
    if operator is Combination.SQUARE_ADD:
        return _exchange(wide * wide, ExchangeKind.SUM, groups).astype(x.dtype)
    parts = _exchange(x, ExchangeKind.GATHER, groups)
    if operator is Combination.MUL:
        return _chain(lambda a, b: a * b, [_wide(parts[s]) for s in range(size)]).astype(x.dtype)
    if operator is Combination.MIN:
        return parts.min(0)
    if operator is Combination.MAX:
        return parts.max(0)
    truth = (parts != 0).all(0) if operator is Combination.LOGICAL_AND else (parts != 0).any(0)
    return truth.astype(x.dtype)


def _of_one(x: jax.Array, operator: Combination) -> Any:
    """The result of a combination in a group of one."""
    if operator is Combination.SQUARE_ADD:
        return x * x
    return (x != 0).astype(x.dtype) if operator in (Combination.LOGICAL_AND, Combination.LOGICAL_OR) else x


def reduce_scatter(x: jax.Array, operator: Combination, groups: CollectiveGroups) -> Any:
    """This replica's part of ``x`` combined over its group: flat, padded with zeros, cut into as many equal parts as
    the group has replicas; ``[ceil(elements / group size)]``. Raises what `all_reduce` raises."""
    size = len(groups[0])
    flat = all_reduce(x, operator, groups).reshape(-1)
    if size == 1:
        return flat
    part = -(-flat.size // size)
    parts = jnp.pad(flat, (0, part * size - flat.size)).reshape(size, part)
    return lax.dynamic_index_in_dim(parts, replica_position(groups), 0, keepdims=False)


def all_gather(x: jax.Array, groups: CollectiveGroups) -> Any:
    """The values of the group's replicas end to end, in order: ``[elements * group size]``."""
    if len(groups[0]) == 1:
        return x.reshape(-1)
    return _exchange(x.reshape(-1), ExchangeKind.GATHER, groups).reshape(-1)


def check_replica_groups(groups: CollectiveGroups, replicas: int | None = None) -> None:
    """Raise UsageError unless the groups are disjoint and equally large, and hold ``replicas`` replicas, if given."""
    members = [replica for group in groups for replica in group]
    sizes = {len(group) for group in groups}
    if len(sizes) != 1 or 0 in sizes or sorted(members) != list(range(len(members))):
        raise UsageError(
            f"the groups {[list(group) for group in groups]} of a collective are not disjoint groups of equally many "
            "replicas, each replica in one",
            hint="podrun.core.layout.replica_groups makes such groups.",
        )
    if replicas is not None and len(members) != replicas:
        raise UsageError(
            f"a collective has groups of {len(members)} replicas; the program has {replicas}",
            hint="Name every replica of the program in one group.",
        )


def _check(x: jax.Array, operator: Combination) -> None:
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    logical = operator in (Combination.LOGICAL_AND, Combination.LOGICAL_OR)
    if (operator is Combination.MEAN and not floating) or (x.dtype == bool and not logical):
        raise UsageError(
            f"a collective cannot combine values of type {x.dtype} with {operator.name}",
            hint="Cast them before.",
        )


def _wide(x: jax.Array) -> Any:
    half = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    return x.astype(jnp.float32) if half else x


def _chain(combine: Callable[[Any, Any], Any], parts: Sequence[Any]) -> Any:
    """Combine from left to right, one after the other: an order that no layout changes."""
    combined = parts[0]
    for part in parts[1:]:
        combined = combine(combined, part)
    return combined


# --- The primitives ------------------------------------------------------------------------------------------

exchange_p = private_jax.new_primitive("exchange")
"""``exchange(x, token)`` on one replica. The token has no meaning but to differ from replica to replica, so that
folding sees each exchange even where all replicas give the same."""
folded_p = private_jax.new_primitive("folded_exchange")
"""``folded_exchange(x)``: micro-batches and replicas of a machine as the leading axis of operand and result."""


total_p = private_jax.new_primitive("folded_total")
"""``folded_total(x)``: the sum over all replicas of the program, once for a machine: its result has no leading axis.
The compiler alone makes it, of sums in programs whose replicas share state; nothing differentiates it."""

gather_p = private_jax.new_primitive("gather_parts")
"""``gather_parts(part)``: the parts of all machines, end to end."""
gather_p.def_abstract_eval(lambda part, *, machines: ShapedArray((part.shape[0] * machines,), part.dtype))
sum_p = private_jax.new_primitive("sum_parts")
"""``sum_parts(part)``: the sum of the parts of all machines, in order; float32."""
sum_p.def_abstract_eval(lambda part: ShapedArray(part.shape, part.dtype))


def _exchange(x: jax.Array, kind: ExchangeKind, groups: CollectiveGroups) -> Any:
    check_replica_groups(groups)
    return exchange_p.bind(x, jnp.int32(0), kind=kind, groups=groups)


def replica_position(groups: CollectiveGroups) -> Any:
    """The place of a replica in its group, an int32 that is traced."""
    return _exchange(jnp.int32(0), ExchangeKind.POSITION, groups)


def _result(aval: ShapedArray, kind: ExchangeKind, groups: CollectiveGroups, lead: int) -> ShapedArray:
    shape = aval.shape
    if kind is ExchangeKind.GATHER:
        shape = (*shape[:lead], len(groups[0]), *shape[lead:])
    return ShapedArray(shape, aval.dtype)


exchange_p.def_abstract_eval(lambda x, token, *, kind, groups, **_: _result(x, kind, groups, 0))
folded_p.def_abstract_eval(lambda x, *, kind, groups: _result(x, kind, groups, 1))
total_p.def_abstract_eval(lambda x, *, kind, groups: ShapedArray(x.shape[1:], x.dtype))


def _fold(
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    kind: ExchangeKind,
    groups: CollectiveGroups,
    once: bool = False,
) -> tuple[Any, int | None]:
    x = args[0]
    size = next(a.shape[d] for a, d in zip(args, dims, strict=True) if d is not None)
    same = dims[0] is None
    x = jnp.broadcast_to(x, (size, *x.shape)) if same else jnp.moveaxis(x, dims[0], 0)
    if once:
        return total_p.bind(x, kind=kind, groups=groups), None
    return folded_p.bind(x, kind=kind, groups=groups), 0


batching.primitive_batchers[exchange_p] = _fold


def _jvp(primitive: private_jax.TracedPrimitive) -> Callable[..., tuple[Any, Any]]:
    def rule(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
        value = primitive.bind(*primals, **params)
        moving = tangents[0]
        if type(moving) is ad.Zero or params["kind"] is ExchangeKind.POSITION:
            return value, ad.Zero(jax.typeof(value).to_tangent_aval())
        return value, primitive.bind(moving, *primals[1:], **params)

    return rule


def _transpose(
    cotangent: jax.Array, x: jax.Array, token: jax.Array, *, kind: ExchangeKind, groups: CollectiveGroups
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval), None]
    total = exchange_p.bind(cotangent, token, kind=ExchangeKind.SUM, groups=groups)
    if kind is ExchangeKind.GATHER:
        place = exchange_p.bind(jnp.int32(0), token, kind=ExchangeKind.POSITION, groups=groups)
        total = lax.dynamic_index_in_dim(total, place, 0, keepdims=False)
    return [total, None]


def _folded_transpose(
    cotangent: jax.Array, x: jax.Array, *, kind: ExchangeKind, groups: CollectiveGroups
) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [ad.Zero(x.aval)]
    total = folded_p.bind(cotangent, kind=ExchangeKind.SUM, groups=groups)
    if kind is ExchangeKind.GATHER:
        size = cotangent.shape[0]
        places = folded_p.bind(jnp.zeros(size, jnp.int32), kind=ExchangeKind.POSITION, groups=groups)
        total = jax.vmap(lambda row, k: lax.dynamic_index_in_dim(row, k, 0, keepdims=False))(total, places)
    return [total]


ad.primitive_jvps[exchange_p] = _jvp(exchange_p)
ad.primitive_jvps[folded_p] = _jvp(folded_p)
ad.primitive_transposes[exchange_p] = _transpose
ad.primitive_transposes[folded_p] = _folded_transpose


# --- What the compiler asks ----------------------------------------------------------------------------------


_EXCHANGES = (exchange_p, folded_p, total_p)


def exchanges(closed: ClosedJaxpr) -> list[JaxprEqn]:
    """The exchanges of a jaxpr, folded or not, in order; not those inside of loops and branches."""
    return [equation for equation in closed.jaxpr.eqns if equation.primitive in _EXCHANGES]


def has_exchange(jaxpr: Jaxpr) -> bool:
    """True iff a jaxpr has an exchange, inside of loops and branches or not."""
    return any(
        equation.primitive in _EXCHANGES
        or any(has_exchange(inner) for inner in jaxprs.inner_jaxprs(equation))
        for equation in jaxpr.eqns
    )


def with_tokens(tokens: object, *, once: bool = False) -> Callable[[JaxprEqn, Sequence[Any]], Any]:
    """How to evaluate equations while folding: exchanges get a token that differs from replica to replica. ``once``:
    sums over all replicas become one value for all replicas of a machine (`total_p`).
    """

    def apply(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
        if equation.primitive.name != exchange_p.name:
            return private_jax.bind_equation(equation, operands)
        params = equation.params
        if once and params["kind"] is ExchangeKind.SUM and len(params["groups"]) == 1:
            params = params | {"once": True}
        return exchange_p.bind(operands[0], tokens, **params)

    return apply


def alone(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    """How to evaluate equations where there is one replica only: for cost and digest, never for results."""
    if equation.primitive is not exchange_p:
        return private_jax.bind_equation(equation, operands)
    x, size = operands[0], len(equation.params["groups"][0])
    return jnp.broadcast_to(x, (size, *x.shape)) if equation.params["kind"] is ExchangeKind.GATHER else x
