"""``compile``: a function of a version-1 program as one program on an IPU."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from podrun.tensorflow.capture.program_graphs import (
    FunctionGraph,
    IpuGraph,
    check_host_free,
    host_scope,
    parameter,
    takes,
    trace,
)
from podrun.tensorflow.execution.eager_devices import eager_ordinal
from podrun.tensorflow.execution.launching import launch_program
from podrun.tensorflow.execution.placed_devices import OWN_DEVICE, placed_inside, placed_ordinal
from podrun.tensorflow.execution.program_parts import program_of
from podrun.tensorflow.graph.importer import has_effect

if TYPE_CHECKING:
    from tensorflow.types.experimental import PolymorphicFunction

_NOT_PLACED = (
    "The computation was not placed on an IPU device: use `with ipu.scopes.ipu_scope('/device:IPU:0')`."
)


def compile(computation: Callable[..., Any], inputs: Any = None) -> Any:
    """Trace ``computation`` once, and return its results: a list of tensors, or an operation that runs it. In eager
    mode it runs at once.
    """
    if tf.executing_eagerly():
        return _run_eagerly(computation, inputs)
    outer = tf.compat.v1.get_default_graph()
    # Otherwise variables of a default graph that no scope opened would be eager ones.
    with outer.as_default(), _resource_variables():
        return _compiled(outer, computation, inputs)


def _run_eagerly(computation: Callable[..., object], inputs: object) -> object:
    """The results of a program that runs at once. What ``computation`` itself refuses comes before where it lies."""
    values = [tf.convert_to_tensor(v) for v in tf.nest.flatten([] if inputs is None else inputs)]

    def body(*flat: tf.Tensor) -> object:
        arguments = flat if inputs is None else tf.nest.pack_sequence_as(inputs, flat)
        return computation(*(arguments if isinstance(arguments, (list, tuple)) else [arguments]))

    function = tf.function(body, autograph=False)
    ordinal = eager_ordinal()
    if ordinal is None:
        ordinal = placed_inside(function.get_concrete_function(*values).graph)
    if ordinal is None:
        raise Exception(_NOT_PLACED)  # noqa: TRY002 - the SDK's class and words
    with tf.device(f"/device:IPU:{ordinal}"):
        outcome = function(*values)
    if not _is_flat(outcome):
        return outcome
    return [item for item in tf.nest.flatten(outcome) if item is not None]


def _compiled(outer: tf.Graph, computation: Callable[..., Any], inputs: Any) -> Any:
    values = [tf.convert_to_tensor(v) for v in tf.nest.flatten([] if inputs is None else inputs)]
    ordinal = placed_ordinal(outer)
    graph = IpuGraph("ipu_program", ordinal or 0, automatic=False)
    if ordinal is not None:
        setattr(graph, OWN_DEVICE, f"/device:IPU:{ordinal}")
    parameters = [parameter(graph, v, f"input_{i}") for i, v in enumerate(values)]
    arguments = parameters if inputs is None else tf.nest.pack_sequence_as(inputs, parameters)
    arguments = arguments if isinstance(arguments, (list, tuple)) else [arguments]
    wrong = takes(computation, len(arguments))
    if wrong:
        raise TypeError(f"Supplied computation cannot be called with the specified inputs. {wrong}")
    outcome = trace(graph, computation, list(arguments))
    if _has_estimator_spec(outcome):
        raise ValueError(
            "The output of the computation contains an EstimatorSpec, which cannot leave a compiled program: return "
            "its tensors."
        )
    flat = [r for r in tf.nest.flatten(outcome) if r is not None]
    results = [tf.convert_to_tensor(r) if not isinstance(r, tf.Operation) else r for r in _in(graph, flat)]
    tensors = [r for r in results if isinstance(r, tf.Tensor)]
    effects = [*(r for r in results if isinstance(r, tf.Operation)), *graph.control_outputs]
    effects += [o for o in graph.get_operations() if o.type == "PrintV2" and host_scope(o) is not None]
    if ordinal is None:
        ordinal = placed_inside(graph)
        graph.ordinal = ordinal or 0
    if ordinal is None and any(
        o.type not in ("NoOp", "Placeholder", "Const") for o in graph.get_operations()
    ):
        raise Exception(_NOT_PLACED)  # noqa: TRY002 - the SDK's class and words
    check_host_free(graph)
    if not tensors and not effects:
        return tf.no_op()
    # XLA's cluster is the whole computation: what it writes without returning it is written too.
    effects += [o for o in graph.get_operations() if o not in effects and has_effect(graph, o)]
    program = program_of(graph, tensors, effects, shards=getattr(graph, "shards", 1))
    arguments = [*values, *(t for t, _ in graph.captures)]
    *launched, done = launch_program(program, arguments)
    if not tensors:
        return done
    if not _is_flat(outcome):
        kept = (
            outcome if isinstance(outcome, dict) else [o for o in outcome if not isinstance(o, tf.Operation)]
        )
        return tf.nest.pack_sequence_as(kept, launched)
    return launched


class PlacedFunction:
    """A ``tf.function`` that runs on an IPU wherever it is called, with the attributes of one: in a class, a method."""

    def __init__(self, own: PolymorphicFunction, ipu_device: str) -> None:
        functools.update_wrapper(self, own.python_function)
        self._own, self._ipu_device = own, ipu_device

    def __call__(self, *args: object, **kwargs: object) -> object:
        with tf.device(self._ipu_device):
            return self._own(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> PlacedFunction:
        """The function with its object as the first argument, which is no value of the program."""
        return (
            self if instance is None else PlacedFunction(self._own.__get__(instance, owner), self._ipu_device)
        )

    def __getattr__(self, name: str) -> object:
        if name == "_own":  # Of an object that is being copied.
            raise AttributeError(name)
        return getattr(self._own, name)

    def get_concrete_function(self, *args: object, **kwargs: object) -> object:
        """The program for arguments of these types, as `tf.function` gives it."""
        with tf.device(self._ipu_device):
            return self._own.get_concrete_function(*args, **kwargs)


def ipu_function(
    func: Callable[..., Any] | None = None,
    input_signature: Sequence[tf.TensorSpec] | None = None,
    autograph: bool = True,
    ipu_device: str = "/device:IPU:0",
    experimental_implements: str | None = None,
    experimental_autograph_options: object = None,
    experimental_relax_shapes: bool = False,
) -> Callable[..., Any]:
    """A ``tf.function`` that runs on an IPU wherever it is called, as a decorator with or without arguments."""

    def decorated(inner: Callable[..., Any]) -> Callable[..., Any]:
        own = tf.function(
            inner,
            input_signature=input_signature,
            autograph=autograph,
            reduce_retracing=experimental_relax_shapes,
            experimental_implements=experimental_implements,
            experimental_autograph_options=experimental_autograph_options,
        )
        return PlacedFunction(own, ipu_device)

    return decorated if func is None else decorated(func)


@contextlib.contextmanager
def _resource_variables() -> Iterator[None]:
    """Let new variables be resources, as those of compiled programs are."""
    scope = tf.compat.v1.get_variable_scope()
    before = scope.use_resource
    scope.set_use_resource(True)
    try:
        yield
    finally:
        scope.set_use_resource(before)


def _is_flat(outcome: object) -> bool:
    """Whether XLA's compile returns ``outcome`` as a flat list. A dict or nested sequence keeps its structure."""
    if isinstance(outcome, (list, tuple)):
        return not any(isinstance(item, (list, tuple, dict)) for item in outcome)
    return not isinstance(outcome, dict)


def _has_estimator_spec(outcome: object) -> bool:
    if isinstance(outcome, (list, tuple)) and not hasattr(outcome, "mode"):
        return any(_has_estimator_spec(item) for item in outcome)
    return type(outcome).__name__.endswith("EstimatorSpec")


def _in(graph: FunctionGraph, values: Sequence[tf.Tensor | tf.Operation]) -> list[tf.Tensor | tf.Operation]:
    with graph.as_default():
        return [v if isinstance(v, tf.Operation) else graph.capture(tf.convert_to_tensor(v)) for v in values]
