"""A Keras classifier: fit, evaluate and predict under an IPU strategy."""

import numpy as np
from tensorflow import keras
from tensorflow.python import ipu

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
random = np.random.RandomState(0)
points = random.rand(256, 20).astype(np.float32)
labels = (points.sum(1) > 10).astype(np.int32)
keras.utils.set_random_seed(1)
strategy = ipu.ipu_strategy.IPUStrategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Dense(32, activation="relu", input_shape=(20,)), keras.layers.Dense(2)]
    )
    model.compile(
        keras.optimizers.legacy.Adam(0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        steps_per_execution=8,
    )
    history = model.fit(points, labels, batch_size=16, epochs=4, verbose=0)
    print("losses", history.history["loss"])
    print("evaluated", model.evaluate(points, labels, batch_size=16, verbose=0))
    print("predicted", model.predict(points, batch_size=16, verbose=0).shape)
