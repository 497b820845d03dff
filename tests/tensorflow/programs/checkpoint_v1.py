"""Training of version 1 that is stopped and resumed from a checkpoint; both ways end with the same weights."""

import os
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu

tf.disable_v2_behavior()
points = np.random.RandomState(0).rand(64, 4, 3).astype(np.float32)
targets = points.sum(-1, keepdims=True)


def train(steps, folder, skip=0):
    """The weights after so many steps, from the folder's checkpoint if there is one."""
    with tf.Graph().as_default():
        data = tf.data.Dataset.from_tensor_slices((points, targets)).skip(skip)
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue(ipu.ipu_outfeed_queue.IPUOutfeedMode.LAST)

        def body(x, y):
            w = tf.get_variable("w", [3, 1], initializer=tf.constant_initializer(0.1))
            loss = tf.losses.mean_squared_error(y, tf.matmul(tf.reshape(x, [-1, 3]), w)[None][0])
            with tf.control_dependencies([tf.train.AdamOptimizer(0.05).minimize(loss)]):
                return outfeed.enqueue(loss)

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(steps, body, infeed_queue=infeed))
        loss, saver = outfeed.dequeue(), tf.train.Saver()
        with tf.Session() as session:
            latest = tf.train.latest_checkpoint(folder)
            if latest:
                saver.restore(session, latest)
            else:
                session.run(tf.global_variables_initializer())
            session.run(infeed.initializer)
            session.run(run)
            saver.save(session, os.path.join(folder, "model"), global_step=steps + skip)
            return session.run(loss), session.run(next(v for v in tf.global_variables() if v.op.name == "w"))


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
    loss, whole = train(32, one)
    early, _ = train(16, two)
    _, resumed = train(16, two, skip=16)
print("loss", early, loss)
print("equal", np.array_equal(whole, resumed))
