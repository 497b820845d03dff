"""``AutomaticLossScalingOptimizer`` of ``ipu.keras.optimizers``: older SDKs had it where `ALSOptimizer` is now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import tensorflow as tf
from tf_keras.optimizers.legacy import Optimizer

from podrun.tensorflow.addons.accumulating_wrappers import WrappedOptimizer
from podrun.tensorflow.keras.accumulating_optimizers import accumulated, wrapped_update
from podrun.tensorflow.sdk.gradient_accumulation import GradientPairs
from podrun.tensorflow.sdk.scaling_optimizer import (
    LARGEST_HALF,
    check_scaling_bounds,
    check_scaling_steps,
    counted_halves,
    counted_until,
    next_scaling,
)

_OPTIONS = (
    "initial_loss_scaling_factor", "update_frequency", "increase_factor", "decrease_factor", "max_loss_scaling_factor",
    "accumulate_statistics_over_update_period", "ratio_threshold",
)  # fmt: skip
_READ_ONLY = frozenset({
    "histogram", "normalized_histogram", "loss_scaling_factor", "clip_levels", "update_counter",
})  # fmt: skip


class KerasLossScaling(WrappedOptimizer):
    """Scales the loss. Gradients are counted and divided by the factor where they are computed. Each update begins with
    the factor's change, if it is due: in each ``update_frequency``-th update, counted from 1, the factor is multiplied
    by ``decrease_factor`` where more than ``ratio_threshold`` of the gradients in float16 overflowed (at least 65504 in
    magnitude, or NaN), and by ``increase_factor`` otherwise; it stays from 1 to below ``max_loss_scaling_factor``.

    Options are attributes, which programs that are traced later read; ValueError for those that are out of bounds.
    """

    def __init__(
        self,
        opt: Optimizer,
        initial_loss_scaling_factor: float = 1.0,
        update_frequency: int = 8,
        increase_factor: float = 2.0,
        decrease_factor: float = 0.5,
        max_loss_scaling_factor: float = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 10e-6,
        name: str = "AutomaticLossScalingOptimizer",
    ) -> None:
        super().__init__(opt, name)
        arguments = locals()
        self._options: dict[str, float] = {option: arguments[option] for option in _OPTIONS}
        _check(self._options)
        with tf.init_scope():
            self._scale = tf.Variable(
                float(initial_loss_scaling_factor), trainable=False, name="loss_scaling_factor"
            )
            self._counts = tf.Variable([0.0, 0.0], trainable=False, name="gradient_histogram")
            self._number = tf.Variable(1, dtype=tf.int32, trainable=False, name="lsf_update_counter")

    def __getattribute__(self, name: str) -> object:
        return (
            object.__getattribute__(self, "_options")[name]
            if name in _OPTIONS
            else super().__getattribute__(name)
        )

    def __setattr__(self, name: str, value: object) -> None:
        if name in _READ_ONLY:
            raise ValueError(f"{name} is a read only property.")
        if name in _OPTIONS:
            options = {**self._options, name: value}
            _check(options)  # type: ignore[arg-type]
            name, value = "_options", options
        super().__setattr__(name, value)

    @property
    def histogram(self) -> tf.Tensor:
        """Two float32: values of gradients that fitted since the last change of the factor, and those that did not."""
        return tf.convert_to_tensor(self._counts)

    @property
    def normalized_histogram(self) -> tf.Tensor:
        """The parts of the values that fitted and did not; zeros where none are counted."""
        return tf.math.divide_no_nan(self.histogram, tf.reduce_sum(self.histogram))

    @property
    def loss_scaling_factor(self) -> tf.Tensor:
        """What losses are multiplied by."""
        return tf.convert_to_tensor(self._scale)

    @property
    def update_counter(self) -> tf.Tensor:
        """The number of the next update: an int32 scalar from 1 to ``update_frequency``, 0 after `reset`."""
        return tf.convert_to_tensor(self._number)

    @property
    def clip_levels(self) -> tf.Tensor:
        """The edge between the two counts, a float32 of shape (1,)."""
        return tf.constant([LARGEST_HALF], tf.float32)

    def get_config(self) -> dict[str, object]:
        """The wrapped optimizer, as Keras writes it, and the options."""
        return {**super().get_config(), **self._options}

    def reset(self) -> None:
        """Start again with the initial factor, and without counts."""
        self._scale.assign(self._options["initial_loss_scaling_factor"])
        self._counts.assign([0.0, 0.0])
        self._number.assign(0)

    def get_scaled_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the factor."""
        return loss * tf.cast(self._scale, loss.dtype)

    def get_unscaled_gradients(
        self, grads: tf.Tensor | tf.IndexedSlices | Iterable[tf.Tensor | None] | None
    ) -> tf.Tensor | list[tf.Tensor | None] | None:
        """Count gradients of the scaled loss, one or several, and divide them by the factor. None stays."""
        if grads is None or tf.is_tensor(grads) or isinstance(grads, tf.IndexedSlices):
            return self._unscaled([grads])[0]
        return self._unscaled(list(grads))

    def _unscaled(self, grads: Sequence[tf.Tensor | None]) -> list[tf.Tensor | None]:
        counts = counted_halves([g for g in grads if g is not None], counted_until())
        if not self._options["accumulate_statistics_over_update_period"]:
            due = tf.equal(self._number % self._options["update_frequency"], 0)
            counts = tf.compat.v2.where(due, counts, tf.zeros_like(counts))
        with tf.control_dependencies([self._counts.assign_add(counts, read_value=False)]):
            return [None if g is None else g / tf.cast(self._scale, g.dtype) for g in grads]

    def _compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable],
        grad_loss: tf.Tensor | None = None,
        tape: tf.GradientTape | None = None,
    ) -> GradientPairs:
        scaled: tf.Tensor | Callable[[], tf.Tensor]
        if callable(loss):
            scaled = lambda: self.get_scaled_loss(loss())  # noqa: E731
        elif tape is None:
            scaled = self.get_scaled_loss(loss)
        else:
            with tape:
                scaled = self.get_scaled_loss(loss)
        pairs = list(self._opt._compute_gradients(scaled, var_list, grad_loss=grad_loss, tape=tape))
        unscaled = self._unscaled([gradient for gradient, _ in pairs])
        return [(g, v) for g, (_, v) in zip(unscaled, pairs, strict=True)]

    def apply_gradients(
        self,
        grads_and_vars: GradientPairs,
        global_step: tf.Variable | None = None,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> object:
        """Change the factor when it is due, and update with unscaled gradients. A model may accumulate before."""
        return accumulated(
            self,
            KerasLossScaling._update_now,
            grads_and_vars,
            experimental_aggregate_gradients=experimental_aggregate_gradients,
        )

    def _update_now(
        self, grads_and_vars: GradientPairs, experimental_aggregate_gradients: bool = True
    ) -> object:
        scale, counts, number = next_scaling(
            self.loss_scaling_factor, self.histogram, self.update_counter, self._options
        )
        changes = (
            self._scale.assign(scale, read_value=False),
            self._counts.assign(counts, read_value=False),
            self._number.assign(number, read_value=False),
        )
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        done = wrapped_update(
            self._opt, pairs, experimental_aggregate_gradients=experimental_aggregate_gradients
        )
        return tf.group(*changes, done) if isinstance(done, (tf.Operation, tf.Tensor)) else done


def _check(options: dict[str, float]) -> None:
    check_scaling_steps(options["increase_factor"], options["decrease_factor"])
    check_scaling_bounds(options)
