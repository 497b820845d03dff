"""MNIST-like digits: fit, evaluate and predict, beside the same model on the host."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
images = random.rand(256, 28, 28).astype(np.float32)
labels = (images.sum((1, 2)) % 10).astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(16, drop_remainder=True)


def create_model():
    model = keras.Sequential(
        [
            keras.layers.Flatten(input_shape=(28, 28)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(),
        optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
        metrics=["accuracy"],
        steps_per_execution=16,
    )
    return model


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = create_model()
    model.summary()
    start = model.get_weights()
    history = model.fit(dataset.repeat(), epochs=3, steps_per_epoch=16, verbose=2)
    scores = model.evaluate(dataset, verbose=0)
    outputs = model.predict(images, batch_size=16, verbose=0)
host = create_model()
host.set_weights(start)
expected = host.fit(dataset.repeat(), epochs=3, steps_per_epoch=16, verbose=0)
pairs = [
    *zip(model.get_weights(), host.get_weights(), strict=True),
    (history.history["loss"], expected.history["loss"]),
    (scores, host.evaluate(dataset, verbose=0)),
    (outputs, host.predict(images, batch_size=16, verbose=0)),
]
print("difference", max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs))
