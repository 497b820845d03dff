"""Neural collaborative filtering: the SDK's embeddings and Adam, asynchronous callbacks.

Epsilon is too small to matter: AdamIpuOptimizer adds it after the correction of the second moment, Keras before.
"""

import numpy as np
import tensorflow as tf
from ipu_tensorflow_addons.keras import layers as ipu_layers
from ipu_tensorflow_addons.keras.optimizers import AdamIpuOptimizer
from tensorflow import keras
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
users, items = (random.randint(0, n, 128).astype(np.int32) for n in (20, 30))
liked = ((users + items) % 2).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices(((users[:, None], items[:, None]), liked)).batch(
    8, drop_remainder=True
)


def create_model(embedding, optimizer):
    user, item = keras.Input((1,), dtype=tf.int32), keras.Input((1,), dtype=tf.int32)
    u = keras.layers.Flatten()(embedding(20, 8)(user))
    i = keras.layers.Flatten()(embedding(30, 8)(item))
    h = keras.layers.Concatenate()([u * i, u, i])
    h = keras.layers.Dense(8, activation="relu")(h)
    model = keras.Model((user, item), keras.layers.Dense(1, activation="sigmoid")(h))
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"], steps_per_execution=8)
    return model


class Counter(keras.callbacks.Callback):
    batches = 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
counter = Counter()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model(ipu_layers.Embedding, AdamIpuOptimizer(0.01, epsilon=1e-12))
    model.set_asynchronous_callbacks(True)
    start = model.get_weights()
    history = model.fit(dataset, epochs=3, verbose=0, callbacks=[counter]).history
host = create_model(keras.layers.Embedding, keras.optimizers.Adam(0.01, epsilon=1e-12))
host.set_weights(start)
expected = host.fit(dataset, epochs=3, verbose=0).history
print("batches", counter.batches)
print("difference", float(np.abs(np.subtract(history["loss"], expected["loss"])).max()))
