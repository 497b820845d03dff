"""What decoders and beams of ``tf.contrib.seq2seq`` take on the host, and what they refuse, in contrib's words."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
HINT = "Perhaps you forgot to create a zero_state with batch_size=encoder_batch_size . beam_width"


def counting_decoder(start: Any, beams: int = 2, **options: Any) -> Any:
    """Beams of a cell whose likeliest next symbol is its input plus one, and 4 the end."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_beams import BeamSearch, tile_batch

    class Counting(tf.compat.v1.nn.rnn_cell.RNNCell):  # type: ignore[misc, name-defined]
        output_size = 5
        state_size = 1

        def call(self, inputs, state):
            return 9.0 * tf.one_hot(tf.cast(inputs[:, 0], tf.int32) + 1, 5), state + 1.0

    def embedded(ids):
        return tf.cast(ids, tf.float32)[..., tf.newaxis]

    if "initial_state" not in options:
        options["initial_state"] = tile_batch(tf.zeros([tf.size(start), 1]), beams)
    cell = options.pop("cell", None) or Counting()
    return BeamSearch(cell, embedded, start, 4, beam_width=beams, **options)


def test_rows_are_repeated_of_arrays_too_and_scalars_are_refused() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_beams import tile_batch

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        both = tile_batch({"a": np.array([[1, 2], [3, 4]]), "b": tf.constant([5.0, 6.0])}, 2, name="mine")
        assert {x.op.name.split("/")[0] for x in both.values()} == {"mine"}
        values = session.run(both)
        for wrong in (v1.placeholder(tf.float32), tf.constant(1.0), [1, 2]):
            with pytest.raises(ValueError, match="t must have statically known rank"):
                tile_batch(wrong, 2)
    np.testing.assert_array_equal(values["a"], [[1, 2], [1, 2], [3, 4], [3, 4]])
    np.testing.assert_array_equal(values["b"], [5, 5, 6, 6])


