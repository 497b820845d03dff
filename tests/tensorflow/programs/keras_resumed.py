"""Training that ends and goes on from a checkpoint: of weights with the optimizer's state, and of the whole model."""

import numpy as np
from tensorflow import keras
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
x = random.rand(64, 4).astype(np.float32)
y = x.sum(1, keepdims=True)


def create_model():
    model = keras.Sequential(
        [keras.layers.Dense(8, activation="tanh", input_shape=(4,)), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=8)
    return model


def fit(model, epochs, callbacks=()):
    model.fit(x, y, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.get_weights()


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    start = model.get_weights()
    saver = keras.callbacks.ModelCheckpoint("weights-{epoch}", save_weights_only=True)
    fit(model, 2, [saver])
    model.save("whole.h5")
    model.save("whole")
    again = create_model()
    again.load_weights("weights-2").expect_partial()
    resumed = [fit(again, 2)]
    loaded = keras.models.load_model("whole.h5")
    loaded.compile(loaded.optimizer, "mse", steps_per_execution=8)
    resumed.append(fit(loaded, 2))
    # A SavedModel has no slots of Keras' former optimizers: the weights alone come back.
    predicted = keras.models.load_model("whole").predict(x, batch_size=8, verbose=0)
    served = float(np.abs(predicted - model.predict(x, batch_size=8, verbose=0)).max())
host = create_model()
host.set_weights(start)
expected = fit(host, 4)
differences = [max(float(np.abs(a - b).max()) for a, b in zip(w, expected, strict=True)) for w in resumed]
print("differences", differences)
print("difference", max([*differences, served]))
