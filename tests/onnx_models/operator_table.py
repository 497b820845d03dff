"""One table of examples for every registered operator, so that a new operator cannot miss the tests made
from it.

ONNX's own node cases give the examples of its operators; those of ai.graphcore, and the few that the suite
leaves out, are written here. `examples` covers the registry or fails.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
from onnx import helper

from podrun.onnx_models.ops.registry import ONNX, operators
from tests.conformance.onnx_suite import cases, data_of
from tests.onnx_models import graphcore_examples
from tests.onnx_models.example_models import Example, example, model, random

MOST = 2
"""Examples of one operator taken from ONNX's suite, the smallest ones."""


# fmt: off
NOT_DIFFERENTIABLE = {
    "integers or booleans come out": [
        "And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN",
        "ArgMax", "ArgMin", "NonZero", "Shape", "Size", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
        "BitwiseNot", "BitwiseXnor", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv",
        "QuantizeLinear", "DynamicQuantizeLinear", "NonMaxSuppression", "Bucketize", "OptionalHasElement",
        "CtcBeamSearchDecoder", "IncrementMod", "BitCast", "OneHot", "TfIdfVectorizer", "AttentionMask",
    ],
    "constant almost everywhere": [
        "Floor", "Ceil", "Round", "NearbyInt", "Sign", "Hardmax", "Binarizer", "TreeEnsemble", "Pow2ScaleThenCast",
    ],
    "an 8-bit float goes in, which has no neighbours to take a slope from": [
        "CastThenPow2Scale",
    ],
    "made from shapes or constants alone": [
        "Constant", "ConstantOfShape", "EyeLike", "Range", "Init", "HannWindow", "HammingWindow", "BlackmanWindow",
        "MelWeightMatrix",
    ],
    "random": [
        "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial",
        "Dropout", "ShapedDropout",
    ],
    "stops gradients by its meaning": [
        "Detach",
    ],
    "refused by name": [
        "Abort",
    ],
    # Values and gradients of these: test_popart_collectives.py, tests/compiler/test_exchange.py.
    "between replicas": [
        "ReplicatedAllReduce", "ReplicatedAllReduceInplace", "ReplicatedReduceScatter", "ReplicatedAllGather",
    ],
    "its inputs decide a shape, so they are constants": [
        "Unique",
    ],
}
# fmt: on
"""Operators without gradients, by reason."""


def reason_without_gradient(name: str) -> str | None:
    """Why an operator has no gradient, or None if it has one."""
    return next((why for why, names in NOT_DIFFERENTIABLE.items() if name in names), None)


def names() -> list[tuple[str, str]]:
    """Every registered operator, by domain and name."""
    return sorted({(o.domain, o.name) for o in operators()})


@functools.cache
def _from_suite() -> dict[tuple[str, str], list[Example]]:
    found: dict[tuple[str, str], list[tuple[int, Example]]] = {}
    for case in cases(("node",)):
        model = case.model
        if len(model.graph.node) != 1 or case.name.endswith("_expanded"):
            continue
        node = model.graph.node[0]
        inputs, _ = next(iter(data_of(case, model)))
        size = sum(v.size for v in inputs if isinstance(v, np.ndarray))
        if any(a.name == "seed" for a in node.attribute):
            continue
        if any(isinstance(v, np.ndarray) and v.dtype.kind in "OUS" for v in inputs):
            continue
        if not any(isinstance(v, np.ndarray) and v.dtype == np.float32 for v in inputs):
            size += 10**6
        example = Example(case.name, model, tuple(inputs))
        found.setdefault((node.domain or ONNX, node.op_type), []).append((size, example))
    return {
        key: [e for _, e in sorted(rows, key=lambda row: (row[0], row[1].name))[:MOST]]
        for key, rows in found.items()
    }


def _sequences() -> Example:
    """Every operator on sequences and optionals in one model."""
    node = helper.make_node
    nodes = [
        node("Constant", [], ["zero"], value_int=0),
        node("SequenceConstruct", ["x", "y"], ["s"]),
        node("SequenceInsert", ["s", "x", "zero"], ["t"]),
        node("SequenceErase", ["t"], ["u"]),
        node("Optional", ["u"], ["o"]),
        node("OptionalGetElement", ["o"], ["v"]),
        node("ConcatFromSequence", ["v"], ["a"], axis=0),
        node("SequenceAt", ["v", "zero"], ["b"]),
        node("SequenceLength", ["v"], ["c"]),
        node("SequenceEmpty", [], ["e"]),
        node("SequenceInsert", ["e", "y"], ["f"]),
        node("ConcatFromSequence", ["f"], ["d"], axis=1),
        node("Mul", ["a", "a"], ["g"]),
    ]
    return model(nodes, {"x": random(2, 3), "y": random(2, 3, seed=1)}, ["g", "b", "c", "d"], 15)


def _if() -> Example:
    value = helper.make_empty_tensor_value_info
    branches = {
        name: helper.make_graph([helper.make_node(op, ["x"], ["z"])], name, [], [value("z")])
        for name, op in (("then_branch", "Sin"), ("else_branch", "Tanh"))
    }
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=0),
        helper.make_node("Mul", ["total", "total"], ["square"]),
        helper.make_node("Greater", ["square", "total"], ["c"]),
        helper.make_node("If", ["c"], ["y"], **branches),
    ]
    return model(nodes, {"x": random(2, 3)}, ["y"])


