"""The trace: the program's forward function as a jaxpr for one replica and one micro-batch.

It is made once. Folding and differentiation evaluate this jaxpr under JAX's transformations, and the tile
model reads it; the front end's Python runs no second time.

**Collectives inside loops and branches.** Machines exchange data between Computations, so a collective has to stand
outside of control flow. `written_out` writes out a loop with a collective inside, by iteration; of a branch with
one inside it computes both sides and selects one. All replicas take part in both sides' collectives, whatever their own
condition is (on a real system they must agree). Results equal those of the loop or branch. A loop whose end depends on
data cannot be written out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from podrun.compiler import grid_rounding, jaxprs, stochastic
from podrun.compiler.anchors import Anchor, AnchorKind, unknown_tensor
from podrun.compiler.jaxprs import abstract, buffer
from podrun.compiler.model_collectives import has_exchange
from podrun.compiler.program import Program
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import TensorSpec, numpy_dtype
from podrun.core.quick_dataclass import dataclass
from podrun.device.xla.clients import on_one_thread_device
from podrun.private_apis import jax as private_jax
from podrun.private_apis.jax import plain_errors

MOST_ITERATIONS = 1024
"""A loop with a collective inside is refused beyond this: each iteration is code of its own."""


def written_out(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The jaxpr with every collective in its main line; the same jaxpr if all are there already.

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
        return private_jax.bind_equation(equation, operands)
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


@contextmanager
def fixed_numerics() -> Iterator[None]:
    """Set JAX settings that change the meaning of a trace to fixed values, whatever the host process has set. Constants
    met while tracing are computed by podrun's own client.
    """
    precision = jax.default_matmul_precision("highest")
    with on_one_thread_device(), jax.enable_x64(False), precision, plain_errors():
        yield


@dataclass(frozen=True, slots=True)
class Trace:
    """The forward jaxpr with names for what goes in and comes out.

    Arguments are the parameters, then the inputs, then key data (uint32 ``[2]``); results are ``outputs`` in
    order. Names are in alphabetical order. ``uses_random``: some result, or its rounding, needs the key. ``used``:
    parameters and inputs that some result needs.
    """

    jaxpr: ClosedJaxpr
    parameters: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    uses_random: bool
    used: frozenset[str]
    stochastic: bool = False
    """Halves are rounded stochastically, with bits that follow from the key."""

    def variable(self, name: str) -> Var | None:
        """The jaxpr's variable for an argument or a result; None for a result that is a constant."""
        arguments = (*self.parameters, *self.inputs)
        if name in arguments:
            argument: Var = self.jaxpr.jaxpr.invars[arguments.index(name)]
            return argument
        output = self.jaxpr.jaxpr.outvars[self.outputs.index(name)]
        return output if isinstance(output, Var) else None

    def spec(self, name: str) -> TensorSpec:
        """Name, dtype and shape of a result."""
        aval = self.jaxpr.out_avals[self.outputs.index(name)]
        return TensorSpec(name, str(aval.dtype), tuple(aval.shape))

    def depends(self, result: str, on: str) -> bool:
        """True iff a chain of equations leads from ``on`` to ``result``."""
        start = self.variable(on)
        return start is not None and self.variable(result) in _reached(self.jaxpr.jaxpr, start)


def trace_forward(program: Program, anchors: Sequence[Anchor]) -> Trace:
    """Trace ``program.forward``, pruned to what the loss, the anchors and the state updates need.

    Raises UsageError for names that are no tensors of the program, a loss that is no scalar, a gradient of
    what the loss does not depend on, and a state update of another shape or dtype.
    """
    parameters, inputs = tuple(sorted(program.parameters)), tuple(sorted(program.inputs))
    outputs = _needed(program, anchors)
    both = sorted(set(parameters) & set(inputs))
    if both:
        raise UsageError(
            f"both a parameter and an input are called: {', '.join(both)}", hint="Rename the input."
        )

    def flat(*arguments: jax.Array) -> tuple[Any, ...]:
        *tensors, key_data = arguments
        named = dict(zip((*parameters, *inputs), tensors, strict=True))
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        values = program.forward({n: named[n] for n in parameters}, {n: named[n] for n in inputs}, key)
        for name in outputs:
            if name not in values:
                raise unknown_tensor(name, values)
        return tuple(values[name] for name in outputs)

    specs = [abstract(program.parameters[n].spec) for n in parameters]
    specs += [abstract(program.inputs[n].spec) for n in inputs]
    closed = jax.make_jaxpr(flat)(*specs, buffer((2,), "uint32"))
    pruned = jaxprs.pruned(jaxprs.without_repeated_clips(written_out(closed)))
    needed = jaxprs.read_arguments(pruned.jaxpr)
    *variables, key_variable = pruned.jaxpr.invars
    named = zip((*parameters, *inputs), variables, strict=True)
    used = frozenset(name for name, variable in named if variable in needed)
    rounds = program.rounds_stochastically and stochastic.has_half(pruned.jaxpr)
    draws = key_variable in needed or rounds
    traced = Trace(pruned, parameters, inputs, outputs, uses_random=draws, used=used, stochastic=rounds)
    _check(traced, program, anchors)
    return traced


