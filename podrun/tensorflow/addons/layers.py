"""Keras layers of the SDK besides recurrent ones: norms, dropout, embeddings, products in parts and hints.

Group and instance norm have a parameter for each channel and statistics over all places of a sample; layer norm follows
Keras' axes. Hints (`RecomputationCheckpoint`, `AssumeEqualAcrossReplicas`) change no numbers.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf
import tf_keras

from podrun.tensorflow.capture.markers import mark
from podrun.tensorflow.sdk import replica_ops
from podrun.tensorflow.sdk.eight_bit_tensors import (
    EightBitFormat,
    QuarterTensor,
    convert_from_f8,
    convert_to_f8,
    create_metadata,
    f8_matmul,
)
from podrun.tensorflow.sdk.layer_ops import ipu_serialized_matmul, seeded_dropout

if TYPE_CHECKING:
    from podrun.tensorflow.sdk.eight_bit_tensors import Metadata

KerasInitializer = object
"""The name of an initializer of Keras, or one."""
_initializers = tf_keras.initializers


class Embedding(tf_keras.layers.Layer):  # type: ignore[misc]
    """Rows of a table ``[input_dim, output_dim]``. ``serialization_factor`` changes no numbers. NotImplementedError for
    arguments of Keras that an IPU's layer does not have, ValueError for a factor that does not divide the rows.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: KerasInitializer = "uniform",
        embeddings_regularizer: object = None,
        activity_regularizer: object = None,
        embeddings_constraint: object = None,
        mask_zero: bool = False,
        input_length: int | None = None,
        serialization_factor: int = 1,
        **kwargs: object,
    ) -> None:
        for name, value in (
            ("embeddings_regularizer", embeddings_regularizer),
            ("activity_regularizer", activity_regularizer),
            ("embeddings_constraint", embeddings_constraint),
            ("mask_zero", mask_zero or None),
            ("input_length", input_length),
        ):
            if value is not None:
                raise NotImplementedError(f"ipu.keras.layers.Embedding does not support {name}.")
        if serialization_factor < 1:
            raise ValueError(f"serialization_factor must be >= 1, but was {serialization_factor}.")
        if input_dim % serialization_factor:
            raise ValueError(
                f"serialization_factor {serialization_factor} must divide the {input_dim} rows of the table."
            )
        super().__init__(**kwargs)
        self.input_dim, self.output_dim = int(input_dim), int(output_dim)
        self.embeddings_initializer = _initializers.get(embeddings_initializer)
        self.serialization_factor = serialization_factor

    def build(self, input_shape: tf.TensorShape) -> None:
        """Make the table. ValueError for inputs that are not ``[batch, input_length]``."""
        if len(input_shape) != 2:
            raise ValueError("The input shape should be a tensor of shape [batch, input_length]")
        self.embeddings = self.add_weight(
            "embeddings", [self.input_dim, self.output_dim], initializer=self.embeddings_initializer
        )
        self.built = True

    def call(
        self, inputs: tf.Tensor, inputs_are_sorted: bool = False, training: bool | None = None
    ) -> tf.Tensor:
        """The rows of the table that belong to the ids."""
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        return tf.gather(tf.cast(self.embeddings, self.compute_dtype), ids)

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": _initializers.serialize(self.embeddings_initializer),
            "serialization_factor": self.serialization_factor,
        }


