"""A functional model in a pipeline of four stages on two IPUs, twice replicated, beside accumulation on the host."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras.layers import Dense, Dropout, Input
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
x = random.rand(512, 16).astype(np.float32)
y = x.sum(1, keepdims=True)
BATCH, COUNT, REPLICAS = 4, 8, 2


def create_model(stage):
    inputs = Input(16)
    with stage(0):
        h = Dense(32, activation="relu")(inputs)
        h = Dropout(0.0)(h)
    with stage(1):
        h = Dense(16, activation="relu")(h)
    with stage(2):
        skip = h + 1.0
    with stage(3):
        outputs = Dense(1)(skip)
    return keras.Model(inputs, outputs)


config = ipu.config.IPUConfig()
config.auto_select_ipus = 2 * REPLICAS
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model(keras.ipu.PipelineStage)
    model.set_pipelining_options(
        gradient_accumulation_steps_per_replica=COUNT,
        gradient_accumulation_reduction_method="mean",
        device_mapping=[0, 1, 1, 0],
        pipeline_schedule=ipu.ops.pipelining_ops.PipelineSchedule.Grouped,
        recomputation_mode=ipu.ops.pipelining_ops.RecomputationMode.Auto,
        offload_weight_update_variables=False,
    )
    model.compile("sgd", "mse", steps_per_execution=2 * COUNT)
    model.optimizer.learning_rate.assign(0.02)
    model.print_pipeline_stage_assignment_summary()
    start = model.get_weights()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    outputs = model.predict(x, batch_size=BATCH, verbose=0)


class NoStage:
    def __init__(self, stage):
        pass

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass


host = create_model(NoStage)
host.set_weights(start)
host.compile(keras.optimizers.SGD(0.02), lambda t, p: REPLICAS * tf.reduce_mean(tf.square(t - p)))
host.fit(x, y, batch_size=BATCH * COUNT * REPLICAS, epochs=2, shuffle=False, verbose=0)
pairs = [*zip(model.get_weights(), host.get_weights(), strict=True), (outputs, host(x))]
print("updates", int(model.optimizer.iterations.numpy()))
print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
