"""A variational autoencoder whose samples a Hamiltonian Monte Carlo improves: gradients inside of nested loops."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.contrib.compiler import xla
from tensorflow.python import ipu

SIZE, LATENT, BATCH, LOOP, MOVES, JUMPS = 16, 3, 16, 20, 4, 3
random = np.random.RandomState(0)
kinds = random.rand(4, SIZE) > 0.5
pixels = (kinds[random.randint(0, 4, 256)] ^ (random.rand(256, SIZE) < 0.05)).astype(np.float32)


def dense(x, units, name, activation=None):
    return tf.layers.dense(x, units, activation, name=name)


def encoder(x):
    with tf.variable_scope("encoder", reuse=tf.AUTO_REUSE, use_resource=True):
        hidden = dense(x, 24, "hidden", tf.nn.relu)
        return dense(hidden, LATENT, "mean"), tf.nn.softplus(dense(hidden, LATENT, "deviation")) + 1e-3


def decoder(z):
    with tf.variable_scope("decoder", reuse=tf.AUTO_REUSE, use_resource=True):
        return dense(dense(z, 24, "hidden", tf.nn.relu), SIZE, "logits")


def log_normal(z, mean, deviation):
    squares = ((z - mean) / deviation) ** 2
    return -0.5 * tf.reduce_sum(squares + 2 * tf.log(deviation) + np.log(2 * np.pi).astype(np.float32), -1)


def log_joint(x, z):
    entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=x, logits=decoder(z))
    return log_normal(z, tf.zeros_like(z), tf.ones_like(z)) - tf.reduce_sum(entropy, -1)


def improved(x, z, size):
    """The samples after each move, ``[MOVES, batch, LATENT]``, and the share of moves that were accepted."""

    def slope(at):
        return tf.gradients(-log_joint(x, at), [at])[0]

    def jump(i, at, speed):
        at += size * speed
        return i + 1, at, speed - size * slope(at)

    def move(i, at, kept, accepted):
        speed = tf.random.normal(tf.shape(at))
        first = speed - 0.5 * size * slope(at)
        _, new, last = tf.while_loop(
            lambda i, *_: i < JUMPS, jump, [0, at, first], back_prop=False, maximum_iterations=JUMPS
        )
        last += 0.5 * size * slope(new)
        gain = log_joint(x, new) - log_joint(x, at)
        gain += 0.5 * (tf.reduce_sum(speed**2, -1) - tf.reduce_sum(last**2, -1))
        taken = tf.random_uniform(tf.shape(gain)) < tf.exp(gain)
        at = tf.where(taken, new, at)
        share = tf.reduce_mean(tf.cast(taken, tf.float32))
        return i + 1, at, kept.write(i, at), accepted + share / MOVES

    kept = tf.TensorArray(tf.float32, MOVES)
    loop = [0, z, kept, 0.0]
    _, _, kept, accepted = tf.while_loop(
        lambda i, *_: i < MOVES, move, loop, back_prop=False, maximum_iterations=MOVES
    )
    return kept.stack(), accepted


def train(total, size, x):
    mean, deviation = encoder(x)
    z = mean + deviation * tf.random.normal(tf.shape(mean))
    bound = tf.reduce_mean(log_joint(x, z) - log_normal(z, mean, deviation))
    better, accepted = improved(x, tf.stop_gradient(z), size)
    decoded = tf.reduce_mean(log_joint(x, tf.stop_gradient(better[-1])))
    updates = []
    for loss, scope in ((-bound, "encoder"), (-decoded, "decoder")):
        updates.append(tf.train.AdamOptimizer(0.01).minimize(loss, var_list=tf.trainable_variables(scope)))
    with tf.control_dependencies(updates):
        return total + bound / LOOP, size * (1 + 0.02 * (accepted - 0.8))


def judged(x):
    """The bound of one sample and that of 64 samples, which is never below it but by chance."""
    mean, deviation = encoder(x)
    z = mean + deviation * tf.random.normal((64, *x.shape[:1], LATENT))
    weights = log_joint(x[None] * tf.ones((64, 1, 1)), z) - log_normal(z, mean, deviation)
    return tf.reduce_mean(weights), tf.reduce_mean(tf.reduce_logsumexp(weights, 0)) - np.float32(np.log(64))


config = ipu.config.IPUConfig()
config.auto_select_ipus = [1]
config.configure_ipu_system()
tf.set_random_seed(2)
data = tf.data.Dataset.from_tensor_slices(pixels).repeat().batch(BATCH, drop_remainder=True)
infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
images = tf.placeholder(tf.float32, [32, SIZE])
with ipu.scopes.ipu_scope("/device:IPU:0"):
    size = tf.get_variable("size", initializer=0.1, trainable=False, use_resource=True)
    bound, new_size = xla.compile(lambda s: ipu.loops.repeat(LOOP, train, [0.0, s], infeed), [size])
    keep = size.assign(new_size)
    judge = xla.compile(judged, [images])
ipu.utils.move_variable_initialization_to_cpu()
with tf.Session() as session:
    session.run([tf.global_variables_initializer(), infeed.initializer])
    for _ in range(10):
        print("bound", float(session.run([bound, keep])[0]))
    print(
        "one and many",
        *map(float, session.run(judge, {images: pixels[:32]})),
        "size",
        float(session.run(size)),
    )
