"""A Keras model in a pipeline of two IPUs: each layer says its stage, an update accumulates eight micro-batches."""

import numpy as np
from sklearn.datasets import load_digits
from tensorflow import keras
from tensorflow.python import ipu

BATCH, ACCUMULATED = 8, 8


def network():
    inputs = keras.Input(64)
    with keras.ipu.PipelineStage(0):
        hidden = keras.layers.Dense(64, activation="relu")(inputs)
    with keras.ipu.PipelineStage(1):
        outputs = keras.layers.Dense(10)(keras.layers.Dense(32, activation="relu")(hidden))
    return keras.Model(inputs, outputs)


def main():
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    count = len(images) // (BATCH * ACCUMULATED) * BATCH * ACCUMULATED
    images, labels = (images[:count] / 16).astype(np.float32), labels[:count].astype(np.int32)
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.configure_ipu_system()
    with ipu.ipu_strategy.IPUStrategy().scope():
        model = network()
        model.set_pipelining_options(
            gradient_accumulation_steps_per_replica=ACCUMULATED,
            gradient_accumulation_reduction_method="mean",
            pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
        )
        model.compile(
            optimizer=keras.optimizers.Adam(0.01),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
            steps_per_execution=count // BATCH,
        )
        model.print_pipeline_stage_assignment_summary()
        history = model.fit(images, labels, batch_size=BATCH, epochs=12, shuffle=False, verbose=2)
    assert history.history["accuracy"][-1] > 0.9


if __name__ == "__main__":
    main()