def _loop() -> Example:
    value, node = helper.make_empty_tensor_value_info, helper.make_node
    body = helper.make_graph(
        [
            node("Identity", ["go"], ["again"]),
            node("Mul", ["v", "x"], ["p"]),
            node("Add", ["p", "x"], ["w"]),
            node("Sin", ["w"], ["out"]),
        ],
        "body",
        [value("i"), value("go"), value("v")],
        [value("again"), value("w"), value("out")],
    )
    nodes = [
        node("Constant", [], ["n"], value_int=3),
        node("Loop", ["n", "", "v0"], ["last", "all"], body=body),
    ]
    return model(nodes, {"v0": random(2, 3), "x": random(2, 3, seed=1)}, ["last", "all"])


def _window(name: str) -> Example:
    nodes = [
        helper.make_node("Constant", [], ["n"], value_int=8),
        helper.make_node(name, ["n"], ["y"]),
    ]
    return model(nodes, {}, ["y"], 17)


def _mel() -> Example:
    numbers = {"bins": 8, "length": 16, "rate": 8192}
    nodes = [helper.make_node("Constant", [], [n], value_int=v) for n, v in numbers.items()]
    nodes += [
        helper.make_node("Constant", [], [n], value_float=v) for n, v in (("low", 0.0), ("high", 4096.0))
    ]
    nodes.append(helper.make_node("MelWeightMatrix", [*numbers, "low", "high"], ["y"]))
    return model(nodes, {}, ["y"], 17)


def _onnx() -> list[Example]:
    """ONNX operators that the suite leaves out, or shows in no form that these tests can use."""
    x = random(2, 3)
    m = random(3, 4)
    return [
        example(ONNX, "Gemm", [x, m, random(4)], opset=13, alpha=0.5, beta=2.0),
        example(ONNX, "Conv", [random(2, 4, 6, 6), random(6, 2, 3, 3)], opset=11, group=2, pads=[1, 1, 1, 1]),
        example(ONNX, "Conv", [random(2, 4, 6, 6), random(8, 1, 3, 3)], opset=11, group=4, strides=[2, 2]),
        example(
            ONNX,
            "Upsample",
            [random(1, 1, 2, 3), np.asarray([1, 1, 2, 2], np.float32)],
            opset=9,
            mode="linear",
        ),
        example(ONNX, "GlobalLpPool", [np.abs(random(2, 3, 4, 4)) + 0.1], opset=2),
        example(
            ONNX,
            "MaxRoiPool",
            [random(1, 2, 6, 6), np.asarray([[0, 0, 0, 3, 3]], np.float32)],
            opset=1,
            pooled_shape=[2, 2],
        ),
        example(ONNX, "Scatter", [random(3, 3), np.asarray([[0, 1]], np.int64), random(1, 2)], opset=9),
        example(ONNX, "RandomNormal", [], opset=1, shape=[3]),
        example(ONNX, "RandomNormalLike", [x], opset=1),
        example(ONNX, "RandomUniform", [], opset=1, shape=[3]),
        example(ONNX, "RandomUniformLike", [x], opset=1),
        example(ONNX, "Multinomial", [x], opset=7, sample_size=4),
        example(ONNX, "Cast", [x], opset=13, to=onnx.TensorProto.DOUBLE),
        example(ONNX, "CastLike", [x, x], opset=15),
        example(ONNX, "Trilu", [random(3, 4)], opset=14, upper=0),
        *(
            example(ONNX, op, [random(2, 3, low=0.5)], opset=11, axes=[1])
            for op in ("ReduceLogSum", "ReduceLogSumExp")
        ),
        *(example(ONNX, op, [x], opset=11, axes=[1]) for op in ("ReduceMin", "ReduceMax")),
        example(ONNX, "Acosh", [random(2, 3, low=1.2, high=3.0)], opset=9),
        example(ONNX, "Pow", [random(2, 3, low=0.5, high=2.0), x], opset=7),
    ]


@functools.cache
def _written() -> dict[tuple[str, str], list[Example]]:
    rows = [
        *graphcore_examples.elementwise(),
        *graphcore_examples.losses(),
        *graphcore_examples.layers(),
        *graphcore_examples.moving(),
        *_onnx(),
    ]
    found: dict[tuple[str, str], list[Example]] = {}
    for row in rows:
        node = row.model.graph.node[0]
        found.setdefault((node.domain or ONNX, node.op_type), []).append(row)
    sequences = _sequences()
    for name in {n.op_type for n in sequences.model.graph.node} - {"Mul"}:
        found[ONNX, name] = [sequences]
    found[ONNX, "If"], found[ONNX, "Loop"], found[ONNX, "MelWeightMatrix"] = [_if()], [_loop()], [_mel()]
    for name in ("HannWindow", "HammingWindow", "BlackmanWindow"):
        found[ONNX, name] = [_window(name)]
    return found


def examples(domain: str, name: str) -> list[Example]:
    """Examples of an operator: those written here, else the smallest of ONNX's suite."""
    return _written().get((domain, name)) or _from_suite().get((domain, name), [])
