"""Operators for `generated_training`: each as the builder makes it, and as NumPy computes it in float64.

A family takes a `Model` and the name of a tensor and gives the name of another. Rows are ``[n, features]``, images
``[n, channels, height, width]``.
"""

from __future__ import annotations

from collections.abc import Callable
from math import erf as erf_of_one
from typing import Any

import numpy as np

import podrun.popart as popart

Weights = dict[str, np.ndarray]
Values = dict[str, np.ndarray]
Random = np.random.Generator
ReductionType = popart.ReductionType


class Model:
    """A model while it is drawn: the builder's side and the reference's side of each operator.

    ``stages``: pieces for virtual graphs; each operator goes to the piece that is open.
    """

    def __init__(self, random: Random) -> None:
        self.random = random
        self.builder = popart.Builder()
        self.onnx, self.graphcore = self.builder.aiOnnx, self.builder.aiGraphcore
        self.start: Weights = {}
        self.steps: list[Callable[[Values, Weights], None]] = []
        self.first: dict[str, int] = {}
        """The first step that reads a tensor."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.inputs: dict[str, tuple[tuple[int, ...], int]] = {}
        self.statistics: list[Callable[[Values, Weights], None]] = []
        self.ids: list[list[str]] = [[]]
        self.words: list[str] = []
        self.saturated = False
        """Whether a likelihood met its bound, where its value no longer says what its gradient is."""

    def input(self, shape: tuple[int, ...], below: int = 0) -> str:
        """An input: normally distributed, or integers ``below`` a bound."""
        name = self.builder.addInputTensor("INT32" if below else "FLOAT", list(shape))
        self.inputs[name], self.shapes[name] = (shape, below), shape
        return name

    def weight(self, *shape: int, scale: float = 0.5, shift: float = 0.0) -> str:
        value = (self.random.standard_normal(shape) * scale + shift).astype(np.float32)
        name = self.builder.addInitializedInputTensor(value)
        self.start[name], self.shapes[name] = value.astype(np.float64), shape
        return name

    def add(self, name: str, apply: Callable[..., np.ndarray], *inputs: str) -> str:
        """An operator that the builder made, and how NumPy computes it."""

        def step(values: Values, weights: Weights) -> None:
            values[name] = apply(*(weights[i] if i in weights else values[i] for i in inputs))

        for i in inputs:
            self.first.setdefault(i, len(self.steps))
        self.steps.append(step)
        self.ids[-1].append(name)
        self.words.append(name)
        example = {n: np.zeros(s) + 0.5 for n, s in self.shapes.items()}
        integer = {n: example[n].astype(np.int64) * 0 for n, (_, below) in self.inputs.items() if below}
        self.shapes[name] = apply(*((example | integer)[i] for i in inputs)).shape
        return name

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        name = self.onnx.constant(np.asarray(value, dtype))
        self.ids[-1].append(name)
        return name

    def pick(self, *choices: Any) -> Any:
        return choices[self.random.integers(len(choices))]

    def forward(self, values: Values, weights: Weights, begin: int = 0) -> Values:
        """The values of all tensors; those that steps before ``begin`` make are there already."""
        for step in self.steps[begin:]:
            step(values, weights)
        return values


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(erf_of_one, otypes=[np.float64])(x)


def softmax(x: np.ndarray) -> np.ndarray:
    wide = np.exp(x - x.max(-1, keepdims=True))
    return wide / wide.sum(-1, keepdims=True)


UNARY: dict[str, tuple[Callable[[Model, str], str], Callable[[np.ndarray], np.ndarray]]] = {
    "relu": (lambda m, x: m.onnx.relu([x]), lambda x: np.maximum(x, 0)),
    "tanh": (lambda m, x: m.onnx.tanh([x]), np.tanh),
    "sigmoid": (lambda m, x: m.onnx.sigmoid([x]), lambda x: 1 / (1 + np.exp(-x))),
    "leakyrelu": (lambda m, x: m.onnx.leakyrelu([x], 0.1), lambda x: np.where(x < 0, 0.1 * x, x)),
    "elu": (lambda m, x: m.onnx.elu([x], 0.7), lambda x: np.where(x < 0, 0.7 * np.expm1(x), x)),
    "softplus": (lambda m, x: m.onnx.softplus([x]), lambda x: np.log1p(np.exp(x))),
    "softsign": (lambda m, x: m.onnx.softsign([x]), lambda x: x / (1 + np.abs(x))),
    "abs": (lambda m, x: m.onnx.abs([x]), np.abs),
    "neg": (lambda m, x: m.onnx.neg([x]), np.negative),
    "sin": (lambda m, x: m.onnx.sin([x]), np.sin),
    "clip": (lambda m, x: m.onnx.clip([x], 0.9, -0.8), lambda x: np.clip(x, -0.8, 0.9)),
    "erf": (lambda m, x: m.onnx.erf([x]), erf),
    "swish": (lambda m, x: m.graphcore.swish([x]), lambda x: x / (1 + np.exp(-x))),
    "scale": (lambda m, x: m.graphcore.scale([x], -1.5), lambda x: -1.5 * x),
    "softmax": (lambda m, x: m.onnx.softmax([x], axis=len(m.shapes[x]) - 1), softmax),
}


def unary(m: Model, x: str) -> str:
    make, apply = UNARY[m.pick(*UNARY)]
    return m.add(make(m, x), apply, x)


def matmul(m: Model, x: str) -> str:
    w = m.weight(m.shapes[x][-1], m.pick(2, 3, 4))
    return m.add(m.onnx.matmul([x, w]), np.matmul, x, w)


def gemm(m: Model, x: str) -> str:
    transposed, alpha, beta, width = m.pick(0, 1), m.pick(1.0, 0.5), m.pick(1.0, 2.0), m.pick(2, 3)
    inner = m.shapes[x][-1]
    w = m.weight(width, inner) if transposed else m.weight(inner, width)
    b = m.weight(width)
    made = m.onnx.gemm([x, w, b], alpha, beta, 0, transposed)
    return m.add(made, lambda x, w, b: alpha * x @ (w.T if transposed else w) + beta * b, x, w, b)


def affine(m: Model, x: str) -> str:
    how = m.pick("add", "mul", "sub", "div")
    apply = {"add": np.add, "mul": np.multiply, "sub": np.subtract, "div": np.divide}[how]
    w = m.weight(m.shapes[x][-1], **({"scale": 0.1, "shift": 2.0} if how == "div" else {"shift": 1.0}))
    order = [w, x] if how == "sub" and m.pick(0, 1) else [x, w]
    return m.add(getattr(m.onnx, how)(order), apply, *order)


def extreme(m: Model, x: str) -> str:
    w = m.weight(*m.shapes[x][1:])
    how = m.pick("max", "min")
    return m.add(getattr(m.onnx, how)([x, w]), np.maximum if how == "max" else np.minimum, x, w)


def doubled(m: Model, x: str) -> str:
    """x and tanh x joined, cut apart again, and multiplied: one tensor with many readers."""
    t = m.add(m.onnx.tanh([x]), np.tanh, x)
    axis = len(m.shapes[x]) - 1
    both = m.add(m.onnx.concat([x, t], axis), lambda *p: np.concatenate(p, axis), x, t)
    width = m.shapes[x][axis]
    first, second = m.onnx.split([both], 2, axis=axis, split=[width, width])
    m.ids[-1].append((first, second))
    halves = []
    for place, name in enumerate((first, second)):

        def apply(v: np.ndarray, place: int = place) -> np.ndarray:
            return np.split(v, 2, axis)[place]

        halves.append(m.add(name, apply, both))
        m.ids[-1].pop()
    return m.add(m.onnx.mul(halves), np.multiply, *halves)


def reduced(m: Model, x: str) -> str:
    """x minus (or times) a reduction of x."""
    how = m.pick(
        "reducemean", "reducesum", "reducel2", "reducelogsumexp", "reducemax", "reducemin", "reducesumsquare"
    )
    axis = len(m.shapes[x]) - 1
    apply = {
        "reducemean": lambda v: v.mean(axis, keepdims=True),
        "reducesum": lambda v: v.sum(axis, keepdims=True),
        "reducel2": lambda v: np.sqrt((v**2).sum(axis, keepdims=True)),
        "reducelogsumexp": lambda v: np.log(np.exp(v).sum(axis, keepdims=True)),
        "reducemax": lambda v: v.max(axis, keepdims=True),
        "reducemin": lambda v: v.min(axis, keepdims=True),
        "reducesumsquare": lambda v: (v**2).sum(axis, keepdims=True),
    }[how]
    part = m.add(getattr(m.onnx, how)([x], axes=[axis], keepdims=1), apply, x)
    return m.add(m.onnx.sub([x, part]), np.subtract, x, part)


def moved(m: Model, x: str) -> str:
    """x transposed, cut, padded and put back into rows."""
    n, f = m.shapes[x]
    turned = m.add(m.onnx.transpose([x], [1, 0]), np.transpose, x)
    stop = m.pick(1, f) if f > 1 else 1
    cut = m.add(_slice(m, turned, stop), lambda v: v[:stop], turned)
    padded = m.add(
        m.onnx.pad([cut], [0, 0, f - stop + 1, 0], "constant", 0.25),
        lambda v: np.pad(v, [(0, f - stop + 1), (0, 0)], constant_values=0.25),
        cut,
    )
    shape = m.constant([n, f + 1])
    back = m.add(m.onnx.transpose([padded], [1, 0]), np.transpose, padded)
    return m.add(m.onnx.reshape([back, shape]), lambda v: v.reshape(n, f + 1), back)


def _slice(m: Model, x: str, stop: int) -> str:
    starts, ends, axes = (m.constant([value]) for value in (0, stop, 0))
    return m.onnx.slice([x, starts, ends, axes])


def embedded(m: Model, x: str) -> str:
    """x and the rows of a table that an input selects, some of them several times."""
    n, f = m.shapes[x]
    table, rows = m.weight(3, f), m.input((n,), below=3)
    found = m.add(m.onnx.gather([table, rows], 0), lambda t, r: t[r], table, rows)
    return m.add(m.onnx.add([x, found]), np.add, x, found)


def grouped(m: Model, x: str) -> str:
    """Normalised in groups of channels."""
    channels = m.shapes[x][1]
    groups = m.pick(1, channels)
    scale, bias = m.weight(channels, shift=1.0), m.weight(channels)

    def apply(v: np.ndarray, s: np.ndarray, b: np.ndarray) -> np.ndarray:
        flat = v.reshape(v.shape[0], groups, -1)
        flat = (flat - flat.mean(-1, keepdims=True)) / np.sqrt(flat.var(-1, keepdims=True) + 1e-2)
        wide = (1, -1) + (1,) * (v.ndim - 2)
        return flat.reshape(v.shape) * s.reshape(wide) + b.reshape(wide)

    made = m.graphcore.groupnormalization([x, scale, bias], groups, 1e-2)
    m.ids[-1].append(tuple(made))
    name = m.add(made[0], apply, x, scale, bias)
    m.ids[-1].pop()
    return name


def convolved(m: Model, x: str) -> str:
    _, channels, *size = m.shapes[x]
    group = m.pick(1, channels) if channels > 1 else 1
    out = group * m.pick(1, 2)
    kernel, stride, pad = m.pick(1, 2, 3), m.pick(1, 2), m.pick(0, 1)
    kernel = min(kernel, size[0] + 2 * pad)
    w = m.weight(out, channels // group, kernel, kernel)
    inputs = [x, w] + ([m.weight(out)] if m.pick(0, 1) else [])
    made = m.onnx.conv(inputs, [1, 1], group, [], [pad] * 4, [stride] * 2)

    def apply(v: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
        cut = windows(np.pad(v, [(0, 0), (0, 0), (pad, pad), (pad, pad)]), kernel, stride)
        cut = cut.reshape(v.shape[0], group, channels // group, *cut.shape[2:])
        own = w.reshape(group, out // group, channels // group, kernel, kernel)
        y = np.einsum("ngchwij,gocij->ngohw", cut, own)
        y = y.reshape(v.shape[0], out, *y.shape[3:])
        return y if b is None else y + b[:, None, None]

    return m.add(made, apply, *inputs)


def windows(v: np.ndarray, kernel: int, stride: int) -> np.ndarray:
    """``[N, C, H, W] -> [N, C, h, w, kernel, kernel]``."""
    found = np.lib.stride_tricks.sliding_window_view(v, (kernel, kernel), (2, 3))
    return found[:, :, ::stride, ::stride]


def pooled(m: Model, x: str) -> str:
    size = m.shapes[x][2]
    kernel = min(m.pick(2, 3), size)
    stride, pad = m.pick(1, 2), m.pick(0, 1) if kernel > 1 else 0
    around = [(0, 0), (0, 0), (pad, pad), (pad, pad)]
    if m.pick(0, 1):
        made = m.onnx.maxpool([x], 1, [kernel] * 2, pads=[pad] * 4, strides=[stride] * 2)[0]
        return m.add(
            made,
            lambda v: windows(np.pad(v, around, constant_values=-np.inf), kernel, stride).max((-1, -2)),
            x,
        )

    def average(v: np.ndarray) -> np.ndarray:
        counts = windows(np.pad(np.ones_like(v), around), kernel, stride).sum((-1, -2))
        return windows(np.pad(v, around), kernel, stride).sum((-1, -2)) / counts

    return m.add(m.onnx.averagepool([x], [kernel] * 2, pads=[pad] * 4, strides=[stride] * 2), average, x)


def batch_normalised(m: Model, x: str) -> str:
    channels = m.shapes[x][1]
    momentum, epsilon = m.pick(0.9, 0.5), 1e-2
    scale, bias = m.weight(channels, shift=1.0), m.weight(channels)
    mean, variance = m.weight(channels), m.weight(channels, scale=0.0, shift=1.0)
    made = m.onnx.batchnormalization([x, scale, bias, mean, variance], 5, epsilon, momentum)
    m.ids[-1].append(tuple(made))
    wide = (1, -1) + (1,) * (len(m.shapes[x]) - 2)
    axes = (0, *range(2, len(m.shapes[x])))

    def apply(v: np.ndarray, s: np.ndarray, b: np.ndarray) -> np.ndarray:
        centred = v - v.mean(axes, keepdims=True)
        return centred / np.sqrt(v.var(axes, keepdims=True) + epsilon) * s.reshape(wide) + b.reshape(wide)

    def keep(values: Values, weights: Weights) -> None:
        weights[mean] = weights[mean] * momentum + values[x].mean(axes) * (1 - momentum)
        weights[variance] = weights[variance] * momentum + values[x].var(axes) * (1 - momentum)

    m.statistics.append(keep)
    name = m.add(made[0], apply, x, scale, bias)
    m.ids[-1].pop()
    return name


ROWS = (matmul, gemm, affine, extreme, doubled, reduced, moved, embedded, unary, unary, grouped)
IMAGES = (convolved, convolved, pooled, batch_normalised, grouped, unary)


def loss_of(m: Model, x: str) -> str:
    """A scalar of rows: l1, identity or nll in one of its forms."""
    how = m.pick(ReductionType.Sum, ReductionType.Mean, ReductionType.NoReduction)
    kind = m.pick("l1", "identity", "nll", "nll-of-logarithms")
    reduce = {ReductionType.Sum: np.sum, ReductionType.Mean: np.mean, ReductionType.NoReduction: lambda v: v}[
        how
    ]
    if kind == "l1":
        each = m.add(m.graphcore.l1loss([x], 0.3, how), lambda v: reduce(0.3 * np.abs(v)), x)
    elif kind == "identity":
        square = m.add(m.onnx.mul([x, x]), np.multiply, x, x)
        each = m.add(m.graphcore.identityloss([square], how), reduce, square)
    else:
        each = _likelihood(m, x, how, kind.endswith("logarithms"))
    if how is not ReductionType.NoReduction:
        return each
    axes = list(range(len(m.shapes[each])))
    return m.add(m.onnx.reducesum([each], axes=axes, keepdims=0), np.sum, each)


def _likelihood(m: Model, x: str, how: Any, logarithms: bool) -> str:
    n, classes = m.shapes[x]
    label, ignored = m.input((n,), below=classes), m.pick(None, 0)
    if logarithms:
        p = m.add(m.onnx.logsoftmax([x], 1), lambda v: np.log(softmax(v)), x)
    else:
        p = m.add(m.onnx.softmax([x], 1), softmax, x)

    def apply(p: np.ndarray, label: np.ndarray) -> np.ndarray:
        picked = np.take_along_axis(p, label[:, None], 1)[:, 0]
        m.saturated |= not logarithms and bool((picked < 1e-6).any())
        each = -picked if logarithms else -np.log(np.maximum(picked, 1e-7))
        keep = np.ones(n, bool) if ignored is None else label != ignored
        each = np.where(keep, each, 0)
        if how is ReductionType.NoReduction:
            return each
        return each.sum() / (max(keep.sum(), 1) if how is ReductionType.Mean else 1)

    return m.add(m.graphcore.nllloss([p, label], how, ignored, logarithms), apply, p, label)
