"""``ipu.optimizers.automatic_loss_scaling_optimizer``: an optimizer of version 1 around another one, which scales the
loss by a factor that it finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from podrun.tensorflow.sdk.gradient_accumulation import GradientPairs
from podrun.tensorflow.sdk.wrapping_optimizers import IpuOptimizer

LARGEST_HALF = float(tf.float16.max)
_EDGE = float(np.nextafter(np.float16(LARGEST_HALF), np.float16(0)))
"""The last value that counts as one that did not overflow: the one below the largest number of float16."""


def counted_halves(gradients: Sequence[tf.Tensor], edge: float) -> tf.Tensor:
    """Two float32: how many values of the gradients in float16 are at most ``edge`` in magnitude, and how many others
    there are, NaN among them. Gradients of other types do not count.
    """
    below, above = tf.constant(0.0), tf.constant(0.0)
    for gradient in gradients:
        if gradient.dtype == tf.float16:
            small = tf.abs(tf.cast(gradient, tf.float32)) <= edge
            count = tf.reduce_sum(tf.cast(small, tf.float32))
            below, above = below + count, above + (tf.cast(tf.size(gradient), tf.float32) - count)
    return tf.stack([below, above])


def counted_until() -> float:
    """The edge of `counted_halves` for which what overflows is what does not fit in float16."""
    return _EDGE


def next_scaling(
    scale: tf.Tensor, counts: tf.Tensor, number: tf.Tensor, options: Mapping[str, float]
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Factor, counts and number of the next update in its period, from 1, behind one with these and such options."""
    due = tf.equal(number % options["update_frequency"], 0)
    ratio = tf.math.divide_no_nan(counts[1], tf.reduce_sum(counts))
    lower, higher = scale * options["decrease_factor"], scale * options["increase_factor"]
    wanted = tf.compat.v2.where(ratio > options["ratio_threshold"], lower, higher)
    inside = (wanted >= 1) & (wanted < options["max_loss_scaling_factor"])
    return (
        tf.compat.v2.where(due & inside, wanted, scale),
        tf.compat.v2.where(due, tf.zeros_like(counts), counts),
        tf.compat.v2.where(due, 1, number + 1),
    )


def check_scaling_steps(increase_factor: float, decrease_factor: float) -> None:
    """ValueError, in the SDK's words, for factors that do not change a scale up and down."""
    if decrease_factor <= 0:
        raise ValueError(f"decrease_factor must be nonzero and positive, not {decrease_factor}")
    if 0 < increase_factor <= decrease_factor:
        raise ValueError("increase_factor must be greater than decrease_factor")


def check_scaling_bounds(options: Mapping[str, float]) -> None:
    """ValueError, in the SDK's words, for options of loss scaling, by name, that are out of bounds."""
    for name in ("update_frequency", "increase_factor", "initial_loss_scaling_factor"):
        if options[name] <= 0:
            raise ValueError(f"{name} must be nonzero and positive, not {options[name]}")
    if options["max_loss_scaling_factor"] <= 1:
        raise ValueError("max_loss_scaling_factor must be greater than one")
    if not 0 < options["ratio_threshold"] < 1:
        raise ValueError("ratio_threshold must be greater than zero and less than one")
    initial, most = options["initial_loss_scaling_factor"], options["max_loss_scaling_factor"]
    if initial >= most:
        raise ValueError("initial_loss_scaling_factor must be less than max_loss_scaling_factor")
    if initial * options["increase_factor"] >= most:
        raise ValueError(
            "initial_loss_scaling_factor x increase_factor must be less than max_loss_scaling_factor"
        )


class AutomaticLossScalingOptimizer(IpuOptimizer):
    """Automatic loss scaling. Of the gradients in float16, the part that overflowed (at least 65504 in magnitude, or
    NaN) decides whether the factor is multiplied by ``decrease_factor``, if it is more than ``ratio_threshold``, or by
    ``increase_factor``, in each ``update_frequency``-th step; it stays from 1 to below ``max_loss_scaling_factor``.
    Without ``accumulate_statistics_over_update_period`` only the gradients of that step count.

    Options are attributes, which programs that are traced later read. The variables ``loss_scaling_factor`` (float32)
    and ``histogram`` (two float32: values that fitted, and others) have the state; ``histogram_levels`` is the edge.
    ValueError for options that are out of bounds when the optimizer is created.
    """

    def __init__(
        self,
        wrapped_optimizer: tf.compat.v1.train.Optimizer,
        initial_loss_scaling_factor: float = 1.0,
        update_frequency: int = 8,
        increase_factor: float = 2.0,
        decrease_factor: float = 0.5,
        max_loss_scaling_factor: float = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 10e-6,
        name: str = "AutomaticLossScalingOptimizer",
    ) -> None:
        super().__init__(wrapped_optimizer, name)
        self.initial_loss_scaling_factor = initial_loss_scaling_factor
        self.update_frequency = update_frequency
        self.increase_factor, self.decrease_factor = increase_factor, decrease_factor
        self.max_loss_scaling_factor = max_loss_scaling_factor
        self.accumulate_statistics_over_update_period = accumulate_statistics_over_update_period
        self.ratio_threshold = ratio_threshold
        check_scaling_steps(increase_factor, decrease_factor)
        check_scaling_bounds(vars(self))

        def variable(value: object, dtype: tf.DType, label: str) -> tf.Variable:
            return tf.compat.v1.Variable(value, trainable=False, dtype=dtype, name=label, use_resource=True)

        self.histogram = variable([0.0, 0.0], tf.float32, "gradient_histogram")
        self._n = variable(1, tf.int32, "lsf_update_counter")
        self.loss_scaling_factor = variable(initial_loss_scaling_factor, tf.float32, "loss_scaling_factor")

    @property
    def histogram_levels(self) -> tf.Tensor:
        """The edge between the two counts, a float32 of shape (1,)."""
        return tf.constant([LARGEST_HALF], tf.float32)

    def _due(self) -> tf.Tensor:
        return tf.equal(self._n % self.update_frequency, 0)

    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[tf.Variable] | None = None, **kwargs: object
    ) -> GradientPairs:
        """The gradients of ``loss``, a scalar, with their variables, as the wrapped optimizer's method gives them. They
        have the types of the variables; None stays. Those of the scaled loss are counted before they are divided.
        """
        scale = tf.convert_to_tensor(self.loss_scaling_factor)
        pairs = super().compute_gradients(tf.cast(scale, loss.dtype) * loss, var_list, **kwargs)
        counts = counted_halves([g for g, _ in pairs if g is not None], _EDGE)
        if not self.accumulate_statistics_over_update_period:
            counts = tf.compat.v2.where(self._due(), counts, tf.zeros_like(counts))
        with tf.control_dependencies([self.histogram.assign_add(counts, read_value=False)]):
            return [(None if g is None else g / tf.cast(scale, g.dtype), v) for g, v in pairs]

    def apply_gradients(
        self, grads_and_vars: GradientPairs, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """An operation that updates the variables with the unscaled gradients that `compute_gradients` gave, and
        changes the factor if it is due. ``global_step``: a variable that counts updates.
        """
        pairs = list(grads_and_vars)
        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            counts = self.histogram.read_value()
        following = next_scaling(
            tf.convert_to_tensor(self.loss_scaling_factor), counts, tf.convert_to_tensor(self._n), vars(self)
        )
        done = self._opt.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([done, *following]):
            state = (self.loss_scaling_factor, self.histogram, self._n)
            changes = zip(state, following, strict=True)
            return tf.group(done, *[v.assign(value, read_value=False) for v, value in changes])
