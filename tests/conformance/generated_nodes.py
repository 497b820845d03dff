"""Generated nodes against two independent implementations: what onnx.reference and onnxruntime give for the same.

    python tests/conformance/generated_nodes.py 0 1000            # seeds from 0 on
    python tests/conformance/generated_nodes.py 0 200 --only pooling --verbose

A seed draws an operator, an opset of 6 to 23, shapes (also without elements), attributes, types and values (also
infinities, NaN, denormals, zeros of either sign, the ends of integer ranges). Both peers have mistakes and gaps of
their own, so podrun is *alone* only where none of those that answer agrees with it. Left out is what ONNX's text and
the peers read differently: NaN in a maximum pool, softmax of a vector before opset 13, transposed convolutions padded
to the same size, average pools before opset 7, local response over an even size, strides beyond the kernel of a pool
that is padded to the same size (ONNX's shape inference, as podrun, then pads nothing).
"""

from __future__ import annotations

import argparse
import collections
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import helper

from podrun import onnx_backend
from podrun.core.errors import PodrunError

Random = random.Random
SPECIAL = (np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, 3e38, 65504.0, 6e-8, 2.5, 1e-20)


@dataclass
class Case:
    """A node of one operator: inputs by position (None: left out), those that are constants, its outputs."""

    op: str
    inputs: list[Any]
    opset: int
    attributes: dict[str, Any] = field(default_factory=dict)
    constants: tuple[int, ...] = ()
    outputs: int = 1

    def model(self) -> onnx.ModelProto:
        """As a checked model."""
        names = [f"x{i}" if value is not None else "" for i, value in enumerate(self.inputs)]
        kept = {key: value for key, value in self.attributes.items() if value is not None}
        results = [f"y{i}" for i in range(self.outputs)]
        declared = [
            helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(v.dtype), v.shape)
            for i, (n, v) in enumerate(zip(names, self.inputs, strict=True))
            if v is not None and i not in self.constants
        ]
        graph = helper.make_graph(
            [helper.make_node(self.op, names, results, **kept)],
            "generated",
            declared,
            [helper.make_empty_tensor_value_info(n) for n in results],
            [
                onnx.numpy_helper.from_array(self.inputs[i], names[i])
                for i in self.constants
                if i < len(names)
            ],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)
        model = onnx.shape_inference.infer_shapes(model)
        onnx.checker.check_model(model)
        return model

    def feeds(self) -> dict[str, np.ndarray]:
        """Inputs that are no constants, by name."""
        return {f"x{i}": v for i, v in enumerate(self.inputs) if v is not None and i not in self.constants}


# --- What is drawn --------------------------------------------------------------------------------


def shape(r: Random, least: int = 0, most: int = 4, empty: float = 0.06) -> list[int]:
    return [0 if r.random() < empty else r.randint(1, 4) for _ in range(r.randint(least, most))]


def array(r: Random, size: Any, kind: Any = np.float32, special: float = 0.25) -> np.ndarray:
    """Values of a type; with chance ``special`` some of them odd ones."""
    draw = np.random.default_rng(r.randrange(2**32))
    dtype = np.dtype(kind)
    if dtype.kind in "iub":
        least, most = (0, 1) if dtype.kind == "b" else (max(np.iinfo(dtype).min, -5), 5)
        made = draw.integers(least, most, size, endpoint=True).astype(dtype)
        odd: tuple[Any, ...] = () if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    else:
        made, odd = draw.uniform(-3, 3, size).astype(dtype), SPECIAL
    if odd and made.size and r.random() < special:
        with np.errstate(over="ignore"):
            made.reshape(-1)[draw.integers(made.size)] = np.asarray(r.choice(odd)).astype(dtype)
    return np.asarray(made)


def fitting(r: Random) -> tuple[list[int], list[int]]:
    """Two shapes that broadcast."""
    whole = shape(r)
    part = [d if r.random() < 0.7 else 1 for d in whole][r.randint(0, len(whole)) :]
    return (whole, part) if r.random() < 0.5 else (part, whole)


def axis_of(r: Random, rank: int, opset: int) -> int:
    return r.randint(0 if opset < 11 else -rank, rank - 1)


# --- Families -------------------------------------------------------------------------------------

