"""``keras.ipu.layers`` that capture gradients, and ``keras.ipu.optimizers`` that scale the loss for one kind of update.

Captured gradients go to the method ``apply_gradients`` of the model's optimizer, as ``captured_grads``, if its
``supports_captured_grads`` is true. The updates of `ALSOptimizerAdam` and its like are those of `ALSOptimizer` around
the optimizer of Keras: moments of scaled gradients, divided by the factor, are moments of gradients.
"""

from __future__ import annotations

import functools
import typing
import warnings
from collections.abc import Callable, Mapping

import tensorflow as tf
import tf_keras

from podrun.tensorflow.addons.accumulating_wrappers import (
    KerasCrossReplica,
    KerasGradientAccumulation,
    KerasMapGradient,
    inner_optimizer,
)
from podrun.tensorflow.addons.loss_scaling import ALSOptimizer
from podrun.tensorflow.addons.older_loss_scaling import KerasLossScaling
from podrun.tensorflow.keras.accumulating_optimizers import (
    accumulated_update,
    takes_reduced,
    wrapped_update,
)
from podrun.tensorflow.sdk.carried_state import capture_upstream_gradients
from podrun.tensorflow.sdk.gradient_accumulation import GradientPairs


class CaptureUpstreamGradients(tf_keras.layers.Wrapper):  # type: ignore[misc]
    """A layer; the gradient that reaches its output is captured as ``tag``, its name with ``_cug`` by default."""

    _suffix = "_cug"

    def __init__(self, layer: tf_keras.layers.Layer, tag: str | None = None, **kwargs: object) -> None:
        _check_layer(layer)
        self._tag = layer.name + self._suffix if tag is None else tag
        kwargs.setdefault("name", self._tag)
        super().__init__(layer, **kwargs)

    @property
    def tag(self) -> str:
        """The name under which the gradient is captured."""
        return self._tag

    def call(self, inputs: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        """The layer's outputs."""
        return captured_if_asked(self.layer(inputs, *args, **kwargs), self._tag)

    def get_config(self) -> dict[str, object]:
        """The layer and the tag."""
        return {**super().get_config(), "tag": self._tag}


def _check_layer(layer: object) -> None:
    """ValueError, in the SDK's words, for what is no layer."""
    if not isinstance(layer, tf_keras.layers.Layer):
        raise ValueError("Expected an instance of a keras.engine.base_layer.Layer")


def captured_if_asked(tensor: tf.Tensor, tag: str) -> tf.Tensor:
    """The tensor, whose gradient is captured where a program captures some."""
    try:
        return capture_upstream_gradients(tensor, tag)
    except RuntimeError:
        return tensor


class CaptureActivationGradients(CaptureUpstreamGradients):
    """A layer; the gradients that reach the inputs of its activations are captured, as ``<tag>_<argument>``. The layer
    stays as it is: its copy is wrapped, made from its configuration, with the values of its weights. ValueError for a
    layer without activations.
    """

    _suffix = "_cag"

    def __init__(self, layer: tf_keras.layers.Layer, tag: str | None = None, **kwargs: object) -> None:
        super().__init__(layer, tag, **kwargs)
        self._places = places = _activation_places(layer)
        if not places:
            raise ValueError(
                f"Layer {layer.name} does not use an activation function so is not supported by "
                "keras.ipu.layers.CaptureActivationGradients"
            )
        original = getattr(layer, "cell", layer)  # Recurrent layers show the activations of their cell.
        self._unwrapped_activations = {name: getattr(original, place) for name, place in places.items()}
        self._wrapped_activations = {
            name: ActivationCapture(activation, f"{self._tag}_{name}")
            for name, activation in self._unwrapped_activations.items()
        }
        self.layer = _copied_layer(layer, self._unwrapped_activations)
        self._set_activations(self._wrapped_activations)
        if original is not layer:
            warnings.warn(
                f"No gradients are captured inside the loop of {layer.name}: capture those of what it gives, with "
                "keras.ipu.layers.CaptureUpstreamGradients around the next layer.",
                stacklevel=2,
            )

    def _set_activations(self, activations: Mapping[str, Callable[[tf.Tensor], tf.Tensor]]) -> None:
        for name, place in self._places.items():
            setattr(getattr(self.layer, "cell", self.layer), place, activations[name])

    def get_config(self) -> dict[str, object]:
        """The layer with its own activations, and the tag."""
        self._set_activations(self._unwrapped_activations)
        try:
            return super().get_config()
        finally:
            self._set_activations(self._wrapped_activations)

    @staticmethod
    def layer_is_supported(layer: tf_keras.layers.Layer) -> bool:
        """Whether a layer has activations. ValueError for what is no layer."""
        _check_layer(layer)
        return bool(_activation_places(layer))

    def call(self, inputs: tf.Tensor, *args: object, **kwargs: object) -> tf.Tensor:
        """The layer's outputs."""
        return self.layer(inputs, *args, **kwargs)


def _activation_places(layer: tf_keras.layers.Layer) -> dict[str, str]:
    """The arguments of a layer that are its activations, and the attribute of it or of its cell that each one is."""
    owner = getattr(layer, "cell", layer)
    return {
        name: place
        for name in layer.get_config()
        for place in (f"_{name}", name)
        if "activation" in name and callable(getattr(owner, place, None))
    }


def _copied_layer(
    layer: tf_keras.layers.Layer, activations: Mapping[str, Callable[[tf.Tensor], tf.Tensor]]
) -> tf_keras.layers.Layer:
    """A layer of the same configuration, with those activations; with the same values if it has been built."""
    copied = type(layer).from_config({**layer.get_config(), **activations})
    if layer.weights:
        copied.build(layer._build_input_shape)
        copied.built = True
        copied.set_weights(layer.get_weights())
    return copied


class ActivationCapture:
    """An activation of a layer, called with a tensor and returning one of its shape and dtype, as ``activation`` does.
    The gradient that reaches its input is captured under ``tag`` where a program captures gradients.
    """

    def __init__(self, activation: Callable[[tf.Tensor], tf.Tensor], tag: str) -> None:
        self._activation, self._tag = activation, tag
        self.__name__ = getattr(activation, "__name__", "activation")

    def __call__(self, inputs: tf.Tensor) -> tf.Tensor:
        """The outputs of the activation for ``inputs``."""
        return self._activation(captured_if_asked(inputs, self._tag))


class _ScaledUpdate(ALSOptimizer):
    """Loss scaling around an optimizer that the class makes itself."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, object], custom_objects: Mapping[str, object] | None = None
    ) -> _ScaledUpdate:
        """The optimizer of which `get_config` gave the configuration."""
        options = dict(config)
        inner = inner_optimizer(options.pop("opt"), custom_objects or {})
        optimizer = cls(**options)  # type: ignore[arg-type]
        optimizer._opt = inner
        return optimizer


class ALSOptimizerAdam(_ScaledUpdate):
    """Keras' Adam with automatic loss scaling. ``scaling``: the arguments of `ALSOptimizer`."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        name: str = "ALSOptimizerAdam",
        **scaling: object,
    ) -> None:
        inner = tf_keras.optimizers.legacy.Adam(learning_rate, beta_1, beta_2, epsilon)
        super().__init__(inner, name=name, **scaling)  # type: ignore[arg-type]


