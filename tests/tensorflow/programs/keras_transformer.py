"""A small transformer as a subclass of Model with a train step of its own."""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.python import ipu

keras.utils.set_random_seed(1)
random = np.random.RandomState(0)
tokens = random.randint(0, 20, (64, 5)).astype(np.int32)


class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
        self.wide, self.narrow = layers.Dense(16, activation=tf.nn.gelu), layers.Dense(8)

    def call(self, x):
        x = self.first(x + self.attention(x, x))
        return self.second(x + self.narrow(self.wide(x)))


class Transformer(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding, self.places = layers.Embedding(20, 8), layers.Embedding(5, 8)
        self.blocks = [Block() for _ in range(2)]
        self.head = layers.Dense(20)

    def call(self, ids):
        x = self.embedding(ids) + self.places(tf.range(5))
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def train_step(self, ids):
        with tf.GradientTape() as tape:
            logits = self(ids[:, :-1] if ids.shape[1] > 5 else ids, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits)
            loss = tf.reduce_mean(losses)
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables, strict=True))
        return {"nll": loss}


config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with ipu.ipu_strategy.IPUStrategy().scope():
    model = Transformer()
    model.build((4, 5))
    start = model.get_weights()
    model.compile(keras.optimizers.Adam(0.01), steps_per_execution=8)
    data = tf.data.Dataset.from_tensor_slices(tokens).batch(4, drop_remainder=True)
    history = model.fit(data, epochs=3, verbose=0).history
host = Transformer()
host.build((4, 5))
host.set_weights(start)
host.compile(keras.optimizers.Adam(0.01))
host.fit(tf.data.Dataset.from_tensor_slices(tokens).batch(4), epochs=3, verbose=0)
print("metrics", sorted(history))
print(
    "difference",
    max(float(np.abs(a - b).max()) for a, b in zip(model.get_weights(), host.get_weights(), strict=True)),
)
