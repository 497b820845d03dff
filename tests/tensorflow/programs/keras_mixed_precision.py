"""Mixed precision with a scaled loss and accumulated gradients."""

import numpy as np
from tensorflow import keras
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
x = random.rand(128, 8).astype(np.float32)
y = (x.sum(1) > 4).astype(np.int32)


def create_model():
    model = keras.Sequential(
        [
            keras.layers.Dense(16, activation="relu", input_shape=(8,)),
            keras.layers.Dense(2),
            keras.layers.Activation("softmax", dtype="float32"),
        ]
    )
    optimizer = keras.mixed_precision.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), dynamic=False, initial_scale=128
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", steps_per_execution=8)
    return model


keras.mixed_precision.set_global_policy("mixed_float16")
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    start = model.get_weights()
    model.set_gradient_accumulation_options(
        gradient_accumulation_steps_per_replica=4, gradient_accumulation_reduction_method="mean"
    )
    model.fit(x, y, batch_size=4, epochs=4, shuffle=False, verbose=0)
    types = {layer.compute_dtype for layer in model.layers}
keras.mixed_precision.set_global_policy("float32")
host = create_model()
host.set_weights(start)
host.fit(x, y, batch_size=16, epochs=4, shuffle=False, verbose=0)
print("types", sorted(types), "updates", int(model.optimizer.iterations.numpy()))
pairs = zip(model.get_weights(), host.get_weights(), strict=True)
print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
