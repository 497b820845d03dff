"""A recurrent network of version 1 over short sequences, accumulated gradients, and an operator of its own."""

import numpy as np
import tensorflow as tf
from tensorflow.python import ipu

tf.set_random_seed(1)
random = np.random.RandomState(0)
sequences = random.rand(48, 8, 5, 2).astype(np.float32)
labels = (sequences.sum((2, 3)) > 5).astype(np.int32)
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices((sequences, labels)).repeat())
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def step(x, y):
    w = tf.get_variable("w", [2 + 12, 4 * 12], initializer=tf.contrib.layers.xavier_initializer())
    h = c = tf.zeros([8, 12])
    for moment in tf.unstack(x, axis=1):
        i, j, f, o = tf.split(tf.concat([moment, h], 1) @ w, 4, 1)
        c = tf.sigmoid(f + 1.0) * c + tf.sigmoid(i) * tf.tanh(j)
        h = tf.sigmoid(o) * tf.tanh(c)
    outs = {"output_types": [tf.float32], "output_shapes": [h.shape]}
    (h,) = ipu.custom_ops.precompiled_user_op([h], "libscale.so", outs=outs, attributes='{"by": 2.0}')
    logits = tf.layers.dense(h, 2)
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
    optimizer = ipu.optimizers.GradientAccumulationOptimizerV2(tf.train.AdamOptimizer(0.01), 4)
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return outfeed.enqueue(loss)


with ipu.scopes.ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(240, step, infeed_queue=infeed))
dequeued = outfeed.dequeue()
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(infeed.initializer)
    session.run(run)
    losses = session.run(dequeued)
print("loss", losses.shape, losses[:48].mean(), losses[-48:].mean())
