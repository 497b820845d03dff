"""Connectionist temporal classification of ``nn_ops``, and losses over sampled classes.

Source of meanings: the SDK's documentation of ``nn_ops``; numbers are those of `podrun.numerics.ctc`.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    _check_dtypes(out_dtype or logits.dtype, logits.dtype, "logits")
    return _ctc_loss(labels, logs, label_length, logit_length, blank_index, out_dtype or logits.dtype)


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
    _check_dtypes(out_dtype or data.dtype, data.dtype, "data")
    return _ctc_loss(labels, logs, label_length, data_length, blank_index, out_dtype or data.dtype)


def _check_dtypes(chosen: tf.DType, source: tf.DType, name: str) -> None:
    """ValueError, in the SDK's words where halves are asked for of floats."""
    if not {tf.as_dtype(chosen), source} <= {tf.float16, tf.float32}:
        raise ValueError("CTC loss is computed from float16 or float32 data.")
    if tf.as_dtype(chosen) == tf.float16 and source == tf.float32:
        raise ValueError(f"out_dtype cannot be float16 when dtype of {name} is float32.")


def _ctc_loss(
    labels: tf.Tensor,
    logs: tf.Tensor,
    label_length: tf.Tensor,
    length: tf.Tensor,
    blank: int,
    dtype: tf.DType,
) -> tf.Tensor:
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


SampledValues = Sequence[tf.Tensor]
"""Classes that a program has drawn, and how often true classes and these are expected."""


def compute_sampled_logits(
    weights: tf.Tensor | Sequence[tf.Tensor],
    biases: tf.Tensor,
    labels: tf.Tensor,
    inputs: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: SampledValues | None = None,
    subtract_log_q: bool = True,
    name: str | None = None,
    seed: int | None = None,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Logits of the true classes, then of the drawn ones, less the logarithm of how often each is expected where
    ``subtract_log_q``, and what they should be: ``[batch, num_true + num_sampled]`` both. Drawn classes stay where they
    are true ones too, as in the SDK.
    """
    table = weights[0] if isinstance(weights, (list, tuple)) else weights
    labels = tf.reshape(labels, [-1, num_true])
    drawn, *expected = map(
        tf.stop_gradient,
        sampled_values
        or tf.random.log_uniform_candidate_sampler(
            tf.cast(labels, tf.int64), num_true, num_sampled, True, num_classes, seed=seed
        ),
    )
    true, others = (
        (tf.cast(tf.gather(table, ids), inputs.dtype), tf.cast(tf.gather(biases, ids), inputs.dtype))
        for ids in (tf.cast(labels, tf.int32), tf.cast(drawn, tf.int32))
    )
    logits = [
        tf.reduce_sum(true[0] * inputs[:, None, :], -1) + true[1],
        tf.matmul(inputs, others[0], transpose_b=True) + others[1],
    ]
    if subtract_log_q:
        logits = [x - tf.cast(tf.math.log(e), x.dtype) for x, e in zip(logits, expected, strict=True)]
    targets = [tf.ones_like(logits[0]) / num_true, tf.zeros_like(logits[1])]
    return tf.concat(logits, 1), tf.concat(targets, 1)


def ipu_sampled_softmax_loss(
    weights: tf.Tensor | Sequence[tf.Tensor],
    biases: tf.Tensor,
    labels: tf.Tensor,
    inputs: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: SampledValues | None = None,
    name: str = "sampled_softmax_loss",
    seed: int | None = None,
) -> tf.Tensor:
    """The loss of each sample ``[batch]`` over its true classes and drawn ones: ``sampled_values``, or the device's."""
    logits, targets = compute_sampled_logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, True, name, seed
    )
    return tf.nn.softmax_cross_entropy_with_logits(labels=tf.stop_gradient(targets), logits=logits)


def ipu_nce_loss(
    weights: tf.Tensor | Sequence[tf.Tensor],
    biases: tf.Tensor,
    labels: tf.Tensor,
    inputs: tf.Tensor,
    num_sampled: int,
    num_classes: int,
    num_true: int = 1,
    sampled_values: SampledValues | None = None,
    name: str = "nce_loss",
) -> tf.Tensor:
    """The noise-contrastive loss of each sample ``[batch]``, with classes as `ipu_sampled_softmax_loss` has them."""
    logits, targets = compute_sampled_logits(
        weights, biases, labels, inputs, num_sampled, num_classes, num_true, sampled_values, True, name
    )
    return tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels=targets, logits=logits), 1)
