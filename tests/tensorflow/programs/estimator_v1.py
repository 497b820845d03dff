"""An estimator of version 1: trained, stopped and resumed, evaluated, asked for predictions."""

import sys
import tempfile

import numpy as np
import tensorflow.compat.v1 as tf
from tensorflow.python import ipu

tf.disable_v2_behavior()
REPLICAS = int(sys.argv[1]) if len(sys.argv) > 1 else 1
random = np.random.RandomState(0)
points = random.rand(512, 8).astype(np.float32)
labels = (points.sum(1) > 4).astype(np.int32)


def model_fn(features, labels, mode, params):
    hidden = tf.layers.dense(features, 16, activation=tf.nn.relu)
    logits = tf.layers.dense(hidden, 2)
    predictions = tf.argmax(logits, -1, output_type=tf.int32)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return tf.estimator.EstimatorSpec(mode, predictions={"class": predictions})
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
    if mode == tf.estimator.ModeKeys.EVAL:
        metrics = {"accuracy": tf.metrics.accuracy(labels, predictions)}
        return tf.estimator.EstimatorSpec(mode, loss=loss, eval_metric_ops=metrics)
    optimizer = tf.train.MomentumOptimizer(params["rate"], 0.9)
    if REPLICAS > 1:
        optimizer = ipu.optimizers.CrossReplicaOptimizer(optimizer)
    return tf.estimator.EstimatorSpec(mode, loss=loss, train_op=optimizer.minimize(loss))


def input_fn(mode, params):
    dataset = tf.data.Dataset.from_tensor_slices((points, labels))
    dataset = dataset.batch(params["batch_size"], drop_remainder=True)
    if mode == tf.estimator.ModeKeys.PREDICT:
        return dataset.map(lambda x, y: x).take(16)
    return dataset.repeat() if mode == tf.estimator.ModeKeys.TRAIN else dataset


def made(folder):
    options = ipu.config.IPUConfig()
    options.auto_select_ipus = REPLICAS
    run = ipu.ipu_run_config.IPURunConfig(iterations_per_loop=8, ipu_options=options, num_replicas=REPLICAS)
    config = ipu.ipu_run_config.RunConfig(ipu_run_config=run, save_checkpoints_steps=8, model_dir=folder)
    size = 16 * REPLICAS
    return ipu.ipu_estimator.IPUEstimator(
        model_fn,
        config=config,
        params={"rate": 0.1},
        train_batch_size=size,
        eval_batch_size=size,
        predict_batch_size=16 * REPLICAS,
    )


with tempfile.TemporaryDirectory() as folder:
    made(folder).train(input_fn, steps=16)
    first = made(folder).evaluate(input_fn, steps=8)
    made(folder).train(input_fn, max_steps=96)
    second = made(folder).evaluate(input_fn, steps=8)
    print("steps", first["global_step"], second["global_step"])
    print("loss", first["loss"], second["loss"])
    print("accuracy", first["accuracy"], second["accuracy"])
    predictions = [item["class"] for item in made(folder).predict(input_fn)]
    print("predictions", len(predictions), np.mean(predictions == labels[: len(predictions)]))
