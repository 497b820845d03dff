"""Two instances of version 1: each has half of the replicas and of the data; gradients are averaged over all.

The argument is the number of replicas.
"""

import sys

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import horovod as hvd

replicas = int(sys.argv[1])
config = ipu.config.IPUConfig()
if popdist.isPopdistEnvSet():
    hvd.init()
    popdist.tensorflow.set_ipu_config(config, ipus_per_replica=1, configure_device=False)
    instances, index, local = (
        popdist.getNumInstances(),
        popdist.getInstanceIndex(),
        popdist.getNumLocalReplicas(),
    )
else:
    config.auto_select_ipus = replicas
    instances, index, local = 1, 0, replicas
config.configure_ipu_system()

random = np.random.RandomState(0)
steps = 8
points = random.rand(steps, replicas, 8, 5).astype(np.float32)
targets = points.sum(-1, keepdims=True).astype(np.float32)
own = slice(index * local, (index + 1) * local)
data = tuple(v[:, own].reshape(-1, *v.shape[2:]) for v in (points, targets))
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(tf.data.Dataset.from_tensor_slices(data))
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def step(x, y):
    w = tf.get_variable("w", [5, 1], initializer=tf.constant_initializer(0.1))
    loss = tf.reduce_mean((x @ w - y) ** 2)
    optimizer = ipu.optimizers.CrossReplicaOptimizer(tf.train.MomentumOptimizer(0.1, 0.9))
    with tf.control_dependencies([optimizer.minimize(loss)]):
        return outfeed.enqueue(loss)


with ipu.scopes.ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(steps, step, infeed_queue=infeed))
dequeued = outfeed.dequeue()
value = tf.placeholder(tf.float32, [])
mean = hvd.allreduce(value)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    session.run(tf.group(*[v.assign(hvd.broadcast(v, 0)) for v in tf.global_variables()]))
    session.run(infeed.initializer)
    session.run(run)
    losses = session.run(dequeued)
    overall = session.run(mean, {value: float(losses.mean())})
    (weights,) = session.run([v for v in tf.global_variables() if v.op.name == "w"])
    print("shape", losses.shape, "loss", float(losses[0].mean()), float(losses[-1].mean()), "mean", overall)
    print("weights", weights.tobytes().hex())
