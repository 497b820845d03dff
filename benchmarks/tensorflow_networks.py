"""Networks for ``tensorflow_step.py``, in TensorFlow 1's graph functions: the same code on the host and on an IPU.

Initial values come from NumPy with a seed, so that both sides start alike. A network takes its inputs and gives a loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


class Options:
    """How weights start: ``plain``: from TensorFlow's own initializer, which costs nothing while tracing."""

    plain = False


def _weight(name: str, shape: list[int], scale: float | None = None) -> Any:
    import tensorflow.compat.v1 as tf

    if Options.plain:
        return tf.get_variable(name, shape, initializer=tf.glorot_uniform_initializer(), use_resource=True)
    fan = int(np.prod(shape[:-1])) or 1
    random = np.random.RandomState(sum(map(ord, name)) % 2**31)
    value = random.randn(*shape).astype(np.float32) * (scale if scale is not None else (1.0 / fan) ** 0.5)
    return tf.get_variable(name, initializer=value, use_resource=True)


def _dense(x: Any, size: int, name: str) -> Any:
    return x @ _weight(f"{name}_w", [int(x.shape[-1]), size]) + _weight(f"{name}_b", [size], 0.0)


def mlp_loss(x: Any, y: Any) -> Any:
    """784-512-512-10."""
    import tensorflow.compat.v1 as tf

    for place in range(2):
        x = tf.nn.relu(_dense(x, 512, f"mlp{place}"))
    return _entropy(_dense(x, 10, "mlp2"), y)


def _entropy(logits: Any, y: Any) -> Any:
    import tensorflow.compat.v1 as tf

    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def _conv(x: Any, size: int, kernel: int, stride: int, name: str, groups: int = 1) -> Any:
    import tensorflow.compat.v1 as tf

    w = _weight(f"{name}_w", [kernel, kernel, int(x.shape[-1]) // groups, size])
    y = tf.nn.conv2d(x, w, stride, "SAME")
    scale, offset = _weight(f"{name}_s", [size], 0.0) + 1.0, _weight(f"{name}_o", [size], 0.0)
    return tf.nn.fused_batch_norm(y, scale, offset)[0]


def resnet18_loss(x: Any, y: Any) -> Any:
    """ResNet-18 for 64x64 images."""
    import tensorflow.compat.v1 as tf

    x = tf.nn.relu(_conv(x, 64, 7, 2, "stem"))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME")
    for stage, size in enumerate((64, 128, 256, 512)):
        for block in range(2):
            stride, name = (2 if stage and not block else 1), f"s{stage}b{block}"
            short = x if stride == 1 and x.shape[-1] == size else _conv(x, size, 1, stride, f"{name}d")
            h = tf.nn.relu(_conv(x, size, 3, stride, f"{name}a"))
            x = tf.nn.relu(_conv(h, size, 3, 1, f"{name}b") + short)
    return _entropy(_dense(tf.reduce_mean(x, [1, 2]), 10, "head"), y)


def _norm(x: Any, name: str) -> Any:
    import tensorflow.compat.v1 as tf

    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    scale = _weight(f"{name}_s", [int(x.shape[-1])], 0.0) + 1.0
    return (x - mean) * tf.math.rsqrt(variance + 1e-6) * scale + _weight(f"{name}_o", [int(x.shape[-1])], 0.0)


def bert_tiny_loss(ids: Any, y: Any) -> Any:
    """BERT-tiny: two layers of 128, two heads, sentences of 128 tokens, a class for each sentence."""
    import tensorflow.compat.v1 as tf

    batch, length = ids.shape.as_list()
    x = tf.gather(_weight("words", [30522, 128], 0.02), ids) + _weight("places", [length, 128], 0.02)
    for layer in range(2):
        name = f"l{layer}"
        heads = [
            tf.transpose(tf.reshape(_dense(x, 128, f"{name}{part}"), [batch, length, 2, 64]), [0, 2, 1, 3])
            for part in "qkv"
        ]
        attention = tf.nn.softmax(tf.matmul(heads[0], heads[1], transpose_b=True) / 8.0)
        mixed = tf.reshape(tf.transpose(tf.matmul(attention, heads[2]), [0, 2, 1, 3]), [batch, length, 128])
        x = _norm(x + _dense(mixed, 128, f"{name}o"), f"{name}n1")
        wide = _dense(x, 512, f"{name}f")
        wide = 0.5 * wide * (1.0 + tf.tanh(0.7978845608 * (wide + 0.044715 * wide**3)))
        x = _norm(x + _dense(wide, 128, f"{name}g"), f"{name}n2")
    return _entropy(_dense(tf.tanh(_dense(x[:, 0], 128, "pool")), 2, "head"), y)


def resnext101(x: Any) -> Any:
    """ResNeXt-101 32x4d: the class probabilities."""
    import tensorflow.compat.v1 as tf

    x = tf.nn.max_pool2d(tf.nn.relu(_conv(x, 64, 7, 2, "stem")), 3, 2, "SAME")
    for stage, (count, size) in enumerate(((3, 256), (4, 512), (23, 1024), (3, 2048))):
        for block in range(count):
            stride, name = (2 if stage and not block else 1), f"s{stage}b{block}"
            short = _conv(x, size, 1, stride, f"{name}d") if not block else x
            h = tf.nn.relu(_conv(x, size // 2, 1, 1, f"{name}a"))
            h = tf.nn.relu(_conv(h, size // 2, 3, stride, f"{name}b", groups=32))
            x = tf.nn.relu(_conv(h, size, 1, 1, f"{name}c") + short)
    return tf.nn.softmax(_dense(tf.reduce_mean(x, [1, 2]), 1000, "head"))


@dataclass(frozen=True)
class Network:
    """A loss, and its samples: shape and number of values of the inputs (0: floats), and the classes."""

    loss: Callable[[Any, Any], Any]
    shape: tuple[int, ...]
    words: int
    classes: int

    def samples(self, replicas: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of so many micro-batches, one after the other."""
        random = np.random.RandomState(1)
        shape = (self.shape[0] * replicas, *self.shape[1:])
        if self.words:
            x = random.randint(0, self.words, shape).astype(np.int32)
        else:
            x = random.rand(*shape).astype(np.float32)
        return x, random.randint(0, self.classes, shape[:1]).astype(np.int32)


NETWORKS = {
    "resnet18": Network(resnet18_loss, (16, 64, 64, 3), 0, 10),
    "bert_tiny": Network(bert_tiny_loss, (4, 128), 30522, 2),
    "mlp": Network(mlp_loss, (128, 784), 0, 10),
    "mlp16": Network(mlp_loss, (32, 784), 0, 10),
}
