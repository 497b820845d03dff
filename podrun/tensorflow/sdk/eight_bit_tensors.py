"""``f8_ops``: tensors of 8-bit floats, which are bytes beside metadata: a format and a scale.

A byte with the value v stands for v * 2^scale. The formats are those of the IPU, which have no infinity and one NaN:
F143 (4 bits of exponent, 3 of significand, up to 240) and F152 (5 and 2, up to 57344). What is larger is clipped.
Products and convolutions are computed in float32 and give halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import tensorflow as tf

from podrun.numerics.precision import eight_bit_floats, from_eight_bit_floats
from podrun.tensorflow.capture.markers import mark
from podrun.tensorflow.capture.program_graphs import in_program
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.placed_devices import placed_ordinal

if TYPE_CHECKING:
    Strides: TypeAlias = int | Sequence[int]
    Metadata: TypeAlias = int | np.ndarray | tf.Tensor


class EightBitFormat(IntEnum):
    """The bits of an 8-bit float: sign, exponent, significand."""

    F143 = 0
    F152 = 1


def create_metadata(fmt: EightBitFormat, scale: int = 0) -> int:
    """The byte that says format and scale: bit 7 for F143, and the scale in 6 bits. ValueError for a scale that is not
    from -32 to 31.
    """
    if not -32 <= scale <= 31:
        raise ValueError(f"`scale` must be from -32 to 31, the range of 6 bits. Received: scale={scale}")
    return (128 if fmt == EightBitFormat.F143 else 0) | (scale & 0x3F)


class QuarterTensor:
    """A tensor of 8-bit floats. ``data``: bytes; ``metadata``: what `create_metadata` gave, or a scalar tensor.

    TypeError for data of another type.
    """

    def __init__(self, data: tf.Tensor, metadata: Metadata) -> None:
        self.data = _bytes_of(data)
        self.metadata = metadata

    def numpy(self) -> list[object]:
        """Bytes and metadata."""
        return [self.data.numpy(), self.metadata]

    def assign(self, new_values: Sequence[object], **kwargs: object) -> None:
        """Take bytes and metadata as `numpy` gives them."""
        self.data = _bytes_of(new_values[0])
        self.metadata = new_values[1]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuarterTensor):
            return NotImplemented
        own, others = self.numpy(), other.numpy()
        return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(own, others, strict=True))

    __hash__ = None  # type: ignore[assignment]

    @property
    def shape(self) -> tf.TensorShape:
        """The shape of the bytes."""
        return self.data.shape

    @property
    def dtype(self) -> tf.DType:
        """The type of the bytes."""
        return tf.uint8

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: object) -> tf.Tensor:
        return self.data[index]

    def __iter__(self) -> Iterator[object]:
        return iter([self.data, self.metadata])


def _bytes_of(data: object) -> tf.Tensor:
    held = tf.Variable(data) if isinstance(data, np.ndarray) else data
    if getattr(held, "dtype", None) != tf.uint8:
        raise TypeError(
            f"Trying to set/update QuarterTensor data with a tensor of type {getattr(held, 'dtype', type(data))}, but "
            "only uint8 are supported. Check that data is a value returned by `convert_to_f8`"
        )
    return held


def convert_to_f8(values: tf.Tensor, metadata: Metadata, name: str | None = None) -> QuarterTensor:
    """Numbers of any type, as halves, rounded to the nearest 8-bit float; the metadata is handed on as a tensor."""
    halves = _halves(values)
    scalar = tf.convert_to_tensor(metadata, tf.uint8)
    data = _converted("to_eight_bits", eight_bit_floats, [halves, scalar], tf.uint8, name)
    return QuarterTensor(data, scalar)


def convert_from_f8(
    packed_input: QuarterTensor | Sequence[object], dtype: tf.DType = tf.float16, name: str | None = None
) -> tf.Tensor:
    """The numbers of 8-bit floats: halves, or as another type."""
    return tf.cast(_halves(_floats(QuarterTensor(*packed_input), name)), dtype)


def _halves(values: tf.Tensor, name: str | None = None) -> tf.Tensor:
    """A tensor in float16. Too large numbers become the greatest, or NaN with ``nanoo``, on the host as on a device."""
    halves = tf.cast(values, tf.float16, name=name)
    if _on_device():
        return halves
    limit = tf.constant(np.nan, tf.float16) if DEVICES.nan_on_overflow else tf.sign(halves) * tf.float16.max
    return tf.compat.v2.where(tf.math.is_inf(halves), limit, halves)


def _on_device() -> bool:
    """Whether operations that are made now are computed by a program, and not by the host."""
    if tf.executing_eagerly():
        return False
    graph: tf.Graph = tf.compat.v1.get_default_graph()
    return in_program() or placed_ordinal(graph) is not None


def _converted(
    kind: str,
    function: Callable[..., np.ndarray],
    inputs: Sequence[tf.Tensor],
    dtype: tf.DType,
    name: str | None,
) -> tf.Tensor:
    """What ``function`` gives for bytes or halves and their metadata: computed by a program, or by the host."""
    spec = tf.TensorSpec(inputs[0].shape, dtype)
    if _on_device():
        (result,) = mark(kind, list(inputs), [spec], name=name)
        return result
    if tf.executing_eagerly():
        return tf.constant(function(np, *(t.numpy() for t in inputs)))
    result = tf.numpy_function(lambda *arrays: function(np, *arrays), list(inputs), dtype, name=name)
    result.set_shape(spec.shape)
    return result


def _floats(value: object, name: str | None = None) -> tf.Tensor:
    """A tensor in float32."""
    if not isinstance(value, QuarterTensor):
        return tf.cast(value, tf.float32)
    scalar = tf.convert_to_tensor(value.metadata, tf.uint8)
    data = tf.convert_to_tensor(value.data)
    return _converted("from_eight_bits", from_eight_bit_floats, [data, scalar], tf.float32, name)


def _checked(value: object, rank: int) -> tf.Tensor:
    floats = _floats(value)
    if not floats.shape.is_fully_defined():
        raise Exception(f"Input shape must be fully defined: {floats}")  # noqa: TRY002 - the SDK's class and words
    floats.shape.assert_has_rank(rank)
    return floats


def f8_matmul(lhs: object, rhs: object, name: str = "f8_matmul") -> tf.Tensor:
    """The product of two matrices, or of groups of them; each is a `QuarterTensor` or a tensor. Gives halves."""
    left, right = (_checked(v, 2 if len(v.shape) == 2 else 3) for v in (lhs, rhs))  # type: ignore[attr-defined]
    return _halves(tf.matmul(left, right), name)


def f8_conv_1d(
    inputs: object,
    filters: object,
    strides: Strides,
    padding: str,
    data_format: str = "NWC",
    dilations: Strides = (1,),
    name: str = "f8_conv_1d",
) -> tf.Tensor:
    """A convolution along one axis. ValueError for another ``data_format`` than NWC and NCW. Gives halves."""
    if data_format not in ("NWC", "NCW"):
        raise ValueError(f"`data_format` must be 'NWC' or 'NCW'. Received: data_format={data_format}")
    x, w = _checked(inputs, 3), _checked(filters, 3)
    y = tf.nn.conv1d(
        x, w, strides, padding, data_format=data_format, dilations=list(np.atleast_1d(dilations))
    )
    return _halves(y, name)


def f8_conv_2d(
    inputs: object,
    filters: object,
    strides: Strides,
    padding: str | Sequence[Sequence[int]],
    data_format: str = "NHWC",
    dilations: Strides = (1, 1, 1, 1),
    name: str = "f8_conv_2d",
) -> tf.Tensor:
    """A convolution over images. Gives halves."""
    x, w = _checked(inputs, 4), _checked(filters, 4)
    y = tf.nn.conv2d(x, w, strides, padding, data_format=data_format, dilations=dilations)
    return _halves(y, name)


def f8_conv_3d(
    inputs: object,
    filters: object,
    strides: Sequence[int],
    padding: str,
    data_format: str = "NDHWC",
    dilations: Sequence[int] = (1, 1, 1, 1, 1),
    name: str = "f8_conv_3d",
) -> tf.Tensor:
    """A convolution over volumes. Gives halves."""
    x, w = _checked(inputs, 5), _checked(filters, 5)
    y = tf.nn.conv3d(x, w, list(strides), padding, data_format=data_format, dilations=list(dilations))
    return _halves(y, name)
