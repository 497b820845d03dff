"""Operations of the SDK's libraries: activations, dropout, normalisation, embeddings, products, images."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.private_apis.tensorflow import private_module
from podrun.tensorflow.capture.markers import mark

EPSILON = 1.53e-5
"""The norms' default."""
_FUSED_NORMS = (
    "fused_batch_norm_v2",
    "fused_batch_norm_v3",
    "fused_batch_norm_grad_v2",
    "fused_batch_norm_grad_v3",
)
"""Operations of ``gen_nn_ops`` whose scales and statistics are floats in TensorFlow, and may be halves in the SDK."""
_STATISTICS = ("scale", "offset", "mean", "variance", "reserve_space_1", "reserve_space_2", "reserve_space_3")


def let_batch_norms_take_halves() -> None:
    """Let fused batch norms, and their gradients, take scales and statistics in halves, and give these in halves."""
    operations = private_module("ops.gen_nn_ops")
    for name in _FUSED_NORMS:
        call = getattr(operations, name)
        if not hasattr(call, "__wrapped__"):
            setattr(operations, name, _of_any_width(call))


def _of_any_width(call: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(call)

    @functools.wraps(call)
    def fused(*args: object, **options: object) -> Any:
        bound = signature.bind(*args, **options)
        scale = bound.arguments["scale"]
        dtype = scale.dtype if hasattr(scale, "dtype") else tf.convert_to_tensor(scale).dtype
        if tf.as_dtype(dtype).base_dtype != tf.float16:
            return call(*args, **options)
        for name in set(_STATISTICS) & bound.arguments.keys():
            bound.arguments[name] = tf.cast(bound.arguments[name], tf.float32)
        first, *others = outcome = call(*bound.args, **bound.kwargs)
        return type(outcome)(first, *(tf.cast(x, tf.float16) for x in others))

    return fused


def approximate_gelu(x: tf.Tensor, approximate: bool = True, name: str | None = None) -> tf.Tensor:
    """``nn_ops.gelu``: the form with a hyperbolic tangent, or the exact one."""
    return tf.compat.v2.nn.gelu(x, approximate=approximate)


def ipu_swish(x: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """``x * sigmoid(x)``."""
    return x * tf.sigmoid(x)


def ipu_hard_sigmoid(x: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """``0.2 x + 0.5`` between 0 and 1."""
    return tf.clip_by_value(0.2 * x + 0.5, 0.0, 1.0)


def stable_softmax(x: tf.Tensor, stable: bool = False, name: str | None = None) -> tf.Tensor:
    """``nn_ops.softmax`` over the last axis."""
    return tf.nn.softmax(x)


def seeded_dropout(
    x: tf.Tensor,
    rate: float = 0.5,
    noise_shape: Sequence[int] | None = None,
    seed: tf.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    **kwargs: object,
) -> tf.Tensor:
    """``rand_ops.dropout``: zero with probability ``rate``, else scaled. The seed (int32 [2]) decides the mask."""
    unknown = sorted(kwargs.keys() - {"ref"})
    if unknown:
        raise ValueError(f"dropout got an unexpected argument {unknown[0]!r}")
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"`rate` must be a real number in the range [0, 1), got {rate}")
    x = tf.convert_to_tensor(x)
    shape = [int(d) for d in noise_shape] if noise_shape is not None and len(noise_shape) else None
    if shape is not None:
        if len(shape) != x.shape.rank:
            raise ValueError(
                f"The length of noise_shape, {len(shape)}, must equal the rank of x. It is {x.shape.rank}."
            )
        if any(n not in (1, d) for n, d in zip(shape, x.shape, strict=True)):
            raise ValueError(
                f"Dimension mismatch: noise_shape {shape} must be 1 or the size of x in each dimension: {x.shape}."
            )
    if rate == 0.0:
        return x
    if seed is None:  # Drawn beside the dropout: gradients that share a forward pass have the same mask.
        seed = tf.random.uniform([2], tf.int32.min, tf.int32.max, tf.int32)
    (result,) = mark(
        "dropout",
        [x, tf.convert_to_tensor(seed)],
        [tf.TensorSpec(x.shape, x.dtype)],
        rate=float(rate),
        noise_shape=shape,
    )
    return result


def _checked_channels(inputs: tf.Tensor, groups: int, channels_axis: int) -> int:
    """The number of channels. ValueError in the SDK's words if groups or axis do not fit."""
    if inputs.shape.rank is None:
        raise ValueError("Inputs has undefined rank.")
    if not -inputs.shape.rank <= channels_axis < inputs.shape.rank:
        raise ValueError("Axis is out of bounds.")
    if channels_axis % inputs.shape.rank not in (1, inputs.shape.rank - 1):
        raise ValueError("Only channels_axis 1 and -1 are supported.")
    channels = inputs.shape.as_list()[channels_axis]
    if channels is None:
        raise ValueError("Inputs has undefined channel dimension.")
    if groups > channels:
        raise ValueError(f"Invalid groups {groups} for {channels} channels.")
    if channels % groups:
        raise ValueError(f"{channels} channels is not commensurate with {groups} groups.")
    return int(channels)


def ipu_group_norm(
    inputs: tf.Tensor,
    groups: int = 2,
    channels_axis: int = -1,
    center: bool = True,
    scale: bool = True,
    epsilon: float = EPSILON,
    param_initializers: Mapping[str, tf.keras.initializers.Initializer] | None = None,
    reuse: bool | None = None,
    variables_collections: object = None,
    training: bool = True,
    trainable: bool = True,
    scope: str | tf.compat.v1.VariableScope | None = None,
    strided_channel_grouping: bool = True,
    _scope_name: str = "GroupNorm",
) -> tf.Tensor:
    """Each sample normalised over groups of channels, with variables ``gamma`` and ``beta`` of the channels' size."""
    channels = _checked_channels(inputs, groups, channels_axis)
    initializers = dict(param_initializers or {})
    with tf.compat.v1.variable_scope(scope, _scope_name, [inputs], reuse=reuse):

        def weights(
            name: str, wanted: bool, initializer: tf.keras.initializers.Initializer
        ) -> tf.Tensor | tf.Variable:
            if not wanted:
                return tf.fill([channels], tf.constant(1.0 if name == "gamma" else 0.0, inputs.dtype))
            return tf.compat.v1.get_variable(
                name, [channels], inputs.dtype, initializers.get(name, initializer), trainable=trainable,
                use_resource=True,
            )  # fmt: skip

        beta = weights("beta", center, tf.compat.v1.zeros_initializer())
        gamma = weights("gamma", scale, tf.compat.v1.ones_initializer())
    (result,) = mark(
        "group_norm",
        [inputs, tf.convert_to_tensor(gamma), tf.convert_to_tensor(beta)],
        [tf.TensorSpec(inputs.shape, inputs.dtype)],
        groups=groups,
        axis=channels_axis if channels_axis == -1 else channels_axis % inputs.shape.rank,
        epsilon=float(epsilon),
        strided=bool(strided_channel_grouping),
    )
    return result


def ipu_layer_norm(inputs: tf.Tensor, channels_axis: int = -1, *args: Any, **kwargs: Any) -> tf.Tensor:
    """`group_norm` with one group: over all but the batch."""
    kwargs.pop("reduction_axes", None)
    return ipu_group_norm(inputs, 1, channels_axis, *args, **{"_scope_name": "LayerNorm", **kwargs})


def instance_norm(inputs: tf.Tensor, channels_axis: int = -1, *args: Any, **kwargs: Any) -> tf.Tensor:
    """`group_norm` with a group for each channel."""
    rank = inputs.shape.rank
    known = rank is not None and -rank <= channels_axis < rank
    groups = (inputs.shape.as_list()[channels_axis] if known else None) or 1
    return ipu_group_norm(inputs, groups, channels_axis, *args, **{"_scope_name": "InstanceNorm", **kwargs})


def embedding_lookup(
    params: tf.Tensor | tf.Variable,
    ids: tf.Tensor,
    serialization_factor: int | object = 1,
    indices_are_sorted: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """Rows of a table. ValueError if the factor does not divide the rows."""
    factor = serialization_factor if isinstance(serialization_factor, int) else 1
    if factor < 1 or int(params.shape[0]) % factor:
        raise ValueError(
            f"The serialization_factor ({factor}) must divide the size of the 0th dimension of params "
            f"({params.shape[0]})."
        )
    return tf.gather(params, ids)


def ipu_serialized_matmul(
    a: tf.Tensor,
    b: tf.Tensor,
    serialization_factor: int,
    serialization_dimension: str,
    transpose_a: bool = False,
    transpose_b: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """The matrix product; parts one after the other change no numbers."""
    if serialization_dimension not in ("a_columns", "a_rows_b_columns", "b_rows"):
        raise ValueError(f"Invalid serialization_dimension {serialization_dimension!r}.")
    return tf.matmul(a, b, transpose_a=transpose_a, transpose_b=transpose_b)


def segment_sum(
    data: tf.Tensor, segment_ids: tf.Tensor, num_segments: int, name: str | None = None
) -> tf.Tensor:
    """Sums of rows by segment; the ids need not be sorted."""
    return tf.math.unsorted_segment_sum(data, segment_ids, num_segments)


def normalise_image(
    image: tf.Tensor,
    channel_offsets: tf.Tensor | Sequence[float],
    channel_scales: tf.Tensor | Sequence[float],
    scale: float = 1,
    name: str | None = None,
) -> tf.Tensor:
    """``(image * scale - offsets) * scales`` for each channel, and a fourth channel of zeros."""
    image = tf.convert_to_tensor(image)
    if image.dtype not in (tf.uint8, tf.float16, tf.float32):
        raise TypeError(f"normalise_image does not support {image.dtype.name}")
    dtype = tf.float16 if image.dtype == tf.uint8 else image.dtype
    wide = tf.cast(image, tf.float32) * scale
    result = (wide - tf.cast(channel_offsets, tf.float32)) * tf.cast(channel_scales, tf.float32)
    padding = [[0, 0]] * (image.shape.rank - 1) + [[0, 1]]
    return tf.cast(tf.pad(result, padding), dtype)