class ALSOptimizerSGD(_ScaledUpdate):
    """Keras' SGD with automatic loss scaling. ``scaling``: the arguments of `ALSOptimizer`."""

    def __init__(
        self,
        learning_rate: float = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        name: str = "ALSOptimizerSGD",
        **scaling: object,
    ) -> None:
        inner = tf_keras.optimizers.legacy.SGD(learning_rate, momentum, nesterov)
        super().__init__(inner, name=name, **scaling)  # type: ignore[arg-type]


class ALSOptimizerRMSProp(_ScaledUpdate):
    """Keras' RMSprop with automatic loss scaling. ``scaling``: the arguments of `ALSOptimizer`."""

    def __init__(
        self,
        learning_rate: float = 0.001,
        rho: float = 0.9,
        momentum: float = 0.0,
        epsilon: float = 1e-7,
        centered: bool = False,
        name: str = "ALSOptimizerRMSProp",
        **scaling: object,
    ) -> None:
        inner = tf_keras.optimizers.legacy.RMSprop(learning_rate, rho, momentum, epsilon, centered)
        super().__init__(inner, name=name, **scaling)  # type: ignore[arg-type]


class ALSGradientAccumulationOptimizer(KerasGradientAccumulation):
    """Each mini-batch's gradients, and those that layers captured, are counted by the `ALSOptimizer`, which may change
    its factor then, as in the SDK. The unscaled gradients are accumulated for the optimizer in it.
    """

    def __new__(
        cls, als_optimizer: ALSOptimizer | None = None, num_mini_batches: int = 0, *_: object, **__: object
    ) -> ALSGradientAccumulationOptimizer:
        """The wrapper, or the wrapped optimizer where nothing accumulates."""
        return typing.cast(
            "ALSGradientAccumulationOptimizer", super().__new__(cls, als_optimizer, num_mini_batches)
        )

    def __init__(
        self, als_optimizer: ALSOptimizer, num_mini_batches: int, *args: object, **kwargs: object
    ) -> None:
        if not isinstance(als_optimizer, ALSOptimizer):
            raise ValueError("ALSGradientAccumulationOptimizer must only wrap an instance of ALSOptimizer.")
        kwargs.setdefault("name", "ALSGradientAccumulationOptimizer")
        super().__init__(als_optimizer, num_mini_batches, *args, **kwargs)  # type: ignore[arg-type]

    supports_captured_grads = True

    @property
    def als_optimizer(self) -> ALSOptimizer:
        """The wrapped `ALSOptimizer`; this optimizer passes reads of its attributes on."""
        inner: ALSOptimizer = self._opt
        return inner

    def __getattr__(self, name: str) -> object:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.als_optimizer, name)

    def apply_gradients(  # type: ignore[override]
        self,
        grads_and_vars: GradientPairs,
        captured_grads: Mapping[str, tf.Tensor] | None = None,
        name: str | None = None,
        experimental_aggregate_gradients: bool = True,
    ) -> object:
        """Count, change the factor when it is due, accumulate, and update when the gradients are complete."""
        scaling, inner = self.als_optimizer, self.als_optimizer._opt
        pairs, counts = scaling.unscaled_and_counted(grads_and_vars, dict(captured_grads or {}))
        with tf.control_dependencies([tf.identity(g) for g, _ in pairs]):
            changed = scaling.changed_scale(*counts)
        done = accumulated_update(
            inner,
            self._accumulation,
            pairs,
            functools.partial(wrapped_update, inner),
            reduces_itself=not takes_reduced(inner),
        )
        return tf.group(changed, done)

    def get_scaled_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The loss times the factor."""
        return self._opt.get_scaled_loss(loss)

    def get_unscaled_gradients(self, grads: list[tf.Tensor | None]) -> list[tf.Tensor | None]:
        """The gradients divided by the factor."""
        unscaled: list[tf.Tensor | None] = self._opt.get_unscaled_gradients(grads)
        return unscaled


def register_wrapping_optimizers() -> None:
    """Register the wrapping optimizers, and the layers that capture gradients, as custom objects, so that
    ``load_model`` restores models that use them.
    """
    kinds = (
        ALSOptimizer, ALSOptimizerAdam, ALSOptimizerSGD, ALSOptimizerRMSProp, ALSGradientAccumulationOptimizer,
        KerasGradientAccumulation, KerasCrossReplica, KerasMapGradient, KerasLossScaling,
        CaptureUpstreamGradients, CaptureActivationGradients,
    )  # fmt: skip
    known = tf_keras.utils.get_custom_objects()
    known.update({kind.__name__: kind for kind in kinds})
    known["GradientAccumulationOptimizer"] = KerasGradientAccumulation
    known["AutomaticLossScalingOptimizer"] = KerasLossScaling
    known["CrossReplicaOptimizer"] = KerasCrossReplica
    known["MapGradientOptimizerInvertedChaining"] = KerasMapGradient
