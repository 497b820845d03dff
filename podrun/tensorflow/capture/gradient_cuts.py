"""Gradients are cut: inside a program on an IPU ``tf.gradients`` and ``GradientTape.gradient`` put a marker in the
graph, and JAX differentiates what lies before it (`podrun.tensorflow.graph.differentiation`).

The marker has the differentiated tensors, the sources and the incoming gradients as inputs, and a gradient for each
source as output. A source to which no path leads has the gradient None, as in TensorFlow.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from podrun.core.errors import UnsupportedError
from podrun.private_apis.tensorflow import private_module, symbol
from podrun.tensorflow.capture.markers import mark
from podrun.tensorflow.capture.program_graphs import FunctionGraph, in_program

_gradient_function = symbol("framework.ops.get_gradient_function")


def _is_variable(source: tf.Tensor | tf.Variable) -> bool:
    return hasattr(source, "handle") and hasattr(source, "read_value")


def _anchor(graph: FunctionGraph, source: tf.Tensor | tf.Variable) -> tf.Tensor:
    """The tensor of ``graph`` at which a source enters: the handle of a variable, or the tensor itself."""
    return _captured(graph, source.handle if _is_variable(source) else source)


def _captured(graph: Any, tensor: Any) -> Any:
    """The tensor in ``graph``, which captures it if it is the graph of a program."""
    return graph.capture(tensor) if hasattr(graph, "capture") else tensor


BLOCKING = {"StopGradient", "PreventGradient", "Floor", "Ceil", "Round", "Rint", "FloorDiv"}
"""Operations through which no gradient passes."""


_WITHOUT = {"Zeta": (0,), "Polygamma": (0,), "Betainc": (0, 1)} | dict.fromkeys(
    ("FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"), (3, 4)
)
"""Inputs that have no gradient, of operations whose other inputs have one."""


def _passes(operation: tf.Operation) -> bool:
    """Whether a gradient passes through an operation."""
    if operation.type in BLOCKING:
        return False
    try:
        return _gradient_function(operation) is not None or operation.type in ("PyFunc", "PyFuncStateless")
    except LookupError:
        return True


def _reached(targets: Sequence[tf.Tensor], stops: Sequence[tf.Tensor]) -> set[int]:
    """The ids of the tensors from which a path leads to a target."""
    stopping = {id(tensor) for tensor in stops}
    seen: set[int] = set()
    waiting = list(targets)
    while waiting:
        tensor = waiting.pop()
        if id(tensor) in seen or not (tensor.dtype.is_floating or tensor.dtype in (tf.resource, tf.variant)):
            continue
        seen.add(id(tensor))
        if id(tensor) in stopping:
            continue
        if _passes(tensor.op):
            without = _WITHOUT.get(tensor.op.type, ())
            waiting += [source for i, source in enumerate(tensor.op.inputs) if i not in without]
    return seen


def watch_gradient(tensor: tf.Tensor, take: Callable[[tf.Tensor], object]) -> tf.Tensor:
    """The tensor, such that ``take`` gets the gradient that reaches it when gradients of the program are computed: once
    for each call that asks for some.
    """
    nothing = tf.zeros(tensor.shape, tensor.dtype)
    (result,) = mark("watched", [tensor, nothing], [tf.TensorSpec(tensor.shape, tensor.dtype)])
    graph = tf.compat.v1.get_default_graph()
    graph.gradient_watchers = [*getattr(graph, "gradient_watchers", []), (nothing, take)]
    return result


def cut_gradients(
    targets: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor | tf.Variable],
    incoming: Sequence[tf.Tensor | None] | None = None,
    stops: Sequence[tf.Tensor | tf.Variable] = (),
) -> list[tf.Tensor | None]:
    """The gradients of the sum of ``targets`` with respect to ``sources``, as operations that the importer
    differentiates; None for a source without a path to them.
    """
    graph = tf.compat.v1.get_default_graph()
    targets = [_captured(graph, tf.convert_to_tensor(target)) for target in targets]
    stopped = [_anchor(graph, stop) for stop in stops]
    anchors = [_anchor(graph, source) for source in sources]
    reached = _reached(targets, stopped)
    watchers = [(t, take) for t, take in getattr(graph, "gradient_watchers", []) if id(t) in reached]
    sources, anchors = [*sources, *(t for t, _ in watchers)], [*anchors, *(t for t, _ in watchers)]
    live = [i for i, anchor in enumerate(anchors) if id(anchor) in reached]
    if not live:
        return [None] * len(sources)
    specs = [_spec(sources[i]) for i in live]
    gradients = [None] * len(targets) if incoming is None else list(incoming)
    present = [i for i, gradient in enumerate(gradients) if gradient is not None]
    inputs = [
        *targets,
        *(anchors[i] for i in live),
        *(tf.convert_to_tensor(gradients[i]) for i in present),
        *stopped,
    ]
    results = mark(
        "gradients",
        inputs,
        specs,
        targets=len(targets),
        sources=len(live),
        incoming=present,
        name="gradients",
    )
    placed = dict(zip(live, results, strict=True))
    asked = len(sources) - len(watchers)
    for place, (_, take) in enumerate(watchers, asked):
        take(placed[place])
    return [placed.get(i) for i in range(asked)]


def _spec(source: tf.Tensor | tf.Variable) -> tf.TensorSpec:
    dtype = source.dtype.base_dtype
    variable = getattr(source, "_variable", None)  # A variable that mixed precision shows as a half.
    return tf.TensorSpec(source.shape, dtype if variable is None else variable.dtype.base_dtype)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _zeros_for_none(
    gradients: list[tf.Tensor | None],
    sources: Sequence[tf.Tensor | tf.Variable],
    unconnected: tf.UnconnectedGradients | str | None,
) -> list[tf.Tensor | None]:
    if getattr(unconnected, "value", unconnected) != "zero":
        return gradients
    return [
        tf.zeros(_spec(s).shape, _spec(s).dtype) if g is None else g
        for g, s in zip(gradients, sources, strict=True)
    ]


def _starts_outside(targets: Sequence[tf.Tensor]) -> bool:
    """Whether targets depend on what eager mode computed before the program, as in ``GradientTape.jacobian``."""
    graph = tf.compat.v1.get_default_graph()
    reached = _reached([_captured(graph, tf.convert_to_tensor(target)) for target in targets], ())
    captures = ((outer, inner) for outer, inner in graph.captures if outer.dtype.is_floating)
    return any(id(inner) in reached and getattr(outer, "graph", None) is None for outer, inner in captures)


def _is_graph() -> bool:
    """Whether TensorFlow is making a graph of a session."""
    return not tf.executing_eagerly() and not hasattr(tf.compat.v1.get_default_graph(), "capture")


def install_cuts(is_differentiated_here: Callable[[Sequence[Any], Sequence[Any]], bool]) -> None:
    """Replace both ways to ask for gradients. Outside of programs they are TensorFlow's own, but where
    ``is_differentiated_here`` says of targets and sources in the graph of a session that a device differentiates what
    lies between.
    """
    helper_module = private_module("ops.gradients_util")
    helper, tape_gradient = helper_module._GradientsHelper, tf.GradientTape.gradient
    if getattr(helper, "cuts", False):
        return
    parameters = inspect.signature(helper)

    def gradients(ys: Any, xs: Any, grad_ys: Any = None, *args: Any, **options: Any) -> Any:
        if not in_program() and not (_is_graph() and is_differentiated_here(_flat(ys), _flat(xs))):
            return helper(ys, xs, grad_ys, *args, **options)
        sources = _flat(xs)
        # TensorFlow gives the settings by position.
        settings = parameters.bind(ys, xs, grad_ys, *args, **options).arguments
        stops = settings.get("stop_gradients")
        results = cut_gradients(
            _flat(ys),
            sources,
            None if grad_ys is None else _flat(grad_ys),
            [] if stops is None else _flat(stops),
        )
        return _zeros_for_none(results, sources, settings.get("unconnected_gradients"))

    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        if not in_program():
            return tape_gradient(self, target, sources, output_gradients, unconnected_gradients)
        flat = tf.nest.flatten(sources)
        incoming = None if output_gradients is None else tf.nest.flatten(output_gradients)
        cut = cut_gradients(tf.nest.flatten(target), flat, incoming)
        if all(result is None for result in cut) and _starts_outside(tf.nest.flatten(target)):
            raise UnsupportedError(
                "a program asks a tape for gradients of what was computed before the program",
                hint="Open the tape inside of the function, or ask for gradients outside of it.",
            )
        return tf.nest.pack_sequence_as(sources, _zeros_for_none(cut, flat, unconnected_gradients))

    gradients.cuts = True  # type: ignore[attr-defined]
    helper_module._GradientsHelper = gradients
    tf.GradientTape.gradient = gradient
