"""The few things podrun needs of JAX that have no public name, in one place so that an upgrade knows where
to look.

Checked against the JAX version in ``constraints.txt``; ``tests/compiler/test_jax_internals.py`` says what
each must do.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import jax
from jax._src import config, source_info_util
from jax._src.export import _export
from jax._src.interpreters import mlir
from jax._src.lib import _jax  # type: ignore[attr-defined]
from jax._src.lib.mlir import passmanager  # type: ignore[attr-defined]
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval

_own = threading.local()
_make_context = mlir.make_ir_context


def _context_of_thread() -> Any:
    shared = getattr(_own, "context", None)
    return _make_context() if shared is None else shared


mlir.make_ir_context = _context_of_thread


@contextmanager
def one_context() -> Iterator[None]:
    """What this thread lowers and exports in here shares one MLIR context.

    JAX makes one, with all dialects, for each lowering and export: three for a piece, a quarter of the time that
    compiling a small program takes. What is exported is the same to the byte.
    """
    before = getattr(_own, "context", None)
    _own.context = before or _make_context()
    try:
        yield
    finally:
        _own.context = before


def plain_errors() -> AbstractContextManager[None]:
    """Errors raised inside a trace come out as they are, without JAX's note about its own frames."""
    context: AbstractContextManager[None] = config.traceback_filtering("off")
    return context


def bind(equation: JaxprEqn, operands: Sequence[Any]) -> Any:
    """What the equation's primitive makes of the operands."""
    parameters = equation.primitive.get_bind_params(equation.params)  # type: ignore[no-untyped-call]
    return equation.primitive.bind(*operands, **parameters)  # type: ignore[no-untyped-call]


def evaluate(
    jaxpr: Jaxpr,
    consts: Sequence[Any],
    arguments: Sequence[Any],
    taps: Mapping[Var, Any] | None = None,
    apply: Callable[[JaxprEqn, Sequence[Any]], Any] = bind,
) -> list[Any]:
    """Evaluate a jaxpr in its own name scopes, as ``jax.core.eval_jaxpr`` does.

    Where a variable is in ``taps``, its consumers read what the tap, a function, makes of its value.
    ``apply(equation, operands)`` gives an equation's result, a list of them if its primitive has several.
    """
    taps = taps or {}
    if not taps and apply is bind:
        return list(jax.core.eval_jaxpr(jaxpr, consts, *arguments))
    environment: dict[Var, Any] = {}

    def write(variable: Var, value: Any) -> None:
        environment[variable] = taps[variable](value) if variable in taps else value

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else environment[atom]

    for variable, value in zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *arguments), strict=True):
        write(variable, value)
    for equation in jaxpr.eqns:
        stack = source_info_util.current_name_stack() + equation.source_info.name_stack
        with (
            source_info_util.user_context(equation.source_info.traceback, name_stack=stack),
            equation.ctx.manager,
        ):
            answer = apply(equation, [read(atom) for atom in equation.invars])
        results = answer if equation.primitive.multiple_results else [answer]
        for variable, value in zip(equation.outvars, results, strict=True):
            write(variable, value)
    return [read(atom) for atom in jaxpr.outvars]


def pruned(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr without equations that no result needs; arguments stay as they are."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


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
    """The jaxprs that an equation runs: a loop's body, a branch's sides, a call's function."""
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
    """The name scopes of an equation from the outside in, with ``jvp(...)`` and ``transpose(...)`` left
    on."""
    return tuple(part for part in str(equation.source_info.name_stack).split("/") if part)


def without_locations(exported: jax.export.Exported) -> jax.export.Exported:
    """The same StableHLO without source locations: no path, no line, no argument name of the traced function.

    So the bytes depend on what is computed and on nothing else.
    """
    with mlir.make_ir_context():
        module = _jax.mlir.deserialize_portable_artifact(exported.mlir_module_serialized)
        passmanager.PassManager.parse("builtin.module(strip-debuginfo)").run(module.operation)
        data = _export._module_to_bytecode(module)
    return dataclasses.replace(exported, mlir_module_serialized=data)
