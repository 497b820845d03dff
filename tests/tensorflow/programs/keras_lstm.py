"""A text classifier with the SDK's embedding and LSTM, beside Keras' own layers on the host."""

import numpy as np
from ipu_tensorflow_addons.keras.layers import LSTM, Embedding
from tensorflow import keras
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
texts = random.randint(0, 30, (64, 7)).astype(np.int32)
labels = (texts.sum(1) % 2).astype(np.float32)[:, None]


def create_model(embedding, lstm):
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32", batch_size=8),
            embedding(30, 6),
            lstm(5, return_sequences=True),
            lstm(4),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(0.01), "binary_crossentropy", metrics=["accuracy"], steps_per_execution=8
    )
    return model


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model(Embedding, LSTM)
    start = model.get_weights()
    losses = model.fit(texts, labels, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
host = create_model(keras.layers.Embedding, keras.layers.LSTM)
host.set_weights(start)
expected = host.fit(texts, labels, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"]
print("difference", float(np.abs(np.subtract(losses, expected)).max()))
