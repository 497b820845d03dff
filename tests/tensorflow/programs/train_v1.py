"""A classifier of version 1: a loop on the device with queues, momentum, a checkpoint."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu
from tensorflow.python.ipu.scopes import ipu_scope

tf.disable_v2_behavior()
tf.set_random_seed(2)
STEPS, BATCH, RUNS = 10, 16, 4
random = np.random.RandomState(0)
points = random.rand(256, 20).astype(np.float32)
labels = (points.sum(1) > 10).astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices((points, labels)).batch(BATCH, drop_remainder=True).repeat()
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def step(x, y):
    with tf.variable_scope("net"):
        hidden = tf.layers.dense(x, 32, activation=tf.nn.relu)
        logits = tf.layers.dense(hidden, 2)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    train = ipu.optimizers.CrossReplicaOptimizer(tf.train.MomentumOptimizer(0.1, 0.9)).minimize(loss)
    with tf.control_dependencies([train]):
        return outfeed.enqueue(loss)


with ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(STEPS, step, infeed_queue=infeed))
dequeued = outfeed.dequeue()
config = ipu.config.IPUConfig()
config.auto_select_ipus = int(sys.argv[1]) if len(sys.argv) > 1 else 1
config.configure_ipu_system()
ipu.utils.move_variable_initialization_to_cpu()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(infeed.initializer)
    for _ in range(RUNS):
        session.run(run)
        losses = session.run(dequeued)
        print("loss", losses.shape, float(losses.mean()))
