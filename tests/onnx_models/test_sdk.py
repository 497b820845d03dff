"""The SDK's limits of operators in a PopART session: its refusals in its words, and its meanings where they differ from
ONNX's.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from podrun.core.errors import UsageError
from podrun.onnx_models.lowering import Lowered, lower
from podrun.onnx_models.ops.sdk import Sdk

GRAPHCORE = "ai.graphcore"
SDK = Sdk()


def one(
    op_type: str,
    *inputs: Any,
    domain: str = "",
    opset: int = 10,
    outputs: int = 1,
    fixed: dict[int, np.ndarray] | None = None,
    name: str = "",
    **attributes: Any,
) -> onnx.ModelProto:
    """A model of one node. Inputs are arrays (their shapes and types count); ``fixed`` ones are initializers."""
    names = [f"x{i}" for i in range(len(inputs))]
    given = fixed or {}
    made = [f"y{i}" for i in range(outputs)]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, made, name=name, domain=domain, **attributes)],
        "graph",
        [_info(n, v) for i, (n, v) in enumerate(zip(names, inputs, strict=True)) if i not in given],
        [helper.make_empty_tensor_value_info(n) for n in made],
        [onnx.numpy_helper.from_array(v, names[i]) for i, v in given.items()],
    )
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(GRAPHCORE, 1)]
    )


def _info(name: str, value: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def f32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


def i32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.int32)


def u32(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint32)


_SPARSE = helper.make_sparse_tensor(
    helper.make_tensor("values", TensorProto.FLOAT, [1], [2.0]),
    helper.make_tensor("places", TensorProto.INT64, [1], [3]),
    [4],
)
_STATISTICS = (f32(3), f32(3), f32(3))
REFUSED: list[tuple[onnx.ModelProto, str]] = [
    (
        one("Add", f32(4, 4), f32(4, 2)),
        "np broadcasting failed on 'Op(ai.onnx.Add:7, inputs=[x0, x1], outputs=[y0])', frames [4, 4] and [4, 2] are "
        "not aligned",
    ),
    (
        one("MatMul", f32(2, 3), f32(2, 3)),
        "Op(ai.onnx.MatMul:9, inputs=[x0, x1], outputs=[y0]) contracting dimensions unequal: lhs 'x0' [2 3], rhs 'x1' "
        "[2 3]",
    ),
    (one("MatMul", f32(2, 2), f32()), "doesn't support scalar tensor input as the rhs input"),
    (
        one("Constant", opset=11, sparse_value=_SPARSE),
        "The Constant op attribute 'sparse_value' is not supported.",
    ),
    (
        one("Transpose", f32(2, 5, 3), perm=[1, 0]),
        "Rank of permutation tensor [1 0], rank 2 must be equal to rank of input tensor, shape [2 5 3], rank 3.",
    ),
    (one("Subsample", f32(4, 4), domain=GRAPHCORE, strides=[1, 0]), "Strides invalid. 0 stride at index 1"),
    (
        one("Reverse", f32(3, 2), domain=GRAPHCORE, dimensions=[1, -2]),
        "invalid dimension '-2'. Only positive dimensions are supported",
    ),
    (one("Reverse", f32(3, 2), domain=GRAPHCORE, dimensions=[1, 1]), "Dimension 1 appears multiple times"),
    (
        one("Reverse", f32(3, 2), domain=GRAPHCORE, dimensions=[2]),
        "invalid dimension '2' for input tensor of rank 2",
    ),
    (
        one(
            "MatMul",
            f32(2, 2),
            f32(2, 4),
            __serialize_matmul_mode="output_channels",
            __serialize_matmul_factor=3,
        ),
        "Invalid serialisation factor 3 for output channels dim 4. output_channels dim should be a multiple of the "
        "serialisation factor",
    ),
    (
        one(
            "MatMul",
            f32(2, 6),
            f32(6, 4),
            __serialize_matmul_mode="reducing_dim",
            __serialize_matmul_factor=4,
        ),
        "Invalid serialisation factor 4 for reducing dimension 6.",
    ),
    (one("ReduceSum", f32(3, 2), axes=[2]), "Axis 2 is out of acceptable range [-2, 1]"),
    (
        one("ReduceMedian", f32(3), domain=GRAPHCORE, axes=[-2], outputs=2),
        "Axis -2 is out of acceptable range [-1, 0]",
    ),
    (
        one("ScatterReduce", f32(4, 2), u32(4, 2), domain=GRAPHCORE, axis_size=3, axis=2),
        "axis = 2 is outside the acceptable range [-2, 1]",
    ),
    (one("ScatterReduce", f32(4), u32(4), domain=GRAPHCORE, axis_size=0), "axis_size = 0 is not valid"),
    (
        one("ScatterReduce", f32(4, 3), u32(4, 2), domain=GRAPHCORE, axis_size=3, axis=0),
        "Failed to expand 'indices' shape [4 2]",
    ),
    (
        one("ScatterReduce", f32(4, 3), u32(4, 3, 1), domain=GRAPHCORE, axis_size=3, axis=0),
        "Invalid rank for indices input.",
    ),
    (
        one("ScatterReduce", f32(4, 3, 2), u32(1, 3, 2), domain=GRAPHCORE, axis_size=3, axis=0),
        "Partial broadcasting of indices is not currently supported",
    ),
    (
        one("Nll", f32(3, 2, 5), i32(3, 4), domain=GRAPHCORE),
        "The label tensor (INT32   [3 4]) must have shape [3 2] to match all but the final dimension of the "
        "probabilities tensor (FLOAT   [3 2 5])",
    ),
    (
        one("Dropout", f32(3), ratio=1.5),
        "ratio value 1.5 is not valid. Please use a value in the interval [0,1)",
    ),
    (
        one("ShapedDropout", f32(3, 3), domain=GRAPHCORE, shape=[2, 3]),
        "ShapedDropout: incompatible input tensor and dropout shape.",
    ),
    (
        one("BatchNormalization", f32(2, 3), f32(3), *_STATISTICS),
        "batch norm requires X to have a rank >= 3.  x has rank 2",
    ),
    (
        one("BatchNormalization", f32(2, 3, 4), f32(4), *_STATISTICS),
        "expected shape of batch norm input tensor scale ([4]) to be [3]",
    ),
    (
        one("AveragePool", f32(1, 1, 4, 4), kernel_shape=[2, 2], count_include_pad=1),
        "`count_include_pad` is not supported",
    ),
    (
        one("MaxPool", f32(1, 1, 6, 6), kernel_shape=[2, 2], dilations=[2, 1]),
        "Dilations of value other than 1 are currently not supported.",
    ),
    (
        one("RNN", f32(2, 1, 3), f32(1, 2, 3), f32(1, 2, 2), outputs=2, activations=["Affine"]),
        "Activation type 'Affine' is not supported",
    ),
    (
        one("LSTM", f32(2, 1, 3), f32(2, 8, 3), f32(2, 8, 2), outputs=3, direction="bidirectional"),
        "only supports `forward' direction",
    ),
    (one("GRU", f32(2, 1, 3), f32(1, 6, 3), f32(1, 6, 2), outputs=2, clip=1.0), "Attribute `clip' of"),
    (
        one("RNN", f32(2, 1, 3), f32(1, 2, 3), f32(1, 2, 2), outputs=2, hidden_size=4),
        "RNNOp hidden_size attribute, 4, does not match calculated hidden size, 2.",
    ),
    (
        one("Slice", f32(4), i32(1), i32(1)),
        "Need the value of the ai.onnx.Slice:10 input 'starts' to determine the output shape, but was unable because "
        "[Tensor::getDataViaGraphTraversal] Could not work out tensor data for x1.",
    ),
    (one("Tile", f32(4), np.array([2])), "must be of type Constant"),
    (
        one("Tile", f32(4), np.array([-2]), fixed={1: np.array([-2])}),
        "Values must be non-negative in each shape",
    ),
    (
        one("Tile", f32(4), np.array([2, 1]), fixed={1: np.array([2, 1])}),
        "should have one element for each dimension of the data tensor",
    ),
    (
        one("Expand", f32(4, 3), np.array([2, 3]), fixed={1: np.array([2, 3])}),
        "corresponding dimensions must have the same value or one of them must be 1",
    ),
    (
        one("Reshape", f32(4, 3), np.array([-1, -1]), fixed={1: np.array([-1, -1])}),
        "shape input to ReshapeOp can only use -1 to specify one unknown dimension",
    ),
]


@pytest.mark.parametrize(("model", "words"), REFUSED, ids=[m.graph.node[0].op_type for m, _ in REFUSED])
def test_refusals_say_what_the_sdk_says(model: onnx.ModelProto, words: str) -> None:
    with pytest.raises(UsageError) as found:
        lower(model, dialect=SDK)
    assert words in found.value.message
    assert model.graph.node[0].op_type in str(found.value.hint)


def test_onnx_itself_takes_more_than_the_sdk() -> None:
    x = f32(2, 1, 3)
    both_ways = one("LSTM", x, f32(2, 8, 3), f32(2, 8, 2), outputs=3, direction="bidirectional")
    assert lower(both_ways).outputs["y0"].shape == (2, 2, 1, 2)
    newer = one("LSTM", x, f32(2, 8, 3), f32(2, 8, 2), outputs=3, opset=14, direction="bidirectional")
    assert lower(newer, dialect=SDK).outputs["y0"].shape == (2, 2, 1, 2)


def test_a_call_gives_and_takes_what_its_subgraph_does() -> None:
    body = helper.make_graph(
        [helper.make_node("Neg", ["a"], ["b"])],
        "body",
        [helper.make_empty_tensor_value_info("a")],
        [helper.make_empty_tensor_value_info("b")],
    )
    for model, words in (
        (one("Call", f32(2), domain=GRAPHCORE, outputs=2, callee=body, name="twice"), "outputs (2)"),
        (one("Call", f32(2), f32(2), domain=GRAPHCORE, callee=body, name="twice"), "inputs (2)"),
    ):
        with pytest.raises(UsageError) as found:
            lower(model, dialect=SDK)
        assert (
            found.value.message
            == f"For CallOp 'twice', number of {words} does not match that of the callee subgraph (1)"
        )


def run(lowered: Lowered, *inputs: np.ndarray) -> dict[str, Any]:
    return lowered.forward(
        lowered.initial, {f"x{i}": jnp.asarray(v) for i, v in enumerate(inputs)}, jax.random.key(0)
    )


def test_scans_put_their_outputs_one_after_the_other() -> None:
    body = helper.make_graph(
        [helper.make_node("Concat", ["a", "b"], ["c"], axis=0)],
        "body",
        [helper.make_empty_tensor_value_info(n) for n in "ab"],
        [helper.make_empty_tensor_value_info("c")],
    )
    x, y = np.arange(3, dtype=np.float32), np.arange(3, 6, dtype=np.float32)
    model = one("Scan", x, y, num_scan_inputs=2, body=body, scan_input_directions=[0, 1])
    np.testing.assert_array_equal(run(lower(model, dialect=SDK), x, y)["y0"], [0, 5, 1, 4, 2, 3])
    wide = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    model = one(
        "Scan", wide, wide, num_scan_inputs=2, body=body, scan_input_axes=[1, 1], scan_output_axes=[1]
    )
    made = run(lower(model, dialect=SDK), wide, wide)["y0"]
    np.testing.assert_array_equal(
        made, np.concatenate([np.tile(wide[:, i], (2, 1)) for i in range(3)], axis=1)
    )
    assert lower(model).outputs["y0"].shape == (4, 3, 2)  # ONNX stacks along an axis of its own.


def test_meanings_that_are_the_sdks_own() -> None:
    x = np.array([[[[1, 2], [3, 4]]]], np.float32)
    odd = one("ConvTranspose", x, x, opset=11, output_shape=[2, 2], auto_pad="SAME_UPPER")
    whole = np.array([[1, 4, 4], [6, 20, 16], [9, 24, 16]], np.float32)
    np.testing.assert_array_equal(run(lower(odd, dialect=SDK), x, x)["y0"][0, 0], whole[1:, 1:])
    np.testing.assert_array_equal(run(lower(odd), x, x)["y0"][0, 0], whole[:2, :2])
    none = one("ReduceSum", x)
    none.graph.node[0].attribute.append(helper.make_attribute("axes", [], attr_type=onnx.AttributeProto.INTS))
    assert lower(none, dialect=SDK).outputs["y0"].shape == x.shape
    line, lengths = np.ones((3, 1, 1), np.float32), np.array([1], np.int32)
    weights = np.full((1, 1, 1), 0.5, np.float32)
    model = one("RNN", line, weights, weights, f32(1, 2), lengths, outputs=2)
    whole_line, part = (
        np.asarray(run(lower(model, dialect=s), line, weights, weights, f32(1, 2), lengths)["y0"])
        for s in (SDK, None)
    )
    assert whole_line[2, 0, 0, 0] != 0
    assert part[2, 0, 0, 0] == 0


def test_strided_groups_are_dealt_out() -> None:
    x = np.random.default_rng(3).standard_normal((2, 6, 3)).astype(np.float32)
    model = one(
        "GroupNormalization", x, f32(6), f32(6), domain=GRAPHCORE, outputs=3, num_groups=2, epsilon=0.0
    )
    for sdk, parts in ((Sdk(strided_groups=True), (x[:, ::2], x[:, 1::2])), (SDK, (x[:, :3], x[:, 3:]))):
        y, mean, _ = run(lower(model, dialect=sdk), x, np.ones(6, np.float32), f32(6)).values()
        np.testing.assert_allclose(mean.reshape(2, 2)[:, 1], parts[1].mean((1, 2)), rtol=1e-5, atol=1e-6)
        got = y[:, 1::2] if sdk.strided_groups else y[:, 3:]
        want = (parts[1] - parts[1].mean((1, 2), keepdims=True)) / parts[1].std((1, 2), keepdims=True)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


TIES = np.array([1.0, 3.0, 3.0, -1.0], np.float32)
LINE = TIES.reshape(1, 1, 4)
LIKELY, FIRST = np.array([[2.0**-26, 0.5], [0, 1]], np.float32), np.zeros(2, np.int32)
GRADIENTS = [
    (
        one("Nll", LIKELY, FIRST, domain=GRAPHCORE, reduction="Sum"),
        (LIKELY, FIRST),
        0,
        [[-(2.0**26), 0], [np.float32(-1) / np.float32(1e-10), 0]],
    ),
    (one("ReduceMax", TIES, keepdims=0), (TIES,), 0, [0, 1, 1, 0]),
    (one("MaxPool", LINE, kernel_shape=[2], strides=[1], pads=[1, 0]), (LINE,), 0, [[[1, 2, 2, 0]]]),
    (one("GlobalMaxPool", LINE), (LINE,), 0, [[[0, 1, 1, 0]]]),
    (one("Max", TIES, TIES, opset=8), (TIES, TIES), 1, [1, 1, 1, 1]),
    (one("Clip", TIES, opset=6, min=-1.0, max=3.0), (TIES,), 0, [1, 0, 0, 0]),
    (one("Relu", np.maximum(TIES, 0)), (np.maximum(TIES, 0),), 0, [1, 1, 1, 0]),
    (
        one("ScatterReduce", TIES, u32(4), f32(1), domain=GRAPHCORE, axis=0, axis_size=1, reduction=1),
        (TIES, u32(4), f32(1)),
        0,
        [0, 1, 1, 0],
    ),
    (
        one("ScatterReduce", TIES, u32(4), f32(1), domain=GRAPHCORE, axis=0, axis_size=1, reduction=3),
        (TIES, u32(4), np.full(1, 2, np.float32)),
        0,
        [-18, -6, -6, 18],
    ),
    (
        one("ScatterReduce", TIES, u32(4), f32(1), domain=GRAPHCORE, axis=0, axis_size=1, reduction=3),
        (TIES, u32(4), f32(1)),
        2,
        [-9],
    ),
    (
        one("ScatterReduce", TIES, u32(4), f32(1), domain=GRAPHCORE, axis=0, axis_size=1, reduction=3),
        (np.array([0, 0, 3, 1], np.float32), u32(4), np.ones(1, np.float32)),
        0,
        [0, 0, 0, 0],
    ),
]


@pytest.mark.parametrize(
    ("model", "values", "by", "slope"), GRADIENTS, ids=[m.graph.node[0].op_type for m, *_ in GRADIENTS]
)
@pytest.mark.sample(3)
def test_gradients_where_values_meet(
    model: onnx.ModelProto, values: Any, by: int, slope: list[float]
) -> None:
    """Equal greatest values each have the whole gradient; a bound that is met has none; products count zeros; a
    likelihood pushes improbable labels up.
    """
    lowered = lower(model, training=True, dialect=SDK)

    def total(x: Any) -> Any:
        return jnp.sum(run(lowered, *(x if i == by else v for i, v in enumerate(values)))["y0"])

    np.testing.assert_array_equal(jax.jit(jax.grad(total))(values[by]), slope)


def test_a_slice_may_name_where_it_goes_and_an_update_may_leave_out_ones() -> None:
    x, at = np.arange(12, dtype=np.float32).reshape(3, 4), np.array([2], np.uint32)
    model = one("DynamicSlice", x, at, f32(1, 4), domain=GRAPHCORE, axes=[0], sizes=[1])
    np.testing.assert_array_equal(run(lower(model, dialect=SDK), x, at, f32(1, 4))["y0"], x[2:])
    model = one("DynamicUpdate", x, at, f32(4), domain=GRAPHCORE, axes=[0], sizes=[1])
    np.testing.assert_array_equal(run(lower(model, dialect=SDK), x, at, f32(4))["y0"], [*x[:2], f32(4)])


def test_packed_sequences_go_through_the_callback_in_batches() -> None:
    body = helper.make_graph(
        [helper.make_node("CumSum", ["a", "axis"], ["b"])],
        "body",
        [helper.make_empty_tensor_value_info("a")],
        [helper.make_empty_tensor_value_info("b")],
        [onnx.numpy_helper.from_array(np.array(1), "axis")],
    )
    x = np.arange(1, 8, dtype=np.float32).reshape(7, 1)
    starts, lengths, to = np.array([0, 3, 5, 6]), np.array([3, 2, 1, 1]), np.array([5, 0, 3, 4])
    given = [x, *(v.astype(np.uint32) for v in (starts, lengths, to, lengths))]
    want = np.zeros((9, 1), np.float32)
    for start, length, place in zip(starts, lengths, to, strict=True):
        want[place : place + length] = np.cumsum(x[start : start + length], axis=0)
    for batch in (1, 2, 4):
        attributes = {
            "maxSequenceLengths": [4],
            "resultSize": 9,
            "callbackBatchSize": batch,
            "callback": body,
        }
        model = one("PackedDataBlock", *given, domain=GRAPHCORE, opset=11, **attributes)
        np.testing.assert_array_equal(run(lower(model, dialect=SDK), *given)["y0"], want)


def test_an_increment_has_the_sign_of_its_sum() -> None:
    x = np.array([-5, 5, 1], np.int32)
    model = one("IncrementMod", x, domain=GRAPHCORE, increment=2.0, modulus=4.0)
    np.testing.assert_array_equal(run(lower(model, dialect=SDK), x)["y0"], [-3, 3, 3])


def test_the_sdks_nearest_mode_is_pytorchs() -> None:
    x, scales = np.arange(8, dtype=np.float32).reshape(1, 8), np.array([1, 0.375], np.float32)
    model = one("Resize", x, f32(0), scales, opset=11, fixed={1: f32(0), 2: scales}, nearest_mode="pytorch")
    np.testing.assert_array_equal(run(lower(model, dialect=SDK), x)["y0"], [[0, 2, 5]])


def test_random_numbers_of_a_seed_or_of_double_are_refused() -> None:
    with pytest.raises(
        Exception, match=r"Optional seed attribute is not supported\. Use session::setRandomSeed instead\."
    ):
        lower(one("RandomNormal", shape=[2], seed=1.0), dialect=SDK)
    with pytest.raises(Exception, match="The data type DOUBLE is not supported in Poplar"):
        lower(one("RandomUniform", shape=[2], dtype=TensorProto.DOUBLE), dialect=SDK)
