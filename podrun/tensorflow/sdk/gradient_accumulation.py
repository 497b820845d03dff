"""Gradient accumulation: gradients of N iterations are reduced, then one update is made with them.

The accumulators and the counter are variables, so that the step of an iteration stays one step. A reduction over
replicas stands before the branch that updates, because all replicas take part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeAlias

import tensorflow as tf

from podrun.tensorflow.execution.launching import start_with

GradientPairs = Sequence[tuple[tf.Tensor | None, tf.Variable]]
"""Gradients with the variables to which they belong; None for a variable on which the loss does not depend."""
AccumulatorType: TypeAlias = "tf.DType | Callable[[tf.Variable], tf.DType] | None"
"""The type of accumulators, or a function of a variable that gives it; None: the variable's own."""


class GradientAccumulationReductionMethod(Enum):
    """How the gradients of an update are reduced."""

    SUM = 0
    MEAN = 1
    RUNNING_MEAN = 2

    @classmethod
    def parse(cls, method: object) -> GradientAccumulationReductionMethod:
        """The method of that name, in any case. ValueError for another."""
        if isinstance(method, cls):
            return method
        if isinstance(method, str) and method.upper() in cls.__members__:
            return cls[method.upper()]
        raise ValueError(
            f"Cannot parse {method!r}: reduction_method must be set to SUM, MEAN or RUNNING_MEAN, not {method!r}."
        )


def zero_variable(name: str, shape: tf.TensorShape | Sequence[int], dtype: tf.DType) -> tf.Variable:
    """A resource variable of zeros that is not trained, made outside of the program. It is state of the device: it is
    in no collection, so that checkpoints do not have it, and sessions start it by themselves.
    """
    with tf.init_scope():
        if tf.executing_eagerly():
            return tf.Variable(tf.zeros(shape, dtype), trainable=False, name=name)
        graph = tf.compat.v1.get_default_graph()
        variable = tf.compat.v1.get_variable(
            graph.unique_name(name), shape, dtype, tf.compat.v1.zeros_initializer(), trainable=False,
            use_resource=True, collections=[],
        )  # fmt: skip
        start_with(graph, variable.initializer)
        return variable


class Accumulation:
    """Accumulators for one optimizer. ``count``: gradients of an update, a number or a tensor. ``dtype``: of the
    accumulators, or a function of a variable; None: the variable's. ``storage``: options that say where the optimizer's
    state is kept. ``sums_captured``: whether gradients that layers capture are reduced as well (`captured`).
    ``transforms_each``: whether an optimizer of Keras clips and transforms the gradients of each iteration.
    """

    def __init__(
        self,
        count: int | tf.Tensor,
        method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
        dtype: AccumulatorType = None,
        storage: Mapping[str, object] | None = None,
        *,
        sums_captured: bool = False,
        transforms_each: bool = False,
    ) -> None:
        if isinstance(count, int) and count < 1:
            raise ValueError(f"The number of mini-batches must be >= 1, not {count}.")
        self.count, self.method = count, GradientAccumulationReductionMethod.parse(method)
        self.storage = storage or {}
        self.sums_captured, self.transforms_each = sums_captured, transforms_each
        self._dtype = dtype
        self._counter: tf.Variable | None = None
        self._sums: dict[int, tf.Variable] = {}
        self._captured: dict[str, tf.Variable] = {}

    @property
    def state(self) -> list[tf.Variable]:
        """The counter and the accumulators."""
        counter = [] if self._counter is None else [self._counter]
        return [*counter, *self._sums.values(), *self._captured.values()]

    def _counted(self) -> tf.Variable:
        """The variable that says which gradient of an update comes, from 0."""
        if self._counter is None:
            self._counter = zero_variable("gradient_accumulation_counter", [], tf.int32)
        return self._counter

    def _accumulator(self, variable: tf.Variable) -> tf.Variable:
        key = id(variable)
        if key not in self._sums:
            dtype = self._dtype
            if callable(dtype) and not isinstance(dtype, type):  # np.float32 is a class.
                dtype = dtype(variable)
            dtype = variable.dtype.base_dtype if dtype is None else tf.as_dtype(dtype)
            name = variable.name.split(":")[0] + "/gradient_accumulator"
            self._sums[key] = zero_variable(name, variable.shape, dtype)
        return self._sums[key]

    def apply(
        self,
        gradients: GradientPairs,
        update: Callable[[GradientPairs], tf.Operation],
        reduce: Callable[[tf.Tensor], tf.Tensor] = lambda gradient: gradient,
    ) -> tf.Operation:
        """The operation that adds gradients, and after ``count`` iterations calls ``update`` with their reduction."""
        pairs = [(tf.convert_to_tensor(g), v) for g, v in gradients if g is not None]
        if isinstance(self.count, int) and self.count == 1:
            return update([(reduce(g), v) for g, v in pairs])
        counter = self._counted()
        step, totals = counter.read_value(), []
        for gradient, variable in pairs:
            store = self._accumulator(variable)
            totals.append((self._added(store, tf.cast(gradient, store.dtype), step), variable, store))
        last = tf.equal(step, self.count - 1)
        ready = [(reduce(total), variable) for total, variable, _ in totals]

        def update_now() -> tf.Tensor:
            with tf.control_dependencies([_operation(update(ready))]):
                return tf.constant(True)

        done = tf.cond(last, update_now, lambda: tf.constant(False))
        with tf.control_dependencies([done.op if hasattr(done, "op") else done]):
            writes = [
                store.assign(tf.compat.v2.where(last, tf.zeros_like(total), total), read_value=False)
                for total, _, store in totals
            ]
            writes.append(counter.assign(tf.compat.v2.where(last, 0, step + 1), read_value=False))
            return tf.group(*writes, done)

    def captured(self, gradients: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Captured gradients by tag as an update sees them: this iteration's, or with ``sums_captured`` their reduction
        over the iterations so far, in their own types. Call it before `apply`, which counts the iteration.
        """
        if not self.sums_captured or not gradients or (isinstance(self.count, int) and self.count == 1):
            return dict(gradients)
        step = self._counted().read_value()
        last = tf.equal(step, self.count - 1)
        totals = {}
        for tag, value in gradients.items():
            gradient = tf.convert_to_tensor(value)
            if tag not in self._captured:
                name = f"captured_gradient_accumulator_{len(self._captured)}"
                self._captured[tag] = zero_variable(name, gradient.shape, gradient.dtype)
            total = self._added(self._captured[tag], gradient, step)
            kept = tf.compat.v2.where(last, tf.zeros_like(total), total)
            with tf.control_dependencies([self._captured[tag].assign(kept, read_value=False)]):
                totals[tag] = tf.identity(total)
        return totals

    def _added(self, store: tf.Variable, gradient: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        held = store.read_value()
        if self.method is GradientAccumulationReductionMethod.SUM:
            return held + gradient
        if self.method is GradientAccumulationReductionMethod.MEAN:
            return held + gradient / tf.cast(self.count, gradient.dtype)
        part = tf.cast(step, gradient.dtype)
        return held * (part / (part + 1)) + gradient / (part + 1)


def _operation(value: tf.Tensor | tf.Operation | None) -> tf.Operation:
    return tf.group(value) if value is not None else tf.no_op()
