"""Beam search of ``tf.contrib.seq2seq``: a decoder that keeps the likeliest sequences, its beams, and extends them.

A score is the logarithm of a sequence's probability, divided by ``((5 + length) / 6) ** length_penalty_weight``. For
sequences that were finished before this step ``coverage_penalty_weight`` times the sum of ``log(min(weight, 1))`` over
the memory's steps is added: a step's weight is the attention that it had in all, and steps without any count as 0.
Source: the documentation of TensorFlow 1.15, and arXiv:1609.08144.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from podrun.tensorflow.capture.program_graphs import in_program
from podrun.tensorflow.sdk import sequence_attention
from podrun.tensorflow.sdk.sequence_decoding import (
    BasicSequenceDecoder,
    DecoderStep,
    DrawnSamples,
    OwnSamples,
    SequenceDecoder,
    SequenceHelper,
    Structure,
    TeacherForcing,
    check_cell_and_layer,
    dynamic_decode,
    length_of,
    sequence_loss,
)

_v1 = tf.compat.v1


class BeamStep(NamedTuple):
    """``BeamSearchDecoderOutput``: what a step gives for each beam, ``[batch, beams]`` each: the score, in the dtype of
    the cell's state, the symbol it ends with (int32), and the beam of the step before that it continues (int32).
    """

    scores: tf.Tensor
    predicted_ids: tf.Tensor
    parent_ids: tf.Tensor


class BeamState(NamedTuple):
    """``BeamSearchDecoderState``: the cell's state ``[batch, beams, ...]``, and ``[batch, beams]`` each: the logarithm
    of a beam's probability, whether it has its end symbol, and its symbols so far (int64), the end symbol among them.
    """

    cell_state: Structure
    log_probs: tf.Tensor
    finished: tf.Tensor
    lengths: tf.Tensor
    accumulated_attention_probs: Structure


class DecodedBeams(NamedTuple):
    """``FinalBeamSearchDecoderOutput``: the symbols, int32, the likeliest beam first, and what the steps gave.

    `BeamSearch.finalize` makes them ``[time, batch, beams]``; `dynamic_decode` gives ``[batch, time, beams]`` unless it
    is asked for time first.
    """

    predicted_ids: tf.Tensor
    beam_search_decoder_output: BeamStep


def tile_batch(t: Structure, multiplier: int, name: str | None = None) -> Structure:
    """Tensors or arrays ``[batch, ...]`` with each row ``multiplier`` times in a row: ``[batch * multiplier, ...]``.
    ValueError, as in contrib, for scalars and tensors of unknown rank.
    """

    def tiled(x: tf.Tensor) -> tf.Tensor:
        x = tf.convert_to_tensor(x)
        if not x.shape.rank:
            raise ValueError("t must have statically known rank")
        return tf.repeat(x, multiplier, 0)

    with _v1.name_scope(name, "tile_batch", [*tf.nest.flatten(t), multiplier]):
        return tf.nest.map_structure(tiled, t)


def _is_wanted(weight: float | tf.Tensor) -> bool:
    """Whether a penalty's weight is not 0, or a tensor of which that is not known. ValueError for one that is no
    scalar.
    """
    shape = tf.TensorShape(weight.shape if isinstance(weight, tf.Tensor) else np.shape(weight))
    if shape.rank != 0:
        raise ValueError(f"coverage_penalty_weight should be a scalar, but saw shape: {shape}")
    return bool((tf.get_static_value(weight) if tf.is_tensor(weight) else weight) != 0)


class BeamSearch(SequenceDecoder):
    """``BeamSearchDecoder``: the ``beam_width`` likeliest sequences that start behind ``start_tokens`` ``[batch]``.

    ``embedding``: a table ``[symbols, depth]``, or a function of symbols ``[batch, beams]``; ``initial_state``
    ``[batch * beams, ...]`` has a row for each beam (`tile_batch`); ``output_layer`` makes logits ``[..., symbols]`` of
    the cell's outputs. TypeError for other cells and layers; ValueError for start symbols that are no vector, an end
    symbol that is no scalar, a state of other rows, and in a program for a batch that is not known.
    """

    def __init__(
        self,
        cell: object,
        embedding: tf.Tensor | Callable[[tf.Tensor], tf.Tensor],
        start_tokens: object,
        end_token: object,
        initial_state: Structure,
        beam_width: int,
        output_layer: object | None = None,
        length_penalty_weight: float = 0.0,
        coverage_penalty_weight: float | tf.Tensor = 0.0,
        reorder_tensor_arrays: bool = True,
    ) -> None:
        check_cell_and_layer(cell, output_layer)
        self._cell, self._output_layer = cell, output_layer
        self._embedding_fn = embedding if callable(embedding) else lambda ids: tf.gather(embedding, ids)
        self._start_tokens = tf.convert_to_tensor(start_tokens, tf.int32)
        self._end_token = tf.convert_to_tensor(end_token, tf.int32)
        if self._start_tokens.shape.rank != 1:
            raise ValueError("start_tokens must be a vector")
        if self._end_token.shape.rank != 0:
            raise ValueError("end_token must be a scalar")
        self.batch_size, self._beam_width = length_of(self._start_tokens), beam_width
        if in_program() and not isinstance(self.batch_size, int):
            raise ValueError(
                "start_tokens must have a known number of sequences in a program for an IPU. Say how many there are: "
                "start_tokens.set_shape([8]), or tf.fill([8], start_token)"
            )
        self._length_penalty_weight = length_penalty_weight
        self._coverage_penalty_weight = coverage_penalty_weight
        self._covers = _is_wanted(coverage_penalty_weight)
        self._initial_cell_state = tf.nest.map_structure(self._split, initial_state)
        self._dtype = tf.nest.flatten(self._initial_cell_state)[0].dtype
        self._start_inputs = self._embedding_fn(tf.repeat(self._start_tokens[:, tf.newaxis], beam_width, 1))

    @property
    def tracks_own_finished(self) -> bool:
        """True: beams change their places."""
        return True

    @property
    def output_size(self) -> BeamStep:
        """Shapes of a step's results, without the batch."""
        return BeamStep(*[tf.TensorShape([self._beam_width])] * 3)

    @property
    def output_dtype(self) -> BeamStep:
        """The dtypes of a step's results."""
        return BeamStep(self._dtype, tf.int32, tf.int32)

    def _split(self, x: tf.Tensor) -> tf.Tensor:
        """``[batch, beams, ...]`` of ``[batch * beams, ...]``. ValueError for other rows and an unknown rank."""
        if isinstance(x, tf.TensorArray):
            raise TypeError(
                "TensorArray state is not supported by BeamSearchDecoder: give the cell's state as tensors"
            )
        x = tf.convert_to_tensor(x)
        if x.shape.rank is None:
            raise ValueError(f"Expected tensor ({x}) to have known rank, but ndims == None.")
        if x.shape.rank == 0:
            return x
        rows = tf.compat.dimension_value(x.shape[0])
        if (
            rows is not None
            and isinstance(self.batch_size, int)
            and rows != self.batch_size * self._beam_width
        ):
            raise ValueError(
                f"The state has {rows} rows, not batch_size * beam_width == {self.batch_size} * {self._beam_width}. "
                "Perhaps you forgot to create a zero_state with batch_size=encoder_batch_size * beam_width? "
                "States of an encoder are tiled: tile_batch(state, beam_width)"
            )
        return tf.reshape(x, [self.batch_size, self._beam_width, *_sizes(x)[1:]])

    def _merged(self, x: tf.Tensor) -> tf.Tensor:
        return tf.reshape(x, [self.batch_size * self._beam_width, *_sizes(x)[2:]]) if x.shape.rank else x

    def initialize(self, name: str | None = None) -> tuple[tf.Tensor, Structure, BeamState]:
        """Before the first step: what is finished ``[batch, beams]``, inputs ``[batch, beams, ...]``, and the state.
        Only the first beam of each sequence counts; the others are finished, and have no probability.
        """
        first = tf.repeat([[0.0] + [-math.inf] * (self._beam_width - 1)], self.batch_size, 0)
        finished = tf.math.is_inf(first)
        lengths = tf.zeros_like(first, tf.int64)
        weights = self._attention_weights(self._initial_cell_state)
        state = BeamState(self._initial_cell_state, tf.cast(first, self._dtype), finished, lengths, weights)
        return finished, self._start_inputs, state

    def step(
        self, time: tf.Tensor, inputs: Structure, state: BeamState, name: str | None = None
    ) -> tuple[BeamStep, BeamState, Structure, tf.Tensor]:
        """Run the cell for one symbol of each beam: inputs ``[batch, beams, ...]`` and the state -> results and state
        of the beams that go on, the embeddings of their symbols, and which are finished ``[batch, beams]``.
        """
        with _v1.name_scope(name, "BeamSearchDecoderStep", (time, inputs, state)):
            merged = tf.nest.map_structure(self._merged, (inputs, state.cell_state))
            logits, cell_state = self._cell(*merged)  # type: ignore[operator]
            if self._output_layer is not None:
                logits = self._output_layer(logits)  # type: ignore[operator]
            cell_state = tf.nest.map_structure(self._split, cell_state)
            step, following = self._chosen_beams(self._split(logits), state, cell_state)
            return step, following, self._embedding_fn(step.predicted_ids), following.finished

    def _attention_weights(self, cell_state: Structure) -> tf.Tensor | tuple[()]:
        """What the last step paid to each step of the memory, ``[batch, beams, time]``, the mean over attentive cells;
        an empty tuple if no score needs it. ValueError if there is no such cell.
        """
        if not self._covers:
            return ()
        cells = cell_state if type(cell_state) is tuple else (cell_state,)
        weights = [c.alignments for c in cells if isinstance(c, sequence_attention.AttentionState)]
        if not weights:
            raise ValueError("coverage_penalty_weight must be 0.0 if no cell is attentional.")
        return tf.reduce_mean(tf.stack(weights), 0)

    def _coverage(self, weights: tf.Tensor, finished: tf.Tensor) -> tf.Tensor:
        """What the scores of finished beams lose for steps of the memory without attention, ``[batch, beams, 1]``."""
        seen = tf.compat.v2.where(tf.equal(weights, 0), tf.ones_like(weights), tf.minimum(weights, 1))
        penalty = tf.reduce_sum(tf.math.log(seen), 2, keepdims=True)
        return self._coverage_penalty_weight * penalty * tf.cast(finished, penalty.dtype)

    def _chosen_beams(
        self, logits: tf.Tensor, state: BeamState, cell_state: Structure
    ) -> tuple[BeamStep, BeamState]:
        """The likeliest sequences of all that the beams make with one symbol more; finished ones stay."""
        symbols = int(logits.shape[-1])
        is_end = tf.equal(tf.range(symbols), self._end_token)
        stays = tf.compat.v2.where(
            is_end, tf.constant(0.0, logits.dtype), tf.constant(logits.dtype.min, logits.dtype)
        )
        finished = state.finished[..., tf.newaxis]
        totals = state.log_probs[..., tf.newaxis] + tf.compat.v2.where(
            finished, stays, tf.nn.log_softmax(logits)
        )
        longer = tf.cast(tf.logical_not(finished | is_end), tf.int64)
        lengths = state.lengths[..., tf.newaxis] + longer
        penalty = ((5.0 + tf.cast(lengths, totals.dtype)) / 6.0) ** self._length_penalty_weight
        flat = [self.batch_size, self._beam_width * symbols]
        candidates, weights = totals / penalty, state.accumulated_attention_probs
        if self._covers:
            weights += self._attention_weights(cell_state) * (1 - tf.cast(finished, totals.dtype))
            candidates += self._coverage(weights, finished)
        scores, places = tf.math.top_k(tf.reshape(candidates, flat), self._beam_width)
        parents, words = places // symbols, places % symbols

        def of_parents(x: tf.Tensor) -> tf.Tensor:
            return tf.gather(x, parents, batch_dims=1) if x.shape.rank else x

        before = of_parents(state.finished)
        following = BeamState(
            tf.nest.map_structure(of_parents, cell_state),
            tf.gather(tf.reshape(totals, flat), places, batch_dims=1),
            before | tf.equal(words, self._end_token),
            of_parents(state.lengths) + tf.cast(tf.logical_not(before), tf.int64),
            tf.nest.map_structure(of_parents, weights),
        )
        return BeamStep(scores, words, parents), following

    def finalize(  # type: ignore[override]
        self, outputs: BeamStep, final_state: BeamState, sequence_lengths: tf.Tensor
    ) -> tuple[DecodedBeams, BeamState]:
        """After the last step: results ``[time, batch, beams]`` of all steps -> the symbols of each beam, with end
        symbols behind the first one, and the same state. ``sequence_lengths`` is not read: the state has them.
        """
        longest = tf.cast(tf.reduce_max(final_state.lengths, 1), tf.int32)[:, tf.newaxis]
        ids = traced_beams(outputs.predicted_ids, outputs.parent_ids, longest, self._end_token)
        return DecodedBeams(ids, outputs), final_state


