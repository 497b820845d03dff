"""``tf.contrib.seq2seq``: decoders that run step by step, with teacher forcing or their own samples, and attention.

Programs of version 1 for IPUs derive classes from these, so that names of attributes and methods are contrib's. Shapes
are static in programs, as the IPU needs them: `dynamic_decode` takes ``maximum_iterations``. Source: the documentation
of TensorFlow 1.15.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from podrun.tensorflow.capture.program_graphs import in_program

_v1 = tf.compat.v1
Structure = object
"""A tensor, or tuples of tensors in one another."""


class DecoderStep(NamedTuple):
    """``BasicDecoderOutput``: what a decoder gives in a step."""

    rnn_output: object
    sample_id: object


class SequenceDecoder:
    """``Decoder``: what `dynamic_decode` runs. A class of a program has its properties, `initialize` and `step`."""

    @property
    def tracks_own_finished(self) -> bool:
        """Whether the decoder says itself which sequences are finished, and may take it back."""
        return False

    def finalize(
        self, outputs: Structure, final_state: Structure, sequence_lengths: tf.Tensor
    ) -> tuple[Structure, Structure]:
        """What becomes of the results of all steps. NotImplementedError: they stay."""
        raise NotImplementedError


class BasicSequenceDecoder(SequenceDecoder):
    """``BasicDecoder``: a cell, a helper that gives its inputs, and a layer for its outputs."""

    def __init__(
        self,
        cell: object,
        helper: SequenceHelper,
        initial_state: Structure,
        output_layer: object | None = None,
    ) -> None:
        check_cell_and_layer(cell, output_layer)
        self._cell, self._helper = cell, helper
        self._initial_state, self._output_layer = initial_state, output_layer

    @property
    def batch_size(self) -> int | tf.Tensor:
        """The number of sequences."""
        return self._helper.batch_size

    @property
    def output_size(self) -> DecoderStep:
        """Shapes of a step's results, without the batch."""
        size = tf.TensorShape(self._cell.output_size)  # type: ignore[attr-defined]
        if self._output_layer is not None:
            shape = tf.TensorShape([None]).concatenate(size)
            size = self._output_layer.compute_output_shape(shape)[1:]  # type: ignore[attr-defined]
        return DecoderStep(size, self._helper.sample_ids_shape)

    @property
    def output_dtype(self) -> DecoderStep:
        """The dtypes of a step's results."""
        return DecoderStep(tf.nest.flatten(self._initial_state)[0].dtype, self._helper.sample_ids_dtype)

    def initialize(self, name: str | None = None) -> tuple[tf.Tensor, Structure, Structure]:
        """What is finished before the first step, its inputs and its state."""
        return (*self._helper.initialize(), self._initial_state)

    def step(
        self, time: tf.Tensor, inputs: Structure, state: Structure, name: str | None = None
    ) -> tuple[DecoderStep, Structure, Structure, tf.Tensor]:
        """A step: its results, the next state and inputs, and what is finished."""
        with _v1.name_scope(name, "BasicDecoderStep", (time, inputs, state)):
            outputs, state = self._cell(inputs, state)  # type: ignore[operator]
            if self._output_layer is not None:
                outputs = self._output_layer(outputs)  # type: ignore[operator]
            samples = self._helper.sample(time=time, outputs=outputs, state=state)
            finished, inputs, state = self._helper.next_inputs(
                time=time, outputs=outputs, state=state, sample_ids=samples
            )
        return DecoderStep(outputs, samples), state, inputs, finished


class SequenceHelper:
    """``Helper``: samples of a step's outputs, and the inputs of the next step."""

    batch_size: int | tf.Tensor
    sample_ids_shape = tf.TensorShape([])
    sample_ids_dtype = tf.int32

    def initialize(self, name: str | None = None) -> tuple[tf.Tensor, Structure]:
        """What is finished before the first step, and its inputs."""
        raise NotImplementedError

    def sample(
        self, time: tf.Tensor, outputs: tf.Tensor, state: Structure, name: str | None = None
    ) -> tf.Tensor:
        """``[batch]`` of int32: for each sequence the symbol whose output is greatest."""
        return tf.argmax(outputs, axis=-1, output_type=tf.int32)

    def next_inputs(
        self,
        time: tf.Tensor,
        outputs: tf.Tensor,
        state: Structure,
        sample_ids: tf.Tensor,
        name: str | None = None,
    ) -> tuple[tf.Tensor, Structure, Structure]:
        """What is finished, the next inputs, and the state."""
        raise NotImplementedError


