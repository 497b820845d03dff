"""Speech with a Conformer block, a CTC loss and two pipeline stages; the host computes the loss of the same scores."""

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu
from tensorflow.python.ipu import nn_ops, pipelining_ops

BATCH, TIME, BANDS, WIDTH, HEADS, SYMBOLS, LABELS, GRADIENTS = 4, 24, 10, 16, 2, 5, 4, 8
BLANK = SYMBOLS
random = np.random.RandomState(0)
voices = random.randn(SYMBOLS, BANDS)


def utterance():
    """Every symbol lasts four frames of the same voice; frames behind the last are zeros."""
    count = random.randint(2, LABELS + 1)
    words = random.randint(0, SYMBOLS, count)
    sound = np.zeros((TIME, BANDS), np.float32)
    sound[: 6 * count] = np.repeat(voices[words], 6, 0) + 0.1 * random.randn(6 * count, BANDS)
    return sound, 6 * count, np.pad(words, (0, LABELS - count)), count


sounds, frames, words, counts = (np.array(v) for v in zip(*(utterance() for _ in range(48)), strict=True))
arrays = sounds, *(v.astype(np.int32) for v in (frames, words, counts))


def norm(x, name):
    return ipu.normalization_ops.layer_norm(x, scope=name)


def feed_forward(x, name):
    hidden = tf.nn.swish(tf.layers.dense(norm(x, name + "_norm"), 2 * WIDTH, name=name + "_in"))
    return x + 0.5 * tf.layers.dense(hidden, WIDTH, name=name + "_out")


def attention(x, mask):
    parts = tf.layers.dense(norm(x, "attention_norm"), 3 * WIDTH, use_bias=False, name="qkv")
    parts = tf.reshape(parts, [BATCH, -1, 3, HEADS, WIDTH // HEADS])
    query, key, value = (tf.transpose(parts[:, :, i], [0, 2, 1, 3]) for i in range(3))
    scores = tf.matmul(query, key, transpose_b=True) / (WIDTH // HEADS) ** 0.5
    scores += (1 - mask[:, None, None]) * -1e4
    heads = tf.transpose(tf.matmul(tf.nn.softmax(scores), value), [0, 2, 1, 3])
    return x + tf.layers.dense(tf.reshape(heads, [BATCH, -1, WIDTH]), WIDTH, name="heads")


def convolution(x):
    left, right = tf.split(tf.layers.dense(norm(x, "convolution_norm"), 2 * WIDTH, name="gated"), 2, -1)
    gated = (left * tf.nn.sigmoid(right))[:, :, None]
    filters = tf.get_variable("depthwise", [5, 1, WIDTH, 1])
    spread = tf.nn.depthwise_conv2d(gated, filters, [1, 1, 1, 1], "SAME")[:, :, 0]
    return x + tf.layers.dense(tf.nn.swish(norm(spread, "depthwise_norm")), WIDTH, name="point")


def listen(rate, sound, length, label, count):
    with tf.variable_scope("listen", use_resource=True):
        halves = tf.layers.conv1d(sound, WIDTH, 3, 2, "same", activation=tf.nn.relu, name="subsample")
        x = feed_forward(halves, "first")
        mask = tf.sequence_mask((length + 1) // 2, TIME // 2, tf.float32)
        return rate, convolution(attention(x, mask)), length, label, count


def transcribe(rate, x, length, label, count):
    with tf.variable_scope("transcribe", use_resource=True):
        x = norm(feed_forward(x, "second"), "last_norm")
        scores = tf.transpose(tf.layers.dense(x, SYMBOLS + 1, name="scores"), [1, 0, 2])
    losses = nn_ops.ctc_loss_v2(label, scores, count, (length + 1) // 2, BLANK)
    return rate, tf.reduce_mean(losses), scores, length, label, count


def with_loss(rate, loss, *others):
    return pipelining_ops.OptimizerFunctionOutput(tf.train.AdamOptimizer(rate), loss)


def program(rate):
    return pipelining_ops.pipeline(
        [listen, transcribe],
        gradient_accumulation_count=GRADIENTS,
        repeat_count=10,
        inputs=[rate],
        infeed_queue=infeed,
        outfeed_queue=outfeed,
        optimizer_function=with_loss,
        pipeline_schedule=pipelining_ops.PipelineSchedule.Grouped,
        reduction_method=ipu.gradient_accumulation.GradientAccumulationReductionMethod.MEAN,
        recomputation_mode=pipelining_ops.RecomputationMode.RecomputeAndBackpropagateInterleaved,
    )


tf.set_random_seed(1)
data = tf.data.Dataset.from_tensor_slices(arrays).repeat().batch(BATCH, drop_remainder=True)
infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data), ipu.ipu_outfeed_queue.IPUOutfeedQueue()
with tf.device("cpu"):
    rate = tf.placeholder(tf.float32, [])
with ipu.scopes.ipu_scope("/device:IPU:0"):
    run = ipu.ipu_compiler.compile(program, [rate])
dequeued = outfeed.dequeue()
shapes = [TIME // 2, BATCH, SYMBOLS + 1], [BATCH], [BATCH, LABELS], [BATCH]
fed = [tf.placeholder(kind, shape) for kind, shape in zip([tf.float32, *3 * [tf.int32]], shapes, strict=True)]
score, length, label, count = fed
plain = tf.nn.ctc_loss_v2(label, score, count, (length + 1) // 2, blank_index=BLANK)
config = ipu.config.IPUConfig()
config.auto_select_ipus = 2
config.configure_ipu_system()
ipu.utils.move_variable_initialization_to_cpu()
with tf.Session() as session:
    session.run([tf.global_variables_initializer(), infeed.initializer])
    for _ in range(6):
        session.run(run, {rate: 0.01})
        _, losses, *given = session.run(dequeued)
        print("loss", float(losses.mean()))
    wanted = session.run(plain, dict(zip(fed, (values[-1] for values in given), strict=True)))
    print("difference", float(abs(wanted.mean() - losses[-1])))
