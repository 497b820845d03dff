"""From JAX's jaxpr to the flat graph that the cost model prices: the one place that knows JAX's data structures.

Calls (jit, custom derivatives, remat, named scopes) are inlined; loops keep their body as a flat list of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from podrun.core.scopes import without_cuts
from podrun.costmodel.flat_graph import Equation, FlatJaxpr, FlatTensor, needed
from podrun.costmodel.operators import rewrite

_LOOPS = {"scan": ("jaxpr",), "while": ("cond_jaxpr", "body_jaxpr")}
_BODY_KEYS = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def flatten(closed: Any) -> FlatJaxpr:
    """Flatten a ``jax.core.ClosedJaxpr``: operators of the front end in the library's form, and only what is needed."""
    flat = rewrite(_Flattener().run(closed))
    return replace(flat, equations=needed(flat.equations, flat.results))


def tensor_of(aval: Any) -> FlatTensor:
    """The FlatTensor for a JAX abstract value; keys and tokens become 32-bit words."""
    shape = tuple(int(d) for d in getattr(aval, "shape", ()))
    name = str(getattr(aval, "dtype", "uint32"))
    if name.startswith("key<"):
        return FlatTensor((*shape, 2), "uint32")
    return FlatTensor(shape, name)


class _Flattener:
    """Carries the numbering of values while calls are inlined."""

    def __init__(self) -> None:
        self.flat = FlatJaxpr()
        self.next = 0

    def run(self, closed: Any) -> FlatJaxpr:
        jaxpr = closed.jaxpr
        env: dict[Any, int | None] = {}
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
    def _read(var: Any, env: dict[Any, int | None]) -> int | None:
        return None if hasattr(var, "val") else env.get(var)

    def _walk(self, jaxpr: Any, env: dict[Any, int | None], prefix: str) -> None:
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
    def _bodies(eqn: Any) -> list[Any]:
        if eqn.primitive.name == "cond":
            return list(eqn.params["branches"])
        return [eqn.params[key] for key in _LOOPS.get(eqn.primitive.name, ())]

    @staticmethod
    def _called(eqn: Any) -> Any:
        """The jaxpr that a call-like equation runs exactly once, or None."""
        if eqn.primitive.name in _LOOPS or eqn.primitive.name == "cond":
            return None
        for key in _BODY_KEYS:
            inner = eqn.params.get(key)
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                return inner
        return None

    def _inline(self, eqn: Any, inner: Any, env: dict[Any, int | None], scope: str) -> None:
        jaxpr = getattr(inner, "jaxpr", inner)
        local: dict[Any, int | None] = {}
        for var in jaxpr.constvars:
            local[var] = self._new(tensor_of(var.aval))
            self.flat.constants.append(self.next - 1)
        arguments = eqn.invars[len(eqn.invars) - len(jaxpr.invars) :]
        for var, outer in zip(jaxpr.invars, arguments, strict=True):
            local[var] = self._read(outer, env)
        self._walk(jaxpr, local, scope)
        for var, outer in zip(eqn.outvars, jaxpr.outvars, strict=True):
            env[var] = self._read(outer, local)
