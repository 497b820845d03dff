"""A training loop of one's own in TensorFlow 2: a function on the IPU takes many steps; losses come back in a queue."""

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits
from tensorflow import keras
from tensorflow.python import ipu

BATCH, STEPS, EPOCHS = 16, 100, 5


def main():
    keras.utils.set_random_seed(1)
    images, labels = load_digits(return_X_y=True)
    pairs = (images / 16).astype(np.float32), labels.astype(np.int32)
    dataset = (
        tf.data.Dataset.from_tensor_slices(pairs)
        .shuffle(1797, seed=1)
        .repeat()
        .batch(BATCH, drop_remainder=True)
    )
    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 1
    config.configure_ipu_system()
    strategy = ipu.ipu_strategy.IPUStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(64, activation="relu"), keras.layers.Dense(10)])
        model.build((BATCH, 64))
        optimizer = keras.optimizers.SGD(0.1, 0.9)
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        @tf.function(jit_compile=True)
        def train(iterator):
            for _ in tf.range(STEPS):
                x, y = next(iterator)
                with tf.GradientTape() as tape:
                    logits = model(x, training=True)
                    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
                gradients = tape.gradient(loss, model.trainable_variables)
                optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
                outfeed.enqueue(loss)

        iterator = iter(dataset)
        for epoch in range(EPOCHS):
            strategy.run(train, args=[iterator])
            losses = outfeed.dequeue()
            print(f"epoch {epoch}: loss {float(tf.reduce_mean(losses)):.3f}")
    assert float(tf.reduce_mean(losses)) < 0.2


if __name__ == "__main__":
    main()
