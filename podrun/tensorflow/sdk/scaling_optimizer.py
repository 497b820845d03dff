"""``ipu.optimizers.automatic_loss_scaling_optimizer``: an optimizer of version 1 around another one, which scales the
loss by a factor that it finds out.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.sdk.gradient_accumulation import GradientPairs
from podrun.tensorflow.sdk.wrapping_optimizers import IpuOptimizer

_EDGE = float(tf.float16.max)


@dataclass(frozen=True)
class ScalingOptions:
    """The options of loss scaling. ValueError for those that are out of bounds."""

    initial_loss_scaling_factor: float = 1.0
    update_frequency: int = 8
    increase_factor: float = 2.0
    decrease_factor: float = 0.5
    max_loss_scaling_factor: float = 32768
    accumulate_statistics_over_update_period: bool = True
    ratio_threshold: float = 10e-6

    def __post_init__(self) -> None:
        for name in (
            "update_frequency",
            "increase_factor",
            "decrease_factor",
            "initial_loss_scaling_factor",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be nonzero and positive")
        if self.increase_factor <= self.decrease_factor:
            raise ValueError("increase_factor must be greater than decrease_factor")
        if self.max_loss_scaling_factor <= 1:
            raise ValueError("max_loss_scaling_factor must be greater than one")
        if not 0 < self.ratio_threshold < 1:
            raise ValueError("ratio_threshold must be greater than zero and less than one")
        if self.initial_loss_scaling_factor >= self.max_loss_scaling_factor:
            raise ValueError("initial_loss_scaling_factor must be less than max_loss_scaling_factor")
        if self.initial_loss_scaling_factor * self.increase_factor >= self.max_loss_scaling_factor:
            raise ValueError(
                "initial_loss_scaling_factor x increase_factor must be less than max_loss_scaling_factor"
            )


class AutomaticLossScalingOptimizer(IpuOptimizer):
    """Automatic loss scaling. Of the gradients in float16, the part that overflowed decides whether the factor is
    multiplied by ``decrease_factor`` or ``increase_factor``, in each ``update_frequency``-th step; it stays from 1 to
    ``max_loss_scaling_factor``. Options are attributes; variables have the factor and how many values fitted.
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
        self.options = ScalingOptions(
            initial_loss_scaling_factor,
            update_frequency,
            increase_factor,
            decrease_factor,
            max_loss_scaling_factor,
            accumulate_statistics_over_update_period,
            ratio_threshold,
        )

        def variable(value: object, dtype: tf.DType, label: str) -> tf.Variable:
            return tf.compat.v1.Variable(value, trainable=False, dtype=dtype, name=label, use_resource=True)

        self.histogram = variable([0.0, 0.0], tf.float32, "gradient_histogram")
        self._n = variable(1, tf.int32, "lsf_update_counter")
        self.loss_scaling_factor = variable(initial_loss_scaling_factor, tf.float32, "loss_scaling_factor")

    def __getattr__(self, name: str) -> float:
        options = self.__dict__.get("options")
        if options is None or not hasattr(options, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        value: float = getattr(options, name)
        return value

    def _due(self) -> tf.Tensor:
        return tf.equal(self._n % self.options.update_frequency, 0)

    def compute_gradients(
        self, loss: tf.Tensor, var_list: Sequence[tf.Variable] | None = None, **kwargs: object
    ) -> GradientPairs:
        """The gradients of the loss, of which those of the scaled loss are counted."""
        scale = tf.convert_to_tensor(self.loss_scaling_factor)
        pairs = super().compute_gradients(tf.cast(scale, loss.dtype) * loss, var_list, **kwargs)
        counts = _counted([g for g, _ in pairs if g is not None])
        if not self.options.accumulate_statistics_over_update_period:
            counts = tf.compat.v2.where(self._due(), counts, tf.zeros_like(counts))
        with tf.control_dependencies([self.histogram.assign_add(counts, read_value=False)]):
            return [(None if g is None else g / tf.cast(scale, g.dtype), v) for g, v in pairs]

    def apply_gradients(
        self, grads_and_vars: GradientPairs, global_step: tf.Variable | None = None, name: str | None = None
    ) -> tf.Operation:
        """Change the factor if it is due, and apply."""
        pairs, options, due = list(grads_and_vars), self.options, self._due()
        with tf.control_dependencies([g for g, _ in pairs if g is not None]):
            counts = self.histogram.read_value()
        scale = tf.convert_to_tensor(self.loss_scaling_factor)
        ratio = tf.math.divide_no_nan(counts[1], tf.reduce_sum(counts))
        lower, higher = scale * options.decrease_factor, scale * options.increase_factor
        wanted = tf.compat.v2.where(ratio > options.ratio_threshold, lower, higher)
        inside = (wanted >= 1) & (wanted < options.max_loss_scaling_factor)
        done = self._opt.apply_gradients(pairs, global_step, name)
        with tf.control_dependencies([done, counts, ratio]):
            kept = tf.compat.v2.where(due, tf.zeros_like(counts), counts)
            return tf.group(
                done,
                self.loss_scaling_factor.assign(
                    tf.compat.v2.where(due & inside, wanted, scale), read_value=False
                ),
                self.histogram.assign(kept, read_value=False),
                self._n.assign(tf.compat.v2.where(due, 1, self._n + 1), read_value=False),
            )


def _counted(gradients: Sequence[tf.Tensor]) -> tf.Tensor:
    """The values of gradients in float16 that are below the largest number, and all others."""
    fitting, others = tf.constant(0.0), tf.constant(0.0)
    for gradient in gradients:
        if gradient.dtype == tf.float16:
            small = tf.cast(tf.abs(tf.cast(gradient, tf.float32)) < _EDGE, tf.float32)
            fitting, others = fitting + tf.reduce_sum(small), others + tf.reduce_sum(1 - small)
    return tf.stack([fitting, others])
