"""Models that conversion is tried on, written with onnx.helper: small, and each about some operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL


class Writer:
    """Nodes and weights of a model in the making; names count up."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []

    def constant(self, value: Any, dtype: Any = np.float32) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int, scale: float = 0.3) -> str:
        return self.constant(self.random.standard_normal(shape) * scale)

    def __call__(self, operator: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        result = out or f"t{len(self.nodes)}"
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), [result], name=name, **attributes))
        return result

    def several(self, operator: str, inputs: Sequence[str], count: int, **attributes: Any) -> list[str]:
        results = [f"t{len(self.nodes)}_{i}" for i in range(count)]
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, list(inputs), results, name=name, **attributes))
        return results

    def model(
        self, inputs: dict[str, tuple[int, list[Any]]], outputs: dict[str, tuple[int, Any]], opset: int = 13
    ) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes,
            "net",
            [helper.make_tensor_value_info(n, k, s) for n, (k, s) in inputs.items()],
            [helper.make_tensor_value_info(n, k, s) for n, (k, s) in outputs.items()],
            self.weights,
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)
        onnx.checker.check_model(model)
        return model


def layer_norm(w: Writer, x: str, width: int) -> str:
    mean = w("ReduceMean", x, axes=[-1])
    centred = w("Sub", x, mean)
    square = w("Pow", centred, w.constant(2.0))
    variance = w("ReduceMean", square, axes=[-1])
    root = w("Sqrt", w("Add", variance, w.constant(1e-12)))
    scaled = w("Mul", w("Div", centred, root), w.constant(1 + 0.1 * w.random.standard_normal(width)))
    return w("Add", scaled, w.constant(0.1 * w.random.standard_normal(width)))


def erf_gelu(w: Writer, x: str) -> str:
    half = w("Erf", w("Div", x, w.constant(np.sqrt(2.0))))
    return w("Mul", w("Mul", x, w("Add", half, w.constant(1.0))), w.constant(0.5))


def tanh_gelu(w: Writer, x: str) -> str:
    cube = w("Mul", w("Mul", x, x), x)
    inner = w("Add", x, w("Mul", cube, w.constant(0.044715)))
    told = w("Tanh", w("Mul", inner, w.constant(np.sqrt(2 / np.pi))))
    return w("Mul", w("Mul", w.constant(0.5), x), w("Add", told, w.constant(1.0)))


def linear(w: Writer, x: str, rows: int, columns: int) -> str:
    return w("Add", w("MatMul", x, w.weight(rows, columns, scale=rows**-0.5)), w.weight(columns, scale=0.1))


def bert(
    *, layers: int = 2, hidden: int = 32, heads: int = 4, length: int = 12, batch: int = 2, vocabulary: int = 50,
    opset: int = 13, open_batch: bool = False, positions: bool = False,
) -> onnx.ModelProto:  # fmt: skip
    """BERT as frameworks export it: embeddings, a mask from 64-bit integers, attention, GELU by erf, a pooler."""
    w, size = Writer(1), hidden // heads
    words = w("Gather", w.weight(vocabulary, hidden), "input_ids")
    kinds = w("Gather", w.weight(2, hidden), "token_type_ids")
    places = (
        w("Gather", w.weight(length, hidden), "position_ids") if positions else w.weight(1, length, hidden)
    )
    x = w("Add", w("Add", words, kinds), places)
    x = layer_norm(w, x, hidden)
    axes = w.constant([1, 2], np.int64)
    mask = w("Cast", w("Unsqueeze", "attention_mask", axes), to=FLOAT)
    bias = w("Mul", w("Sub", w.constant(1.0), mask), w.constant(-10000.0))
    rows = 0 if open_batch else batch
    split = w.constant([rows, length, heads, size], np.int64)
    join = w.constant([rows, length, hidden], np.int64)
    for _ in range(layers):
        parts = [w("Reshape", linear(w, x, hidden, hidden), split) for _ in range(3)]
        q, v = (w("Transpose", part, perm=[0, 2, 1, 3]) for part in (parts[0], parts[2]))
        k = w("Transpose", parts[1], perm=[0, 2, 3, 1])
        scores = w("Div", w("MatMul", q, k), w.constant(np.sqrt(size)))
        weights = w("Softmax", w("Add", scores, bias), axis=-1)
        context = w("Transpose", w("MatMul", weights, v), perm=[0, 2, 1, 3])
        x = layer_norm(w, w("Add", linear(w, w("Reshape", context, join), hidden, hidden), x), hidden)
        inner = erf_gelu(w, linear(w, x, hidden, 4 * hidden))
        x = layer_norm(w, w("Add", linear(w, inner, 4 * hidden, hidden), x), hidden)
    first = w("Gather", x, w.constant(0, np.int64), axis=1)
    w("Identity", x, out="last_hidden_state")
    w("Tanh", linear(w, first, hidden, hidden), out="pooled")
    names = ["input_ids", "attention_mask", "token_type_ids", *(["position_ids"] if positions else [])]
    size_of: Any = "batch" if open_batch else batch
    return w.model(
        {name: (INT64, [size_of, length]) for name in names},
        {"last_hidden_state": (FLOAT, [size_of, length, hidden]), "pooled": (FLOAT, [size_of, hidden])},
        opset,
    )


