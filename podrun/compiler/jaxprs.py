"""Jaxprs, JAX's form of a traced function: evaluated, pruned, and cut into parts; and the shapes that buffers hold.

What this needs of JAX beyond its public API comes from `podrun.private_apis.jax`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var

from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.names import CLIPPED
from podrun.private_apis.jax import bind_equation, call_in_scope, without_unused

BufferValues = Mapping[str, Any]
"""Traced values of buffers, by name."""


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    taps: Mapping[Var, Any] | None = None,
    apply: Callable[[JaxprEqn, Sequence[Any]], Any] = bind_equation,
) -> list[Any]:
    """Evaluate a jaxpr in its own name scopes, as ``jax.core.eval_jaxpr`` does.

    Where a variable is in ``taps``, its consumers read what the tap, a function, makes of its value.
    ``apply(equation, operands)`` gives an equation's result, a list of them if its primitive has several.
    """
    taps = taps or {}
    if not taps and apply is bind_equation:
        return list(jax.core.eval_jaxpr(jaxpr, consts, *arguments))
    environment: dict[Var, Any] = {}

    def write(variable: Var, value: jax.Array) -> None:
        environment[variable] = taps[variable](value) if variable in taps else value

    def read(atom: Var | Literal) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    for variable, value in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True):
        write(variable, value)
    for equation in jaxpr.eqns:
        answer = call_in_scope(apply, equation, [read(atom) for atom in equation.invars])
        results = answer if equation.primitive.multiple_results else [answer]
        for variable, value in zip(equation.outvars, results, strict=True):
            write(variable, value)
    return [read(atom) for atom in jaxpr.outvars]


def pruned(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr without equations that no result needs; arguments stay as they are."""
    return ClosedJaxpr(without_unused(closed.jaxpr), closed.consts)


_KEEP_FINITE = frozenset(
    (
        *(
            "reshape",
            "broadcast_in_dim",
            "transpose",
            "squeeze",
            "expand_dims",
            "slice",
            "rev",
            "concatenate",
            "name",
        ),
        *("neg", "abs", "max", "min", "select_n", "copy", "copy_p", "pad", "stack", "unstack", "split"),
    )
)
"""Primitives that give no infinities where their operands have none."""