class Dropout(tf_keras.layers.Layer):  # type: ignore[misc]
    """Zero with probability ``rate`` while training, else scaled. ``seed``: two int32 that fix the mask. ``ref``
    changes no numbers.
    """

    def __init__(
        self,
        rate: float,
        noise_shape: Sequence[int] | None = None,
        seed: object = None,
        ref: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        if not 0 <= rate < 1:
            raise ValueError(f"The rate must be in the range [0, 1), but was {rate}")
        self.rate, self.noise_shape, self.seed, self.ref = rate, noise_shape, seed, ref

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """The inputs, with dropped elements while training."""
        if training is None:
            training = bool(tf_keras.backend.learning_phase())
        return seeded_dropout(inputs, self.rate, self.noise_shape, self.seed) if training else inputs

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        own = {"rate": self.rate, "noise_shape": self.noise_shape, "seed": self.seed, "ref": self.ref}
        return {**super().get_config(), **own}


class _ChannelNorm(tf_keras.layers.Layer):  # type: ignore[misc]
    """Each sample normalised over groups of channels, with ``gamma`` and ``beta`` of the channels' size."""

    def __init__(
        self,
        groups: int | None,
        channels_axis: int = -1,
        center: bool = True,
        scale: bool = True,
        epsilon: float = 1e-3,
        beta_initializer: KerasInitializer = None,
        gamma_initializer: KerasInitializer = None,
        strided_channel_grouping: bool = True,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.groups, self.channels_axis = groups, channels_axis
        self.center, self.scale, self.epsilon = center, scale, epsilon
        self.beta_initializer = _initializers.get(beta_initializer or "zeros")
        self.gamma_initializer = _initializers.get(gamma_initializer or "ones")
        self.strided_channel_grouping = strided_channel_grouping

    def build(self, input_shape: tf.TensorShape) -> None:
        """Make the parameters. ValueError if axis or groups do not fit to the shape."""
        shape = tf.TensorShape(input_shape)
        if not -shape.rank <= self.channels_axis < shape.rank:
            raise ValueError("Axis is out of bounds.")
        self.channels_axis %= shape.rank
        if self.channels_axis not in (1, shape.rank - 1):
            raise ValueError(
                "Unsupported data format, group norm only supports NCHW (channel axis 1) and NHWC (channel axis -1)."
            )
        channels = int(shape[self.channels_axis])
        self.group_count = channels if self.groups is None else self.groups
        if self.group_count > channels:
            raise ValueError(f"Invalid groups {self.group_count} for {channels} channels.")
        if channels % self.group_count:
            raise ValueError(f"{channels} channels is not commensurate with {self.group_count} groups.")
        if self.scale:
            self.gamma = self.add_weight("gamma", [channels], initializer=self.gamma_initializer)
        if self.center:
            self.beta = self.add_weight("beta", [channels], initializer=self.beta_initializer)
        self._channels = channels
        self.built = True

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """The normalised inputs."""
        ones, zeros = tf.ones([self._channels], inputs.dtype), tf.zeros([self._channels], inputs.dtype)
        gamma = tf.cast(self.gamma, inputs.dtype) if self.scale else ones
        beta = tf.cast(self.beta, inputs.dtype) if self.center else zeros
        (result,) = mark(
            "group_norm",
            [inputs, gamma, beta],
            [tf.TensorSpec(inputs.shape, inputs.dtype)],
            groups=self.group_count,
            axis=self.channels_axis,
            epsilon=float(self.epsilon),
            strided=bool(self.strided_channel_grouping),
        )
        return result

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        groups = {} if self.groups is None else {
            "groups": self.groups, "strided_channel_grouping": self.strided_channel_grouping,
        }  # fmt: skip
        return {
            **super().get_config(), **groups, "channels_axis": self.channels_axis, "center": self.center,
            "scale": self.scale, "epsilon": self.epsilon,
            "beta_initializer": _initializers.serialize(self.beta_initializer),
            "gamma_initializer": _initializers.serialize(self.gamma_initializer),
        }  # fmt: skip


class GroupNormalization(_ChannelNorm):
    """Statistics over groups of channels. Strided: channel c is in group ``c % groups``."""

    def __init__(self, groups: int = 2, channels_axis: int = -1, **kwargs: object) -> None:
        super().__init__(groups, channels_axis, **kwargs)  # type: ignore[arg-type]


class InstanceNormalization(_ChannelNorm):
    """Statistics of each channel."""

    def __init__(self, channels_axis: int = -1, **kwargs: object) -> None:
        super().__init__(None, channels_axis, **kwargs)  # type: ignore[arg-type]


class LayerNormalization(tf_keras.layers.LayerNormalization):  # type: ignore[misc]
    """Keras' layer norm: statistics over ``axis``, parameters of its shape, statistics of halves in float32.
    NotImplementedError for regularizers and constraints.
    """

    def __init__(self, axis: int | Sequence[int] = -1, epsilon: float = 1e-3, **kwargs: object) -> None:
        for name in ("beta_regularizer", "gamma_regularizer", "beta_constraint", "gamma_constraint"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"ipu.keras.layers.LayerNormalization does not support {name}.")
        super().__init__(axis, epsilon, **kwargs)

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        """The normalised inputs. ValueError for dimensions that are not known."""
        if not inputs.shape.is_fully_defined():
            raise ValueError(
                f"Input shape {inputs.shape} has unknown dimensions - all dimensions need to be fully specified."
            )
        axes = [self.axis] if isinstance(self.axis, int) else list(self.axis)
        wide = tf.cast(inputs, tf.float32)
        mean, variance = tf.nn.moments(wide, axes, keepdims=True)
        result = (wide - mean) * tf.math.rsqrt(variance + self.epsilon)
        shape = [int(d) if i in axes else 1 for i, d in enumerate(inputs.shape)]
        if self.scale:
            result = result * tf.reshape(tf.cast(self.gamma, tf.float32), shape)
        if self.center:
            result = result + tf.reshape(tf.cast(self.beta, tf.float32), shape)
        return tf.cast(result, inputs.dtype)


_DIMENSIONS = {
    "input_columns": "a_columns",
    "input_rows_kernel_columns": "a_rows_b_columns",
    "kernel_rows": "b_rows",
}


class SerialDense(tf_keras.layers.Dense):  # type: ignore[misc]
    """A dense layer whose product is computed in ``serialization_factor`` parts along ``serialization_dimension``:
    input_columns, input_rows_kernel_columns or kernel_rows. The parts change no numbers.
    """

    def __init__(
        self,
        units: int,
        serialization_factor: int,
        serialization_dimension: str,
        *args: object,
        **kwargs: object,
    ) -> None:
        if serialization_dimension not in _DIMENSIONS:
            raise ValueError(
                f"Invalid serialization_dimension {serialization_dimension!r}, expected one of "
                f"{', '.join(_DIMENSIONS)}."
            )
        super().__init__(units, *args, **kwargs)
        self.serialization_factor = serialization_factor
        self.serialization_dimension = serialization_dimension

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """The product, with bias and activation."""
        rows = tf.reshape(inputs, [-1, inputs.shape[-1]])
        result = ipu_serialized_matmul(
            rows,
            tf.cast(self.kernel, inputs.dtype),
            self.serialization_factor,
            _DIMENSIONS[self.serialization_dimension],
        )
        if self.use_bias:
            result = result + tf.cast(self.bias, inputs.dtype)
        lead = [-1 if d is None else d for d in inputs.shape[:-1]]
        result = tf.reshape(result, [*lead, self.units])
        return result if self.activation is None else self.activation(result)

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {
            **super().get_config(),
            "serialization_factor": self.serialization_factor,
            "serialization_dimension": self.serialization_dimension,
        }


class Dense(tf_keras.layers.Dense):  # type: ignore[misc]
    """Keras' dense layer, which also takes 8-bit floats, a `QuarterTensor`. They are multiplied with the kernel as F143
    of scale 0, and give halves. ValueError for more than two dimensions.
    """

    def call(self, inputs: tf.Tensor | QuarterTensor) -> tf.Tensor:
        """``[batch, units]``: the inputs times the kernel, with bias and activation."""
        if not isinstance(inputs, QuarterTensor):
            return super().call(inputs)
        if inputs.shape.rank != 2:
            raise ValueError(
                f"Dense multiplies 8-bit floats of two dimensions, but its input has the shape {inputs.shape}. Reshape "
                "it before it is converted to 8-bit floats."
            )
        kernel = convert_to_f8(self.kernel, create_metadata(EightBitFormat.F143))
        result = f8_matmul(inputs, kernel)
        if self.use_bias:
            result = tf.nn.bias_add(result, tf.cast(self.bias, tf.float16))
        return result if self.activation is None else self.activation(result)


class RecomputationCheckpoint(tf_keras.layers.Layer):  # type: ignore[misc]
    """A layer that gives its inputs: recomputed activations begin there."""

    def call(self, inputs: tf.Tensor, **kwargs: object) -> tf.Tensor:
        """The inputs, unchanged."""
        return replica_ops.kept_or_recomputed(tf.nest.map_structure(tf.identity, inputs), again=False)


class AssumeEqualAcrossReplicas(tf_keras.layers.Layer):  # type: ignore[misc]
    """A layer that gives its inputs, which the program knows to be the same in all replicas."""

    def __init__(self, inplace: bool = False, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self._inplace = inplace

    def call(self, inputs: tf.Tensor, **kwargs: object) -> tf.Tensor:
        """The inputs, unchanged."""
        operations = importlib.import_module("tensorflow.python.ipu.ops.cross_replica_ops")
        return operations.assume_equal_across_replicas(inputs, self._inplace)

    def get_config(self) -> dict[str, object]:
        """The arguments that make an equal object, for files."""
        return {**super().get_config(), "inplace": self._inplace}


class ConvertToF8(tf_keras.layers.Layer):  # type: ignore[misc]
    """Numbers as 8-bit floats: bytes and metadata in a list."""

    def call(self, data: tf.Tensor, metadata: Metadata, **kwargs: object) -> list[tf.Tensor]:
        """``metadata``: what `create_metadata` gave, or a tensor of it."""
        output = convert_to_f8(data, metadata)
        return [output.data, output.metadata]


class ConvertFromF8(tf_keras.layers.Layer):  # type: ignore[misc]
    """Numbers of the type ``dtype`` of 8-bit floats."""

    def __init__(self, dtype: tf.DType = tf.float16, **kwargs: object) -> None:
        super().__init__(dtype=dtype, **kwargs)

    def call(self, inputs: Sequence[object], **kwargs: object) -> tf.Tensor:
        """``inputs``: bytes and metadata."""
        return convert_from_f8(QuarterTensor(*inputs), dtype=tf.as_dtype(self.dtype))