def _sizes(x: tf.Tensor) -> list[int | tf.Tensor]:
    """The size of each axis: numbers where they are known, otherwise scalars that a run finds out."""
    return [tf.shape(x)[i] if size is None else size for i, size in enumerate(x.shape.as_list())]


def traced_beams(ids: tf.Tensor, parents: tf.Tensor, lengths: tf.Tensor, end_token: tf.Tensor) -> tf.Tensor:
    """The symbols of the beams of the last step, from that step back to the first: ``[time, batch, beams]``, with end
    symbols behind ``lengths`` ``[batch, 1]`` and behind the first end symbol.
    """
    steps = length_of(ids)
    if isinstance(steps, int) and not steps:
        return ids
    written = tf.TensorArray(tf.int32, steps, element_shape=ids.shape[1:])
    start = tf.broadcast_to(tf.range(int(ids.shape[2])), _sizes(ids)[1:])

    def back(
        count: tf.Tensor, beams: tf.Tensor, array: tf.TensorArray
    ) -> tuple[tf.Tensor, tf.Tensor, tf.TensorArray]:
        time = steps - 1 - count
        within = time < lengths
        symbols = tf.compat.v2.where(within, tf.gather(ids[time], beams, batch_dims=1), end_token)
        earlier = tf.compat.v2.where(within, tf.gather(parents[time], beams, batch_dims=1), beams)
        return count + 1, earlier, array.write(time, symbols)

    maximum = steps if isinstance(steps, int) else None
    *_, written = _v1.while_loop(
        lambda count, *_: count < steps, back, (tf.constant(0), start, written), maximum_iterations=maximum
    )
    traced = written.stack()
    ended = tf.cumsum(tf.cast(tf.equal(traced, end_token), tf.int32), 0, exclusive=True) > 0
    return tf.compat.v2.where(ended, end_token, traced)


def sequence_names() -> Mapping[str, object]:
    """Public name -> class or function of ``tf.contrib.seq2seq``."""
    return {
        "Decoder": SequenceDecoder,
        "BasicDecoder": BasicSequenceDecoder,
        "BasicDecoderOutput": DecoderStep,
        "Helper": SequenceHelper,
        "TrainingHelper": TeacherForcing,
        "GreedyEmbeddingHelper": OwnSamples,
        "SampleEmbeddingHelper": DrawnSamples,
        "dynamic_decode": dynamic_decode,
        "sequence_loss": sequence_loss,
        **sequence_attention.NAMES,
        "BeamSearchDecoder": BeamSearch,
        "BeamSearchDecoderOutput": BeamStep,
        "BeamSearchDecoderState": BeamState,
        "FinalBeamSearchDecoderOutput": DecodedBeams,
        "tile_batch": tile_batch,
    }