def without_repeated_clips(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr without those of its own equations that replace infinite halves (`CLIPPED`) where none can be: of
    values that were clipped and have only been moved since. Each operation of a program clips what it gives and the
    gradient of what it is given, so half of them repeat another.
    """
    finite: set[Any] = set()
    same: dict[Any, Any] = {}  # Any: JAX types neither variables nor their values.
    kept = []

    for old in closed.jaxpr.eqns:
        atoms: list[Any] = [a if isinstance(a, Literal) else same.get(a, a) for a in old.invars]
        equation = old if atoms == old.invars else old.replace(invars=atoms)
        name = equation.primitive.name
        if name == CLIPPED and isinstance(atoms[0], Var) and atoms[0] in finite:
            same[equation.outvars[0]] = atoms[0]
            continue
        if name == CLIPPED or (_moves(equation) and all(_is_finite(a, finite) for a in atoms)):
            finite.update(equation.outvars)
        kept.append(equation)
    ends = [v if isinstance(v, Literal) else same.get(v, v) for v in closed.jaxpr.outvars]
    return ClosedJaxpr(closed.jaxpr.replace(eqns=kept, outvars=ends), closed.consts)


def _is_finite(atom: Any, finite: set[Any]) -> bool:
    """Whether an atom has no infinities: it is among ``finite``, a finite constant, or of a type without them."""
    if isinstance(atom, Literal):
        return bool(np.isfinite(np.asarray(atom.val, np.float64)).all())
    return atom in finite or not jax.numpy.issubdtype(atom.aval.dtype, jax.numpy.floating)


def _moves(equation: JaxprEqn) -> bool:
    """Whether an equation gives no infinities where its operands have none."""
    if equation.primitive.name not in ("jit", "pjit"):
        return equation.primitive.name in _KEEP_FINITE
    inner = equation.params["jaxpr"]
    read = (*(a for e in inner.jaxpr.eqns for a in e.invars), *inner.jaxpr.outvars)
    literals = [a for a in read if isinstance(a, Literal)]
    return (
        not inner.consts
        and all(_is_finite(a, set()) for a in literals)
        and all(map(_moves, inner.jaxpr.eqns))
    )


_FUNCTIONS = {"jit": "jaxpr", "pjit": "jaxpr", "custom_jvp_call": "call_jaxpr"}
"""The parameter with the function, of primitives that call one."""


def inlined(closed: ClosedJaxpr, primitives: Container[str]) -> ClosedJaxpr:
    """The jaxpr with the equations of functions in the place of their calls, for functions of ``primitives`` alone: JAX
    writes ``where`` and ``clip`` as calls.
    """
    equations: list[JaxprEqn] = []
    outer: dict[Any, Any] = {}  # Any: JAX types neither variables nor their values.

    def add(old: JaxprEqn, same: dict[Any, Any], call: JaxprEqn | None) -> None:
        atoms = [a if isinstance(a, Literal) else same.get(a, a) for a in old.invars]
        if _calls_only(old, primitives):
            function = old.params[_FUNCTIONS[old.primitive.name]].jaxpr
            own = dict(zip(function.invars, atoms, strict=True))
            for equation in function.eqns:
                add(equation, own, call or old)
            ends = [v if isinstance(v, Literal) else own[v] for v in function.outvars]
            same.update(zip(old.outvars, ends, strict=True))
        elif call is None:
            equations.append(old if atoms == old.invars else old.replace(invars=atoms))
        else:
            fresh = [Var(v.aval) for v in old.outvars]  # A function may be called several times.
            same.update(zip(old.outvars, fresh, strict=True))
            equations.append(old.replace(invars=atoms, outvars=fresh, source_info=call.source_info))

    for equation in closed.jaxpr.eqns:
        add(equation, outer, None)
    ends = [v if isinstance(v, Literal) else outer.get(v, v) for v in closed.jaxpr.outvars]
    # What a function gives besides its results reads its arguments, but nothing needs it.
    return pruned(ClosedJaxpr(closed.jaxpr.replace(eqns=equations, outvars=ends), closed.consts))


def _calls_only(equation: JaxprEqn, primitives: Container[str]) -> bool:
    """Whether an equation calls a function of these primitives alone."""
    key = _FUNCTIONS.get(equation.primitive.name)
    if key is None or equation.params[key].consts:
        return False
    inside = equation.params[key].jaxpr.eqns
    return all(e.primitive.name in primitives or _calls_only(e, primitives) for e in inside)


def sub_jaxpr(
    whole: ClosedJaxpr, invars: Sequence[Var], equations: Sequence[JaxprEqn], outvars: Sequence[Any]
) -> ClosedJaxpr:
    """Some equations of a jaxpr as one of their own: arguments ``invars``, results ``outvars``."""
    read = {v for e in equations for v in e.invars if not isinstance(v, Literal)}
    read |= {v for v in outvars if not isinstance(v, Literal)}
    pairs = zip(whole.jaxpr.constvars, whole.consts, strict=True)
    consts = [(variable, value) for variable, value in pairs if variable in read]
    effects = frozenset().union(*(e.effects for e in equations))
    info = DebugInfo("podrun", "piece", ("",) * len(invars), ("",) * len(outvars))
    jaxpr = Jaxpr([v for v, _ in consts], list(invars), list(outvars), list(equations), effects, info)
    return pruned(ClosedJaxpr(jaxpr, [value for _, value in consts]))


def inner_jaxprs(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs that an equation runs: a loop's body, a branch's sides, a called function."""
    for value in equation.params.values():
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item


def read_arguments(jaxpr: Jaxpr) -> set[Any]:
    """The variables that some equation or result reads."""
    read = {v for equation in jaxpr.eqns for v in equation.invars if not isinstance(v, Literal)}
    return read | {v for v in jaxpr.outvars if not isinstance(v, Literal)}


def name_scopes(equation: JaxprEqn) -> tuple[str, ...]:
    """The name scopes of an equation from the outside in, with ``jvp(...)`` and ``transpose(...)`` left on."""
    return tuple(part for part in str(equation.source_info.name_stack).split("/") if part)


def abstract(spec: TensorSpec, *leading: int) -> jax.ShapeDtypeStruct:
    """The abstract value of a tensor with extra leading axes."""
    return buffer((*leading, *spec.shape), spec.dtype)


def buffer(shape: tuple[int, ...], dtype: str) -> jax.ShapeDtypeStruct:
    """The abstract value of a buffer; ``dtype`` by name."""
    return jax.ShapeDtypeStruct(shape, numpy_dtype(dtype))  # type: ignore[no-untyped-call]
