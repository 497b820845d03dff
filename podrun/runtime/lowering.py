"""`lower_graph`: a graph as one JAX function of (parameters, inputs, key), with the specs of all its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core.errors import UnsupportedError, UsageError
from podrun.core.executable import TensorSpec
from podrun.core.names import library_errors_named
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device_types import device_dtype, misfit, spec_of, to_device
from podrun.runtime.environment import import_jax
from podrun.runtime.graph import Node, OperatorGraph, prune, reads
from podrun.runtime.kept_traces import TraceFacts, TraceQuestion, kept_facts
from podrun.runtime.operators import Dialect, OperatorTable
from podrun.runtime.words import NEUTRAL, Words

if TYPE_CHECKING:
    import jax


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

    def meaning(self) -> tuple[object, ...] | None:
        """All of them that decide what a graph computes, as plain values; None if one of them has no plain value."""
        traits = [
            (item.name, getattr(self, item.name)) for item in fields(self) if item.name not in _OF_MESSAGES
        ]
        plain = tuple((n, v if isinstance(v, (bool, int, str)) else repr(v)) for n, v in traits)
        return None if " at 0x" in repr(plain) else plain


_OF_MESSAGES = frozenset(("casting", "casting_hint", "words"))
"""Options that only decide what is refused, and how."""


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
        import_jax()
        from podrun.runtime.discovery import forward_values

        return forward_values(self, parameters, inputs, key)


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
    facts = _facts(graph, operators, options, specs, initial_values, values)
    tensors, baked = facts.tensors, facts.baked
    needed = {*wanted, *(i for node in graph.nodes for i in reads(node))}
    x64 = options.x64
    parameters = {
        n: spec_of(n, v) for n, v in initial_values.items() if n not in baked and not misfit(v, n, x64)
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
        uses_random=facts.uses_random,
        specialised=frozenset(baked & values.keys()),
        state_updates={p: t for p, t in facts.state_updates.items() if p in parameters},
    )


def _facts(
    graph: OperatorGraph,
    operators: OperatorTable,
    options: LoweringOptions,
    specs: Mapping[str, Any],
    initial: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
) -> TraceFacts:
    """What a trace of the graph tells, from an earlier one of an equal graph if there was one."""

    def traced() -> TraceFacts:
        from podrun.device.xla.clients import on_one_thread_device

        import_jax()
        with on_one_thread_device():
            from podrun.runtime.discovery import settled

            return settled(options, operators, graph, specs, initial, values)

    traits = options.meaning()
    if values or options.x64 or traits is None:
        return traced()  # Among others models that are run apart from sessions.
    return kept_facts(TraceQuestion(graph, operators, initial, specs, traits), traced)


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