class TeacherForcing(SequenceHelper):
    """``TrainingHelper``: the inputs are known, ``sequence_length`` of each sequence."""

    def __init__(
        self,
        inputs: Structure,
        sequence_length: object,
        time_major: bool = False,
        name: str | None = None,
    ) -> None:
        steps = [
            x if time_major else _exchanged(x) for x in map(tf.convert_to_tensor, tf.nest.flatten(inputs))
        ]
        arrays = [
            tf.TensorArray(x.dtype, length_of(x), element_shape=x.shape[1:], clear_after_read=False).unstack(
                x
            )
            for x in steps
        ]
        self._inputs = inputs
        self._input_tas = tf.nest.pack_sequence_as(inputs, arrays)
        self._sequence_length = tf.convert_to_tensor(sequence_length, tf.int32)
        self._last_step = length_of(steps[0]) - 1
        self.batch_size = length_of(self._sequence_length)

    def _read(self, time: object) -> Structure:
        within = tf.minimum(time, self._last_step)
        return tf.nest.map_structure(lambda array: array.read(within), self._input_tas)

    def initialize(self, name: str | None = None) -> tuple[tf.Tensor, Structure]:
        """Sequences without a step are finished; the first inputs."""
        return tf.equal(0, self._sequence_length), self._read(0)

    def next_inputs(
        self,
        time: tf.Tensor,
        outputs: tf.Tensor,
        state: Structure,
        sample_ids: tf.Tensor | None = None,
        name: str | None = None,
    ) -> tuple[tf.Tensor, Structure, Structure]:
        """The inputs of the next step; after the last of all they repeat, and nothing reads them."""
        return time + 1 >= self._sequence_length, self._read(time + 1), state


class OwnSamples(SequenceHelper):
    """``GreedyEmbeddingHelper``: the inputs are embeddings of the likeliest symbol of the step before."""

    def __init__(
        self,
        embedding: tf.Tensor | Callable[[tf.Tensor], tf.Tensor],
        start_tokens: object,
        end_token: object,
    ) -> None:
        look_up = embedding if callable(embedding) else lambda ids: tf.gather(embedding, ids)
        self._embedding_fn: Callable[[tf.Tensor], tf.Tensor] = look_up
        self._start_tokens = tf.convert_to_tensor(start_tokens, tf.int32)
        self._end_token = tf.convert_to_tensor(end_token, tf.int32)
        if self._start_tokens.shape.rank != 1:
            raise ValueError("start_tokens must be a vector")
        if self._end_token.shape.rank != 0:
            raise ValueError("end_token must be a scalar")
        self._start_inputs = self._embedding_fn(self._start_tokens)
        self.batch_size = length_of(self._start_tokens)

    def initialize(self, name: str | None = None) -> tuple[tf.Tensor, Structure]:
        """Nothing is finished; the embeddings of the start symbols."""
        return tf.zeros([self.batch_size], tf.bool), self._start_inputs

    def next_inputs(
        self,
        time: tf.Tensor,
        outputs: tf.Tensor,
        state: Structure,
        sample_ids: tf.Tensor,
        name: str | None = None,
    ) -> tuple[tf.Tensor, Structure, Structure]:
        """A sequence is finished with its end symbol."""
        return tf.equal(sample_ids, self._end_token), self._embedding_fn(sample_ids), state


