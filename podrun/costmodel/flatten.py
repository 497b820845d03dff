"""From JAX's jaxpr to the flat graph that the cost model prices: the one place that knows JAX's data structures.

Calls (jit, custom derivatives, remat, named scopes) are inlined; loops keep their body as a flat list of its own.

**Operators in the library's form.** The trace of an operator is what gives the right bits fast on a CPU: a depthwise
convolution is shifted products, a max-pool a chain of maxima. On tiles it is the library's own vertex. Each run of
equations in the scope of such an operator (see `podrun.onnx_models.lowering`), forward and backward, is replaced by the
few equations that the library's form of it consists of (`operator_forms`); the backward pass keeps of the forward one
the values that the library keeps. A run of unknown shape stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from podrun.core.names import without_cuts
from podrun.costmodel.equations import Equation, FlatJaxpr, FlatTensor, needed
from podrun.costmodel.operator_forms import TEMPLATES
from podrun.costmodel.operator_runs import (
    OperatorRun,
    OperatorScope,
    TracedOperator,
    Unexpected,
    place_of,
    runs_of_operators,
    with_halves,
)

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

VIEWS = frozenset({"reshape", "name", "squeeze", "expand_dims", "broadcast_in_dim"})
"""Equations whose result of a parameter still counts as a parameter."""


def in_library_form(flat: FlatJaxpr) -> FlatJaxpr:
    """``flat`` with its operators in the library's form, and with halves where the library has halves."""
    runs = runs_of_operators(flat.equations)
    if all(place is None for place, _, _ in runs):
        return flat
    flat = free_transposes(with_halves(flat))
    replaced: dict[int, OperatorRun] = {}
    for operator in _operators(flat, runs):
        try:
            TEMPLATES[operator.place.kind](operator)
        except Unexpected:
            continue
        for run in (operator.forward, operator.backward):
            if run is not None:
                replaced[run.first] = run
    equations: list[Equation] = []
    for _, first, end in runs:
        equations += replaced[first].library_form if first in replaced else flat.equations[first:end]
    return replace(flat, equations=equations)


def free_transposes(flat: FlatJaxpr) -> FlatJaxpr:
    """``flat`` with transposes that the library does not do as views: of a parameter, which it lays out as
    the product reads it, and of a product's result, which it writes the other way round.
    """
    parameters = {*flat.arguments, *flat.constants}
    product: dict[int, str] = {}
    equations = []
    for equation in flat.equations:
        place = place_of(equation.scope)
        source = equation.inputs[0] if equation.inputs else None
        if equation.primitive == "dot_general" and place is not None:
            product.update(dict.fromkeys(equation.outputs, place.label))
        elif equation.primitive in VIEWS and source in parameters:
            parameters.update(equation.outputs)
        elif equation.primitive == "transpose" and place is not None and source is not None:
            free = source in parameters or product.get(source) == place.label
            equation = replace(equation, primitive="reshape") if free else equation
        equations.append(equation)
    return replace(flat, equations=equations)


def _operators(
    flat: FlatJaxpr, runs: Sequence[tuple[OperatorScope | None, int, int]]
) -> list[TracedOperator]:
    """Operators with a template, in order, whose forward run is one and whose backward run is at most one."""
    spans: dict[tuple[str, bool], list[tuple[OperatorScope, int, int]]] = {}
    for place, first, end in runs:
        # The zeros at the start of a differentiated loop stand apart from it, and are no work.
        works = any(e.primitive not in VIEWS for e in flat.equations[first:end])
        if place is not None and place.kind in TEMPLATES and works:
            spans.setdefault((place.label, place.backward), []).append((place, first, end))
    owner: dict[int, str] = {}
    readers: dict[int, set[str]] = {}
    for place, first, end in runs:
        for equation in flat.equations[first:end]:
            mine = f"{place.label}|{place.backward}" if place is not None else ""
            for number in equation.inputs:
                if number is not None:
                    readers.setdefault(number, set()).add(mine)
            for number in equation.outputs:
                owner[number] = mine
    results = set(flat.results)
    out = []
    for (label, backward), entries in spans.items():
        backward_entries = spans.get((label, True), [])
        if backward or len(entries) != 1 or len(backward_entries) > 1:
            continue
        pair = [_run(flat, label, entry, readers, results) for entry in (*entries, *backward_entries)]
        out.append(
            TracedOperator(
                entries[0][0], flat.tensors, pair[0], pair[1] if backward_entries else None, flat.equations
            )
        )
    return out


