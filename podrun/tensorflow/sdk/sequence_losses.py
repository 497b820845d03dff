"""Connectionist temporal classification of ``nn_ops``, and losses over sampled classes.

Source of meanings: the SDK's documentation of ``nn_ops``; numbers are those of `podrun.numerics.ctc`.
"""

from __future__ import annotations

import tensorflow as tf

from podrun.tensorflow.capture.markers import mark


def ctc_loss_v2(
    labels: tf.Tensor,
    logits: tf.Tensor,
    label_length: tf.Tensor,
    logit_length: tf.Tensor,
    blank_index: int,
    out_dtype: tf.DType | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """The loss of each sample ``[batch]`` from logits ``[time, batch, classes]`` and labels ``[batch, most]``."""
    logits = tf.convert_to_tensor(logits)
    logs = tf.nn.log_softmax(tf.cast(logits, tf.float32))
    return _ctc_loss(
        labels, logs, label_length, logit_length, blank_index, out_dtype or logits.dtype, logits.dtype
    )


def ctc_loss_with_log_probs(
    labels: tf.Tensor,
    data: tf.Tensor,
    label_length: tf.Tensor,
    data_length: tf.Tensor,
    blank_index: int,
    out_dtype: tf.DType | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """`ctc_loss_v2` from logarithms of probabilities."""
    data = tf.convert_to_tensor(data)
    logs = tf.cast(data, tf.float32)
    return _ctc_loss(
        labels, logs, label_length, data_length, blank_index, out_dtype or data.dtype, data.dtype
    )


def _ctc_loss(
    labels: tf.Tensor,
    logs: tf.Tensor,
    label_length: tf.Tensor,
    length: tf.Tensor,
    blank: int,
    dtype: tf.DType,
    source: tf.DType,
) -> tf.Tensor:
    dtype = tf.as_dtype(dtype)
    if dtype not in (tf.float16, tf.float32) or source not in (tf.float16, tf.float32):
        raise ValueError("CTC loss is computed from float16 or float32 data.")
    if dtype == tf.float16 and source == tf.float32:
        raise ValueError("out_dtype cannot be float16 when the data are float32.")
    if not 0 <= blank < int(logs.shape[-1]):
        raise ValueError(f"blank_index {blank} is no class among {logs.shape[-1]}.")
    (loss,) = mark(
        "ctc_loss",
        [logs, tf.cast(labels, tf.int32), tf.cast(length, tf.int32), tf.cast(label_length, tf.int32)],
        [tf.TensorSpec([logs.shape[1]], tf.float32)],
        blank=blank,
    )
    return tf.cast(loss, dtype)


def label_paths_of_logits(
    logits: tf.Tensor,
    logits_lengths: tf.Tensor,
    beam_width: int = 100,
    top_paths: int = 1,
    blank_index: int = -1,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Logarithms of probabilities and lengths ``[batch, top_paths]`` of the best label sequences, and these ``[batch,
    top_paths, time]``, from logits ``[time, batch, classes]``.
    """
    logs = tf.nn.log_softmax(tf.cast(logits, tf.float32))
    return label_paths_of_log_probs(logs, logits_lengths, beam_width, top_paths, blank_index)


def label_paths_of_log_probs(
    log_probs: tf.Tensor,
    input_lengths: tf.Tensor,
    beam_width: int = 100,
    top_paths: int = 1,
    blank_index: int = -1,
    name: str | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """`label_paths_of_logits` from logarithms of probabilities."""
    logs = tf.convert_to_tensor(log_probs)
    time, batch, classes = logs.shape.as_list()
    scores, lengths, labels = mark(
        "ctc_decode",
        [tf.cast(logs, tf.float32), tf.cast(input_lengths, tf.int32)],
        [
            tf.TensorSpec([batch, top_paths], tf.float32),
            tf.TensorSpec([batch, top_paths], tf.int32),
            tf.TensorSpec([batch, top_paths, time], tf.int32),
        ],
        blank=blank_index % classes,
        width=beam_width,
        paths=top_paths,
    )
    return scores, lengths, labels


def _sampled(count: int, unique: bool, classes: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Classes drawn from a log-uniform distribution, and the logarithm of how often each is expected."""
    (drawn,) = mark(
        "log_uniform_sample",
        [],
        [tf.TensorSpec([count], tf.int32)],
        samples=count,
        unique=unique,
        classes=classes,
    )
    return drawn, _log_expected(drawn, count, classes)


def _log_expected(ids: tf.Tensor, count: int, classes: int) -> tf.Tensor:
    x = tf.cast(ids, tf.float32)
    probability = tf.math.log((x + 2.0) / (x + 1.0)) / tf.math.log(float(classes + 1))
    return tf.math.log(probability * float(count))


def _sampled_logits(
    weights: tf.Tensor,
    biases: tf.Tensor,
    labels: tf.Tensor,
    inputs: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int,
    remove_hits: bool,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Logits of the true classes, then of the drawn ones, less the logarithm of what is expected of each, and what they
    should be: ``[batch, num_true + num_sampled]`` both.
    """
    drawn, expected = _sampled(num_sampled, True, num_classes)
    labels = tf.cast(labels, tf.int32)
    rows = tf.gather(weights, labels)
    true = tf.reduce_sum(rows * inputs[:, None, :], -1) + tf.gather(biases, labels)
    true -= tf.cast(_log_expected(labels, num_sampled, num_classes), true.dtype)
    others = tf.matmul(inputs, tf.gather(weights, drawn), transpose_b=True) + tf.gather(biases, drawn)
    others -= tf.cast(expected, others.dtype)
    if remove_hits:
        hit = tf.reduce_any(labels[:, :, None] == drawn[None, None, :], 1)
        others = tf.compat.v2.where(hit, tf.cast(-1e4, others.dtype), others)
    targets = tf.concat([tf.ones_like(true) / num_true, tf.zeros_like(others)], 1)
    return tf.concat([true, others], 1), targets


def ipu_sampled_softmax_loss(
    weights: tf.Tensor,
    biases: tf.Tensor,
    labels: tf.Tensor,
    inputs: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: None = None,
    remove_accidental_hits: bool = True,
    seed: int | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """``tf.nn.sampled_softmax_loss`` with classes that the device draws: ``[batch]``."""
    logits, targets = _sampled_logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, remove_accidental_hits
    )
    return tf.nn.softmax_cross_entropy_with_logits(labels=targets, logits=logits)


def ipu_nce_loss(
    weights: tf.Tensor,
    biases: tf.Tensor,
    labels: tf.Tensor,
    inputs: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: None = None,
    remove_accidental_hits: bool = False,
    name: str | None = None,
) -> tf.Tensor:
    """``tf.nn.nce_loss`` with classes that the device draws: ``[batch]``."""
    logits, targets = _sampled_logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, remove_accidental_hits
    )
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits), 1)
