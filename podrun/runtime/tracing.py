"""Runs a graph's operators inside a JAX trace, and keeps the values that shapes depend on known beside it.

When an operator asks for the value of a tensor (`podrun.runtime.traced_tensor`), the inputs of that value must be fixed
at compile time, so the caller bakes them in and traces again.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.core.errors import InputMismatch, InternalError, PodrunError, UnsupportedError, UsageError
from podrun.core.names import LOCAL, operator_scopes, place_scopes
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device_types import TooWide
from podrun.runtime.graph import Node, OperatorGraph, captured
from podrun.runtime.operators import Dialect, Operator, OperatorTable
from podrun.runtime.traced_tensor import NO_ORIGINS, TracedTensor, lift


@dataclass(slots=True)
class TraceSession:
    """The state of one trace, shared over all graphs: options, and notes of what the operators requested."""

    operators: OperatorTable
    training: bool
    x64: bool
    demanded: set[str] = field(default_factory=set)
    """Origins (initializers, inputs) whose value an operator asked for."""
    uses_random: bool = False
    state_updates: dict[str, str] = field(default_factory=dict)
    """Parameter -> tensor that replaces it after each micro-batch (running statistics)."""
    replicas: int = 1
    """Replicas of the whole program."""
    grouped: bool = False
    """True iff convolutions in groups are traced as one."""
    shapes_only: bool = False
    """True iff only types and shapes of results are read, and the notes."""
    dialect: Dialect | None = None
    """Set iff operators are limited to what a front end's SDK accepts, and have its meaning."""
    tap: Callable[[str, Any], Any] | None = None
    """Called on every tensor of the main graph as it is made; returns the tensor that its consumers read."""
    key: Callable[[], Any] | None = None
    """Gives the random key of the graph that is being run, or of the one around it if that draws by names."""


Environment = dict[str, TracedTensor]


@dataclass(slots=True)
class NodeContext:
    """`podrun.runtime.operators.Context` for one node of a running graph."""

    session: TraceSession
    node: Node
    environment: Environment
    tensors: tuple[TracedTensor | None, ...]
    random_key: Any
    xp: Any

    @property
    def training(self) -> bool:
        return self.session.training

    @property
    def x64(self) -> bool:
        return self.session.x64 or self.xp is np

    @property
    def replicas(self) -> int:
        return self.session.replicas

    @property
    def grouped(self) -> bool:
        return self.session.grouped

    @property
    def shapes_only(self) -> bool:
        return self.session.shapes_only

    @property
    def sdk(self) -> Any:
        dialect = self.session.dialect
        return dialect if dialect is not None and dialect.has(self.node) else None

    def key(self) -> Any:
        self.session.uses_random = True
        return self.random_key()

    def known(self, index: int) -> np.ndarray | None:
        tensor = self.tensors[index] if index < len(self.tensors) else None
        return np.asarray(tensor.known) if tensor is not None and tensor.at_hand else None

    def constant(self, index: int) -> np.ndarray:
        tensor = self.tensors[index] if index < len(self.tensors) else None
        if tensor is None:
            raise UsageError(f"{self.node.describe()} lacks its input {index}")
        if not tensor.is_known:
            said = None if self.sdk is None else self.sdk.unknown_value(self.node, index)
            if said is not None:
                raise said
            raise UnsupportedError(
                f"{self.node.describe()} needs the value of its input {index}, '{tensor.name}', while compiling "
                "(it decides a shape), but it is computed from data that change from run to run",
                hint="Make it a constant or an initializer; programs on IPUs have static shapes.",
            )
        self.session.demanded |= tensor.origins
        return np.asarray(tensor.known)

    def static(self, value: object) -> np.ndarray | None:
        if isinstance(value, jax.core.Tracer) or not isinstance(value, (np.ndarray, jax.Array)):
            return None
        return np.asarray(value)

    def state_update(self, index: int, output: int) -> None:
        """Input ``index``, if it is a parameter, is replaced by output ``output`` after each micro-batch."""
        tensor = self.tensors[index]
        if tensor is not None and output < len(self.node.outputs) and self.node.outputs[output]:
            self.session.state_updates[self.node.inputs[index]] = self.node.outputs[output]

    def run(
        self,
        graph: OperatorGraph,
        inputs: Sequence[Any],
        iteration: int | jax.Array | None = None,
        *,
        by_name: bool = False,
    ) -> tuple[Any, ...]:
        if len(inputs) != len(graph.inputs):
            raise UsageError(
                f"{self.node.describe()} gives {len(inputs)} inputs to graph '{graph.name}', which has "
                f"{len(graph.inputs)}"
            )
        inner = dict(self.environment)
        for name, value in zip(graph.inputs, inputs, strict=True):
            inner[name] = _as_tensor(name, value, self.session.x64)
        add_constants(graph, inner, self.session.x64)

        def key() -> Any:
            base = self.random_key()
            return base if iteration is None else jax.random.fold_in(base, iteration)

        tap, self.session.tap = self.session.tap, None
        try:
            run_graph(graph, inner, self.session, key, by_name=by_name)
        finally:
            self.session.tap = tap
        missing = [o for o in graph.outputs if o not in inner]
        if missing:
            raise UsageError(
                f"graph '{graph.name}' of {self.node.describe()} never makes its output '{missing[0]}'"
            )
        return tuple(_value(inner[o]) for o in graph.outputs)


