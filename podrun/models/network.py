"""The operators that networks are written in: a thin layer over `popart.Builder` that also makes the weights."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import field
from typing import Protocol

import numpy as np

from podrun.core.errors import InvalidOptionError
from podrun.core.quick_dataclass import dataclass
from podrun.popart.building.builder import Builder
from podrun.popart.values.tensor_info import TensorInfo

NORMS = ("batch", "group", "none")
"""Normalisations of a convolution. ``none`` adds a bias: the remainder of batch normalisation in inference."""
DTYPES = {"float16": "FLOAT16", "float32": "FLOAT"}
EPSILON = 1e-5
GROUP_CHANNELS = 16
"""Channels of a group of group normalisation, as near as the channels divide."""
ATTENTION_BLOCKED = -1e4
"""Added to masked scores: far below any score, and representable in float16."""


class Weights(Protocol):
    """The source of a network's weights, and their type."""

    dtype: str

    def add(self, builder: Builder, name: str, shape: Sequence[int], scale: float, mean: float) -> str:
        """Add a weight with values about ``mean`` and spread ``scale``; returns its tensor."""
        ...


@dataclass(slots=True)
class Declared:
    """Weights that are inputs of the model: their shapes and types are known, their values never made."""

    dtype: str = "float16"

    def add(self, builder: Builder, name: str, shape: Sequence[int], scale: float, mean: float) -> str:
        """An input tensor called ``name``."""
        return builder.addInputTensor(TensorInfo(DTYPES[self.dtype], list(shape)), name)


@dataclass(slots=True)
class Random:
    """Weights drawn from normal distributions, the same for the same ``seed`` and order of building."""

    seed: int = 0
    dtype: str = "float32"
    _generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self._generator = np.random.default_rng(self.seed)

    def add(self, builder: Builder, name: str, shape: Sequence[int], scale: float, mean: float) -> str:
        """An initialised variable called ``name``."""
        values = mean + scale * self._generator.standard_normal(tuple(shape))
        return builder.addInitializedInputTensor(values.astype(self.dtype), name)


