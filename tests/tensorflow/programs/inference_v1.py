"""Inference of version 1 in the style of the porting guide: a grouped residual network, queues, throughput."""

import time

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

tf.set_random_seed(1)
BATCH, STEPS = 2, 6
images = np.random.RandomState(0).rand(BATCH, 16, 16, 8).astype(np.float32)
dataset = tf.data.Dataset.from_tensors(tf.constant(images)).repeat()
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def conv(x, size, kernel, name, groups=1):
    with tf.variable_scope(name):
        shape = [kernel, kernel, x.shape.as_list()[-1] // groups, size]
        w = tf.get_variable("w", shape, initializer=tf.contrib.layers.xavier_initializer())
    return tf.nn.conv2d(x, w, strides=[1, 1, 1, 1], padding="SAME")


def block(x, name):
    with tf.variable_scope(name):
        h = tf.nn.relu(conv(x, 16, 1, "a"))
        h = tf.nn.relu(ipu.normalization_ops.group_norm(conv(h, 16, 3, "b", groups=4), groups=4))
        return tf.nn.relu(conv(h, 8, 1, "c") + x)


def network(x):
    for place in range(3):
        x = block(x, f"block{place}")
    logits = tf.layers.dense(tf.reduce_mean(x, [1, 2]), 10)
    return outfeed.enqueue(
        {"probabilities": tf.nn.softmax(logits), "class": tf.argmax(logits, -1, output_type=tf.int32)}
    )


def loop():
    return ipu.loops.repeat(STEPS, network, [], infeed)


with ipu.scopes.ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(loop, [])
dequeued = outfeed.dequeue()
ipu.utils.move_variable_initialization_to_cpu()
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.convolutions.poplar_options = {"availableMemoryProportion": "0.3", "partialsType": "half"}
config.configure_ipu_system()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(infeed.initializer)
    session.run(run)
    first = session.run(dequeued)
    start = time.time()
    session.run(run)
    second = session.run(dequeued)
    print("images/s", BATCH * STEPS / (time.time() - start))
print("shapes", first["probabilities"].shape, first["class"].shape)
print("sums", np.allclose(first["probabilities"].sum(-1), 1, atol=1e-5))
print("equal", np.array_equal(first["class"], second["class"]))