def _value(tensor: TracedTensor) -> Any:
    """A tensor's value for an operator that ran a subgraph: NumPy if it is a constant, else traced."""
    return tensor.known if tensor.at_hand else tensor.traced


def _as_tensor(name: str, value: object, x64: bool) -> TracedTensor:
    if isinstance(value, TracedTensor):
        return value
    if isinstance(value, TooWide):
        raise UnsupportedError(value.reason)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return TracedTensor(name, x64, known=value)
    return TracedTensor(name, x64, traced=value)


def add_constants(graph: OperatorGraph, environment: Environment, x64: bool) -> None:
    """Put a subgraph's initializers into its environment: they are constants."""
    for name, value in graph.initializers.items():
        environment[name] = TracedTensor(name, x64, known=value)


def run_graph(
    graph: OperatorGraph,
    environment: Environment,
    session: TraceSession,
    key: Callable[[], Any],
    *,
    at_once: bool = False,
    by_name: bool = False,
) -> None:
    """Run all nodes of a graph in order; their outputs enter ``environment``. ``key()`` gives the graph's random key;
    ``at_once``: the keys of its random nodes are made together, which compiles faster; ``by_name``: a node's key is
    that of its label in the graph around, so that copies of a node in several such graphs draw the same.
    """
    random: list[int] = []
    if at_once:
        random = [i for i, node in enumerate(graph.nodes) if session.operators.lookup(node).random]
    keys = _folded_together(key(), random) if len(random) > 1 else {}
    around = session.key
    session.key = base = around if by_name and around is not None else key
    try:
        for index, node in enumerate(graph.nodes):
            number = np.uint32(zlib.crc32(node.label.encode())) if by_name else index
            own = keys.get(index) or functools.partial(_folded, base, number)
            trace_node(node, environment, session, own)
    finally:
        session.key = around


def _folded_together(key: jax.Array, indices: Sequence[int]) -> dict[int, Callable[[], Any]]:
    """`_folded` for each of the indices: rows of one table."""
    with jax.named_scope(LOCAL):
        table = jax.vmap(jax.random.fold_in, (None, 0))(key, np.asarray(indices, np.uint32))

    def row(place: int) -> Any:
        with jax.named_scope(LOCAL):
            return table[place]

    return {index: functools.partial(row, place) for place, index in enumerate(indices)}


def _folded(key: Callable[[], Any], index: int | np.uint32) -> Any:
    return jax.random.fold_in(key(), index)


def trace_node(node: Node, environment: Environment, session: TraceSession, key: Callable[[], Any]) -> None:
    """Run one node under the scopes of its name and its place: fold it if all inputs are constants, else trace it."""
    operator = session.operators.lookup(node)
    tensors = tuple(_input(node, name, environment) for name in node.inputs)
    there = [t for t in tensors if t is not None]
    fold = operator.folds and all(t.at_hand for t in there)
    if session.dialect is not None and session.dialect.has(node):
        session.dialect.check(node, [None if t is None else t.form for t in tensors])
    with contextlib.ExitStack() as scopes:
        for scope in _scopes(node):
            scopes.enter_context(jax.named_scope(scope))
        xp = np if fold else jnp
        context = NodeContext(session, node, environment, tensors, key, xp)
        results = _call(
            operator, context, [None if t is None else (t.known if fold else t.operand) for t in tensors]
        )
    if len(results) < len([o for o in node.outputs if o]):
        raise UsageError(f"{node.describe()} asks for {len(node.outputs)} outputs, but gets {len(results)}")
    outer = {name: environment[name] for name in captured(node) if name in environment}
    needed = [*there, *outer.values()]
    origins = NO_ORIGINS.union(*(t.origins for t in needed))
    knowable = all(t.is_known for t in needed) and not operator.random
    for position, (name, result) in enumerate(zip(node.outputs, results, strict=False)):
        if not name:
            continue
        tensor = _as_tensor(name, result, session.x64)
        if not tensor.at_hand:
            work = None
            if knowable and not tensor.is_known:
                work = _later(operator, node, outer, session, tensors, position)
            if work is not None or session.tap is not None:
                value = tensor.traced if session.tap is None else session.tap(name, tensor.traced)
                tensor = TracedTensor(name, session.x64, traced=value, work=work, origins=origins)
        environment[name] = tensor


