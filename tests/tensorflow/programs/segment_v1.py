"""A pipelined estimator that finds what is bright in images: weights of its own precision, a loss that changes with how
good the answer is, decay of weights by a wrapping optimizer; then inference that another thread reads.
"""

import sys
import threading

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.keras.layers import Conv2D, MaxPooling2D
from tensorflow.python import ipu

SIZE, BATCH, COUNT, LOOP = 16, 4, 4, 16
dtype = sys.argv[1]
Mode = tf.estimator.ModeKeys
random = np.random.RandomState(0)


def chain(x, widths, name):
    for i, width in enumerate(widths):
        scaling = tf.initializers.variance_scaling(2.0, seed=i)
        with tf.variable_scope(f"{name}_{i}", use_resource=True, reuse=tf.AUTO_REUSE):
            kernel = tf.get_variable("kernel", [3, 3, x.shape[3], width], "float32", scaling)
            bias = tf.get_variable("bias", [width], "float32", tf.initializers.constant(0.0))
        x = tf.nn.conv2d(x, filters=tf.cast(kernel, dtype), padding="SAME")
        x = tf.nn.relu(tf.nn.bias_add(x, tf.cast(bias, dtype)))
    return x


def larger(x, width, name):
    with tf.variable_scope(name, use_resource=True, reuse=tf.AUTO_REUSE):
        kernel = tf.get_variable("kernel", [3, 3, width, x.shape[3]], "float32")
    shape = [x.shape[0], 2 * x.shape[1], 2 * x.shape[2], width]
    return tf.nn.relu(tf.nn.conv2d_transpose(x, tf.cast(kernel, dtype), shape, (2, 2), "SAME"))


def dice(truth, answer):
    truth, answer = (tf.layers.flatten(tf.cast(v, tf.float32)) for v in (truth, answer))
    return (2 * tf.reduce_sum(truth * answer) + 1) / (tf.reduce_sum(truth) + tf.reduce_sum(answer) + 1)


def down(step, images, masks):
    skips = [chain(images, [8, 8], "first")]
    skips.append(chain(MaxPooling2D(2)(skips[-1]), [16], "second"))
    return (step, MaxPooling2D(2)(skips[-1]), masks, *skips)


def up(mode, step, x, masks, *skips):
    x = chain(x, [32], "bottom")
    for name, width, skip in zip(("large", "largest"), (16, 8), skips[::-1], strict=True):
        x = chain(tf.concat([larger(x, width, name), skip], -1), [width], f"{name}_chain")
    answer = tf.sigmoid(Conv2D(1, 1)(x))
    if mode == Mode.PREDICT:
        return tf.round(answer)
    good = 1 - dice(masks, answer)
    both = 1 - (dice(masks, answer) + dice(1 - masks, 1 - answer)) / 2
    loss = tf.cond(good < 0.2, lambda: good, lambda: both)
    return (step, loss) if mode == Mode.TRAIN else (step, loss, tf.round(answer), masks)


def model_fn(mode, params):
    def optimizer_function(step, loss):
        rate = tf.train.exponential_decay(5e-3, step, 16, 0.8, staircase=True)
        plain = tf.train.RMSPropOptimizer(rate, 0.9, 0.8, 1e-3, centered=True)
        decayed = ipu.optimizers.MapGradientOptimizer(plain, lambda grad, var: grad + 1e-5 * var)
        return ipu.pipelining_ops.OptimizerFunctionOutput(decayed, loss)

    return ipu.ipu_pipeline_estimator.IPUPipelineEstimatorSpec(
        mode,
        computational_stages=[down, lambda *args: up(mode, *args)],
        optimizer_function=optimizer_function,
        eval_metrics_fn=lambda step, loss, answer, masks: {"loss": loss, "dice": dice(masks, answer)},
        inputs=[tf.cast(tf.train.get_global_step(), tf.float32)],
        pipeline_schedule=ipu.pipelining_ops.PipelineSchedule.Grouped,
        gradient_accumulation_count=COUNT,
    )


def input_fn(mode):
    corners = random.randint(0, SIZE - 6, (64, 2))
    images = random.rand(64, SIZE, SIZE, 1) * 0.3
    for image, (row, column) in zip(images, corners, strict=True):
        image[row : row + 6, column : column + 6] += 0.6
    values = images.astype(dtype), (images > 0.5).astype(dtype)
    data = tf.data.Dataset.from_tensor_slices(values[0] if mode == Mode.PREDICT else values)
    return data.batch(BATCH, drop_remainder=True).cache().repeat()


options = ipu.config.IPUConfig()
options.auto_select_ipus = 2
options.floating_point_behaviour.esr = dtype == "float16"
options.convolutions.poplar_options = {"partialsType": "half" if dtype == "float16" else "float"}
run = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=LOOP, ipu_options=options, num_shards=2)
config = ipu.ipu_run_config.RunConfig(ipu_run_config=run, model_dir="model", tf_random_seed=42)
estimator = ipu.ipu_pipeline_estimator.IPUPipelineEstimator(model_fn, config=config, params={})
for _ in range(3):
    estimator.train(lambda: input_fn(Mode.TRAIN), steps=8 * LOOP)
    result = estimator.evaluate(lambda: input_fn(Mode.EVAL), steps=LOOP)
    print("loss", result["loss"], "dice", result["dice"])

infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(input_fn(Mode.PREDICT))
outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()


def body(images):
    return outfeed.enqueue(up(Mode.PREDICT, *down(tf.constant(0), images, tf.constant(0))))


with ipu.scopes.ipu_scope("/device:IPU:0"):
    compiled = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(LOOP, body, infeed_queue=infeed))
answers = outfeed.dequeue()
with tf.Session() as session:
    ipu.utils.move_variable_initialization_to_cpu()
    session.run([tf.global_variables_initializer(), infeed.initializer])
    received = []

    def read():
        while sum(len(part) for part in received) < 3 * LOOP:
            received.append(session.run(answers))

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(3):
        session.run(compiled)
    thread.join()
print("received", np.concatenate(received).shape, received[0].dtype)
