"""A model of version 1 on two IPUs by ipu_shard, with momentum."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu

tf.disable_v2_behavior()
tf.set_random_seed(1)
points = np.random.RandomState(0).rand(64, 8, 6).astype(np.float32)
targets = points.sum(-1, keepdims=True)
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices((points, targets)).repeat())
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def step(x, y):
    with ipu.scopes.ipu_shard(0):
        hidden = tf.layers.dense(x, 16, activation=tf.nn.tanh, name="first")
    with ipu.scopes.ipu_shard(1):
        loss = tf.reduce_mean((tf.layers.dense(hidden, 1, name="second") - y) ** 2)
    optimizer = ipu.optimizers.ShardedOptimizer(tf.train.MomentumOptimizer(0.05, 0.9))
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return outfeed.enqueue(loss)


with ipu.scopes.ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(40, step, infeed_queue=infeed))
config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()
dequeued = outfeed.dequeue()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(infeed.initializer)
    session.run(run)
    losses = session.run(dequeued)
print("loss", losses.shape, losses[0], losses[-1])