def _input(node: Node, name: str, environment: Mapping[str, TracedTensor]) -> TracedTensor | None:
    if not name:
        return None
    if name not in environment:
        raise UsageError(f"{node.describe()} reads tensor '{name}', which nothing makes")
    return environment[name]


def _scopes(node: Node) -> tuple[str, ...]:
    places = place_scopes(node.place.ipu, node.place.stage, node.place.cut)
    return (*places, *operator_scopes(node.label, node.kind))


def _call(operator: Operator, context: NodeContext, values: Sequence[Any]) -> tuple[Any, ...]:
    """Call an operator's function; its or JAX's complaint about the inputs becomes an error that names the node."""
    node = context.node
    try:
        results = operator.function(context, node, *values)
    except PodrunError:
        raise
    except jax.errors.JAXTypeError as error:
        raise UnsupportedError(
            f"{node.describe()} depends on data in a way that has no static shape: {error}"
        ) from error
    except (TypeError, ValueError, IndexError, ArithmeticError, AttributeError) as error:
        wide = next((v for v in values if isinstance(v, TooWide)), None)
        if wide is not None:
            raise UnsupportedError(f"{wide.reason}; {node.describe()} computes with it") from error
        if isinstance(error, InputMismatch):
            raise UsageError(f"{node.describe()} cannot take {_forms(values)}: {error}") from error
        raise UsageError(
            f"{node.describe()} cannot take {_forms(values)}{_given(node)}: {_misfit(operator, values)}",
            hint=f"Compare them with the operator's definition. What computes it says: "
            f"{str(error).strip().partition(chr(10))[0]}",
        ) from error
    except (KeyError, NotImplementedError) as error:
        missing = (
            f"lacks the attribute {error}" if isinstance(error, KeyError) else f"is not supported: {error}"
        )
        raise UnsupportedError(f"{node.describe()} {missing}") from error
    return results if isinstance(results, tuple) else (results,)


def _forms(values: Sequence[Any]) -> str:
    def form(value: Any) -> str:
        if value is None:
            return "nothing"
        if isinstance(value, tuple):
            return f"a sequence of {len(value)}"
        return f"{np.dtype(value.dtype).name}{list(value.shape)}"

    return ", ".join(form(v) for v in values) or "no inputs"


def _given(node: Node) -> str:
    """The attributes of a node that are numbers, texts or lists of them, for a message."""
    shown = {
        name: value
        for name, value in node.attributes.items()
        if isinstance(value, int | float | str | tuple | list) and not name.startswith("_")
    }
    return f" with {', '.join(f'{n}={v!r}' for n, v in sorted(shown.items()))}" if shown else ""


def _misfit(operator: Operator, values: Sequence[Any]) -> str:
    """What is wrong with a node's inputs, as far as that is known: one that is missing, or how they fit."""
    parameters = list(inspect.signature(operator.function).parameters.values())[2:]
    needed = [p for p in parameters if p.default is p.empty]
    for index, parameter in enumerate(needed):
        if index >= len(values) or (values[index] is None and parameter.kind is not parameter.VAR_POSITIONAL):
            if parameter.kind is parameter.VAR_POSITIONAL and values:
                break
            return f"input {index} is missing"
    if len(values) > len(parameters) and all(p.kind is not p.VAR_POSITIONAL for p in parameters):
        return f"it takes {len(parameters)} inputs"
    return "their shapes, types or number do not fit it"


def _later(
    operator: Operator,
    node: Node,
    captured: Environment,
    session: TraceSession,
    tensors: tuple[TracedTensor | None, ...],
    position: int,
) -> Callable[[], Any]:
    """Work that computes a node's output in NumPy (or, if it does not fold, by JAX outside the trace), 64-bit exact."""

    def work() -> Any:
        values = [None if t is None else t.known for t in tensors]
        inner = TraceSession(session.operators, training=session.training, x64=True)
        known = tuple(None if t is None else TracedTensor(t.name, True, known=t.known) for t in tensors)
        if operator.folds:
            context = NodeContext(inner, node, {}, known, _no_key, np)
            return np.asarray(_call(operator, context, values)[position])
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            outer = {n: TracedTensor(n, True, known=t.known) for n, t in captured.items()}
            context = NodeContext(inner, node, outer, known, _no_key, jnp)
            result = _call(operator, context, [lift(v, node.label, True) for v in values])[position]
            return result if isinstance(result, tuple) or result is None else np.asarray(result)

    return work


def _no_key() -> Any:
    raise InternalError("a random operator was taken for one whose value is known")