@pytest.mark.parametrize("first", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_batch_that_is_found_out_in_a_run(first: bool) -> None:
    """And the number of steps with it, as translation programs give it."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import BasicSequenceDecoder, OwnSamples, dynamic_decode

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        start = v1.placeholder(tf.int32, [None])
        lengths = v1.placeholder(tf.int64, [None])
        decoder = counting_decoder(start)
        if not first:
            cell, embedded = decoder._cell, decoder._embedding_fn
            decoder = BasicSequenceDecoder(
                cell, OwnSamples(embedded, start, 4), tf.zeros([tf.size(start), 1])
            )
        outputs, _, _ = dynamic_decode(decoder, maximum_iterations=tf.reduce_max(lengths) * 2)
        ids = outputs.predicted_ids[..., 0] if first else outputs.sample_id
        for begun, seen in (([0, 2, 1], [2, 1, 1]), ([2], [1])):
            feed = {start: begun, lengths: seen}
            expected = [[min(s + i + 1, 4) for i in range(2 * max(seen))] for s in begun]
            got = session.run(ids, feed)
            assert got.shape == np.shape(expected)
            np.testing.assert_array_equal(got[:, :2], np.array(expected)[:, :2])


@pytest.mark.parametrize("steps", [0, pytest.param(-1, marks=pytest.mark.slow), "later"])
def test_decoders_that_take_no_step_give_none(steps: Any) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import dynamic_decode

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        most = v1.placeholder_with_default(0, []) if steps == "later" else steps
        outputs, _, lengths = session.run(
            dynamic_decode(counting_decoder([0, 1, 2]), maximum_iterations=most)
        )
    assert outputs.predicted_ids.shape == (3, 0, 2)
    assert not lengths.any()


def test_a_number_of_steps_is_an_integer() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import dynamic_decode

    with tf.Graph().as_default():
        for wrong in ([3], np.array([[1]])):
            with pytest.raises(ValueError, match="maximum_iterations must be a scalar"):
                dynamic_decode(counting_decoder([0]), maximum_iterations=wrong)
        with pytest.raises(TypeError, match="maximum_iterations must be an integer, but saw float32"):
            dynamic_decode(counting_decoder([0]), maximum_iterations=2.5)  # type: ignore[arg-type]


def test_a_program_needs_to_know_its_batch_and_steps(ipu: Any) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import dynamic_decode

    v1 = tf.compat.v1
    with tf.Graph().as_default(), ipu.scopes.ipu_scope("/device:IPU:0"):
        with pytest.raises(ValueError, match=r"start_tokens\.set_shape\(\[8\]\)"):
            ipu.ipu_compiler.compile(lambda: counting_decoder(v1.placeholder(tf.int32, [None])), [])

        def later(steps: tf.Tensor) -> tf.Tensor:
            return dynamic_decode(counting_decoder([0]), maximum_iterations=steps)[2]

        with pytest.raises(ValueError, match="must be at least 1 in a program"):
            ipu.ipu_compiler.compile(
                lambda: dynamic_decode(counting_decoder([0]), maximum_iterations=0)[2], []
            )
        with pytest.raises(ValueError, match="at most, as a number"):
            ipu.ipu_compiler.compile(later, [v1.placeholder(tf.int32, [])])


def test_parts_of_a_beam_search_are_told_apart() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import BasicSequenceDecoder, OwnSamples

    with tf.Graph().as_default():
        for options, what in (
            ({"output_layer": lambda x: x}, "output_layer must be a Layer, received"),
            ({"cell": object()}, "cell must be an RNNCell, received"),
            ({"initial_state": tf.TensorArray(tf.float32, 1)}, "TensorArray state is not supported"),
        ):
            with pytest.raises(TypeError, match=what):
                counting_decoder([0, 1], **options)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="cell must be an RNNCell, received"):
            BasicSequenceDecoder(object(), OwnSamples(tf.zeros([5, 1]), [0], 4), tf.zeros([1, 1]))
        with pytest.raises(ValueError, match=HINT):
            counting_decoder([0, 1], initial_state=tf.zeros([2, 1]))
        with pytest.raises(ValueError, match="to have known rank"):
            counting_decoder([0, 1], initial_state=tf.compat.v1.placeholder(tf.float32))
        layer = tf.keras.layers.Dense(5)
        assert counting_decoder([0, 1], output_layer=layer, initial_state=np.zeros([4, 1], np.float32))


def test_lengths_are_long_and_finished_beams_have_the_least_number() -> None:
    """The second step of 25 beams and 5 symbols: 20 sequences that go on, and 5 of the one that has ended."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import dynamic_decode

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        _, state, _ = dynamic_decode(counting_decoder([3], beams=25), maximum_iterations=2)
        lengths, totals, finished = session.run([state.lengths, state.log_probs, state.finished])
    assert lengths.dtype == np.int64
    assert np.isfinite(totals).all()
    assert finished[0, 0]


def attentive(v1: Any, memory: Any, lengths: Any, **options: Any) -> Any:
    from podrun.tensorflow.sdk.sequence_attention import AttentionWrapper, ProductAttention

    start = v1.random_normal_initializer(0, 1, seed=3)
    cell = v1.nn.rnn_cell.BasicRNNCell(4, name="inner")
    with v1.variable_scope("here", initializer=start, reuse=v1.AUTO_REUSE):
        return AttentionWrapper(cell, ProductAttention(4, memory, lengths), **options)


def test_the_weights_of_all_steps_are_kept_for_any_batch() -> None:
    """The numbers of sequences and of the memory's steps are known in a run."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import BasicSequenceDecoder, TeacherForcing, dynamic_decode

    v1 = tf.compat.v1
    memory = np.random.RandomState(0).randn(3, 5, 4).astype(np.float32)
    with tf.Graph().as_default(), v1.Session() as session:
        fed = v1.placeholder(tf.float32, [None, None, 4])
        batch = tf.shape(fed)[0]
        cell = attentive(v1, fed, alignment_history=True, lengths=[5, 4, 5])
        inputs = tf.ones([batch, 2, 2])
        state, steps = cell.zero_state(batch, tf.float32), []
        for _ in range(2):
            _, state = cell(inputs[:, 0], state)
            steps.append(state.alignments)
        helper = TeacherForcing(inputs, tf.fill([batch], 2))
        decoder = BasicSequenceDecoder(cell, helper, cell.zero_state(batch, tf.float32))
        _, last, _ = dynamic_decode(decoder)
        history = last.alignment_history.stack()
        session.run(v1.global_variables_initializer())
        kept, expected = session.run([history, tf.stack(steps)], {fed: memory})
    assert kept.shape == (2, 3, 5)
    assert not kept[:, 1, 4].any()
    np.testing.assert_allclose(kept, expected, rtol=1e-6)


def test_finished_sequences_lose_by_what_they_did_not_attend_to() -> None:
    """One step from a state with known weights: scores by the formula in NumPy."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_attention import AttentionState
    from podrun.tensorflow.sdk.sequence_beams import BeamSearch, BeamState

    random = np.random.RandomState(1)
    logits = random.randn(2, 3, 5).astype(np.float32)
    paid = random.rand(2, 3, 6).astype(np.float32)
    before = (random.rand(2, 3, 6) * 1.5).astype(np.float32)
    before[:, :, 0] = paid[:, :, 0] = 0
    totals = random.randn(2, 3).astype(np.float32)
    finished = np.array([[True, False, False], [False, True, True]])
    v1 = tf.compat.v1

    class Fixed(v1.nn.rnn_cell.RNNCell):  # type: ignore[misc, name-defined]
        """Gives what its state says."""

        output_size = 5
        state_size = AttentionState(5, 1, 1, 6, (), 6)

        def call(self, inputs, state):
            return state.cell_state, state

    with tf.Graph().as_default(), v1.Session() as session:
        state = AttentionState(
            tf.constant(logits.reshape(6, 5)),
            tf.zeros([6, 1]),
            tf.zeros([]),
            tf.constant(paid.reshape(6, 6)),
            (),
            (),
        )
        decoder = BeamSearch(
            Fixed(), lambda ids: tf.one_hot(ids, 5), [0, 0], 4, state, 3, coverage_penalty_weight=0.5
        )
        _, inputs, first = decoder.initialize()
        np.testing.assert_array_equal(session.run(first.accumulated_attention_probs), paid)
        lengths = tf.ones([2, 3], tf.int64)
        here = BeamState(first.cell_state, totals, tf.constant(finished), lengths, tf.constant(before))
        step, following, _, _ = decoder.step(tf.constant(1), inputs, here)
        chosen, last = session.run([step, following])
        plain = BeamSearch(Fixed(), lambda ids: tf.one_hot(ids, 5), [0, 0], 4, state, 3)
        assert plain.initialize()[2].accumulated_attention_probs == ()
        with pytest.raises(ValueError, match=r"must be 0\.0 if no cell is attentional"):
            counting_decoder([0], coverage_penalty_weight=0.5).initialize()
    chances = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    stays = np.where(np.arange(5) == 4, 0, np.finfo(np.float32).min)
    scores = totals[..., None] + np.where(finished[..., None], stays, chances)
    weights = before + paid * ~finished[..., None]
    penalty = np.log(np.where(weights == 0, 1, np.minimum(weights, 1))).sum(-1) * finished
    flat = (scores + 0.5 * penalty[..., None]).reshape(2, 15)
    places = np.argsort(-flat, -1)[:, :3]
    np.testing.assert_array_equal(chosen.parent_ids, places // 5)
    np.testing.assert_array_equal(chosen.predicted_ids, places % 5)
    np.testing.assert_allclose(chosen.scores, np.take_along_axis(flat, places, 1), rtol=1e-5)
    np.testing.assert_allclose(
        last.accumulated_attention_probs, np.take_along_axis(weights, places[..., None] // 5, 1), rtol=1e-6
    )


def test_an_attention_over_a_memory_whose_size_is_found_out_in_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs of version 1 give it, whose sizes are ``Dimension``."""
    import tensorflow as tf

    from podrun.private_apis.tensorflow import private_module
    from podrun.tensorflow.sdk.sequence_attention import ProductAttention

    v1 = tf.compat.v1
    monkeypatch.setattr(private_module("framework.tensor_shape"), "_TENSORSHAPE_V2_OVERRIDE", False)
    with tf.Graph().as_default(), v1.Session() as session:
        memory = v1.placeholder(tf.float32, [None, None, 2])
        mechanism = ProductAttention(2, memory, v1.placeholder_with_default([1, 2], [None]))
        assert mechanism.batch_size is None
        alignments, _ = mechanism(tf.ones([2, 2]))
        session.run(v1.global_variables_initializer())
        weights = session.run(alignments, {memory: np.ones([2, 3, 2], np.float32)})
    np.testing.assert_allclose(weights, [[1, 0, 0], [0.5, 0.5, 0]], rtol=1e-6)


def test_the_weight_of_a_coverage_penalty_may_be_a_tensor() -> None:
    import tensorflow as tf

    with tf.Graph().as_default():
        counting_decoder([0], coverage_penalty_weight=tf.constant(0.0)).initialize()
        for weight in (tf.constant(0.5), tf.compat.v1.placeholder(tf.float32, [])):
            with pytest.raises(ValueError, match=r"must be 0\.0 if no cell is attentional"):
                counting_decoder([0], coverage_penalty_weight=weight).initialize()
        with pytest.raises(ValueError, match="should be a scalar, but saw shape"):
            counting_decoder([0], coverage_penalty_weight=[0.5])
