"""`lower_graph`: a graph as one JAX function of (parameters, inputs, key), with the specs of all its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler.program import tap
from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import TensorSpec
from podrun.core.names import in_float32, library_errors_named
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.graph import Node, OperatorGraph, prune, reads
from podrun.runtime.operators import Dialect, OperatorTable
from podrun.runtime.traced_tensor import TooWide, TracedTensor, device_dtype, misfit, to_device
from podrun.runtime.tracing import Environment, TraceSession, run_graph
from podrun.runtime.widening import widened
from podrun.runtime.words import NEUTRAL, Words


@dataclass(frozen=True, slots=True)
class LoweringOptions:
    """How a graph is traced.

    ``x64``: compute 64-bit types as such; trace and run `Lowered.forward` inside ``jax.enable_x64(True)`` then.
    ``casting`` False refuses 64-bit integers instead of narrowing them, with ``casting_hint``. ``replicas``: of the
    whole program, for collectives. ``grouped``: trace a convolution in groups as one, for a library that computes it.
    ``dialect``: hold the operators that an SDK has to what it takes, and let them mean what they mean there.
    """

    training: bool = False
    x64: bool = False
    casting: bool = True
    casting_hint: str = ""
    replicas: int = 1
    grouped: bool = False
    dialect: Dialect | None = None
    words: Words = NEUTRAL

    def session(self, operators: OperatorTable, tap: Callable[[str, Any], Any] | None = None) -> TraceSession:
        """The state of a new trace."""
        return TraceSession(
            operators,
            self.training,
            self.x64,
            replicas=self.replicas,
            grouped=self.grouped,
            dialect=self.dialect,
            tap=tap,
        )


@dataclass(frozen=True, slots=True)
class Lowered:
    """A model ready for the compiler. `forward` is a `podrun.compiler.program.Forward`.

    ``inputs`` and ``parameters`` are the arguments of `forward`, with device types (inputs that nothing needs are left
    out); ``initial`` holds the parameters' values from the model. Initializers that decide shapes are baked in: they
    are in ``constants``, not in ``parameters``.

    ``returns`` names the results of `forward`, ``outputs`` those of them that are tensors (not sequences), ``tensors``
    every tensor of the main graph (pruned to what the outputs need), parameters and inputs among them. ``specialised``
    are inputs whose given values were baked in.

    ``state_updates`` names, for each parameter that the forward pass itself replaces, the tensor that replaces it.
    """

    graph: OperatorGraph
    operators: OperatorTable
    options: LoweringOptions
    inputs: Mapping[str, TensorSpec]
    parameters: Mapping[str, TensorSpec]
    initial: Mapping[str, np.ndarray]
    constants: Mapping[str, Any]
    outputs: Mapping[str, TensorSpec]
    returns: tuple[str, ...]
    tensors: Mapping[str, TensorSpec]
    uses_random: bool
    specialised: frozenset[str] = frozenset()
    state_updates: Mapping[str, str] = field(default_factory=dict)
    wide: tuple[Node, ...] = ()
    """The operators that also run in float32, so that a loss can be differentiated."""

    def forward(
        self, parameters: Mapping[str, Any], inputs: Mapping[str, Any], key: jax.Array
    ) -> dict[str, Any]:
        """One micro-batch on one replica: the tensors in ``returns``.

        Pure and traceable. Every input and every operator's output goes through `podrun.compiler.program.tap`, so
        gradients of all of them can be anchored.
        """
        session = self.options.session(self.operators, _tap)
        environment = _environment(self.constants, parameters, inputs, self.options.x64)
        run_graph(self.graph, environment, session, lambda: key, at_once=True)
        values = {name: environment[name].traced for name in self.returns}
        wide = widened(self.wide, environment, session, lambda: key)
        return values | {in_float32(name): value for name, value in wide.items()}


@library_errors_named("Reading the model")
def lower_graph(
    graph: OperatorGraph,
    operators: OperatorTable,
    options: LoweringOptions = LoweringOptions(),
    *,
    outputs: Sequence[str] | None = None,
    input_shapes: Mapping[str, tuple[int, ...]] | None = None,
    input_values: Mapping[str, Any] | None = None,
) -> Lowered:
    """Trace a graph abstractly, which checks it and finds every shape and type.

    ``outputs``: names of tensors to return (default: the graph's outputs); nodes that they do not need are left out.
    ``input_shapes``: shapes of inputs, overriding the model's. ``input_values``: values of inputs that may be baked in
    if they decide shapes (also gives their shapes and types).

    Raises `UnimplementedError` for an operator that is not there, `UnsupportedError` for what is refused by intent
    (strings, dynamic shapes, DOUBLE), `UsageError` for a model that cannot be right; all name the node.
    """
    wanted = tuple(outputs) if outputs is not None else graph.outputs
    graph = prune(graph, wanted)
    values = dict(input_values or {})
    specs = _input_specs(graph, input_shapes or {}, values, options)
    initial_values = _initial_values(graph, options)
    session, tensors, baked = _settled(
        lambda: options.session(operators), graph, specs, initial_values, values
    )
    needed = {*wanted, *(i for node in graph.nodes for i in reads(node))}
    x64 = options.x64
    parameters = {
        n: _spec(n, v) for n, v in initial_values.items() if n not in baked and not misfit(v, n, x64)
    }
    return Lowered(
        graph=graph,
        operators=operators,
        options=options,
        inputs={
            n: s for n, s in specs.items() if n not in baked and n in needed and isinstance(s, TensorSpec)
        },
        parameters=parameters,
        initial={n: initial_values[n] for n in parameters},
        constants={n: graph.initializers.get(n, values.get(n)) for n in baked},
        outputs={n: tensors[n] for n in wanted if n in tensors},
        returns=wanted,
        tensors=tensors,
        uses_random=session.uses_random,
        specialised=frozenset(baked & values.keys()),
        state_updates={p: t for p, t in session.state_updates.items() if p in parameters},
    )


def _spec(name: str, value: Any) -> TensorSpec:
    return TensorSpec(name, np.dtype(value.dtype).name, tuple(int(d) for d in value.shape))


def _cast_checked(name: str, dtype: np.dtype[Any], options: LoweringOptions) -> np.dtype[Any]:
    try:
        narrowed = device_dtype(dtype, options.x64)
    except UnsupportedError as error:
        raise UnsupportedError(f"tensor '{name}': {error}") from None
    if narrowed != dtype and not options.casting:
        raise UnsupportedError(
            f"tensor '{name}' has type {dtype.name.upper()}, which is not a device type",
            hint=f"{options.casting_hint} lets it become {narrowed.name.upper()}"
            if options.casting_hint
            else "",
        )
    return narrowed


def _input_specs(
    graph: OperatorGraph,
    shapes: Mapping[str, tuple[int, ...]],
    values: Mapping[str, Any],
    options: LoweringOptions,
) -> dict[str, Any]:
    """Specs of the graph's inputs. Sequences and optionals, which are only given as values, have the values'
    structure.
    """
    specs: dict[str, Any] = {}
    for name in graph.inputs:
        kind = graph.types[name]
        if name in values:
            value = values[name]
            if _holds_strings(value):
                raise UnsupportedError(f"input '{name}' holds strings, which are not computed on IPUs")
            specs[name] = (
                TensorSpec(name, _cast_checked(name, value.dtype, options).name, value.shape)
                if isinstance(value, np.ndarray)
                else value
            )
            continue
        if kind.kind != "tensor" or kind.dtype is None:
            raise UnsupportedError(f"input '{name}' is not a tensor ({kind.kind}); IPU programs take tensors")
        if kind.dtype.kind in "OUS":
            raise UnsupportedError(f"input '{name}' holds strings, which are not computed on IPUs")
        shape = shapes.get(name, kind.shape)
        if shape is None or any(d is None for d in shape):
            what = f"unknown dimensions {', '.join(kind.symbols)}" if kind.symbols else "no shape"
            raise UsageError(
                f"input '{name}' has {what}",
                hint=options.words.input_shape,
            )
        dtype = _cast_checked(name, kind.dtype, options)
        specs[name] = TensorSpec(name, dtype.name, tuple(int(d) for d in shape if d is not None))
    return specs


def _holds_strings(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(_holds_strings(v) for v in value)
    return value is not None and value.dtype.kind in "OUS"


def _initial_values(graph: OperatorGraph, options: LoweringOptions) -> dict[str, np.ndarray]:
    """Initializers in device types. Values that do not fit stay unchanged, because they may only decide shapes."""
    initial = {}
    for name, value in graph.initializers.items():
        if value.dtype.kind in "OUS":
            raise UnsupportedError(f"initializer '{name}' holds strings, which are not computed on IPUs")
        if value.dtype.kind in "iu":
            _cast_checked(name, value.dtype, options)
        try:
            initial[name] = to_device(value, name, options.x64)
        except UnsupportedError:
            initial[name] = value
    return initial


def _environment(
    constants: Mapping[str, Any], parameters: Mapping[str, Any], inputs: Mapping[str, Any], x64: bool
) -> Environment:
    environment: Environment = {n: TracedTensor(n, x64, known=v) for n, v in constants.items()}
    for name, value in (*parameters.items(), *inputs.items()):
        if name not in environment:
            array = jnp.asarray(value) if isinstance(value, np.ndarray) else value
            environment[name] = TracedTensor(name, x64, traced=_tap(name, array) if name in inputs else array)
    return environment


def _tap(name: str, value: object) -> Any:
    """`tap` for arrays; sequences and empty optionals have no gradients and pass unchanged."""
    return tap(name, value) if isinstance(value, jax.Array) else value


def _settled(
    fresh: Callable[[], TraceSession],
    graph: OperatorGraph,
    specs: Mapping[str, Any],
    initial: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
) -> tuple[TraceSession, dict[str, TensorSpec], frozenset[str]]:
    """Trace until everything that decides shapes is baked in. Returns the last trace's session and specs, and the
    baked-in values.
    """
    baked: frozenset[str] = frozenset()
    while True:
        session = fresh()
        with jax.enable_x64(session.x64):
            tensors = _discover(session, graph, specs, initial, values, baked)
        if session.demanded <= baked:
            return session, tensors, baked
        baked |= session.demanded


def _discover(
    session: TraceSession,
    graph: OperatorGraph,
    specs: Mapping[str, Any],
    initial: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    baked: frozenset[str],
) -> dict[str, TensorSpec]:
    """Trace abstractly, treating as known whatever can be known; returns every tensor's spec. The session notes the
    demanded values.
    """
    x64 = session.x64

    def probe(arrays: Mapping[str, Any], key: jax.Array) -> dict[str, Any]:
        session.demanded.clear()
        environment: Environment = {}
        for name in (*specs, *graph.initializers):
            value = values.get(name) if name in specs else graph.initializers[name]
            if name in baked:
                environment[name] = TracedTensor(name, x64, known=value)
            elif value is not None and not isinstance(value, (tuple, list)):
                traced = arrays.get(name)
                if traced is None:
                    traced = TooWide(str(misfit(value, name, x64)), value.shape, value.dtype)
                environment[name] = TracedTensor(name, x64, traced, known=value, origins=frozenset((name,)))
            else:
                environment[name] = TracedTensor(name, x64, arrays.get(name))
        run_graph(graph, environment, session, lambda: key)
        results = {n: (t.known if t.at_hand else t.traced) for n, t in environment.items()}
        return {n: v for n, v in results.items() if not isinstance(v, TooWide)}

    arrays = {
        n: _abstract(s.shape, s.dtype) if isinstance(s, TensorSpec) else s
        for n, s in specs.items()
        if n not in baked
    }
    fitting = {n: v for n, v in initial.items() if n not in baked and not misfit(v, n, x64)}
    arrays.update({n: _abstract(v.shape, v.dtype) for n, v in fitting.items()})
    shapes = jax.eval_shape(probe, arrays, jax.eval_shape(lambda: jax.random.key(0)))
    discovered = {n: _spec(n, s) for n, s in shapes.items() if hasattr(s, "dtype")}
    _check_sizes(discovered)
    return discovered


def _abstract(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)  # type: ignore[no-untyped-call]


MOST_TENSOR_BYTES = 2**38
"""Most bytes of a tensor: more than all memory of an IPU-M2000 (its streaming memory has at most 256 GB)."""


def _check_sizes(specs: Mapping[str, TensorSpec]) -> None:
    for spec in specs.values():
        if spec.nbytes > MOST_TENSOR_BYTES:
            raise UsageError(
                f"tensor '{spec.name}' would have {spec.nbytes / 2**40:.3g} TiB (shape {list(spec.shape)}); "
                f"no machine holds that"
            )
