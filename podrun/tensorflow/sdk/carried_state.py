"""Operations of the SDK that keep something from one iteration to the next, and those that look into a program.

``internal_ops``: `fifo`, `get_current_iteration_counter`, `printed_tensor`; ``gen_poputil_ops``: accumulation that
gives its sum at every N-th call; ``grad_util_ops``: gradients that are captured on their way.
"""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

from podrun.core.errors import UsageError
from podrun.runtime.observers import PrintLayout
from podrun.tensorflow.capture.gradient_cuts import watch_gradient
from podrun.tensorflow.capture.markers import mark_like, reference
from podrun.tensorflow.capture.places import pipeline_of
from podrun.tensorflow.capture.program_graphs import in_program, innermost_program
from podrun.tensorflow.sdk.gradient_accumulation import zero_variable


def fifo(x: tf.Tensor, depth: int, offload: bool = False, name: str | None = None) -> tf.Tensor:
    """What ``x`` was ``depth`` iterations ago, zeros before. ValueError for a depth below 1."""
    if depth < 1:
        raise ValueError(f"fifo needs a depth of at least 1, not {depth}.")
    x = tf.convert_to_tensor(x)
    held = zero_variable(name or "fifo", [depth, *x.shape], x.dtype)
    line = held.read_value()
    moved = held.assign(tf.concat([line[1:], x[None]], 0), read_value=False)
    with tf.control_dependencies([moved]):
        return tf.identity(line[0])


def get_current_iteration_counter(name: str | None = None, **_: object) -> tf.Tensor:
    """The iteration of the innermost loop, int32; in a pipeline the mini-batch of the weight update. UsageError outside
    of any.
    """
    program = innermost_program()
    if program is None or program.name != "loop_body":
        raise UsageError("get_current_iteration_counter is called outside of a loop on the device.")
    counted = getattr(program, "count_of_updates", None)
    if counted is not None:
        return program.inputs[0] % counted.tensor
    pipeline = pipeline_of(program)
    if pipeline is not None:
        return program.inputs[0] % pipeline.micro_batches
    return tf.identity(program.inputs[0])


class _Printer:
    """Prints what a program hands over for a tensor: a queue that only the host sees."""

    def __init__(self, title: str) -> None:
        self.title = title

    def take(self, place: int, value: np.ndarray) -> None:
        """Print the values of all iterations."""
        for row in value:
            sys.stderr.write(PrintLayout().text(self.title, np.asarray(row)) + "\n")


def printed_tensor(input: tf.Tensor, name: str = "") -> tf.Tensor:
    """The tensor, printed to standard error in each iteration of the program's outermost loop."""
    input = tf.convert_to_tensor(input)
    if not in_program():
        return input
    return mark_like("print", input, queue=reference(_Printer(name or input.name)))


def ipu_stateful_gradient_accumulate(
    input: tf.Tensor, num_mini_batches: int, verify_usage: bool = True, name: str | None = None
) -> tf.Tensor:
    """The sum of so many calls at the last of them, zeros otherwise."""
    gradient = tf.convert_to_tensor(input)
    total = zero_variable("gradient_accumulator", gradient.shape, gradient.dtype)
    count = zero_variable("gradient_accumulation_counter", [], tf.int32)
    summed, step = total.read_value() + gradient, count.read_value()
    last = tf.equal(step, num_mini_batches - 1)
    nothing = tf.zeros_like(gradient)
    writes = [
        total.assign(tf.compat.v2.where(last, nothing, summed), read_value=False),
        count.assign(tf.compat.v2.where(last, 0, step + 1), read_value=False),
    ]
    with tf.control_dependencies(writes):
        return tf.compat.v2.where(last, summed, nothing)


def ipu_stateful_gradient_accumulate_with_momentum(
    accum: tf.Tensor, grad: tf.Tensor, momentum: float, num_mini_batches: int, name: str | None = None
) -> tf.Tensor:
    """The variable of the handle ``accum`` after so many calls, zeros otherwise. The first of them scales it with
    ``momentum``; each adds its gradient.
    """
    gradient = tf.convert_to_tensor(grad)
    count = zero_variable("gradient_accumulation_counter", [], tf.int32)
    step, before = count.read_value(), tf.raw_ops.ReadVariableOp(resource=accum, dtype=gradient.dtype)
    after = tf.compat.v2.where(tf.equal(step, 0), momentum * before, before) + gradient
    last = tf.equal(step, num_mini_batches - 1)
    writes = [
        tf.raw_ops.AssignVariableOp(resource=accum, value=after),
        count.assign(tf.compat.v2.where(last, 0, step + 1), read_value=False),
    ]
    with tf.control_dependencies(writes):
        return tf.compat.v2.where(last, after, tf.zeros_like(after))


_contexts: list[GradientCaptureContext] = []


class GradientCaptureContext:
    """Collects gradients that `capture_upstream_gradients` names: ``captured_gradients``, by tag."""

    def __init__(self) -> None:
        self._captured: dict[str, tf.Tensor] = {}

    @property
    def captured_gradients(self) -> dict[str, tf.Tensor]:
        """Tag -> gradient, of those that have been computed."""
        return self._captured

    def __enter__(self) -> GradientCaptureContext:
        _contexts.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _contexts.remove(self)


class GradientCaptureTape(tf.GradientTape, GradientCaptureContext):  # type: ignore[misc]
    """A gradient tape that collects gradients as `GradientCaptureContext`."""

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        tf.GradientTape.__init__(self, persistent, watch_accessed_variables)
        GradientCaptureContext.__init__(self)

    def __enter__(self) -> GradientCaptureTape:
        tf.GradientTape.__enter__(self)
        _contexts.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        _contexts.remove(self)
        tf.GradientTape.__exit__(self, *error)


def capture_upstream_gradients(args: tf.Tensor, tag: str = "") -> tf.Tensor:
    """The tensor, or nest of tensors; the gradients that reach it are collected by the context around. RuntimeError
    outside of a context.
    """
    if not _contexts:
        raise RuntimeError(
            "capture_upstream_gradients may only be used within the context of a GradientCaptureContext or "
            "GradientCaptureTape."
        )
    context, flat = _contexts[-1], tf.nest.flatten(args)
    names = [tag or t.name.split(":")[0] for t in flat]
    if len(flat) > 1 and tag:
        names = [f"{tag}_{place}" for place in range(len(flat))]

    def watched(tensor: tf.Tensor, name: str) -> tf.Tensor:
        return watch_gradient(tensor, lambda gradient: context.captured_gradients.update({name: gradient}))

    return tf.nest.pack_sequence_as(args, [watched(t, n) for t, n in zip(flat, names, strict=True)])
