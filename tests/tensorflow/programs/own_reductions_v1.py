"""Version 1 over instances as BERT has it: a graph of its own, an optimizer that reduces gradients itself."""

import numpy as np
import popdist
import popdist.tensorflow
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu
from tensorflow.python.distribute import distribution_strategy_context as context
from tensorflow.python.ipu.horovod import popdist_strategy

BATCH, STEPS = 4, 8
index, replicas = popdist.getInstanceIndex(), popdist.getNumLocalReplicas()
strategy = popdist_strategy.PopDistStrategy(add_ipu_cross_replica_reductions=False)
graph = tf.Graph()
x = np.random.RandomState(0).rand(STEPS * BATCH * 4, 5).astype(np.float32)


class ReducingOptimizer(tf.train.GradientDescentOptimizer):
    def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        return context.get_replica_context().merge_call(self._apply, args=(grads_and_vars, name))

    def _apply(self, distribution, grads_and_vars, name):
        @ipu.outlined_function(unique_sharding=True)
        def update(gradient, value):
            return value - 0.2 * ipu.ops.cross_replica_ops.cross_replica_mean(gradient)

        return tf.group(*[v.assign(update(g, v)) for g, v in grads_and_vars], name=name)


def step(features, targets):
    hidden = tf.layers.dense(features, 8, activation=ipu.nn_ops.gelu)
    loss = tf.reduce_mean((tf.layers.dense(hidden, 1) - targets) ** 2)
    with tf.control_dependencies([ReducingOptimizer(0.2).minimize(loss)]):
        return outfeed.enqueue(loss)


def build():
    return ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(STEPS, step, infeed_queue=infeed), [])


with graph.as_default(), strategy.scope():
    tf.set_random_seed(index)
    data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True)))
    data = data.shard(popdist.getNumInstances(), index).repeat().batch(BATCH, drop_remainder=True)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        train = strategy.experimental_run_v2(build)
    losses = strategy.reduce(tf.distribute.ReduceOp.MEAN, outfeed.dequeue())
    saver = tf.train.Saver(max_to_keep=1)
    ipu.utils.move_variable_initialization_to_cpu()
    start = tf.global_variables_initializer()
    variables = tf.trainable_variables()

config = ipu.config.IPUConfig()
config.auto_select_ipus = replicas
config = popdist.tensorflow.set_ipu_config(config, 1, configure_device=False)
config.configure_ipu_system()
session = tf.Session(graph=graph)
session.run(start)
session.run(infeed.initializer)
means = []
for _ in range(3):
    session.run(train)
    means.append(session.run(losses).mean())
print("loss", means[0], means[-1])
print("weights", b"".join(v.tobytes() for v in session.run(variables)).hex())
saver.save(session, f"instance_{index}/model", global_step=3)
session.close()