class DrawnSamples(OwnSamples):
    """``SampleEmbeddingHelper``: symbols are drawn with the probabilities that the outputs are logits of."""

    def __init__(
        self,
        embedding: tf.Tensor | Callable[[tf.Tensor], tf.Tensor],
        start_tokens: object,
        end_token: object,
        softmax_temperature: float | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(embedding, start_tokens, end_token)
        self._softmax_temperature, self._seed = softmax_temperature, seed

    def sample(
        self, time: tf.Tensor, outputs: tf.Tensor, state: Structure, name: str | None = None
    ) -> tf.Tensor:
        """Draws: the greatest of the logits with Gumbel noise."""
        logits = outputs if self._softmax_temperature is None else outputs / self._softmax_temperature
        uniform = tf.random.uniform(tf.shape(logits), 1e-6, 1.0, tf.float32, seed=self._seed)
        noise = -tf.math.log(-tf.math.log(uniform * (1 - 1e-6)))
        return tf.argmax(tf.cast(logits, tf.float32) + noise, axis=-1, output_type=tf.int32)


def dynamic_decode(
    decoder: SequenceDecoder,
    output_time_major: bool = False,
    impute_finished: bool = False,
    maximum_iterations: int | tf.Tensor | None = None,
    parallel_iterations: int = 32,
    swap_memory: bool = False,
    scope: object | None = None,
) -> tuple[Structure, Structure, tf.Tensor]:
    """Run a decoder until all sequences are finished, at most ``maximum_iterations`` steps: the results of all steps,
    the last state, and the steps of each sequence. Of a constant number, steps that were not run give zeros; of a
    tensor, which the host takes, there are results of the steps that were run.

    TypeError for no decoder; ValueError, as in contrib, for a ``maximum_iterations`` that is no scalar, and in a
    program without a constant one, which decides the shape of the results, or with no step.
    """
    if not isinstance(decoder, SequenceDecoder):
        raise TypeError(f"Expected decoder to be type Decoder, but saw: {type(decoder)}")
    steps: int | tf.Tensor | None = None
    if maximum_iterations is not None:
        most = tf.convert_to_tensor(maximum_iterations)
        if most.shape.rank != 0:
            raise ValueError("maximum_iterations must be a scalar")
        if not most.dtype.is_integer:
            raise TypeError(f"maximum_iterations must be an integer, but saw {most.dtype.name}")
        known = tf.get_static_value(most)
        steps = tf.cast(most, tf.int32) if known is None else max(int(known), 0)
    if in_program() and not isinstance(steps, int):
        raise ValueError(
            "maximum_iterations is required for XLA compilation. Say how many steps there are at most, as a number, "
            "which decides the shape of the results: dynamic_decode(decoder, maximum_iterations=20)"
        )
    if in_program() and steps == 0:
        raise ValueError(
            "maximum_iterations must be at least 1 in a program for an IPU, which has no results without a step: "
            "dynamic_decode(decoder, maximum_iterations=20)"
        )
    with _v1.variable_scope(scope, "decoder"):
        return _DecodingLoop(decoder, steps, impute_finished).run(output_time_major)


class _DecodingLoop:
    """The ``tf.while_loop`` of `dynamic_decode`: its body, and the arrays that collect results."""

    def __init__(self, decoder: SequenceDecoder, steps: int | tf.Tensor | None, impute: bool) -> None:
        self.decoder, self.steps, self.impute = decoder, steps, impute

    def run(self, time_major: bool) -> tuple[Structure, Structure, tf.Tensor]:
        """Loop, and put the results of the steps together."""
        finished, inputs, state = self.decoder.initialize()  # type: ignore[attr-defined]
        size, kind = self.decoder.output_size, self.decoder.output_dtype  # type: ignore[attr-defined]
        batch = tf.get_static_value(self.decoder.batch_size)  # type: ignore[attr-defined]
        known = isinstance(self.steps, int)
        arrays = [
            tf.TensorArray(
                d,
                size=self.steps if known else 0,
                dynamic_size=not known,
                element_shape=tf.TensorShape([batch]).concatenate(tf.TensorShape(s)),
            )
            for s, d in zip(tf.nest.flatten(size), tf.nest.flatten(kind), strict=True)
        ]
        arrays = tf.nest.pack_sequence_as(kind, arrays)
        start = (tf.constant(0), arrays, state, inputs, finished, tf.zeros_like(finished, tf.int32))
        loop = _v1.while_loop(
            lambda *values: tf.logical_not(tf.reduce_all(values[4])),
            self.body,
            start,
            maximum_iterations=self.steps,
        )
        outputs = tf.nest.map_structure(lambda array: array.stack(), loop[1])
        state, lengths = loop[2], loop[5]
        with contextlib.suppress(NotImplementedError):
            outputs, state = self.decoder.finalize(outputs, state, lengths)
        return (outputs if time_major else tf.nest.map_structure(_exchanged, outputs)), state, lengths

    def body(
        self,
        time: tf.Tensor,
        arrays: Structure,
        state: Structure,
        inputs: Structure,
        finished: tf.Tensor,
        lengths: tf.Tensor,
    ) -> tuple[object, ...]:
        """The loop's body: run the decoder for one step, and store its results at ``time``."""
        step = self.decoder.step  # type: ignore[attr-defined]
        outputs, next_state, inputs, ended = step(time, inputs, state)
        if not self.decoder.tracks_own_finished:
            ended = tf.logical_or(ended, finished)
        lengths = _v1.where_v2(finished, lengths, time + 1)
        if self.impute:
            outputs = tf.nest.map_structure(lambda x: _chosen(finished, tf.zeros_like(x), x), outputs)
            next_state = tf.nest.map_structure(
                lambda new, old: _chosen(finished, old, new), next_state, state
            )
        arrays = tf.nest.map_structure(lambda array, value: array.write(time, value), arrays, outputs)
        return time + 1, arrays, next_state, inputs, ended, lengths


def length_of(x: tf.Tensor) -> int | tf.Tensor:
    """The size of the first axis, which on the host may be found out as late as in a run."""
    size = tf.compat.dimension_value(x.shape[0])
    return tf.shape(x)[0] if size is None else int(size)


def check_cell_and_layer(cell: object, output_layer: object | None) -> None:
    """TypeError, in contrib's words, for what is no cell of a recurrent network, and no layer of outputs."""
    if not callable(cell) or not all(hasattr(cell, x) for x in ("output_size", "state_size", "zero_state")):
        raise TypeError(f"cell must be an RNNCell, received: {type(cell)}")
    if output_layer is not None and not isinstance(output_layer, tf.Module):
        raise TypeError(f"output_layer must be a Layer, received: {type(output_layer)}")


def _exchanged(x: tf.Tensor) -> tf.Tensor:
    """The tensor with its first two axes, time and batch, exchanged."""
    return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])


