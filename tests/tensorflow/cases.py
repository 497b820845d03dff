"""Functions of TensorFlow for the comparison, by name: from inputs of a type to results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class _Later:
    """TensorFlow, imported when a case first runs and not when tests are collected."""

    def __getattr__(self, name: str) -> Any:
        import tensorflow

        return getattr(tensorflow, name)


tf: Any = _Later()
_random = np.random.RandomState(3)
X = (_random.rand(4, 6) * 0.8 + 0.1).astype(np.float32)
Y = (_random.rand(4, 6) * 0.8 + 0.1).astype(np.float32)
IMAGE = _random.rand(2, 8, 8, 4).astype(np.float32)
LABELS = np.array([0, 3, 2, 5], np.int32)
KERNEL = (_random.rand(3, 3, 4, 6) - 0.5).astype(np.float32)
DEPTH = (_random.rand(3, 3, 4, 2) - 0.5).astype(np.float32)
CHANNELS = _random.rand(4).astype(np.float32) + 0.5

_UNARY = (
    "abs", "exp", "expm1", "log1p", "sqrt", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "tanh", "sigmoid", "erf", "square", "negative", "sign", "floor", "ceil", "reciprocal", "softplus",
    "round", "lgamma", "digamma", "erfc", "atanh", "asinh",
)  # fmt: skip
_NN = (
    "relu", "relu6", "elu", "selu", "softplus", "softsign", "softmax", "log_softmax", "leaky_relu", "swish",
    "gelu", "l2_loss",
)  # fmt: skip
_BINARY = (
    "add", "subtract", "multiply", "divide", "maximum", "minimum", "pow", "squared_difference",
    "divide_no_nan", "multiply_no_nan", "xlogy", "xdivy", "floordiv", "floormod", "atan2",
)  # fmt: skip
_REDUCE = (
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_euclidean_norm",
    "reduce_logsumexp",
)  # fmt: skip


def _named(module: str, name: str) -> Callable[..., Any]:
    return lambda *inputs: getattr(getattr(tf, module), name)(*inputs)


Case = tuple[Callable[..., Any], tuple[np.ndarray, ...]]
CASES: dict[str, Case] = {name: (_named("math", name), (X,)) for name in _UNARY}
CASES |= {f"nn_{name}": (_named("nn", name), (X - 0.5,)) for name in _NN}
CASES |= {name: (_named("math", name), (X, Y)) for name in _BINARY}
CASES |= {name: (lambda x, n=name: getattr(tf.math, n)(x, 1), (X,)) for name in _REDUCE}
CASES |= {
    "matmul": (lambda a, b: tf.matmul(a, b, transpose_b=True), (X, Y)),
    "einsum": (lambda a, b: tf.einsum("ij,kj->ik", a, b), (X, Y)),
    "conv_same": (lambda x, w: tf.nn.conv2d(x, w, 2, "SAME"), (IMAGE, KERNEL)),
    "conv_valid": (lambda x, w: tf.nn.conv2d(x, w, 1, "VALID", dilations=2), (IMAGE, KERNEL)),
    "conv_grouped": (lambda x, w: tf.nn.conv2d(x, w[:, :, :2], 1, "SAME"), (IMAGE, KERNEL)),
    "conv_transposed": (lambda x, w: tf.nn.conv2d_transpose(x, w[:, :, :3], [2, 16, 16, 3], 2),
                        (IMAGE, _random.rand(3, 3, 4, 4).astype(np.float32))),
    "depthwise": (lambda x, w: tf.nn.depthwise_conv2d(x, w, [1, 1, 1, 1], "SAME"), (IMAGE, DEPTH)),
    "max_pool": (lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"), (IMAGE,)),
    "avg_pool": (lambda x: tf.nn.avg_pool2d(x, 3, 2, "SAME"), (IMAGE,)),
    "bias": (lambda x, b: tf.nn.bias_add(x, b), (IMAGE, CHANNELS)),
    "batch_norm": (
        lambda x, s, b: tf.compat.v1.nn.fused_batch_norm(x, s, b)[0], (IMAGE, CHANNELS, CHANNELS),
    ),
    "resize": (lambda x: tf.image.resize(x, [5, 11]), (IMAGE,)),
    "sparse_entropy": (
        lambda x: tf.nn.sparse_softmax_cross_entropy_with_logits(LABELS, x), (X,),
    ),
    "entropy": (lambda x, y: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x), (X, Y)),
    "sigmoid_entropy": (lambda x, y: tf.nn.sigmoid_cross_entropy_with_logits(labels=y, logits=x), (X, Y)),
    "reshape": (lambda x: tf.reshape(x, [3, -1]), (X,)),
    "transpose": (lambda x: tf.transpose(x, [0, 3, 1, 2]), (IMAGE,)),
    "concat": (lambda a, b: tf.concat([a, b], 1), (X, Y)),
    "stack": (lambda a, b: tf.stack([a, b], 1), (X, Y)),
    "unstack": (lambda x: tf.unstack(x, axis=1)[2], (X,)),
    "split": (lambda x: tf.split(x, 3, 1)[1], (X,)),
    "split_sizes": (lambda x: tf.split(x, [1, 2, 3], 1)[2], (X,)),
    "pad": (lambda x: tf.pad(x, [[1, 0], [0, 2]]), (X,)),
    "mirror_pad": (lambda x: tf.pad(x, [[1, 0], [0, 2]], "REFLECT"), (X,)),
    "slice": (lambda x: tf.slice(x, [1, 2], [2, -1]), (X,)),
    "strided": (lambda x: x[1:4:2, ::-1][:, None, ..., 2], (X,)),
    "tile": (lambda x: tf.tile(x, [2, 1]), (X,)),
    "gather": (lambda x: tf.gather(x, [3, 0, 0]), (X,)),
    "gather_batch": (lambda x: tf.gather(x, [[1], [0], [2], [2]], batch_dims=1), (X,)),
    "gather_nd": (lambda x: tf.gather_nd(x, [[1, 2], [3, 0]]), (X,)),
    "cumsum": (lambda x: tf.cumsum(x, 1, exclusive=True, reverse=True), (X,)),
    "top": (lambda x: tf.math.top_k(x, 3)[0], (X,)),
    "where": (lambda x, y: tf.where(x > y, x * 2, y * 3), (X, Y)),
    "clip": (lambda x: tf.clip_by_value(x, 0.3, 0.6), (X,)),
    "one_hot": (lambda x: x * tf.one_hot(LABELS, 6, dtype=x.dtype), (X,)),
    "argmax": (lambda x: x * tf.cast(tf.argmax(x, 1), x.dtype)[:, None], (X,)),
    "band": (lambda x: tf.linalg.band_part(x, 1, 0), (X,)),
    "space_to_depth": (lambda x: tf.nn.space_to_depth(x, 2), (IMAGE,)),
    "depth_to_space": (lambda x: tf.nn.depth_to_space(x, 2), (IMAGE,)),
    "segment": (lambda x: tf.math.unsorted_segment_sum(x, [0, 2, 0, 1], 3), (X,)),
    "reverse": (lambda x: tf.reverse(x, [1]), (X,)),
    "stop": (lambda x: x * tf.stop_gradient(x), (X,)),
    "loop": (lambda x: tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * x + a), (0, x))[1], (X,)),
    "branch": (lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x * 3), (X,)),
    "broadcast": (lambda x: tf.broadcast_to(x[:1], [4, 6]) * x, (X,)),
    "local_norm": (lambda x: tf.nn.lrn(x, 1), (IMAGE,)),
}  # fmt: skip
