"""Digits with TensorFlow 1: a loop on the IPUs, fed by an infeed queue, that puts its losses into an outfeed queue."""

import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits
from tensorflow.python import ipu
from tensorflow.python.ipu.scopes import ipu_scope

tf.disable_v2_behavior()
BATCH, STEPS, RUNS, REPLICAS = 16, 20, 8, 2


def dataset():
    images, labels = load_digits(return_X_y=True)
    pairs = (images / 16).astype(np.float32), labels.astype(np.int32)
    return (
        tf.data.Dataset.from_tensor_slices(pairs)
        .shuffle(1797, seed=1)
        .repeat()
        .batch(BATCH, drop_remainder=True)
    )


def main():
    tf.set_random_seed(1)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset())
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    def step(images, labels):
        hidden = tf.layers.dense(images, 64, activation=tf.nn.relu)
        logits = tf.layers.dense(hidden, 10)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
        optimizer = ipu.optimizers.CrossReplicaOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
        return optimizer.minimize(loss), outfeed.enqueue(loss)

    with ipu_scope("/device:IPU:0"):
        run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(STEPS, step, infeed_queue=infeed))
    losses = outfeed.dequeue()
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = REPLICAS
    config.configure_ipu_system()
    ipu.utils.move_variable_initialization_to_cpu()
    with tf.Session() as session:
        session.run(tf.global_variables_initializer())
        session.run(infeed.initializer)
        for _ in range(RUNS):
            session.run(run)
            values = session.run(losses)
            print(f"{values.shape[0]} steps on {REPLICAS} replicas: loss {values.mean():.3f}")
    assert values.mean() < 0.2


if __name__ == "__main__":
    main()
