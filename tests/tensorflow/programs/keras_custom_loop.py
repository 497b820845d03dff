"""A training loop of its own: queues in a tf.function, losses taken in a thread, a learning rate that changes."""

import threading
import time

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.python import ipu

STEPS, EPOCHS = 8, 4
keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
x = random.rand(STEPS * 4, 3).astype(np.float32)
y = x.sum(1, keepdims=True)
dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4, drop_remainder=True).repeat()

config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
strategy = ipu.ipu_strategy.IPUStrategy()
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()
losses, done = [], threading.Event()


def take_losses():
    while not done.is_set() or len(losses) < STEPS * EPOCHS:
        if outfeed.enqueued:
            losses.extend(float(loss) for loss in outfeed)
        time.sleep(0.01)
        if done.is_set() and time.time() > deadline:
            return


with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    start = model.get_weights()
    optimizer = keras.optimizers.SGD(0.1)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)
    iterator = iter(dataset)

    @tf.function(experimental_compile=True)
    def epoch(iterator):
        for _ in tf.range(STEPS):
            points, targets = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(points, training=True) - targets))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            outfeed.enqueue(loss)

    deadline = time.time() + 120
    thread = threading.Thread(target=take_losses, daemon=True)
    thread.start()
    for number in range(EPOCHS):
        optimizer.learning_rate.assign(0.1 / (number + 1))
        strategy.run(epoch, args=[iterator])
    done.set()
    thread.join()
    path = checkpoint.save("ckpt/model")

host = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
host.set_weights(start)
expected = []
for number in range(EPOCHS):
    host.compile(keras.optimizers.SGD(0.1 / (number + 1)), "mse")
    expected.extend(host.train_on_batch(x[i : i + 4], y[i : i + 4]) for i in range(0, len(x), 4))
restored = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
tf.train.Checkpoint(model=restored).restore(path).expect_partial()
pairs = [(losses, expected), *zip(restored.get_weights(), host.get_weights(), strict=True)]
print("losses", len(losses))
print("difference", max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs))
