"""``keras.ipu.optimizers.ALSOptimizer``: an optimizer of Keras around another one, which scales the loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import tensorflow as tf
from tf_keras.optimizers.legacy import Optimizer

from podrun.tensorflow.addons.accumulating_wrappers import WrappedOptimizer
from podrun.tensorflow.keras.accumulating_optimizers import accumulated, wrapped_update
from podrun.tensorflow.sdk.gradient_accumulation import GradientPairs
from podrun.tensorflow.sdk.scaling_optimizer import check_scaling_bounds, counted_halves

_READ_ONLY = frozenset({
    "histogram", "normalized_histogram", "loss_scaling_factor", "clip_levels", "decrease_factor",
    "previous_loss_scaling_factor", "update_counter",
})  # fmt: skip
"""What programs read of loss scaling, and cannot set."""


class ALSOptimizer(WrappedOptimizer):
    """Automatic loss scaling. The loss is multiplied by a factor; of the gradients in float16, the part with absolute
    values above ``histogram_bin_edge`` decides whether the factor is divided or multiplied by ``increase_factor``,
    within 1 and ``max_loss_scaling_factor``: in the call after ``update_frequency`` others, or in every call if that
    is 1. ``captured_grads_only``: of the gradients only those count that layers captured.
    """

    supports_captured_grads = True

    def __init__(
        self,
        opt: Optimizer,
        initial_loss_scaling_factor: float = 1,
        update_frequency: int = 8,
        increase_factor: float = 2,
        max_loss_scaling_factor: float = 32768,
        accumulate_statistics_over_update_period: bool = True,
        ratio_threshold: float = 10e-6,
        captured_grads_only: bool = False,
        lpf_alpha: float = 0.0,
        histogram_bin_edge: float = 2**13,
        name: str = "ALSOptimizer",
    ) -> None:
        super().__init__(opt, name)
        self._options: dict[str, float] = {
            "initial_loss_scaling_factor": float(initial_loss_scaling_factor),
            "update_frequency": update_frequency,
            "increase_factor": float(increase_factor),
            "max_loss_scaling_factor": float(max_loss_scaling_factor),
            "ratio_threshold": ratio_threshold,
            "lpf_alpha": lpf_alpha,
        }
        _check_scaling(self._options)
        self._captured_only = captured_grads_only
        self._keeps, self._edge = accumulate_statistics_over_update_period, histogram_bin_edge
        self._settings = {name: self._number(name, value) for name, value in self._options.items()}
        self._scale = self._number("loss_scaling_factor", initial_loss_scaling_factor)
        self._before = self._number("previous_loss_scaling_factor", initial_loss_scaling_factor)
        self._counts = self._number("histogram", [0.0, 0.0])
        self._calls = self._number("n", 0)

    @staticmethod
    def _number(name: str, value: object) -> tf.Variable:
        with tf.init_scope():
            dtype = tf.int32 if name in ("n", "update_frequency") else tf.float32
            return tf.Variable(value, dtype=dtype, trainable=False, name=name)

    def _set_option(self, name: str, value: float) -> None:
        """Set an option; programs that are already traced read it too. ValueError if it is out of bounds."""
        options = {**self._options, name: value}
        _check_scaling(options)
        self._options = options
        self._settings[name].assign(value)

    @property
    def loss_scaling_factor(self) -> tf.Variable:
        """The variable with the factor that losses are multiplied by."""
        return self._scale

    @property
    def histogram(self) -> tf.Variable:
        """How many values of gradients lie below and above the edge."""
        return self._counts

    @property
    def normalized_histogram(self) -> tf.Tensor:
        """The parts of the values of gradients below and above the edge; zeros where none are counted."""
        return tf.math.divide_no_nan(tf.convert_to_tensor(self._counts), tf.reduce_sum(self._counts))

    @property
    def clip_levels(self) -> tf.Tensor:
        """The edge between the two counts."""
        return tf.constant([self._edge], tf.float32)

    @property
    def initial_loss_scaling_factor(self) -> float:
        """The factor before the first change, and after `reset`."""
        return self._options["initial_loss_scaling_factor"]

    @initial_loss_scaling_factor.setter
    def initial_loss_scaling_factor(self, value: float) -> None:
        self._set_option("initial_loss_scaling_factor", value)

    @property
    def update_frequency(self) -> int:
        """Calls between two changes of the factor."""
        return int(self._options["update_frequency"])

    @update_frequency.setter
    def update_frequency(self, value: int) -> None:
        self._set_option("update_frequency", value)

    @property
    def increase_factor(self) -> float:
        """What the factor is multiplied or divided by."""
        return self._options["increase_factor"]

    @increase_factor.setter
    def increase_factor(self, value: float) -> None:
        self._set_option("increase_factor", value)

    @property
    def decrease_factor(self) -> float:
        """What the factor is multiplied by where gradients overflow."""
        return 1 / self.increase_factor

    @property
    def previous_loss_scaling_factor(self) -> tf.Variable:
        """The factor before its last change; `reset` leaves it as it is."""
        return self._before

    @property
    def update_counter(self) -> tf.Variable:
        """The calls since the last change of the factor."""
        return self._calls

    @property
    def accumulate_statistics_over_update_period(self) -> bool:
        """Whether the gradients of all calls count, not only those of the call that changes the factor."""
        return self._keeps

    @property
    def ratio_threshold(self) -> float:
        """The part of gradients above the edge from which on the factor is divided."""
        return self._options["ratio_threshold"]

    @ratio_threshold.setter
    def ratio_threshold(self, value: float) -> None:
        self._set_option("ratio_threshold", value)

    @property
    def captured_grads_only(self) -> bool:
        """Whether only captured gradients count. Another value resets the scaling, and is for programs traced later."""
        return self._captured_only

    @captured_grads_only.setter
    def captured_grads_only(self, value: bool) -> None:
        if value != self._captured_only:
            self.reset()
        self._captured_only = value

    @property
    def lpf_alpha(self) -> float:
        """How much of the counts of earlier calls is kept in each call. Another value resets the scaling."""
        return self._options["lpf_alpha"]

    @lpf_alpha.setter
    def lpf_alpha(self, value: float) -> None:
        if value != self.lpf_alpha:
            self.reset()
        self._set_option("lpf_alpha", value)

    def get_config(self) -> dict[str, object]:
        """The wrapped optimizer, as Keras writes it, and the options."""
        names = (
            "initial_loss_scaling_factor", "update_frequency", "increase_factor", "max_loss_scaling_factor",
            "accumulate_statistics_over_update_period", "ratio_threshold", "captured_grads_only", "lpf_alpha",
        )  # fmt: skip
        options = {name: getattr(self, name) for name in names}
        return {**super().get_config(), **options, "histogram_bin_edge": self._edge}

    @property
    def max_loss_scaling_factor(self) -> float:
        """What the factor stays below."""
        return self._options["max_loss_scaling_factor"]

    @max_loss_scaling_factor.setter
    def max_loss_scaling_factor(self, value: float) -> None:
        self._set_option("max_loss_scaling_factor", value)

    def reset(self) -> None:
        """Start again with the initial factor, and without counts."""
        self._scale.assign(self._options["initial_loss_scaling_factor"])
        self._counts.assign([0.0, 0.0])
        self._calls.assign(0)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _READ_ONLY:
            raise ValueError(f"{name} is a read only property.")
        super().__setattr__(name, value)

    def get_scaled_loss(
        self, loss: tf.Tensor | Callable[[], tf.Tensor]
    ) -> tf.Tensor | Callable[[], tf.Tensor]:
        """The loss times the factor."""
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        return loss * tf.cast(self._scale, loss.dtype)

    def get_unscaled_gradients(self, grads: Iterable[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """The gradients divided by the factor."""
        return [None if g is None else g / tf.cast(self._scale, g.dtype) for g in grads]

    def _compute_gradients(
        self,
        loss: tf.Tensor | Callable[[], tf.Tensor],
        var_list: Sequence[tf.Variable],
        grad_loss: tf.Tensor | None = None,
        tape: tf.GradientTape | None = None,
    ) -> GradientPairs:
        if tape is not None and not callable(loss):
            with tape:
                loss = self.get_scaled_loss(loss)
        else:
            loss = self.get_scaled_loss(loss)
        pairs: GradientPairs = self._opt._compute_gradients(loss, var_list, grad_loss=grad_loss, tape=tape)
        return pairs

    def get_gradients(self, loss: tf.Tensor, params: Sequence[tf.Variable]) -> list[tf.Tensor]:
        """The gradients of the scaled loss."""
        return super().get_gradients(self.get_scaled_loss(loss), params)

    def apply_gradients(
        self,
        grads_and_vars: GradientPairs,
        captured_grads: Mapping[str, tf.Tensor] | None = None,
        global_step: tf.Variable | None = None,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> object:
        """Update with the gradients of the scaled loss, then change the factor when its time has come. A model may
        accumulate before.
        """
        return accumulated(
            self,
            ALSOptimizer._update_now,
            grads_and_vars,
            captured_grads=dict(captured_grads or {}),
            experimental_aggregate_gradients=experimental_aggregate_gradients,
        )

    def _update_now(
        self,
        grads_and_vars: GradientPairs,
        captured_grads: Mapping[str, tf.Tensor],
        experimental_aggregate_gradients: bool = True,
    ) -> object:
        pairs, counts = self.unscaled_and_counted(grads_and_vars, captured_grads)
        done = wrapped_update(
            self._opt, pairs, experimental_aggregate_gradients=experimental_aggregate_gradients
        )
        dependencies = [done] if isinstance(done, (tf.Operation, tf.Tensor)) else []
        with tf.control_dependencies(dependencies):
            return self.changed_scale(*counts)

    def unscaled_and_counted(
        self, grads_and_vars: GradientPairs, captured_grads: Mapping[str, tf.Tensor]
    ) -> tuple[GradientPairs, tuple[tf.Tensor, tf.Tensor]]:
        """For scaled gradients with their variables, and captured ones by tag: the pairs with unscaled gradients,
        without those that are None, and the counts of both, each two float32: values up to the edge and above it.
        """
        pairs = [(g, v) for g, v in grads_and_vars if g is not None]
        grads = self.get_unscaled_gradients([g for g, _ in pairs])
        own = counted_halves([] if self.captured_grads_only else [g for g, _ in pairs], self._edge)
        counts = own, counted_halves(tf.nest.flatten(captured_grads), self._edge)
        return list(zip(grads, [v for _, v in pairs], strict=True)), counts

    def changed_scale(self, counts: tf.Tensor, captured: tf.Tensor) -> tf.Operation:
        """An operation that adds the counts of a call, two float32 as `unscaled_and_counted` gives them for gradients
        and for captured ones, and changes the factor when it is due. The filter passes ``1 - lpf_alpha`` of each count,
        but all of what is captured in the call that changes the factor, as in the SDK.
        """
        period, factor, most, threshold, alpha = (
            tf.convert_to_tensor(self._settings[name])
            for name in (
                "update_frequency", "increase_factor", "max_loss_scaling_factor", "ratio_threshold", "lpf_alpha",
            )
        )  # fmt: skip
        due = (period == 1) | ((self._calls > 0) & (self._calls % period == 0))
        fresh = (1 - alpha) * counts + tf.compat.v2.where(due, captured, (1 - alpha) * captured)
        held = tf.convert_to_tensor(self._counts)
        smooth = held + (fresh if self._keeps else tf.compat.v2.where(due, fresh, tf.zeros_like(fresh)))
        ratio = tf.math.divide_no_nan(smooth[1], tf.reduce_sum(smooth))
        higher, lower = self._scale * factor, self._scale / factor
        wanted = tf.compat.v2.where(ratio > threshold, lower, higher)
        inside = (wanted >= 1) & (wanted < most)
        scale = tf.compat.v2.where(due & inside, wanted, self._scale)
        return tf.group(
            self._before.assign(
                tf.compat.v2.where(scale == self._scale, self._before, self._scale), read_value=False
            ),
            self._scale.assign(scale, read_value=False),
            self._counts.assign(tf.compat.v2.where(due, tf.zeros_like(smooth), smooth), read_value=False),
            self._calls.assign(tf.compat.v2.where(due, 0, self._calls + 1), read_value=False),
        )


def _check_scaling(options: Mapping[str, float]) -> None:
    """ValueError for settings of loss scaling that are no powers of two, or out of bounds."""
    for name, value in options.items():
        power = value >= 1 and int(value) == value and not int(value) & (int(value) - 1)
        if name.endswith("_factor") and not power:
            raise ValueError(f"{name} must be a power of two that is at least 1, not {value}.")
    if not 0 <= options["lpf_alpha"] <= 1:
        raise ValueError("lpf_alpha must be between 0 and 1.")
    check_scaling_bounds(options)
