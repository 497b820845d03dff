"""Message passing on packs of graphs of different sizes, which share a batch, beside the same training on the host.

An edge gathers its nodes, a node sums its edges, and a graph takes the mean of its nodes; labels of graphs that only
fill a pack have no weight.
"""

import numpy as np
import tensorflow as tf
from tensorflow import keras
from tensorflow.keras import layers
from tensorflow.python import ipu

PACKS, NODES, EDGES, GRAPHS, BATCH, COUNT, REPLICAS = 64, 12, 24, 3, 2, 2, 2
random = np.random.RandomState(0)


def packs():
    """Nodes, edges and labels of packs of two or three graphs."""
    kinds = random.randint(0, 4, (PACKS, NODES)).astype(np.int32)
    graph_of = np.zeros((PACKS, NODES), np.int32)
    senders, receivers = np.zeros((2, PACKS, EDGES), np.int32)
    weights = np.ones((PACKS, GRAPHS), np.float32)
    for pack in range(PACKS):
        graphs = random.randint(2, GRAPHS + 1)
        weights[pack, graphs:] = 0
        cuts = np.sort(random.choice(np.arange(1, NODES), graphs - 1, replace=False))
        graph_of[pack] = np.searchsorted(cuts, np.arange(NODES), "right")
        for edge in range(EDGES):
            sender = random.randint(NODES)
            senders[pack, edge] = sender
            receivers[pack, edge] = random.choice(np.flatnonzero(graph_of[pack] == graph_of[pack, sender]))
    sums = np.stack([np.where(graph_of == g, kinds == 0, 0).sum(1) for g in range(GRAPHS)], 1)
    labels = (sums > 1).astype(np.int32)[..., None]
    return (kinds, senders, receivers, graph_of), labels, weights


def summed(values, groups, count):
    """The sum of the rows of each group, pack by pack."""
    return tf.stack(
        [tf.math.unsorted_segment_sum(values[i], groups[i], count) for i in range(values.shape[0])]
    )


class Messages(layers.Layer):
    def __init__(self, width, **options):
        super().__init__(**options)
        self.message = keras.Sequential([layers.Dense(width, "relu"), layers.Dense(width)])
        self.update = layers.Dense(width, "relu")
        self.norm = layers.LayerNormalization()

    def build(self, shapes):
        super().build(shapes)
        self.epsilon = self.add_weight("epsilon", shape=(1,), initializer="zeros")

    def call(self, inputs, training=False):
        nodes, senders, receivers = inputs
        sent = tf.gather(nodes, senders, batch_dims=1)
        received = tf.gather(nodes, receivers, batch_dims=1)
        arriving = summed(self.message(tf.concat([sent, received], -1)), receivers, NODES)
        return nodes + self.norm(self.update((1 + self.epsilon) * nodes + arriving))


def create_model():
    shapes = ((NODES,), (EDGES,), (EDGES,), (NODES,))
    inputs = [keras.Input(shape, BATCH, dtype=tf.int32) for shape in shapes]
    kinds, senders, receivers, graph_of = inputs
    nodes = layers.Embedding(4, 16)(kinds)
    for _ in range(2):
        nodes = Messages(16)([nodes, senders, receivers])
    totals = layers.Lambda(lambda pair: summed(pair[0], pair[1], GRAPHS))((nodes, graph_of))
    sizes = layers.Lambda(lambda g: summed(tf.ones([BATCH, NODES, 1]), g, GRAPHS))(graph_of)
    return keras.Model(inputs, layers.Dense(1, "sigmoid")(totals / tf.maximum(sizes, 1.0)))


def compiled(model, rate, **options):
    keep = [keras.metrics.BinaryAccuracy(name="accuracy"), keras.metrics.AUC(num_thresholds=20, name="area")]
    model.compile(keras.optimizers.SGD(rate), "binary_crossentropy", weighted_metrics=keep, **options)


config = ipu.config.IPUConfig()
config.auto_select_ipus = REPLICAS
config.configure_ipu_system()
keras.utils.set_random_seed(1)
features, labels, weights = packs()
data = (
    tf.data.Dataset.from_tensor_slices((features, labels, weights)).repeat().batch(BATCH, drop_remainder=True)
)
with ipu.ipu_strategy.IPUStrategy().scope():
    model = create_model()
    compiled(model, 0.2, steps_per_execution=PACKS // BATCH // REPLICAS)
    model.set_gradient_accumulation_options(
        gradient_accumulation_steps_per_replica=COUNT, gradient_accumulation_reduction_method="sum"
    )
    start = model.get_weights()
    history = model.fit(data, steps_per_epoch=PACKS // BATCH, epochs=3, verbose=0).history
    outputs = model.predict(features, batch_size=BATCH, verbose=0)

host = create_model()
host.set_weights(start)
sgd = keras.optimizers.SGD(0.2)
cost = keras.losses.BinaryCrossentropy()
elements = iter(data)
for _ in range(3 * PACKS // BATCH // COUNT // REPLICAS):
    total = [tf.zeros_like(v) for v in host.trainable_variables]
    for _ in range(COUNT * REPLICAS):
        x, y, w = next(elements)
        with tf.GradientTape() as tape:
            loss = cost(y, host(x, training=True), sample_weight=w)
        gradients = map(tf.convert_to_tensor, tape.gradient(loss, host.trainable_variables))
        total = [t + g for t, g in zip(total, gradients, strict=True)]
    sgd.apply_gradients(zip(total, host.trainable_variables, strict=True))
expected = np.concatenate([host([f[i : i + BATCH] for f in features]) for i in range(0, PACKS, BATCH)])
pairs = [*zip(model.get_weights(), host.get_weights(), strict=True), (outputs, expected)]
print("metrics", sorted(history))
print("loss", *history["loss"])
print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
