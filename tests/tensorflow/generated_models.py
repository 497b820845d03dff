"""Keras models made from a seed: dense, convolutional, recurrent and transformer, with options drawn at random."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class GeneratedModel:
    """A model with its samples. ``outputs`` classes; labels are whole numbers."""

    network: Any
    inputs: np.ndarray
    labels: np.ndarray


class _Drawn:
    """Options drawn one after the other from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def one(self, *values: Any) -> Any:
        """One of the values."""
        return values[self.random.randint(len(values))]


CLASSES = 4


def _dense(drawn: _Drawn, samples: int) -> tuple[Any, np.ndarray]:
    import tf_keras

    layers = tf_keras.layers
    features = drawn.one(3, 7, 12)
    given = x = tf_keras.Input((features,))
    for _ in range(drawn.one(2, 3)):
        x = layers.Dense(
            drawn.one(4, 9, 16),
            drawn.one("relu", "tanh", "sigmoid", "elu", "selu", "gelu", "swish", "softsign"),
            use_bias=drawn.one(True, False),
            kernel_regularizer=drawn.one(
                None, tf_keras.regularizers.l2(0.01), tf_keras.regularizers.l1(0.002)
            ),
        )(x)
        x = drawn.one(lambda v: v, layers.BatchNormalization(momentum=0.8), layers.LayerNormalization())(x)
    return tf_keras.Model(given, layers.Dense(CLASSES)(x)), drawn.random.randn(samples, features)


def _convolutional(drawn: _Drawn, samples: int) -> tuple[Any, np.ndarray]:
    import tf_keras

    layers = tf_keras.layers
    size, channels = drawn.one(8, 9, 11), drawn.one(2, 4)
    given = x = tf_keras.Input((size, size, channels))
    for _ in range(2):
        padding = drawn.one("same", "valid")
        x = drawn.one(
            layers.Conv2D(8, drawn.one(3, (2, 3)), drawn.one(1, 2), padding, use_bias=False),
            layers.Conv2D(8, 3, dilation_rate=drawn.one(1, 2), padding="same"),
            layers.Conv2D(8, 3, padding=padding, groups=2),
            layers.SeparableConv2D(6, 3, padding=padding),
            layers.Conv2DTranspose(4, 3, drawn.one(1, 2), padding),
        )(x)
        x = layers.BatchNormalization(momentum=drawn.one(0.9, 0.99), scale=drawn.one(True, False))(x)
        x = layers.Activation(drawn.one("relu", "tanh"))(x)
    x = drawn.one(layers.MaxPool2D(2), layers.AveragePooling2D(2, padding="same"))(x)
    x = drawn.one(layers.Flatten(), layers.GlobalAveragePooling2D(), layers.GlobalMaxPooling2D())(x)
    return tf_keras.Model(given, layers.Dense(CLASSES)(x)), drawn.random.randn(samples, size, size, channels)


def _recurrent(drawn: _Drawn, samples: int) -> tuple[Any, np.ndarray]:
    import tf_keras

    layers = tf_keras.layers
    time, features = drawn.one(4, 7), drawn.one(2, 5)
    given = tf_keras.Input((time, features))
    kind = drawn.one(layers.LSTM, layers.GRU)
    first = kind(drawn.one(3, 6), return_sequences=True, go_backwards=drawn.one(True, False))
    x = drawn.one(lambda v: v, layers.Bidirectional)(first)(given)
    x = drawn.one(layers.LSTM, layers.GRU, layers.SimpleRNN)(5, unroll=drawn.one(True, False))(x)
    return tf_keras.Model(given, layers.Dense(CLASSES)(x)), drawn.random.randn(samples, time, features)


def _transformer(drawn: _Drawn, samples: int) -> tuple[Any, np.ndarray]:
    import tf_keras

    layers = tf_keras.layers
    length, width, heads = drawn.one(4, 6), drawn.one(8, 12), drawn.one(1, 2)
    given = tf_keras.Input((length,), dtype="int32")
    x = layers.Embedding(20, width)(given)
    for _ in range(2):
        attended = layers.MultiHeadAttention(heads, drawn.one(3, 4))(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        wide = layers.Dense(2 * width, drawn.one("gelu", "relu"))(x)
        x = layers.LayerNormalization()(layers.Add()([x, layers.Dense(width)(wide)]))
    x = drawn.one(layers.GlobalAveragePooling1D(), layers.Flatten())(x)
    return tf_keras.Model(given, layers.Dense(CLASSES)(x)), drawn.random.randint(0, 20, (samples, length))


KINDS: dict[str, Callable[[_Drawn, int], tuple[Any, np.ndarray]]] = {
    "dense": _dense,
    "cnn": _convolutional,
    "lstm": _recurrent,
    "transformer": _transformer,
}


def generated(kind: str, seed: int, samples: int) -> GeneratedModel:
    """The model of a seed, with its first weights, and so many samples."""
    import tf_keras

    tf_keras.utils.set_random_seed(seed)
    network, inputs = KINDS[kind](_Drawn(seed), samples)
    values = np.random.RandomState(seed)
    inputs = inputs.astype(np.int32 if inputs.dtype.kind == "i" else np.float32)
    return GeneratedModel(network, inputs, values.randint(0, CLASSES, samples).astype(np.int32))


def assign_stages(network: Any) -> None:
    """Divide a model into two stages, the first with half of its calls."""
    assignment = network.get_pipeline_stage_assignment()
    for place, entry in enumerate(assignment):
        entry.pipeline_stage = int(place >= len(assignment) // 2)
    network.set_pipeline_stage_assignment(assignment)