@dataclass(slots=True)
class Network:
    """A network being written: the builder, the source of weights, and how the network normalises.

    ``norm`` is one of `NORMS`. ``train``: dropout and batch statistics are in use. Images are ``[batch, channels, rows,
    columns]``, text ``[batch, tokens, hidden]``.
    """

    builder: Builder
    weights: Weights
    norm: str = "batch"
    train: bool = False
    named: dict[str, str] = field(default_factory=dict)
    state: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.norm not in NORMS:
            raise InvalidOptionError(
                f"unknown normalisation {self.norm!r}", hint=f"Known: {', '.join(NORMS)}."
            )
        if self.weights.dtype not in DTYPES:
            raise InvalidOptionError(
                f"unknown type {self.weights.dtype!r}", hint=f"Known: {', '.join(DTYPES)}."
            )

    @property
    def dtype(self) -> str:
        """The type of weights and activations."""
        return self.weights.dtype

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Operators added inside carry ``name``: reports sum over it."""
        with self.builder.nameScope(name):
            yield

    def shape(self, x: str) -> list[int]:
        """Shape of a tensor."""
        return list(self.builder.getTensorShape(x))

    def input(self, name: str, shape: Sequence[int], dtype: str | None = None) -> str:
        """An input of the network."""
        return self.builder.addInputTensor(TensorInfo(dtype or DTYPES[self.dtype], list(shape)), name)

    def weight(self, name: str, shape: Sequence[int], scale: float = 0.02, mean: float = 0.0) -> str:
        """The trained parameter called ``name``; the same one at each call."""
        if name not in self.named:
            self.named[name] = self.weights.add(self.builder, name, shape, scale, mean)
        return self.named[name]

    def constant(self, value: float) -> str:
        """A scalar of the network's type."""
        return str(self.builder.aiOnnx.constant(np.asarray(value, self.dtype)))

    # -- convolutions -----------------------------------------------------------------------------

    def conv(
        self,
        x: str,
        name: str,
        out: int,
        kernel: int,
        stride: int = 1,
        groups: int = 1,
        pad: int | None = None,
    ) -> str:
        """A convolution without bias; unless ``pad`` is given, padding keeps the field before striding."""
        channels = self.shape(x)[1]
        fan_in = channels // groups * kernel * kernel
        w = self.weight(name, (out, channels // groups, kernel, kernel), math.sqrt(2.0 / fan_in))
        before, after = ((kernel - 1) // 2, kernel // 2) if pad is None else (pad, pad)
        return str(
            self.builder.aiOnnx.conv(
                [x, w],
                strides=[stride] * 2,
                pads=[before, before, after, after],
                dilations=[1, 1],
                group=groups,
            )
        )

    def normalise(self, x: str, name: str) -> str:
        """Normalise channels with the network's normalisation."""
        channels = self.shape(x)[1]
        bias = self.weight(f"{name}.bias", (channels,))
        if self.norm == "none" or (self.norm == "batch" and not self.train):
            return self.add(x, self.reshape(bias, (1, channels, 1, 1)))
        scale = self.weight(f"{name}.scale", (channels,), 0.02, 1.0)
        if self.norm == "group":
            groups = channels // math.gcd(channels, GROUP_CHANNELS)
            return self._group(x, scale, bias, groups)
        return self._batch(x, name, scale, bias, channels)

    def _batch(self, x: str, name: str, scale: str, bias: str, channels: int) -> str:
        running = [
            self.weights.add(self.builder, f"{name}.{part}", (channels,), 0.0, value)
            for part, value in (("mean", 0.0), ("var", 1.0))
        ]
        self.state += running
        outputs = self.builder.aiOnnx.batchnormalization(
            [x, scale, bias, *running], num_outputs=5, epsilon=EPSILON, momentum=0.9
        )
        return str(outputs[0])

    def _group(self, x: str, scale: str, bias: str, groups: int) -> str:
        outputs = self.builder.aiGraphcore.groupnormalization(
            [x, scale, bias], num_groups=groups, epsilon=EPSILON
        )
        return str(outputs[0])

    def max_pool(self, x: str, window: int, stride: int, *, padded: bool = True) -> str:
        """Max-pooling; ``padded``: with the padding that keeps the field before striding."""
        before, after = ((window - 1) // 2, window // 2) if padded else (0, 0)
        (y,) = self.builder.aiOnnx.maxpool(
            [x],
            num_outputs=1,
            kernel_shape=[window] * 2,
            pads=[before, before, after, after],
            strides=[stride] * 2,
        )
        return str(y)

    def average_field(self, x: str) -> str:
        """Mean over rows and columns: ``[batch, channels]``."""
        return self.reshape(self.builder.aiOnnx.globalaveragepool([x]), (-1, self.shape(x)[1]))

    # -- products and shapes ----------------------------------------------------------------------

    def dense(self, x: str, name: str, out: int, *, bias: bool = True) -> str:
        """A fully connected layer on the last dimension."""
        wide = self.shape(x)[-1]
        y = self.matmul(x, self.weight(name, (wide, out), 1.0 / math.sqrt(wide)))
        return self.add(y, self.weight(f"{name}.bias", (out,))) if bias else y

    def matmul(self, a: str, b: str) -> str:
        """Matrix product over the last two dimensions."""
        return str(self.builder.aiOnnx.matmul([a, b]))

    def reshape(self, x: str, shape: Sequence[int]) -> str:
        """The same values in another shape."""
        return str(self.builder.reshape_const(self.builder.aiOnnx, [x], list(shape)))

    def transpose(self, x: str, order: Sequence[int]) -> str:
        """The tensor with its dimensions in another order."""
        return str(self.builder.aiOnnx.transpose([x], perm=list(order)))

    def split(self, x: str, parts: int, axis: int) -> list[str]:
        """The tensor in equal parts along ``axis``."""
        size = self.shape(x)[axis] // parts
        return [
            str(y) for y in self.builder.aiOnnx.split([x], num_outputs=parts, axis=axis, split=[size] * parts)
        ]

    def slice(self, x: str, axis: int, start: int, end: int) -> str:
        """Elements ``start`` to ``end`` along ``axis``."""
        ai = self.builder.aiOnnx
        bounds = [ai.constant(np.asarray([v], np.int32)) for v in (start, end, axis)]
        return str(ai.slice([x, *bounds]))

    def concat(self, parts: Sequence[str], axis: int) -> str:
        """Tensors one behind the other along ``axis``."""
        return str(self.builder.aiOnnx.concat(list(parts), axis=axis))

    # -- element-wise -----------------------------------------------------------------------------

    def add(self, a: str, b: str) -> str:
        """The element-wise sum of two tensors."""
        return str(self.builder.aiOnnx.add([a, b]))

    def mul(self, a: str, b: str) -> str:
        """The element-wise product of two tensors."""
        return str(self.builder.aiOnnx.mul([a, b]))

    def relu(self, x: str) -> str:
        """The element-wise maximum of x and 0."""
        return str(self.builder.aiOnnx.relu([x]))

    def sigmoid(self, x: str) -> str:
        """The element-wise logistic function, ``1 / (1 + exp(-x))``."""
        return str(self.builder.aiOnnx.sigmoid([x]))

    def silu(self, x: str) -> str:
        """``x * sigmoid(x)``."""
        return str(self.builder.aiGraphcore.swish([x]))

    def gelu(self, x: str) -> str:
        """Gaussian error linear unit."""
        return str(self.builder.aiGraphcore.gelu([x]))

    def softmax(self, x: str) -> str:
        """Softmax over the last dimension."""
        return str(self.builder.aiOnnx.softmax([x], axis=len(self.shape(x)) - 1))

    def log_softmax(self, x: str) -> str:
        """The logarithm of `softmax`."""
        return str(self.builder.aiOnnx.logsoftmax([x], axis=len(self.shape(x)) - 1))

    def dropout(self, x: str, ratio: float = 0.1) -> str:
        """Dropout in training; no-op otherwise."""
        if not self.train:
            return x
        (y,) = self.builder.aiOnnx.dropout([x], num_outputs=1, ratio=ratio)
        return str(y)

    def layer_norm(self, x: str, name: str) -> str:
        """Normalise the last dimension: a group normalisation of one group over rows."""
        shape = self.shape(x)
        scale, bias = (
            self.weight(f"{name}.scale", shape[-1:], 0.02, 1.0),
            self.weight(f"{name}.bias", shape[-1:]),
        )
        rows = self.reshape(x, (math.prod(shape[:-1]), shape[-1]))
        return self.reshape(self._group(rows, scale, bias, 1), shape)

    def gather(self, table: str, indices: str) -> str:
        """Rows of ``table``."""
        return str(self.builder.aiOnnx.gather([table, indices], axis=0))