def evaluate_forward(
    traced: Trace,
    arguments: Sequence[Any],
    deltas: Mapping[str, Any],
    apply: Callable[[JaxprEqn, Sequence[Any]], Any] = private_jax.bind_equation,
) -> dict[str, Any]:
    """The results by name; ``deltas[name]`` is added, for differentiation only, to what consumers of it
    read. ``apply(equation, operands)`` gives an equation's result."""
    taps: dict[Var, partial[Any]] = {}
    for name, delta in deltas.items():
        variable = traced.variable(name)
        if variable is not None:
            taps[variable] = partial(_perturbed, delta)
    closed = traced.jaxpr
    if traced.stochastic:
        state = stochastic.start(arguments[-1])
        wide = {
            variable: _wide_tap(tap, stochastic.state_at(state, _TAPS + index))
            for index, (variable, tap) in enumerate(taps.items())
        }
        results = stochastic.evaluate_rounded(closed, arguments, state, wide, apply)
        return dict(zip(traced.outputs, results, strict=True))
    values = jaxprs.evaluate(closed.jaxpr, closed.consts, arguments, taps, apply)
    return dict(zip(traced.outputs, values, strict=True))


_TAPS = 1 << 24
"""Number at which the places of observed gradients begin, behind those of arguments."""


def _wide_tap(tap: partial[Any], state: jax.Array) -> Callable[[Any], Any]:
    """The tap of a value that is held as float32 on the grid of the halves: its gradient is rounded onto it too."""
    (delta,) = tap.args
    if delta.dtype != grid_rounding.HALF:
        return tap
    return partial(_perturbed, stochastic.entering(delta, state))


def _perturbed(delta: jax.Array, value: jax.Array) -> Any:
    return _perturb(value, delta)


@jax.custom_jvp
def _perturb(value: jax.Array, delta: jax.Array) -> Any:
    """``value`` itself, with the derivative of ``value + delta``: nothing is added, so no bit can change."""
    return value


@_perturb.defjvp
def _perturb_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[0] + tangents[1]


def _needed(program: Program, anchors: Sequence[Anchor]) -> tuple[str, ...]:
    names = set(program.state_updates.values())
    if program.loss is not None:
        names.add(program.loss)
    if program.automatic_scaling is not None:
        names |= set(program.automatic_scaling.tracked) - set(program.parameters) - set(program.inputs)
    kinds = (AnchorKind.VALUE, AnchorKind.VALUE_GRADIENT)
    names |= {a.subject for a in anchors if a.kind in kinds and a.subject not in program.inputs}
    return tuple(sorted(names))


def _reached(jaxpr: Jaxpr, start: Var) -> set[Any]:
    """Every variable that depends on ``start``; an equation's results depend on all it reads."""
    reached: set[Any] = {start}
    for equation in jaxpr.eqns:
        if any(not isinstance(v, Literal) and v in reached for v in equation.invars):
            reached.update(equation.outvars)
    return reached


def _check(traced: Trace, program: Program, anchors: Sequence[Anchor]) -> None:
    if program.loss is not None:
        loss = traced.spec(program.loss)
        if loss.size != 1 or not _is_float(loss.dtype):
            raise UsageError(
                f"the loss {program.loss!r} is {loss.dtype}{list(loss.shape)}; it must be a floating-point scalar",
                hint="Reduce it, with identityloss for one, and cast it if it is of integers.",
            )
        for anchor in anchors:
            if anchor.kind in (AnchorKind.PARAMETER_GRADIENT, AnchorKind.VALUE_GRADIENT):
                _check_gradient(traced, program.loss, anchor.subject)
    for parameter, value in program.state_updates.items():
        old, new = program.parameters[parameter].spec, traced.spec(value)
        if (old.dtype, old.shape) != (new.dtype, new.shape):
            raise UsageError(
                f"{value!r} ({new.dtype}{list(new.shape)}) cannot replace {parameter!r} ({old.dtype}{list(old.shape)})",
                hint="Give the new value the type and shape of the old one.",
            )
        if program.parameters[parameter].trainable:
            raise UsageError(
                f"{parameter!r} is both trained and replaced by {value!r}",
                hint="Replace values of parameters that no optimizer updates only.",
            )


def _check_gradient(traced: Trace, loss: str, subject: str) -> None:
    known = {*traced.parameters, *traced.inputs, *traced.outputs}
    variable = traced.variable(subject)
    if (
        variable is None
        or not _is_float(str(jax.numpy.result_type(variable.aval)))
        or not traced.depends(loss, subject)
    ):
        raise unknown_tensor(subject, known - {subject}, gradient=True)


def _is_float(dtype: str) -> bool:
    return jax.numpy.issubdtype(numpy_dtype(dtype), jax.numpy.floating)