def convolutional() -> onnx.ModelProto:
    """Convolutions with batch normalisation, ReLU, pooling and a classifier."""
    w = Writer(2)
    x = "x"
    for rows, columns in ((3, 8), (8, 8)):
        y = w("Conv", x, w.weight(columns, rows, 3, 3), pads=[1, 1, 1, 1])
        held = [1 + 0.1 * w.random.standard_normal(columns), 0.1 * w.random.standard_normal(columns)]
        held += [0.1 * w.random.standard_normal(columns), 1 + 0.2 * np.abs(w.random.standard_normal(columns))]
        x = w("Relu", w("BatchNormalization", y, *(w.constant(v) for v in held)))
    pooled = w("Flatten", w("GlobalAveragePool", w("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2])))
    y = w("Gemm", pooled, w.weight(10, 8), w.weight(10), transB=1, alpha=0.5, beta=2.0)
    held = [np.full(10, 1.5), np.full(10, 0.5), np.full(10, 0.1), np.full(10, 2.0)]
    w("BatchNormalization", y, *(w.constant(v) for v in held), out="y")
    return w.model({"x": (FLOAT, [2, 3, 8, 8])}, {"y": (FLOAT, [2, 10])})


def untidy() -> onnx.ModelProto:
    """What exporters leave behind: identities, casts and reshapes that do nothing, twice the same, dead nodes."""
    w = Writer(3)
    a = w("Identity", w("Cast", w("Dropout", "x"), to=FLOAT))
    a = w("Transpose", w("Transpose", a, perm=[1, 0, 2]), perm=[1, 0, 2])
    a = w("Reshape", w("Reshape", a, w.constant([24], np.int64)), w.constant([2, 3, 4], np.int64))
    a = w("Add", w("Mul", a, w.constant(1.0)), w.constant(0.0))
    a = w("Add", w("Add", a, w.constant([1.0, 2, 3, 4])), w.constant(np.full(4, 0.5)))
    a = w("Mul", w("Mul", a, w.constant(2.0)), w.constant(0.25))
    b, c = w("Exp", a), w("Exp", a)
    shape = w("Shape", b)
    rows = w("Gather", shape, w.constant(0, np.int64), axis=0)
    one = w("Unsqueeze", rows, w.constant([0], np.int64))
    target = w("Concat", one, w.constant([-1], np.int64), axis=0)
    flat = w("Reshape", w("Add", b, c), target)
    same = [w.constant(np.arange(12.0)), w.constant(np.arange(12.0))]
    flat = w("Add", w("Sub", flat, same[0]), same[1])
    w("Tanh", flat)  # Nothing needs it.
    z = w("Squeeze", w("Unsqueeze", flat, w.constant([0], np.int64)), w.constant([0], np.int64))
    z = w("Pad", z, w.constant([0, 0, 0, 0], np.int64))
    z = w("Expand", z, w.constant([2, 12], np.int64))
    w("Cast", w("Cast", z, to=TensorProto.DOUBLE), to=FLOAT, out="y")
    return w.model({"x": (FLOAT, [2, 3, 4])}, {"y": (FLOAT, [2, 12])})


def choosing() -> onnx.ModelProto:
    """Where, Clip without limits, Pow, Round, IsInf, comparisons, casts by bool, TopK, OneHot, CumSum, HardSwish."""
    w = Writer(4)
    zero = w.constant(0.0)
    a = w("Where", w("Greater", "x", zero), w.constant(2.0), w.constant(-1.0))
    b = w("Clip", w("Add", a, "x"), "", w.constant(1.5))
    for exponent in (2.0, 3.0):
        b = w("Add", b, w("Pow", "x", w.constant(exponent)))
    b = w("Add", b, w("Pow", w("Add", w("Abs", "x"), w.constant(0.5)), w.constant(0.5)))
    b = w("Add", b, w("Round", w("Mul", "x", w.constant(2.0))))
    infinite = w("Cast", w("IsInf", "x"), to=FLOAT)
    b = w("Add", b, infinite)
    for operator in ("GreaterOrEqual", "LessOrEqual"):
        b = w("Add", b, w("Cast", w(operator, "x", zero), to=FLOAT))
    b = w("Add", b, w("Cast", w("Cast", w("Relu", "x"), to=BOOL), to=FLOAT))
    b = w("Add", b, w("HardSwish", "x"))
    b = w("Add", b, w("CumSum", "x", w.constant(-1, np.int64)))
    hot = w(
        "OneHot",
        w("ArgMax", "x", axis=1, keepdims=0),
        w.constant([5], np.int64),
        w.constant([0, 1], np.int64),
    )
    b = w("Add", b, w("Cast", hot, to=FLOAT))
    masked = w("Where", w("Less", "x", zero), w.constant(-1e9), b)
    b = w("Add", w("Softmax", masked, axis=-1), w("Div", b, w.constant([1.0, 2, 3, 4, 5])))
    least = w.several("TopK", [b, w.constant([3], np.int64)], 2, largest=0, axis=1)
    w("Identity", b, out="y")
    w("Identity", least[0], out="least")
    picked = w("Gather", least[1], w.constant([-1, 0], np.int64), axis=1)
    w("Compress", picked, w.constant([True, False], np.bool_), axis=1, out="place")
    return w.model(
        {"x": (FLOAT, [4, 5])}, {"y": (FLOAT, [4, 5]), "least": (FLOAT, [4, 3]), "place": (INT64, [4, 1])}, 14
    )


def branching() -> onnx.ModelProto:
    """Ifs of one condition and of its opposite, with weights of their own."""
    w = Writer(5)

    def branch(name: str, operator: str, value: float) -> onnx.GraphProto:
        held = numpy_helper.from_array(np.full((2, 3), value, np.float32), f"{name}_w")
        nodes = [helper.make_node(operator, ["x", f"{name}_w"], [f"{name}_y"], name=f"{name}_{operator}")]
        out = [helper.make_tensor_value_info(f"{name}_y", FLOAT, [2, 3])]
        return helper.make_graph(nodes, name, [], out, [held])

    total = w("ReduceSum", "x", keepdims=0)
    condition = w("Greater", total, w.constant(0.0))
    parts = [
        w(
            "If",
            test,
            then_branch=branch(f"a{i}", "Mul", 2.0 + i),
            else_branch=branch(f"b{i}", "Add", -1.0 - i),
        )
        for i, test in enumerate((condition, condition, w("Not", condition)))
    ]
    w("Sum", *parts, out="y")
    return w.model({"x": (FLOAT, [2, 3])}, {"y": (FLOAT, [2, 3])})


def experts() -> onnx.ModelProto:
    """Two experts of one form, rotary embedding, GELU by tanh, Einsum, slices that cut a tensor in parts."""
    w = Writer(6)
    outputs = [w("Relu", w("Add", w("MatMul", "x", w.weight(8, 6)), w.weight(6))) for _ in range(2)]
    y = tanh_gelu(w, w("Add", *outputs))
    y = w("Einsum", y, w.weight(6, 8), equation="bsi,ij->bsj")
    cuts = [
        w("Slice", y, *(w.constant([v], np.int64) for v in (begin, end, 2)))
        for begin, end in ((0, 4), (4, 8))
    ]
    turned = w("Concat", w("Neg", cuts[1]), cuts[0], axis=-1)
    sides = [w("Mul", y, w.weight(3, 8)), w("Mul", turned, w.weight(3, 8))]
    y = w("Add", *sides)
    ones = w("Expand", w.constant(np.ones((1, 1, 8))), w.constant([2, 3, 8], np.int64))
    y = w("MatMul", w("Mul", w("Add", y, ones), w.constant(0.5)), w.weight(8, 8))
    w("Mul", y, w.constant(3.0), out="y")
    return w.model({"x": (FLOAT, [2, 3, 8])}, {"y": (FLOAT, [2, 3, 8])})


MODELS: dict[str, Callable[[], onnx.ModelProto]] = {
    "bert": lambda: bert(layers=1, hidden=16, heads=2, length=5),
    "bert of opset 17": lambda: newer_bert(),
    "convolutional": convolutional,
    "untidy": untidy,
    "choosing": choosing,
    "branching": branching,
    "experts": experts,
}


def newer_bert() -> onnx.ModelProto:
    """LayerNormalization and Split with sizes, in opset 18."""
    w = Writer(7)
    x = linear(w, "x", 8, 24)
    parts = w.several("Split", [x, w.constant([8, 8, 8], np.int64)], 3, axis=-1)
    scores = w("MatMul", w("Mul", parts[0], w.constant(0.35)), w("Transpose", parts[1], perm=[0, 2, 1]))
    y = w("MatMul", w("Softmax", scores, axis=-1), parts[2])
    y = w("LayerNormalization", w("Add", y, "x"), w.weight(8), w.weight(8), axis=-1, epsilon=1e-5)
    mean = w("ReduceMean", y, w.constant([1], np.int64), keepdims=1)
    w("Mish", w("Sub", y, mean), out="y")
    return w.model({"x": (FLOAT, [2, 6, 8])}, {"y": (FLOAT, [2, 6, 8])}, 18)