UNARY = {
    **dict.fromkeys(
        ("Abs", "Neg", "Exp", "Log", "Sqrt", "Floor", "Ceil", "Sigmoid", "Tanh", "Relu", "Softplus"), 6
    ),
    **dict.fromkeys(("Softsign", "Reciprocal", "Identity", "Size", "Shape"), 6),
    **dict.fromkeys(("Sin", "Cos", "Tan", "Asin", "Acos", "Atan"), 7),
    **dict.fromkeys(("Erf", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh", "Sign", "IsNaN"), 9),
    "IsInf": 10,
    "Round": 11,
    "HardSwish": 14,
    "Mish": 18,
}


def unary(r: Random) -> Case:
    op = r.choice(list(UNARY))
    return Case(
        op, [array(r, shape(r), r.choice((np.float32, np.float32, np.float16)))], r.randint(UNARY[op], 23)
    )


def binary(r: Random) -> Case:
    op = r.choice(("Add", "Sub", "Mul", "Div", "Equal", "Less", "Greater", "Max", "Min", "Mod"))
    kind = r.choice((np.float32, np.float32, np.float16, np.int32, np.int64, np.uint8))
    whole = np.dtype(kind).kind in "iu"
    x, y = (array(r, size, kind) for size in fitting(r))
    if whole and op in ("Div", "Mod"):
        y = np.maximum(y, 1)
    attributes = {"fmod": 0 if whole else 1} if op == "Mod" else {}
    return Case(op, [x, y], r.randint(14 if whole else 10, 23), attributes)


def reduction(r: Random) -> Case:
    by_input = {"ReduceSum": 13}
    op = r.choice(
        ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceSumSquare")
    )
    opset, size = r.randint(6, 23), shape(r, 1)
    rank = len(size)
    chosen = r.sample(range(rank), r.randint(1, rank))
    axes = [a - rank * (opset >= 11 and r.random() < 0.4) for a in chosen]
    x, attributes = array(r, size, r.choice((np.float32, np.float16))), {"keepdims": r.choice((0, 1, None))}
    if opset >= by_input.get(op, 18):
        return Case(op, [x, np.asarray(axes, np.int64)], opset, attributes, (1,))
    return Case(op, [x], opset, {"axes": axes, **attributes})


def normal(r: Random) -> Case:
    opset, size = r.randint(6, 23), shape(r, 2, 4, 0.03)
    op = r.choice(("Softmax", "LogSoftmax", "Hardmax"))
    return Case(op, [array(r, size)], opset, {"axis": r.choice((axis_of(r, len(size), opset), None))})


def taking(r: Random) -> Case:
    opset, size = r.randint(11, 23), shape(r, 1, 4, 0)
    axis = axis_of(r, len(size), opset)
    length = size[axis]
    if r.random() < 0.5:
        where = np.random.default_rng(r.randrange(2**32)).integers(-length, length, shape(r, 0, 2))
        return Case("Gather", [array(r, size), np.asarray(where, np.int64)], opset, {"axis": axis})
    x = np.nan_to_num(np.round(array(r, size)), nan=1.0)
    attributes = {"axis": axis, "largest": r.choice((0, 1))}
    return Case("TopK", [x, np.asarray([r.randint(0, length)], np.int64)], opset, attributes, (1,), 2)


def slicing(r: Random) -> Case:
    opset, size = r.randint(10, 23), shape(r, 1, 4, 0.05)
    axes = r.sample(range(len(size)), r.randint(1, len(size)))
    far = r.choice((2**31 - 1, 2**63 - 1, 100))
    columns = [
        [r.randint(-5, 5) for _ in axes],
        [r.choice((r.randint(-5, 5), far, -far)) for _ in axes],
        axes,
        [r.choice((1, -1, 2, -2, 3)) for _ in axes],
    ]
    return Case(
        "Slice", [array(r, size), *(np.asarray(c, np.int64) for c in columns)], opset, {}, (1, 2, 3, 4)
    )


def _windows(r: Random, rank: int) -> dict[str, Any]:
    kernel = [r.randint(1, 3) for _ in range(rank)]
    how = r.choice((None, None, "VALID", "SAME_UPPER", "SAME_LOWER"))
    pads = None if how else [r.randint(0, kernel[i % rank] - 1) for i in range(2 * rank)]
    strides = r.choice((None, [r.randint(1, 3 if how is None else k) for k in kernel]))
    return {"kernel_shape": kernel, "auto_pad": how, "pads": pads, "strides": strides}


def convolution(r: Random) -> Case:
    rank, groups = r.randint(1, 3), r.choice((1, 1, 2, 3))
    attributes = {**_windows(r, rank), "group": groups}
    channels, made = groups * r.randint(1, 3), groups * r.randint(1, 3)
    image = [r.choice((0, 1, 2, 2, 2)), channels, *(r.randint(3, 6) for _ in range(rank))]
    weights = [made, channels // groups, *attributes["kernel_shape"]]
    inputs = [
        array(r, image, special=0.1),
        array(r, weights, special=0),
        r.choice((None, array(r, [made], special=0))),
    ]
    return Case("Conv", inputs if inputs[2] is not None else inputs[:2], r.randint(6, 23), attributes)


def pooling(r: Random) -> Case:
    rank, opset = r.randint(1, 3), r.randint(10, 23)
    op, attributes = r.choice(("MaxPool", "AveragePool")), _windows(r, rank)
    if attributes["auto_pad"] is None:
        attributes["ceil_mode"] = r.choice((0, 1))
    if op == "AveragePool":
        attributes["count_include_pad"] = r.choice((0, 1))
    image = [1, 2, *(r.randint(3, 6) for _ in range(rank))]
    return Case(op, [array(r, image, special=0)], opset, attributes)


def recurrent(r: Random) -> Case:
    op, direction = r.choice(("RNN", "GRU", "LSTM")), r.choice(("forward", "reverse", "bidirectional"))
    gates, ways = {"RNN": 1, "GRU": 3, "LSTM": 4}[op], 2 if direction == "bidirectional" else 1
    time, batch, wide, hidden = (r.randint(1, 3) for _ in range(4))
    rows = gates * hidden
    sizes = [[time, batch, wide], [ways, rows, wide], [ways, rows, hidden], [ways, 2 * rows]]
    lengths = np.asarray([r.randint(1, time) for _ in range(batch)], np.int32)
    inputs = [*(array(r, size, special=0) / 3 for size in sizes), r.choice((None, lengths))]
    attributes = {"direction": direction, "hidden_size": hidden}
    if op == "GRU":
        attributes["linear_before_reset"] = r.choice((0, 1))
    inputs = inputs if inputs[4] is not None else inputs[:4]
    return Case(op, inputs, r.randint(7, 23), attributes, outputs=3 if op == "LSTM" else 2)


FAMILIES: dict[str, Callable[[Random], Case]] = {
    f.__name__: f
    for f in (unary, binary, reduction, normal, taking, slicing, convolution, pooling, recurrent)
}

# --- Comparing ------------------------------------------------------------------------------------


def differs(ours: Any, theirs: Any) -> bool:
    """Whether outputs differ by more than rounding, in shape or in type."""
    for a, b in zip(ours, theirs, strict=True):
        if a.dtype != b.dtype or a.shape != b.shape:
            return True
        if a.dtype.kind in "biu":
            if not np.array_equal(a, b):
                return True
            continue
        wide = [v.astype(np.float64) for v in (a, b)]
        finite = np.abs(wide[1][np.isfinite(wide[1])])
        rounding = 4e-3 if a.dtype.itemsize < 4 else 2e-5
        if not np.allclose(
            *wide, rtol=rounding, atol=rounding * min(1e3, finite.max(initial=1e-3)), equal_nan=True
        ):
            return True
    return False


def by_reference(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Any:
    from onnx.reference import ReferenceEvaluator

    return ReferenceEvaluator(model).run(None, feeds)


def by_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options).run(None, feeds)


def verdict(case: Case) -> str:
    """``agrees`` with a peer, ``alone`` against all that answer, ``refused`` although a peer answers, or ``unheard``:
    no peer answers.
    """
    model, feeds = case.model(), case.feeds()
    answers = []
    for peer in (by_reference, by_onnxruntime):
        try:
            answers.append([np.asarray(v) for v in peer(model, feeds)])
        except Exception:  # Peers refuse by errors of every kind; who refuses is no witness.
            continue
    try:
        ours = onnx_backend.prepare(model).run(feeds)
    except PodrunError:
        return "refused" if answers else "unheard"
    if not answers:
        return "unheard"
    return "agrees" if any(not differs(ours, theirs) for theirs in answers) else "alone"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--only", choices=sorted(FAMILIES))
    parser.add_argument("--verbose", action="store_true", help="show the inputs of what does not agree")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    found: collections.Counter[str] = collections.Counter()
    for seed in range(options.first, options.first + options.count):
        case = drawn(seed, options.only)
        result = verdict(case)
        found[result] += 1
        if result in ("alone", "refused"):
            print(
                f"{seed}: {result}: {case.op} {case.opset} {case.attributes} {[np.shape(v) for v in case.inputs]}"
            )
            if options.verbose:
                print(case.inputs)
    print(dict(found))


def drawn(seed: int, family: str | None = None) -> Case:
    """The case of a seed."""
    r = Random(seed)
    return FAMILIES[family or list(FAMILIES)[seed % len(FAMILIES)]](r)


if __name__ == "__main__":
    main()
