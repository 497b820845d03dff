"""A pipeline of version 1 in two stages, with momentum: four mini-batches share a weight update."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu
from tensorflow.python.ipu.ops import pipelining_ops

tf.disable_v2_behavior()
tf.set_random_seed(1)
random = np.random.RandomState(0)
points = random.rand(256, 20).astype(np.float32)
labels = (points.sum(1) > 10).astype(np.int32)
dataset = tf.data.Dataset.from_tensor_slices((points, labels)).batch(16, drop_remainder=True).repeat()
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def first(rate, x, y):
    with tf.variable_scope("first"):
        return rate, tf.layers.dense(x, 32, activation=tf.nn.relu), y


def second(rate, x, y):
    with tf.variable_scope("second"):
        logits = tf.layers.dense(x, 2)
    return rate, tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))


def optimizer(rate, loss):
    return pipelining_ops.OptimizerFunctionOutput(tf.train.MomentumOptimizer(rate, 0.9), loss / 4)


def program(rate):
    return pipelining_ops.pipeline(
        [first, second],
        gradient_accumulation_count=4,
        repeat_count=10,
        inputs=[rate],
        infeed_queue=infeed,
        outfeed_queue=outfeed,
        optimizer_function=optimizer,
        outfeed_loss=True,
    )


with tf.device("cpu"):
    rate = tf.placeholder(tf.float32, [])
with ipu.scopes.ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(program, [rate])
dequeued = outfeed.dequeue()
config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(infeed.initializer)
    for _ in range(3):
        session.run(run, {rate: 0.1})
        losses = session.run(dequeued)
        print("loss", losses.shape, float(4 * losses.mean()))
