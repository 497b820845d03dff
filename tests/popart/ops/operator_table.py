"""One table of examples for every registered operator, so that a new operator cannot miss the tests made
from it.

ONNX's own node cases give the examples of its operators; those of ai.graphcore, and the few that the suite
leaves out, are written here. `examples` covers the registry or fails.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper
from onnx_suite import cases, data_of

from podrun.popart.ops.registry import GRAPHCORE, ONNX, operators

MOST = 2
"""Examples of one operator taken from ONNX's suite, the smallest ones."""


@dataclass(frozen=True, slots=True)
class Example:
    """A model of one node, and inputs for it."""

    name: str
    model: onnx.ModelProto
    inputs: tuple[Any, ...]


# fmt: off
NOT_DIFFERENTIABLE = {
    "integers or booleans come out": [
        "And", "Or", "Xor", "Not", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "IsInf", "IsNaN",
        "ArgMax", "ArgMin", "NonZero", "Shape", "Size", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor",
        "BitwiseNot", "BitwiseXnor", "MatMulInteger", "ConvInteger", "QLinearMatMul", "QLinearConv",
        "QuantizeLinear", "DynamicQuantizeLinear", "NonMaxSuppression", "Bucketize", "OptionalHasElement",
        "CtcBeamSearchDecoder", "IncrementMod", "BitCast", "OneHot", "TfIdfVectorizer",
    ],
    "constant almost everywhere": [
        "Floor", "Ceil", "Round", "NearbyInt", "Sign", "Hardmax", "Binarizer", "TreeEnsemble",
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
        "Abort", "PackedDataBlock",
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


def example(
    domain: str, op_type: str, inputs: list[Any], outputs: int = 1, opset: int = 1, **attributes: Any
) -> Example:
    """An example of one node on the given arrays."""
    names_in = [f"x{i}" for i in range(len(inputs))]
    names_out = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(
        op_type, names_in, names_out, domain="" if domain == ONNX else domain, **attributes
    )
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in zip(names_in, inputs, strict=True)
    ]
    made = [helper.make_empty_tensor_value_info(n) for n in names_out]
    graph = helper.make_graph([node], f"{domain}.{op_type}", declared, made)
    imports = [helper.make_opsetid("", opset if domain == ONNX else 10), helper.make_opsetid(GRAPHCORE, 1)]
    return Example(f"{domain}.{op_type}", helper.make_model(graph, opset_imports=imports), tuple(inputs))


def _random(*shape: int, low: float = -1.0, high: float = 1.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).uniform(low, high, shape).astype(np.float32)


def _ints(*values: int) -> np.ndarray:
    return np.asarray(values, np.int32)


def _model(nodes: list[Any], inputs: dict[str, np.ndarray], outputs: list[str], opset: int = 13) -> Example:
    """An example of several nodes."""
    declared = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
        for n, v in inputs.items()
    ]
    made = [helper.make_empty_tensor_value_info(n) for n in outputs]
    graph = helper.make_graph(nodes, nodes[0].op_type, declared, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return Example("+".join(n.op_type for n in nodes), model, tuple(inputs.values()))


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
    return _model(nodes, {"x": _random(2, 3), "y": _random(2, 3, seed=1)}, ["g", "b", "c", "d"], 15)


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
    return _model(nodes, {"x": _random(2, 3)}, ["y"])


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
    return _model(nodes, {"v0": _random(2, 3), "x": _random(2, 3, seed=1)}, ["last", "all"])


def _window(name: str) -> Example:
    nodes = [
        helper.make_node("Constant", [], ["n"], value_int=8),
        helper.make_node(name, ["n"], ["y"]),
    ]
    return _model(nodes, {}, ["y"], 17)


def _mel() -> Example:
    numbers = {"bins": 8, "length": 16, "rate": 8192}
    nodes = [helper.make_node("Constant", [], [n], value_int=v) for n, v in numbers.items()]
    nodes += [
        helper.make_node("Constant", [], [n], value_float=v) for n, v in (("low", 0.0), ("high", 4096.0))
    ]
    nodes.append(helper.make_node("MelWeightMatrix", [*numbers, "low", "high"], ["y"]))
    return _model(nodes, {}, ["y"], 17)


def _subgraph(op_type: str, count: int) -> onnx.GraphProto:
    names_in = [f"i{k}" for k in range(count)]
    node = helper.make_node(op_type, names_in, ["o"])
    value = helper.make_empty_tensor_value_info
    return helper.make_graph([node], "callee", [value(n) for n in names_in], [value("o")])


def _elementwise() -> list[Example]:
    """ai.graphcore's operators that work element by element."""
    x = _random(2, 3)
    g = functools.partial(example, GRAPHCORE)
    return [
        *(
            g(op, [x])
            for op in ("Gelu", "GeluErf", "Swish", "Expm1", "Round", "NearbyInt", "Nop", "TensorRemap")
        ),
        *(g(op, [x]) for op in ("Detach", "PrintTensor")),
        g("Log1p", [np.abs(x)]),
        *(g(op, [x, _random(2, 3, seed=1, low=0.5, high=2.0)]) for op in ("Atan2", "Fmod", "Remainder")),
        g("Scale", [x], scale=1.5),
        g("ScaledAdd", [x, _random(2, 3, seed=1)], scale0=0.5, scale1=2.0),
        g("ShapedDropout", [x], shape=[2, 1], ratio=0.25),
        *(
            g(op, [_ints(5, 3), _ints(6, 1)])
            for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseXnor")
        ),
        g("BitwiseNot", [_ints(5, 3)]),
    ]


def _losses() -> list[Example]:
    """Losses, and what reads their inputs."""
    x = _random(2, 3)
    ctc_targets = np.asarray([[1, 2, 2], [3, 1, 0]], np.int32)
    g = functools.partial(example, GRAPHCORE)
    return [
        g("L1", [x], **{"lambda": 0.3, "reduction": "Mean"}),
        g("IdentityLoss", [x], reduction="Sum"),
        g("Nll", [_random(4, 5, low=0.1, high=0.9), _ints(0, 2, 4, 1)], reduction="Mean", ignoreIndex=2),
        g(
            "Ctc",
            [np.log(_random(7, 2, 5, low=0.1)), ctc_targets, _ints(7, 6), _ints(3, 2)],
            reduction="Mean",
        ),
        g(
            "CtcBeamSearchDecoder",
            [np.log(_random(4, 2, 3, low=0.1)), _ints(4, 3)],
            3,
            beam_width=8,
            top_paths=2,
        ),
    ]


def _layers() -> list[Example]:
    """Norms, convolutions, recurrent and spline layers."""
    image = _random(2, 4, 5, 5)
    g = functools.partial(example, GRAPHCORE)
    return [
        g("GroupNormalization", [image, _random(4), _random(4, seed=1)], 3, num_groups=2),
        g(
            "BatchNormalization",
            [image, _random(4), _random(4, seed=1), _random(4, seed=2), _random(4, low=0.5)],
            5,
        ),
        g("NormalizeImage", [_random(2, 4, 4, 3), _random(3), _random(3, seed=1)], scale=0.5),
        g("LSTM", [_random(4, 2, 3), _random(4, 5, 2), _random(4, 2)], 2),
        g("MultiConv", [image, _random(3, 4, 3, 3), image, _random(4, 2, 1, 1)], 2),
        g(
            "SplineBasis",
            [_random(3, 2, low=0.1, high=0.9), _ints(4, 4), np.asarray([1, 0], np.uint8)],
            2,
            degree=2,
        ),
        g(
            "SplineWeighting",
            [
                _random(3, 2),
                _random(5, 2, 4),
                _random(3, 2, seed=1),
                np.asarray([[0, 1], [4, 2], [3, 3]], np.int32),
            ],
        ),
    ]


def _moving() -> list[Example]:
    """What moves, picks, orders or changes elements."""
    x = _random(2, 3)
    image = _random(2, 4, 5, 5)
    g = functools.partial(example, GRAPHCORE)
    return [
        g("Subsample", [image], strides=[1, 2, 2, 2]),
        g("Reverse", [image], dimensions=[1, 3]),
        g("Reshape", [x], shape=[3, -1]),
        g("Slice", [image], starts=[1, 0], ends=[3, 4], axes=[1, 2]),
        g("DepthToSpace", [image], blocksize=2, mode="CRD"),
        g("ReduceMedian", [x], 2, axes=[1], keepdims=0),
        g("Sort", [x], 2, axis=1, descending=1),
        g("Bucketize", [x, _random(4, seed=3)]),
        g("Init", [], shape=[2, 2], data_type=1, init_type=1),
        g("CopyVarUpdate", [x, _random(2, 3, seed=1)]),
        g("IncrementMod", [_ints(1, 2, 3)], increment=1.0, modulus=3.0),
        g("DynamicSlice", [image, np.asarray([1, 2], np.uint32)], axes=[1, 2], sizes=[2, 2]),
        g("DynamicUpdate", [image, np.asarray([1], np.uint32), _random(2, 2, 5, 5)], axes=[1], sizes=[2]),
        g("DynamicAdd", [image, np.asarray([1], np.uint32), _random(2, 2, 5, 5)], axes=[1], sizes=[2]),
        g("DynamicZero", [image, np.asarray([1], np.uint32)], axes=[1], sizes=[2]),
        g(
            "SequenceSlice",
            [_random(5, 2), _random(6, 2), _ints(2, 1), _ints(0, 3), _ints(1, 4)],
            zeroUnused=1,
        ),
        g(
            "ScatterReduce",
            [x, np.asarray([[0, 1, 0], [2, 2, 1]], np.int32)],
            axis_size=4,
            axis=1,
            reduction=0,
        ),
        g(
            "GroupedScatterReduce",
            [_random(2, 3, 2), np.asarray([[0, 1, 0], [2, 2, 1]], np.int32)],
            axis_size=4,
            axis=1,
            group_size=2,
        ),
        g("GroupedGather", [_random(2, 4, 3), np.asarray([[0, 3], [1, 1]], np.int32)], axis=1, group_size=2),
        g("Call", [x, _random(2, 3, seed=1)], callee=_subgraph("Mul", 2)),
    ]


def _onnx() -> list[Example]:
    """ONNX operators that the suite leaves out, or shows in no form that these tests can use."""
    x = _random(2, 3)
    m = _random(3, 4)
    return [
        example(ONNX, "Gemm", [x, m, _random(4)], opset=13, alpha=0.5, beta=2.0),
        example(
            ONNX, "Conv", [_random(2, 4, 6, 6), _random(6, 2, 3, 3)], opset=11, group=2, pads=[1, 1, 1, 1]
        ),
        example(ONNX, "Conv", [_random(2, 4, 6, 6), _random(8, 1, 3, 3)], opset=11, group=4, strides=[2, 2]),
        example(
            ONNX,
            "Upsample",
            [_random(1, 1, 2, 3), np.asarray([1, 1, 2, 2], np.float32)],
            opset=9,
            mode="linear",
        ),
        example(ONNX, "GlobalLpPool", [np.abs(_random(2, 3, 4, 4)) + 0.1], opset=2),
        example(
            ONNX,
            "MaxRoiPool",
            [_random(1, 2, 6, 6), np.asarray([[0, 0, 0, 3, 3]], np.float32)],
            opset=1,
            pooled_shape=[2, 2],
        ),
        example(ONNX, "Scatter", [_random(3, 3), np.asarray([[0, 1]], np.int64), _random(1, 2)], opset=9),
        example(ONNX, "RandomNormal", [], opset=1, shape=[3]),
        example(ONNX, "RandomNormalLike", [x], opset=1),
        example(ONNX, "RandomUniform", [], opset=1, shape=[3]),
        example(ONNX, "RandomUniformLike", [x], opset=1),
        example(ONNX, "Multinomial", [x], opset=7, sample_size=4),
        example(ONNX, "Cast", [x], opset=13, to=onnx.TensorProto.DOUBLE),
        example(ONNX, "CastLike", [x, x], opset=15),
        example(ONNX, "Trilu", [_random(3, 4)], opset=14, upper=0),
        *(
            example(ONNX, op, [_random(2, 3, low=0.5)], opset=11, axes=[1])
            for op in ("ReduceLogSum", "ReduceLogSumExp")
        ),
        *(example(ONNX, op, [x], opset=11, axes=[1]) for op in ("ReduceMin", "ReduceMax")),
        example(ONNX, "Acosh", [_random(2, 3, low=1.2, high=3.0)], opset=9),
        example(ONNX, "Pow", [_random(2, 3, low=0.5, high=2.0), x], opset=7),
    ]


@functools.cache
def _written() -> dict[tuple[str, str], list[Example]]:
    rows = [*_elementwise(), *_losses(), *_layers(), *_moving(), *_onnx()]
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
