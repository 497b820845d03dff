"""A small transformer that reads letters and guesses the next one, in parts that can lie on IPUs of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
from text import LETTERS

try:
    import popart
except ImportError as error:
    sys.exit(
        f"error: {error}. This is a PopART program: start it with podrun, or alone with\n"
        f"    {sys.executable} -m podrun.compat {' '.join(sys.argv)}"
    )

Place = Callable[[popart.Builder, int], AbstractContextManager[object]]
"""A scope for part *i* of the network: where its operators lie."""


@dataclass(frozen=True)
class Sizes:
    """One micro-batch of one replica, and the network."""

    samples: int = 4
    letters: int = 32
    width: int = 64
    heads: int = 4
    blocks: int = 6

    @property
    def parts(self) -> int:
        """Embedding, blocks, and the head with the loss."""
        return self.blocks + 2


@dataclass(frozen=True)
class Transformer:
    """A model and the names of its tensors."""

    model: bytes
    letters: str
    following: str
    loss: str
    weights: list[str]


class _Maker:
    """Adds layers to a builder; weights are drawn from one seeded stream, in the order of the layers."""

    def __init__(self, sizes: Sizes, seed: int) -> None:
        self.sizes = sizes
        self.builder = popart.Builder()
        self.onnx = self.builder.aiOnnx
        self.random = np.random.default_rng(seed)
        self.weights: list[str] = []

    def weight(self, name: str, *shape: int, scale: float) -> str:
        start = (self.random.standard_normal(shape) * scale).astype(np.float32)
        self.weights.append(self.builder.addInitializedInputTensor(start, name))
        return self.weights[-1]

    def filled(self, name: str, size: int, value: float) -> str:
        self.weights.append(self.builder.addInitializedInputTensor(np.full(size, value, np.float32), name))
        return self.weights[-1]

    def reshaped(self, x: str, *shape: int) -> str:
        return self.builder.reshape_const(self.onnx, [x], shape)

    def dense(self, x: str, inputs: int, outputs: int, name: str) -> str:
        with self.builder.nameScope(name):
            product = self.onnx.matmul([x, self.weight("w", inputs, outputs, scale=inputs**-0.5)])
            return self.onnx.add([product, self.filled("b", outputs, 0.0)])

    def norm(self, x: str, name: str) -> str:
        """Layer normalisation of ``[rows, width]``: a group norm with one group."""
        with self.builder.nameScope(name):
            scale, shift = (
                self.filled("scale", self.sizes.width, 1.0),
                self.filled("shift", self.sizes.width, 0.0),
            )
            return self.builder.aiGraphcore.groupnormalization([x, scale, shift], 1, 1e-5)[0]

    def embedding(self, letters: str) -> str:
        """Rows ``[samples * letters, width]`` for letters ``[samples, letters]``."""
        s = self.sizes
        table = self.weight("table", len(LETTERS), s.width, scale=0.1)
        places = self.weight("places", s.letters, s.width, scale=0.1)
        rows = self.onnx.add([self.onnx.gather([table, letters]), places])
        return self.reshaped(rows, s.samples * s.letters, s.width)

    def attention(self, x: str) -> str:
        """Every letter looks at those before it."""
        s = self.sizes
        each = s.width // s.heads
        mixed = self.dense(x, s.width, 3 * s.width, "in")
        mixed = self.reshaped(mixed, s.samples, s.letters, 3, s.heads, each)
        mixed = self.onnx.transpose([mixed], perm=[2, 0, 3, 1, 4])
        query, key, value = (
            self.onnx.squeeze([part], axes=[0])
            for part in self.onnx.split([mixed], 3, axis=0, split=[1, 1, 1])
        )
        scores = self.onnx.matmul([query, self.onnx.transpose([key], perm=[0, 1, 3, 2])])
        scores = self.onnx.mul([scores, self.onnx.constant(np.float32(each**-0.5).reshape(1))])
        later = np.triu(np.full((s.letters, s.letters), -1e4, np.float32), 1)
        chances = self.onnx.softmax([self.onnx.add([scores, self.onnx.constant(later)])], axis=3)
        found = self.onnx.transpose([self.onnx.matmul([chances, value])], perm=[0, 2, 1, 3])
        return self.dense(self.reshaped(found, s.samples * s.letters, s.width), s.width, s.width, "out")

    def block(self, x: str) -> str:
        """Attention, then two dense layers, each added to what it reads."""
        width = self.sizes.width
        with self.builder.nameScope("attention"):
            x = self.onnx.add([x, self.attention(self.norm(x, "norm"))])
        with self.builder.nameScope("dense"):
            h = self.dense(self.norm(x, "norm"), width, 4 * width, "up")
            return self.onnx.add(
                [x, self.dense(self.builder.aiGraphcore.gelu([h]), 4 * width, width, "down")]
            )


def transformer(sizes: Sizes, place: Place, seed: int = 0) -> Transformer:
    """The network, part *i* in the scope ``place(builder, i)``: embedding, blocks, head and loss."""
    make = _Maker(sizes, seed)
    builder = make.builder
    letters = builder.addInputTensor(popart.TensorInfo("INT32", [sizes.samples, sizes.letters]), "letters")
    following = builder.addInputTensor(
        popart.TensorInfo("INT32", [sizes.samples * sizes.letters]), "following"
    )
    with place(builder, 0), builder.nameScope("embedding"):
        x = make.embedding(letters)
    for block in range(sizes.blocks):
        with place(builder, 1 + block), builder.nameScope(f"block{block}"):
            x = make.block(x)
    with place(builder, sizes.parts - 1), builder.nameScope("head"):
        logits = make.dense(make.norm(x, "norm"), sizes.width, len(LETTERS), "letters")
        loss = builder.aiGraphcore.nllloss([make.onnx.softmax([logits], axis=1), following])
    return Transformer(builder.getModelProto(), letters, following, loss, make.weights)