def _chosen(finished: tf.Tensor, old: tf.Tensor, new: tf.Tensor) -> tf.Tensor:
    """The old rows of sequences that are finished; scalars are always new."""
    if new.shape.rank == 0:
        return new
    return _v1.where_v2(tf.reshape(finished, [-1] + [1] * (new.shape.rank - 1)), old, new)


def sequence_loss(
    logits: tf.Tensor,
    targets: tf.Tensor,
    weights: tf.Tensor,
    average_across_timesteps: bool = True,
    average_across_batch: bool = True,
    softmax_loss_function: Callable[..., tf.Tensor] | None = None,
    name: str | None = None,
) -> tf.Tensor:
    """The weighted cross entropy of logits ``[batch, time, symbols]``: its mean over the weights of all steps, or of
    those of a sequence or of a step alone; zero where no weight is. ``softmax_loss_function`` gets targets ``[n]`` and
    logits ``[n, symbols]`` of all steps. ValueError for other ranks.
    """
    logits, targets = tf.convert_to_tensor(logits), tf.convert_to_tensor(targets)
    weights = tf.cast(weights, logits.dtype)
    for what, tensor, last in (
        ("Logits", logits, ["logits"]),
        ("Targets", targets, []),
        ("Weights", weights, []),
    ):
        wanted = ["batch_size", "sequence_length", *last]
        if tensor.shape.rank != len(wanted):
            raise ValueError(f"{what} must be a [{' x '.join(wanted)}] tensor")
    loss_of = softmax_loss_function or _v1.nn.sparse_softmax_cross_entropy_with_logits
    flat = tf.reshape(logits, [-1, tf.shape(logits)[2] if logits.shape[2] is None else logits.shape[2]])
    losses = loss_of(labels=tf.reshape(targets, [-1]), logits=flat)
    losses = tf.reshape(losses, tf.shape(targets)) * weights
    axes = [a for a, over in enumerate((average_across_batch, average_across_timesteps)) if over]
    if not axes:
        return losses
    return tf.math.divide_no_nan(tf.reduce_sum(losses, axes), tf.reduce_sum(weights, axes))
