"""Keras layers of the SDK for sequences of labels without times (CTC): the loss, and what is likeliest."""

from __future__ import annotations

import tensorflow as tf
import tf_keras

from podrun.tensorflow.sdk.sequence_losses import (
    ctc_loss_v2,
    ctc_loss_with_log_probs,
    label_paths_of_log_probs,
    label_paths_of_logits,
)


class CTCLoss(tf_keras.layers.Layer):  # type: ignore[misc]
    """The mean CTC loss of a batch, from logarithms of probabilities, or logits, ``[time, batch, classes]``."""

    def __init__(self, blank_index: int = 0, from_logits: bool = False, **kwargs: object) -> None:
        super().__init__(**kwargs)
        self.blank_index, self.from_logits = blank_index, from_logits

    def call(
        self,
        labels: tf.Tensor,
        data: tf.Tensor,
        label_length: tf.Tensor,
        data_length: tf.Tensor,
        **kwargs: object,
    ) -> tf.Tensor:
        """The loss averaged over the batch, shape ``[1]``, for labels padded to ``[batch, greatest length]``."""
        loss = ctc_loss_v2 if self.from_logits else ctc_loss_with_log_probs
        losses = loss(labels, data, label_length, data_length, self.blank_index)
        return tf.reshape(tf.reduce_mean(losses), [1])

    def get_config(self) -> dict[str, object]:
        """The constructor's arguments, which Keras writes to files of models."""
        return {**super().get_config(), "blank_index": self.blank_index, "from_logits": self.from_logits}


class CTCInferenceLayer(tf_keras.layers.Layer):  # type: ignore[misc]
    """The likeliest sequences of labels: their log probabilities, lengths and labels."""

    def __init__(
        self,
        blank_index: int = 0,
        beam_width: int = 100,
        top_paths: int = 1,
        from_logits: bool = False,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.blank_index, self.from_logits = blank_index, from_logits
        self.beam_width, self.top_paths = beam_width, top_paths

    def call(
        self, data: tf.Tensor, data_length: tf.Tensor, **kwargs: object
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Probabilities and lengths ``[batch, paths]``, and labels ``[batch, paths, time]``."""
        decode = label_paths_of_logits if self.from_logits else label_paths_of_log_probs
        probabilities, lengths, labels = decode(
            data, data_length, self.beam_width, self.top_paths, self.blank_index
        )
        return probabilities, lengths, labels

    def get_config(self) -> dict[str, object]:
        """The constructor's arguments, which Keras writes to files of models."""
        return {
            **super().get_config(), "blank_index": self.blank_index, "beam_width": self.beam_width,
            "top_paths": self.top_paths, "from_logits": self.from_logits,
        }  # fmt: skip


class CTCPredictionsLayer(CTCInferenceLayer):
    """The likeliest sequence of labels of each sample, with blanks behind its end."""

    def call(self, data: tf.Tensor, data_length: tf.Tensor, **kwargs: object) -> tf.Tensor:
        """The labels ``[batch, time]``."""
        probabilities, lengths, labels = super().call(data, data_length)
        chosen, ends = self._select_most_likely_path(probabilities, labels, self.top_paths, lengths)
        places = tf.range(int(labels.shape[-1]), dtype=tf.int32)[None]
        return tf.compat.v2.where(places < ends[:, None], chosen, tf.fill(tf.shape(chosen), self.blank_index))

    @staticmethod
    def _select_most_likely_path(
        probs: tf.Tensor, predicted: tf.Tensor, top_paths: int, lengths: tf.Tensor | None
    ) -> tf.Tensor | tuple[tf.Tensor, tf.Tensor]:
        """The likeliest of ``top_paths`` paths ``[batch, paths, time]`` by the logarithms of their probabilities."""
        best = tf.argmax(probs, 1, output_type=tf.int32)
        chosen = tf.gather(predicted, best, batch_dims=1)
        return chosen if lengths is None else (chosen, tf.gather(lengths, best, batch_dims=1))
