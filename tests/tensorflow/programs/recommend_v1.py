"""Clicks from what users clicked before (DIEN): host embeddings, a GRU, attention and an attentional GRU."""

import sys

import numpy as np
import tensorflow.compat.v1 as tf
from ipu_tensorflow_addons.layers.rnn_ops import PopnnAUGRU, PopnnDynamicGRU
from tensorflow import keras
from tensorflow.python import ipu

REPLICAS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
USERS, ITEMS, STEPS, WIDTH, BATCH, LOOP = 12, 20, 5, 8, 16, 16
random = np.random.RandomState(0)
users = random.randint(0, USERS, 256).astype(np.int32)
items = random.randint(0, ITEMS, 256).astype(np.int32)
history = ((items[:, None] + 2 * random.randint(0, 9, (256, STEPS)) + users[:, None]) % ITEMS).astype(
    np.int32
)
lengths = random.randint(2, STEPS + 1, 256).astype(np.int32)
clicked = (users % 2).astype(np.int32)  # Those whose history is of the item's parity.


def host_embedding(name, rows):
    return ipu.embedding_ops.create_host_embedding(
        name,
        [rows, WIDTH],
        np.float32,
        optimizer_spec=ipu.embedding_ops.HostEmbeddingOptimizerSpec(0.5),
        initializer=keras.initializers.RandomNormal(stddev=0.5, seed=3),
    )


def attention(query, facts, mask):
    queries = tf.reshape(tf.tile(query, [1, tf.shape(facts)[1]]), tf.shape(facts))
    both = tf.concat([queries, facts, queries - facts, queries * facts], -1)
    hidden = keras.layers.Dense(16, activation="sigmoid", name="attend_1")(both)
    scores = keras.layers.Dense(1, name="attend_2")(hidden)[:, :, 0]
    return tf.nn.softmax(tf.where(mask, scores, tf.ones_like(scores) * (-(2**32) + 1)))


def net(rate, user, item, past, length, label):
    item_row, past_rows = item_table.lookup(item), item_table.lookup(past)
    mask = tf.sequence_mask(length, STEPS)
    with tf.variable_scope("dien", use_resource=True):
        states, _ = PopnnDynamicGRU(WIDTH)(past_rows, length, time_major=False)
        states = tf.transpose(states, [1, 0, 2])
        scores = attention(item_row, states, mask)
        _, interest = PopnnAUGRU(WIDTH)(states, length, scores, time_major=False)
        rows = tf.concat([user_table.lookup(user), item_row, interest, item_row * interest], -1)
        hidden = tf.layers.dense(
            tf.layers.batch_normalization(rows, name="norm"), 16, tf.nn.relu, name="wide"
        )
        logits = tf.layers.dense(hidden, 2, name="last")
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=label, logits=logits))
    hits = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, -1, output_type=tf.int32), label), tf.float32))
    optimizer = tf.train.GradientDescentOptimizer(rate)
    if REPLICAS > 1:
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
    return loss, hits, optimizer.apply_gradients(optimizer.compute_gradients(loss))


config = ipu.config.IPUConfig()
config.auto_select_ipus = [REPLICAS]
config.optimizations.combine_embedding_lookups = True
config.configure_ipu_system()
graph = tf.Graph()
with graph.as_default():
    tf.set_random_seed(1)
    rate = tf.placeholder(tf.float32, [])
    values = (users, items, history, lengths, clicked)
    fed = [tf.placeholder(tf.int32, value.shape) for value in values]
    data = tf.data.Dataset.from_tensor_slices(tuple(fed)).cache().repeat().batch(BATCH, drop_remainder=True)
    infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data)
    user_table, item_table = host_embedding("users", USERS), host_embedding("items", ITEMS)

    def step(total, hits, *batch):
        loss, hit, update = net(rate, *batch)
        with tf.control_dependencies([update]):
            return total + loss, hits + hit

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        sums = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(LOOP, step, [0.0, 0.0], infeed))
    means = [total / LOOP for total in sums]
    saver = tf.train.Saver()
    ipu.utils.move_variable_initialization_to_cpu()
    start = tf.global_variables_initializer()
session = tf.Session(graph=graph)
session.run(start)
session.run(infeed.initializer, dict(zip(fed, values, strict=True)))
with user_table.register(session), item_table.register(session):
    for _ in range(8):
        loss, hits = session.run(means, {rate: 0.3})
        print(f"loss {loss} accuracy {hits}")
print("saved", saver.save(session, "model"))
