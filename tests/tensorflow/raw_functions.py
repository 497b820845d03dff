"""Cases of `RawCase` that need more than one operation: lists of tensors, branches, losses, reads of variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.tensorflow.comparing import RawCase, case
from tests.tensorflow.raw_pointwise import ORDINARY, ROWS

_random = np.random.RandomState(14)


_IMAGE = _random.rand(2, 5, 6, 4).astype(np.float32) * 3 + 1
_SCALED = _random.randn(2, 5, 6, 4).astype(np.float32)


_SMALL = _random.randn(2, 3, 3, 2).astype(np.float32)
_POOLED = _random.randn(2, 3, 3, 4).astype(np.float32)
_TWO = {"ksize": [1, 2, 2, 1], "strides": [1, 2, 2, 1]}
_THREE = {"ksize": [1, 2, 2, 1, 1], "strides": [1, 2, 2, 1, 1]}


def _pooled(image: np.ndarray) -> np.ndarray:
    """The maximum of windows of two by two; a row is missing."""
    whole = np.pad(image, ((0, 0), (0, 1), (0, 0), (0, 0)), constant_values=-np.inf)
    return whole.reshape(2, 3, 2, 3, 2, 4).max((2, 4)).astype(np.float32)


def _case(op: str, function: Callable[..., Any], *arrays: np.ndarray, **options: Any) -> RawCase:
    """Results and gradients of a function of arrays; the case counts for ``op``."""
    return RawCase(op, "", {str(i): a for i, a in enumerate(arrays)}, function=function, **options)


def _written(x: Any) -> Any:
    import tensorflow as tf

    items = tf.raw_ops.TensorListReserve(element_shape=[6], num_elements=5, element_dtype=x.dtype)
    for place in (3, 0, 1):
        items = tf.raw_ops.TensorListSetItem(input_handle=items, index=place, item=x[place] * (place + 1))
    return tf.raw_ops.TensorListStack(input_handle=items, element_shape=[6], element_dtype=x.dtype)


def _read(x: Any) -> Any:
    import tensorflow as tf

    items = tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[6])
    return tf.raw_ops.TensorListGetItem(input_handle=items, index=2, element_shape=[6], element_dtype=x.dtype)


def _counted(x: Any) -> Any:
    import tensorflow as tf

    return tf.raw_ops.TensorListLength(
        input_handle=tf.raw_ops.TensorListFromTensor(tensor=x, element_shape=[6])
    )


def _branched(x: Any) -> Any:
    import tensorflow as tf

    return tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: tf.tanh(x))


def _chosen(x: Any) -> Any:
    import tensorflow as tf

    index = tf.cast(tf.reduce_sum(x) > 0, tf.int32) + 1
    return tf.switch_case(index, [lambda: x * 2, lambda: tf.tanh(x), lambda: x**3])


def _looped(x: Any) -> Any:
    import tensorflow as tf

    return tf.while_loop(lambda i, _: i < 4, lambda i, a: (i + 1, tf.sin(a) + x), (0, x))[1]


def _called(x: Any) -> Any:
    import tensorflow as tf

    return tf.function(lambda a: tf.exp(a) * a)(x)


def _own_gradient(x: Any) -> Any:
    import tensorflow as tf

    @tf.custom_gradient
    def clipped(a: Any) -> Any:
        return tf.tanh(a), lambda upstream: tf.clip_by_value(upstream * a, -0.5, 0.5)

    return clipped(x) * 2


_SCORES = (_random.randn(7, 3, 5) * 2).astype(np.float32)
_PLACES = np.array([[0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [2, 1]], np.int64)
_LABELS = np.array([1, 2, 2, 3, 0, 1], np.int32)


def _normalized(kind: str) -> Callable[..., Any]:
    """A batch norm of halves, whose statistics are in float32 on both sides."""

    def norm(x: Any, scale: Any, offset: Any) -> Any:
        import tensorflow as tf

        options = {"mean": [], "variance": [], "epsilon": 1e-3, "is_training": True}
        results = getattr(tf.raw_ops, kind)(x=tf.cast(x, tf.float16), scale=scale, offset=offset, **options)
        return [tf.cast(results[0], tf.float32), *results[1:3]]

    return norm


def _ctc(places: Any) -> Callable[..., Any]:
    def loss(scores: Any, labels: Any, lengths: Any) -> Any:
        import tensorflow as tf

        return tf.raw_ops.CTCLoss(
            inputs=scores, labels_indices=places, labels_values=labels, sequence_length=lengths
        )[0]

    return loss


_IMAGES = (_random.rand(2, 5, 6, 4) * 3 + 1).astype(np.float32)
FUNCTIONS: list[RawCase] = [
    *(
        _case(
            kind,
            _normalized(kind),
            _IMAGES,
            _IMAGES[0, 0, 0],
            _IMAGES[0, 0, 1],
            tolerance=2e-3,
            skip_half="statistics",
        )
        for kind in ("FusedBatchNormV2", "FusedBatchNormV3")
    ),
    *(
        case(op, "", **arguments, strides=[1, 2, 2, 1], padding="SAME", _gradient=False, _half_tolerance=2e-2)
        for op, arguments in (
            ("Conv2DBackpropFilter", {"input": _IMAGE, "filter_sizes": [3, 3, 4, 2], "out_backprop": _SMALL}),
            (
                "DepthwiseConv2dNativeBackpropFilter",
                {"input": _IMAGE[..., :2], "filter_sizes": [3, 3, 2, 1], "out_backprop": _SMALL},
            ),
            (
                "DepthwiseConv2dNativeBackpropInput",
                {"input_sizes": [2, 5, 6, 2], "filter": _SCALED[0, :3, :3, :2, None], "out_backprop": _SMALL},
            ),
        )
    ),
    case(
        "Conv3DBackpropFilterV2",
        input=_IMAGE[..., None],
        filter_sizes=[2, 2, 2, 1, 3],
        out_backprop=_random.rand(2, 4, 5, 3, 3).astype(np.float32),
        strides=[1, 1, 1, 1, 1],
        padding="VALID",
        _gradient=False,
        _half_tolerance=2e-2,
    ),
    *(
        case(op, "", **arguments, padding="SAME", _gradient=False)
        for op, arguments in (
            ("MaxPoolGrad", {"orig_input": _IMAGE, "orig_output": _pooled(_IMAGE), "grad": _POOLED, **_TWO}),
            ("AvgPoolGrad", {"orig_input_shape": [2, 5, 6, 4], "grad": _POOLED, **_TWO}),
            (
                "MaxPool3DGrad",
                {
                    "orig_input": _IMAGE[..., None],
                    "orig_output": _pooled(_IMAGE)[..., None],
                    "grad": _POOLED[..., None],
                    **_THREE,
                },
            ),
            ("AvgPool3DGrad", {"orig_input_shape": [2, 5, 6, 4, 1], "grad": _POOLED[..., None], **_THREE}),
        )
    ),
    *(
        case(
            op,
            "training" if training else "inference",
            y_backprop=_SCALED,
            x=_IMAGE,
            scale=np.float32([1.5, 0.5, 2.0, 1.0]),
            reserve_space_1=_IMAGE.mean((0, 1, 2)),
            reserve_space_2=_IMAGE.var((0, 1, 2)),
            epsilon=1e-3,
            is_training=training,
            _outputs=(0, 1, 2),
            _gradient=False,
            _skip_half="statistics",
            _tolerance=1e-4,
            **({"reserve_space_3": np.zeros((), np.float32)} if op.endswith("V3") else {}),
        )
        for op in ("FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3")
        for training in (True, False)
    ),
    _case("TensorListStack", _written, ORDINARY),
    _case("TensorListGetItem", _read, ORDINARY),
    _case("TensorListLength", _counted, ORDINARY),
    _case("Branch", _branched, ORDINARY),
    _case("Case", _chosen, ORDINARY),
    _case("Loop", _looped, ORDINARY),
    _case("PartitionedCall", _called, ORDINARY),
    _case("CustomGradient", _own_gradient, ORDINARY),
    _case(
        "CTCLoss",
        _ctc(_PLACES),
        _SCORES,
        _LABELS,
        np.array([7, 5, 6], np.int32),
        skip_half="losses of floats",
    ),
    *(
        case(
            "ResourceGather",
            "",
            indices=np.array([2, 0, 2], np.int32),
            dtype="float32",
            _variables={"resource": ROWS},
            _skip_half="says its type",
        )
        for _ in (0,)
    ),
    case("VariableShape", out_type="int32", _variables={"input": ROWS}),
    case("ReadVariableOp", dtype="float32", _variables={"resource": ROWS}, _skip_half="says its type"),
    *(case(op, "", input=ORDINARY) for op in ("Identity", "Snapshot")),
    case("EnsureShape", input=ORDINARY, shape=[4, 6]),
    case("IdentityN", input=[ORDINARY, ROWS]),
    case("PlaceholderWithDefault", input=ORDINARY, shape=[4, 6]),
    case("CheckNumericsV2", tensor=ORDINARY, message="not finite"),
    case("Print", input=ORDINARY, data=[]),
]
