"""A pipelined estimator of version 1 in two stages: trained, evaluated, asked for predictions."""

import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu
from tensorflow.python.ipu.ipu_pipeline_estimator import IPUPipelineEstimator, IPUPipelineEstimatorSpec
from tensorflow.python.ipu.ops import pipelining_ops

tf.disable_v2_behavior()
random = np.random.RandomState(0)
points = random.rand(512, 8).astype(np.float32)
labels = (points.sum(1) > 4).astype(np.int32)
Mode = tf.estimator.ModeKeys


def model_fn(mode, params):
    def first(x, y=None):
        with tf.variable_scope("first", use_resource=True):
            hidden = tf.layers.dense(x, 16, activation=tf.nn.relu)
        return hidden if y is None else (hidden, y)

    def second(hidden, y=None):
        with tf.variable_scope("second", use_resource=True):
            logits = tf.layers.dense(hidden, 2)
        if mode == Mode.PREDICT:
            return tf.nn.softmax(logits)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
        return loss if mode == Mode.TRAIN else (loss, tf.argmax(logits, -1, output_type=tf.int32), y)

    def optimizer(loss):
        return pipelining_ops.OptimizerFunctionOutput(tf.train.MomentumOptimizer(params["rate"], 0.9), loss)

    def metrics(loss, predictions, y):
        return {"loss": loss, "accuracy": tf.metrics.accuracy(y, predictions)}

    return IPUPipelineEstimatorSpec(
        mode,
        computational_stages=[first, second],
        gradient_accumulation_count=4,
        optimizer_function=optimizer,
        eval_metrics_fn=metrics,
    )


def input_fn(mode):
    dataset = tf.data.Dataset.from_tensor_slices((points, labels)).batch(16, drop_remainder=True)
    if mode == Mode.PREDICT:
        return dataset.map(lambda x, y: x)
    return dataset.repeat() if mode == Mode.TRAIN else dataset


options = ipu.config.IPUConfig()
options.auto_select_ipus = 2
run = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=16, ipu_options=options, num_shards=2)
with tempfile.TemporaryDirectory() as folder:
    config = ipu.ipu_run_config.RunConfig(ipu_run_config=run, save_checkpoints_steps=64, model_dir=folder)
    estimator = IPUPipelineEstimator(model_fn, config=config, params={"rate": 0.02})
    for _ in range(2):
        estimator.train(input_fn, steps=256)
        result = estimator.evaluate(input_fn, steps=32)
        print("result", result["global_step"], result["loss"], result["accuracy"])
    predictions = np.stack(list(estimator.predict(input_fn)))
    print("predictions", predictions.shape, np.mean(predictions.argmax(-1) == labels[: len(predictions)]))
