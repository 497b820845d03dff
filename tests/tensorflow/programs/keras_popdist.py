"""Keras over instances: each takes its shard of the data; all have the same weights, those of the whole on the host."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu
from tensorflow.python.ipu.distributed.popdist_strategy import PopDistStrategy

random = np.random.RandomState(0)
x = random.rand(64, 4).astype(np.float32)
y = x.sum(1, keepdims=True)


def create_model():
    model = keras.Sequential(
        [keras.layers.Dense(6, activation="tanh", input_shape=(4,)), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", steps_per_execution=4)
    return model


config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
count, index = popdist.getNumInstances(), popdist.getInstanceIndex()
# Other first weights in each instance: the strategy gives all those of the first.
keras.utils.set_random_seed(index + 1)
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True).shard(count, index)
strategy = PopDistStrategy()
with strategy.scope():
    model = create_model()
    start = model.get_weights()
    model.fit(data, epochs=3, verbose=0)
replicas = strategy.num_replicas_in_sync
mean = ipu.distributed.allreduce(tf.constant(model.get_weights()[0]), tf.distribute.ReduceOp.MEAN)
host = create_model()
host.set_weights(start)
host.fit(x, y, batch_size=4 * replicas, epochs=3, shuffle=False, verbose=0)
pairs = [*zip(model.get_weights(), host.get_weights(), strict=True), (mean, model.get_weights()[0])]
print("replicas", replicas)
print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
