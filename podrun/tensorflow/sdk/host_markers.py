"""Runs operations that only IPUs have where no program is being made: in eager mode and in plain functions.

Each is a program of its own on the first IPU, with gradients, as TensorFlow places what no CPU computes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.private_apis.tensorflow import symbol
from podrun.tensorflow.capture.markers import mark, on_host, placed_marker, token_of
from podrun.tensorflow.capture.program_graphs import in_program
from podrun.tensorflow.sdk.ipu_strategy import IPUStrategyV1

_py_funcs = symbol("ops.script_ops._py_funcs")


class HostMarker:
    """Compiles one such operation and its gradient, each as a program of its own."""

    def __init__(self, kind: str, outputs: Sequence[tf.TensorSpec], attributes: dict[str, Any]) -> None:
        self.kind, self.outputs, self.attributes = kind, list(outputs), attributes
        self._strategy = IPUStrategyV1()
        self._programs = tf.function(self._forward), tf.function(self._backward)

    def _forward(self, *values: tf.Tensor) -> list[tf.Tensor]:
        return list(mark(self.kind, values, self.outputs, **self.attributes))

    def _backward(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """``values``: the inputs, then gradients of the results that are floats."""
        count = len(values) - sum(spec.dtype.is_floating for spec in self.outputs)
        floating = [v for v in values[:count] if v.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(floating)
            results = self._forward(*values[:count])
        wanted = [r for r in results if r.dtype.is_floating]
        slopes = tape.gradient(
            wanted, floating, list(values[count:]), unconnected_gradients=tf.UnconnectedGradients.ZERO
        )
        return list(slopes)

    def results(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """The marker's results."""
        return list(self._strategy.run(self._programs[0], args=[tf.constant(v) for v in values]))

    def slopes(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """Gradients of the inputs that are floats."""
        return list(self._strategy.run(self._programs[1], args=[tf.constant(v) for v in values]))

    def call(self, *values: tf.Tensor) -> list[tf.Tensor]:
        """The results in eager mode or in a function, with a gradient."""

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def differentiable(*inputs: tf.Tensor) -> tuple[list[tf.Tensor], Callable[..., Any]]:
            if tf.executing_eagerly():
                results = self.results(*inputs)
            else:
                results = list(placed_marker(self.kind, inputs, self.outputs, self.attributes))

            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
                known = [u for u, s in zip(upstream, self.outputs, strict=True) if s.dtype.is_floating]
                slopes = iter(self._gradients([*inputs, *known], inputs))
                return [next(slopes) if v.dtype.is_floating else None for v in inputs]

            return results, gradient

        return list(tf.nest.flatten(differentiable(*values)))

    def _gradients(self, values: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        if tf.executing_eagerly():
            return self.slopes(*values)
        floating = [v for v in inputs if v.dtype.is_floating]
        slopes = tf.numpy_function(
            lambda *arrays: [s.numpy() for s in self.slopes(*arrays)], values, [v.dtype for v in floating]
        )
        for slope, value in zip(slopes, floating, strict=True):
            slope.set_shape(value.shape)
        return list(slopes)


MOST_KEPT = 128
"""So many markers keep their compiled programs; that which was used the longest ago goes first."""


class HostMarkers:
    """The compiled operations of this process; equal operations of equal shapes share one."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], HostMarker] = OrderedDict()
        self._by_token: dict[str, Callable[..., Any]] = {}
        """What functions of the host call, for as long as the process may have a graph that names it."""
        self._results: dict[tuple[Any, ...], Sequence[tf.TensorSpec]] = {}
        """The results of those that functions of the host may call again."""
        self._lock = threading.Lock()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def run(
        self,
        kind: str,
        inputs: Sequence[tf.Tensor],
        outputs: Sequence[tf.TensorSpec],
        attributes: dict[str, Any],
    ) -> list[tf.Tensor] | None:
        """A marker's results; None in programs and for unknown shapes. Sessions of version 1 run it on device 0,
        or where a scope says.

        A function of the program that is being traced may call it: AutoGraph leaves it and what it defines alone.
        """
        if in_program() or not inputs:
            return None
        if not tf.compat.v1.executing_eagerly_outside_functions():
            return _on_device(kind, inputs, outputs, attributes)
        tensors = [tf.convert_to_tensor(t) for t in inputs]
        if not all(tf.TensorShape(t.shape).is_fully_defined() for t in (*tensors, *outputs)):
            return None
        token = token_of(kind, attributes)
        key = _key(token, tensors)
        if not tf.executing_eagerly():
            self._results[key] = outputs
            self._let_the_host_run(token, kind, attributes)
        return self._marker(key, kind, outputs, attributes).call(*tensors)

    def _marker(
        self, key: tuple[Any, ...], kind: str, outputs: Sequence[tf.TensorSpec], attributes: dict[str, Any]
    ) -> HostMarker:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = HostMarker(kind, outputs, attributes)
            self._kept.move_to_end(key)
            if len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]

    def _let_the_host_run(self, token: str, kind: str, attributes: dict[str, Any]) -> None:
        """Let functions of the host find what runs a marker, by its token."""
        if token in self._by_token:
            return

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            values = [tf.constant(a) for a in arrays]
            key = _key(token, values)
            marker = self._marker(key, kind, self._results[key], attributes)
            return [np.asarray(r) for r in marker.results(*values)]

        self._by_token[token] = run  # The registry itself keeps nothing alive.
        _py_funcs._funcs[token] = run


def _on_device(
    kind: str, inputs: Sequence[tf.Tensor], outputs: Sequence[tf.TensorSpec], attributes: dict[str, Any]
) -> list[tf.Tensor] | None:
    """A marker in a graph of version 1; None where a scope says a device, and in functions."""
    graph = tf.compat.v1.get_default_graph()
    if type(graph) is not tf.Graph or graph._device_functions_outer_to_inner:
        return None
    with tf.device("/device:IPU:0"):
        return list(placed_marker(kind, inputs, outputs, attributes))


def _key(token: str, tensors: Sequence[tf.Tensor]) -> tuple[Any, ...]:
    return (token, *((t.dtype, tuple(t.shape)) for t in tensors))


def install_host_markers() -> None:
    """Let markers run on their own outside of programs."""
    if not on_host:
        on_host.append(HostMarkers().run)
