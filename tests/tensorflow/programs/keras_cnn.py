"""A residual CNN with batch norm and augmentation on the host, trained with a schedule and weight decay."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
images = random.rand(128, 8, 8, 3).astype(np.float32)
labels = random.randint(0, 4, 128).astype(np.int32)
dataset = (
    tf.data.Dataset.from_tensor_slices((images, labels))
    .map(lambda x, y: (tf.image.flip_left_right(x), y))
    .batch(8, drop_remainder=True)
    .prefetch(4)
)


def create_model():
    inputs = keras.Input((8, 8, 3))
    h = layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    h = layers.ReLU()(layers.BatchNormalization()(h))
    skip = h
    h = layers.Conv2D(8, 3, padding="same", kernel_regularizer=keras.regularizers.l2(1e-3))(h)
    h = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(h) + skip)
    h = layers.GlobalAveragePooling2D()(layers.MaxPool2D()(h))
    model = keras.Model(inputs, layers.Dense(4)(h))
    rates = keras.optimizers.schedules.ExponentialDecay(0.05, 8, 0.5, staircase=True)
    model.compile(
        keras.optimizers.SGD(rates, momentum=0.9, nesterov=True),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseTopKCategoricalAccuracy(2)],
        steps_per_execution=8,
    )
    return model


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    start = model.get_weights()
    history = model.fit(dataset, epochs=2, verbose=0, validation_data=dataset).history
host = create_model()
host.set_weights(start)
expected = host.fit(dataset, epochs=2, verbose=0, validation_data=dataset).history
print("metrics", sorted(history))
pairs = [
    *zip(model.get_weights(), host.get_weights(), strict=True),
    *((history[k], expected[k]) for k in expected),
]
print("difference", max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs))
