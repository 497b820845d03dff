"""Gradient accumulation with the plain name of an optimizer, beside the same updates on the host.

The mean over four batches of 8 is the gradient of one batch of 32, so both trainings make the same updates.
"""

import sys

import numpy as np
from tensorflow import keras
from tensorflow.keras.optimizers import SGD
from tensorflow.python import ipu

NAME = sys.argv[1]
random = np.random.RandomState(0)
points = random.rand(128, 6).astype(np.float32)
targets = points.sum(1, keepdims=True)
weights = [random.rand(6, 1).astype(np.float32), np.zeros(1, np.float32)]
assert SGD is keras.optimizers.legacy.SGD


def train(batch, accumulated):
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(6,))])
    model.set_weights(weights)
    optimizer = NAME if NAME.islower() else getattr(keras.optimizers, NAME)(0.01)
    model.compile(optimizer, "mse", steps_per_execution=accumulated or 1)
    if accumulated:
        model.set_gradient_accumulation_options(
            gradient_accumulation_steps_per_replica=accumulated, gradient_accumulation_reduction_method="mean"
        )
    model.fit(points, targets, batch_size=batch, epochs=2, shuffle=False, verbose=0)
    return model


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    try:
        trained = train(8, 4)
    except NotImplementedError as error:
        print(error)
        sys.exit()
expected = train(32, 0)
pairs = zip(trained.get_weights(), expected.get_weights(), strict=True)
print("updates", int(trained.optimizer.iterations.numpy()))
print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
