"""An encoder and a decoder with attention, of version 1: taught on the IPU, then reading its own samples.

The losses and gradients of the first batch are those of the same graph on the host.
"""

import numpy as np
import tensorflow as tf
from tensorflow.contrib.seq2seq import LuongAttention, dynamic_decode
from tensorflow.python import ipu

seq2seq = tf.contrib.seq2seq
BATCH, LENGTH, SYMBOLS, UNITS = 16, 5, 8, 24
START, END = 0, 1
random = np.random.RandomState(0)
lengths = random.randint(2, LENGTH, 256)
sources = np.full((256, LENGTH), END, np.int32)
for row, length in zip(sources, lengths, strict=True):
    row[:length] = random.randint(2, SYMBOLS, length)
targets = np.concatenate([np.full((256, 1), START, np.int32), sources[:, :-1]], 1)


def decoder(source, helper_of, steps):
    table = tf.get_variable("table", [SYMBOLS, UNITS])
    cell = tf.nn.rnn_cell.GRUCell(UNITS, name="encoder")
    memory, state = tf.nn.dynamic_rnn(cell, tf.nn.embedding_lookup(table, source), dtype=tf.float32)
    counts = 1 + tf.reduce_sum(tf.cast(tf.not_equal(source, END), tf.int32), 1)
    counts = tf.minimum(counts, LENGTH)
    with tf.variable_scope("decoder"):
        attention = LuongAttention(UNITS, memory, counts)
        inner = tf.nn.rnn_cell.GRUCell(UNITS, name="inner")
        cell = seq2seq.AttentionWrapper(
            inner, attention, attention_layer_size=UNITS, initial_cell_state=state, name="reader"
        )
        layer = tf.layers.Dense(SYMBOLS, use_bias=False, name="symbols")
        whole = seq2seq.BasicDecoder(
            cell, helper_of(table, counts), cell.zero_state(BATCH, tf.float32), layer
        )
        return dynamic_decode(whole, maximum_iterations=steps), counts


def loss_of(source, target):
    def taught(table, counts):
        return seq2seq.TrainingHelper(tf.nn.embedding_lookup(table, target), counts)

    with tf.variable_scope("all", reuse=tf.AUTO_REUSE, use_resource=True):
        (outputs, _, _), counts = decoder(source, taught, LENGTH)
    weights = tf.sequence_mask(counts, LENGTH, dtype=tf.float32)
    return seq2seq.sequence_loss(outputs.rnn_output, source, weights)


def gradients_of(source, target):
    loss = loss_of(source, target)
    gradients = tf.gradients(loss, tf.trainable_variables())
    return [loss, *map(tf.convert_to_tensor, gradients)]


def train(infeed, outfeed):
    def step(source, target):
        loss = loss_of(source, target)
        with tf.control_dependencies([tf.train.AdamOptimizer(0.01).minimize(loss)]):
            return outfeed.enqueue(loss)

    return ipu.loops.repeat(60, step, [], infeed)


def translate(source):
    def own(table, counts):
        return seq2seq.GreedyEmbeddingHelper(table, tf.fill([BATCH], START), END)

    with tf.variable_scope("all", reuse=tf.AUTO_REUSE, use_resource=True):
        (outputs, _, counts), _ = decoder(source, own, LENGTH)
    return outputs.sample_id, counts


dataset = tf.data.Dataset.from_tensor_slices((sources, targets)).repeat().batch(BATCH, drop_remainder=True)
infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(dataset), ipu.ipu_outfeed_queue.IPUOutfeedQueue()
source = tf.placeholder(tf.int32, [BATCH, LENGTH])
target = tf.placeholder(tf.int32, [BATCH, LENGTH])
on_host = gradients_of(source, target)
with ipu.scopes.ipu_scope("/device:IPU:0"):
    first = ipu.ipu_compiler.compile(gradients_of, [source, target])
    training = ipu.ipu_compiler.compile(lambda: train(infeed, outfeed), [])
    translated = ipu.ipu_compiler.compile(translate, [source])
dequeued = outfeed.dequeue()
config = ipu.config.IPUConfig()
config.auto_select_ipus = 1
config.configure_ipu_system()
with tf.Session() as session:
    session.run([tf.global_variables_initializer(), infeed.initializer])
    batch = {source: sources[:BATCH], target: targets[:BATCH]}
    pairs = zip(session.run(on_host, batch), session.run(first, batch), strict=True)
    print("difference", max(float(np.abs(a - b).max()) for a, b in pairs))
    for _ in range(5):
        session.run(training)
        losses = session.run(dequeued)
        print("loss", losses.shape, losses[-1])
    symbols, counts = session.run(translated, batch)
    wanted = sources[:BATCH]
    within = np.arange(LENGTH) <= lengths[:BATCH, None]
    print("right", float((symbols == wanted)[within].mean()))
    print("lengths", bool((counts == np.minimum(lengths[:BATCH] + 1, LENGTH)).all()))
