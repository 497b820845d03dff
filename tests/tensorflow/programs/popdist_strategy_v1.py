"""A strategy of version 1 over instances: weights start with those of instance 0, IPUs reduce the loss."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu
from tensorflow.python.ipu.horovod import ipu_multi_replica_strategy

tf.disable_v2_behavior()
BATCH, STEPS = 4, 8
config = ipu.config.IPUConfig()
popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1)
strategy = ipu_multi_replica_strategy.IPUMultiReplicaStrategy()
replicas, index = popdist.getNumTotalReplicas(), popdist.getInstanceIndex()
tf.set_random_seed(index)

x = np.random.RandomState(0).rand(64, 5).astype(np.float32)
data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
data = (
    data.shard(num_shards=popdist.getNumInstances(), index=index).repeat().batch(BATCH, drop_remainder=True)
)

with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="tanh"), tf.keras.layers.Dense(1)])
    optimizer = tf.keras.optimizers.SGD(0.1)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)

    def step(total, features, targets):
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((model(features, training=True) - targets) ** 2, axis=1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=replicas * BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        return total + loss, optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    def train():
        def loop():
            return ipu.loops.repeat(STEPS, step, inputs=[0.0], infeed_queue=infeed)

        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.experimental_run_v2(loop)) / STEPS

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        compiled = ipu.ipu_compiler.compile(train)
    with tf.Session() as session:
        session.run([infeed.initializer, tf.global_variables_initializer()])
        losses = [session.run(compiled)[0] for _ in range(4)]
        saved = session.run(model.trainable_variables)
        tf.train.Saver().save(session, f"instance_{index}/model")
    print("loss", losses[0], losses[-1])
    print("weights", b"".join(v.tobytes() for v in saved).hex())
