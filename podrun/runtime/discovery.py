"""The traces behind a lowered graph: one that finds every shape and type, and the function of a micro-batch.

`podrun.runtime.lowering` comes here when it has to trace. What an earlier process was told of an equal graph needs no
trace, and then this module and JAX are not imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from podrun.compiler.program import tap
from podrun.core.errors import UsageError
from podrun.core.executable import TensorSpec
from podrun.core.names import in_float32
from podrun.runtime.device_types import TooWide, misfit, spec_of
from podrun.runtime.graph import OperatorGraph
from podrun.runtime.kept_traces import TraceFacts
from podrun.runtime.traced_tensor import TracedTensor
from podrun.runtime.tracing import Environment, TraceSession, run_graph
from podrun.runtime.widening import widened

if TYPE_CHECKING:
    from podrun.runtime.lowering import Lowered, LoweringOptions
    from podrun.runtime.operators import OperatorTable


def trace_session(
    options: LoweringOptions, operators: OperatorTable, tap: Callable[[str, Any], Any] | None = None
) -> TraceSession:
    """The state of a new trace."""
    return TraceSession(
        operators,
        options.training,
        options.x64,
        replicas=options.replicas,
        grouped=options.grouped,
        dialect=options.dialect,
        tap=tap,
    )


def forward_values(
    lowered: Lowered, parameters: Mapping[str, Any], inputs: Mapping[str, Any], key: jax.Array
) -> dict[str, Any]:
    """See `podrun.runtime.lowering.Lowered.forward`."""
    session = trace_session(lowered.options, lowered.operators, _tap)
    environment = _environment(lowered.constants, parameters, inputs, lowered.options.x64)
    run_graph(lowered.graph, environment, session, lambda: key, at_once=True)
    values = {name: environment[name].traced for name in lowered.returns}
    wide = widened(lowered.wide, environment, session, lambda: key)
    return values | {in_float32(name): value for name, value in wide.items()}


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


def settled(
    options: LoweringOptions,
    operators: OperatorTable,
    graph: OperatorGraph,
    specs: Mapping[str, Any],
    initial: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
) -> TraceFacts:
    """What the last of several traces tells: trace until everything that decides shapes is baked in."""
    baked: frozenset[str] = frozenset()
    while True:
        session = trace_session(options, operators)
        session.shapes_only = True
        with jax.enable_x64(session.x64):
            tensors = _discover(session, graph, specs, initial, values, baked)
        if session.demanded <= baked:
            return TraceFacts(tensors, baked, session.uses_random, session.state_updates)
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
    discovered = {n: spec_of(n, s) for n, s in shapes.items() if hasattr(s, "dtype")}
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