def _run(
    flat: FlatJaxpr,
    label: str,
    span: tuple[OperatorScope, int, int],
    readers: Mapping[int, set[str]],
    results: set[int],
) -> OperatorRun:
    place, first, end = span
    own = {f"{label}|{place.backward}"}
    if not place.backward:
        own.add(f"{label}|True")
    inside = {n for e in flat.equations[first:end] for n in e.outputs}
    reads = dict.fromkeys(
        n for e in flat.equations[first:end] for n in e.inputs if n is not None and n not in inside
    )
    written = [
        n for e in flat.equations[first:end] for n in e.outputs if n in results or readers.get(n, set()) - own
    ]
    return OperatorRun(first, end, list(reads), written, flat.equations[first].scope)


_LOOPS = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr")}
_BODY_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def flatten_jaxpr(closed: ClosedJaxpr) -> FlatJaxpr:
    """Flatten a ``jax.core.ClosedJaxpr``: operators of the front end in the library's form, and only what is needed."""
    flat = in_library_form(_Flattener().run(closed))
    return replace(flat, equations=needed(flat.equations, flat.results))


def tensor_of(aval: object) -> FlatTensor:
    """The FlatTensor for a JAX abstract value; keys and tokens become 32-bit words."""
    shape = tuple(int(d) for d in getattr(aval, "shape", ()))
    name = str(getattr(aval, "dtype", "uint32"))
    if name.startswith("key<"):
        return FlatTensor((*shape, 2), "uint32")
    return FlatTensor(shape, name)


Numbers = dict["Var", int | None]
"""The number of each variable; None for one that is a constant of the text."""


class _Flattener:
    """Carries the numbering of values while calls are inlined."""

    def __init__(self) -> None:
        self.flat = FlatJaxpr()
        self.next = 0

    def run(self, closed: ClosedJaxpr) -> FlatJaxpr:
        jaxpr = closed.jaxpr
        env: Numbers = {}
        for var in jaxpr.constvars:
            env[var] = self._new(tensor_of(var.aval))
            self.flat.constants.append(self.next - 1)
        for var in jaxpr.invars:
            env[var] = self._new(tensor_of(var.aval))
            self.flat.arguments.append(self.next - 1)
        self._walk(jaxpr, env, "")
        for var in jaxpr.outvars:
            self.flat.outputs.append(self._read(var, env))
        self.flat.results += [number for number in self.flat.outputs if number is not None]
        return self.flat

    def _new(self, tensor: FlatTensor) -> int:
        self.flat.tensors[self.next] = tensor
        self.next += 1
        return self.next - 1

    @staticmethod
    def _read(var: Var | Literal, env: Numbers) -> int | None:
        return None if hasattr(var, "val") else env.get(var)

    def _walk(self, jaxpr: Jaxpr, env: Numbers, prefix: str) -> None:
        for eqn in jaxpr.eqns:
            own = without_cuts(str(eqn.source_info.name_stack))
            scope = "/".join(part for part in (prefix, own) if part)
            inner = self._called(eqn)
            if inner is not None:
                self._inline(eqn, inner, env, scope)
                continue
            bodies = tuple(_Flattener().run(body) for body in self._bodies(eqn))
            outputs = []
            for var in eqn.outvars:
                number = self._new(tensor_of(var.aval))
                env[var] = number
                outputs.append(number)
            self.flat.equations.append(
                Equation(
                    eqn.primitive.name,
                    eqn.params,
                    tuple(self._read(var, env) for var in eqn.invars),
                    tuple(outputs),
                    tuple(tensor_of(var.aval) for var in eqn.invars),
                    tuple(self.flat.tensors[n] for n in outputs),
                    scope,
                    bodies,
                )
            )

    @staticmethod
    def _bodies(eqn: JaxprEqn) -> list[ClosedJaxpr]:
        if eqn.primitive.name == "cond":
            return list(eqn.params["branches"])
        return [eqn.params[key] for key in _LOOPS.get(eqn.primitive.name, ())]

    @staticmethod
    def _called(eqn: JaxprEqn) -> ClosedJaxpr | Jaxpr | None:
        """The jaxpr that a call-like equation runs exactly once, or None."""
        if eqn.primitive.name in _LOOPS or eqn.primitive.name == "cond":
            return None
        for key in _BODY_KEYS:
            inner = eqn.params.get(key)
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                return inner
        return None

    def _inline(self, eqn: JaxprEqn, inner: ClosedJaxpr | Jaxpr, env: Numbers, scope: str) -> None:
        jaxpr = cast("Jaxpr", getattr(inner, "jaxpr", inner))
        local: Numbers = {}
        for var in jaxpr.constvars:
            local[var] = self._new(tensor_of(var.aval))
            self.flat.constants.append(self.next - 1)
        arguments = eqn.invars[len(eqn.invars) - len(jaxpr.invars) :]
        for var, outer in zip(jaxpr.invars, arguments, strict=True):
            local[var] = self._read(outer, env)
        self._walk(jaxpr, local, scope)
        for var, outer in zip(eqn.outvars, jaxpr.outvars, strict=True):
            env[var] = self._read(outer, local)
