"""A functional model with two named inputs and two losses, from a dataset of dictionaries."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
words = random.randint(0, 50, (128, 6)).astype(np.int32)
numbers = random.rand(128, 3)  # Doubles, which become floats.
price = numbers.sum(1, keepdims=True).astype(np.float32)
kind = (words.sum(1) % 3).astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices(
    ({"words": words, "numbers": numbers}, {"price": price, "kind": kind})
).batch(8, drop_remainder=True)


def create_model():
    first = keras.Input((6,), name="words", dtype=tf.int32)
    second = keras.Input((3,), name="numbers")
    h = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(50, 8)(first))
    h = keras.layers.Concatenate()([h, keras.layers.Dense(4, activation="tanh")(second)])
    outputs = [
        keras.layers.Dense(1, name="price")(h),
        keras.layers.Dense(3, activation="softmax", name="kind")(h),
    ]
    model = keras.Model([first, second], outputs)
    model.compile(
        keras.optimizers.RMSprop(0.01),
        {"price": "mse", "kind": "sparse_categorical_crossentropy"},
        metrics={"kind": "accuracy"},
        loss_weights={"price": 0.5, "kind": 1.0},
        steps_per_execution=4,
    )
    return model


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    start = model.get_weights()
    history = model.fit(dataset, epochs=3, verbose=0).history
host = create_model()
host.set_weights(start)
expected = host.fit(dataset, epochs=3, verbose=0).history
print("metrics", sorted(history))
pairs = [
    *zip(model.get_weights(), host.get_weights(), strict=True),
    *((history[k], expected[k]) for k in expected),
]
print("difference", max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs))
