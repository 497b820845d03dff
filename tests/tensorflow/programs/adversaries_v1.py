"""Two networks against each other: two optimizers in one loop, and as many samples as a placeholder says."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.keras.layers import BatchNormalization, Dense, LeakyReLU
from tensorflow.keras.models import Sequential
from tensorflow.python import ipu

BATCH, NOISE, LOOP, CALLS = 16, 4, 25, 4
random = np.random.RandomState(0)
angles = random.rand(512) * np.pi
points = np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)
noise = random.randn(512, NOISE).astype(np.float32)
dataset = tf.data.Dataset.from_tensor_slices((points, noise)).repeat().batch(BATCH, drop_remainder=True)


def network(units, last, name):
    model = Sequential(name=name)
    for number, width in enumerate(units):
        kernel = tf.keras.initializers.glorot_uniform(seed=number)
        model.add(Dense(width, kernel_initializer=kernel))
        model.add(LeakyReLU(alpha=0.2))
    if name == "generator":
        model.add(BatchNormalization(momentum=0.8))
    model.add(Dense(last, kernel_initializer=tf.keras.initializers.glorot_uniform(seed=9)))
    return model


def entropy(logits, label):
    return tf.reduce_mean(
        tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.fill(logits.shape, label), logits=logits)
    )


def step(generator, judge, real, z):
    """One step of the judge, then one of the generator against the judge that has learned."""
    fake = generator(z, training=True)
    loss = entropy(judge(real), 0.9) + entropy(judge(tf.stop_gradient(fake)), 0.0)
    learn = tf.train.AdamOptimizer(2e-3, beta1=0.5).minimize(loss, var_list=judge.trainable_variables)
    with tf.control_dependencies([learn]):
        against = entropy(judge(generator(z, training=True)), 1.0)
    improve = tf.train.AdamOptimizer(1e-3, beta1=0.5).minimize(
        against, var_list=generator.trainable_variables
    )
    return loss, against, improve


def on_ipu():
    generator, judge = network((16, 16), 2, "generator"), network((16,), 1, "judge")
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset)
    losses, samples = (ipu.ipu_outfeed_queue.IPUOutfeedQueue() for _ in range(2))

    def train(real, z):
        loss, against, improve = step(generator, judge, real, z)
        return improve, losses.enqueue({"judge": loss, "generator": against})

    def sample():
        return samples.enqueue(tf.squeeze(generator(tf.random.normal((BATCH, NOISE)), training=False)))

    with tf.device("cpu"):
        count = tf.placeholder(np.int32, ())
    with ipu.scopes.ipu_scope("/device:IPU:0"):
        training = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(LOOP, train, [], infeed), [])
        sampling = ipu.ipu_compiler.compile(lambda n: ipu.loops.repeat(n, sample, []), [count])
    taken, drawn = losses.dequeue(), samples.dequeue()
    ipu.utils.move_variable_initialization_to_cpu()
    with tf.Session() as session:
        session.run([tf.global_variables_initializer(), infeed.initializer])
        history = []
        for _ in range(CALLS):
            session.run(training)
            history.append(session.run(taken))
        weights = session.run(generator.variables + judge.variables)
        shapes = []
        for number in (1, 40):
            session.run(sampling, {count: number})
            images = session.run(drawn)
            shapes.append(images.shape)
    losses = {name: np.concatenate([part[name] for part in history]) for name in history[0]}
    return weights, losses, shapes, images.reshape(-1, 2)


def on_the_host():
    with tf.Graph().as_default(), tf.Session() as session:
        generator, judge = network((16, 16), 2, "generator"), network((16,), 1, "judge")
        data = tf.data.Dataset.from_tensor_slices((points, noise)).repeat().batch(BATCH, drop_remainder=True)
        run = step(generator, judge, *tf.data.make_one_shot_iterator(data).get_next())
        session.run(tf.global_variables_initializer())
        losses = np.array([session.run(run)[:2] for _ in range(LOOP * CALLS)])
        return session.run(generator.variables + judge.variables), losses


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
weights, losses, shapes, drawn = on_ipu()
expected, reference = on_the_host()
print("shapes", *shapes)
print("deviations", *drawn.std(0))
print(
    "losses",
    len(losses["judge"]),
    np.abs(np.stack([losses["judge"], losses["generator"]], -1) - reference).max(),
)
print("difference", max(float(np.abs(a - b).max()) for a, b in zip(weights, expected, strict=True)))
