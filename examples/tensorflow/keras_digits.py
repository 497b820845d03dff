"""Digits with Keras: fit, evaluate and predict under an IPU strategy.

Two replicas inside one process; as many as it is launched with by `podrun --num-replicas 4 --num-instances 2`.
"""

import numpy as np
import popdist
import popdist.tensorflow
from sklearn.datasets import load_digits
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

BATCH, STEPS_PER_EXECUTION = 8, 10


def digits(instances, index):
    """The images of this instance and their labels: every instance trains on its own part."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return images[index::instances], labels[index::instances].astype(np.int32)


def network():
    return keras.Sequential(
        [
            keras.layers.Conv2D(8, 3, padding="same", activation="relu", input_shape=(8, 8, 1)),
            keras.layers.MaxPool2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )


def main():
    keras.utils.set_random_seed(1)
    config = ipu.config.IPUConfig()
    if popdist.isPopdistEnvSet():
        popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
        replicas, strategy = popdist.getNumLocalReplicas(), PopDistStrategy()
        images, labels = digits(popdist.getNumInstances(), popdist.getInstanceIndex())
    else:
        replicas = config.auto_select_ipus = 2
        config.configure_ipu_system()
        strategy = ipu.ipu_strategy.IPUStrategy()
        images, labels = digits(1, 0)
    # A compiled program has static shapes, so the data is a whole number of executions.
    execution = BATCH * replicas * STEPS_PER_EXECUTION
    count = len(images) // execution * execution
    with strategy.scope():
        model = network()
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=STEPS_PER_EXECUTION,
        )
        model.fit(images[:count], labels[:count], batch_size=BATCH, epochs=8, verbose=2)
        loss, accuracy = model.evaluate(images[:count], labels[:count], batch_size=BATCH, verbose=0)
        logits = model.predict(images[:execution], batch_size=BATCH, verbose=0)
    print(f"loss {loss:.3f}, accuracy {accuracy:.3f}, predictions {logits.shape}")
    assert accuracy > 0.9


if __name__ == "__main__":
    main()
