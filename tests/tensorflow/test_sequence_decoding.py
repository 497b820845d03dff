"""``tf.contrib.seq2seq`` beside formulas in NumPy, in sessions on the host."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
RANDOM = np.random.RandomState(5)
MEMORY = RANDOM.randn(3, 4, 5).astype(np.float32)
QUERY = RANDOM.randn(3, 6).astype(np.float32)
LENGTHS = np.array([4, 2, 1])


def session_values(build):
    """What a function builds, and the values of its variables by name."""
    import tensorflow as tf

    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(3)
        results = build(v1)
        session.run(v1.global_variables_initializer())
        values, variables = session.run([results, {v.op.name: v for v in v1.global_variables()}])
    return values, variables


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def masked(scores):
    return np.where(np.arange(4) < LENGTHS[:, None], scores, -np.inf)


def test_scores_of_attention() -> None:
    from podrun.tensorflow.sdk.sequence_attention import AdditiveAttention, ProductAttention

    within = MEMORY * (np.arange(4) < LENGTHS[:, None])[..., None]
    weights, own = session_values(lambda v1: ProductAttention(6, MEMORY, LENGTHS, scale=True)(QUERY)[0])
    keys = within @ own["memory_layer/kernel"]
    np.testing.assert_allclose(weights, softmax(masked(np.einsum("bd,btd->bt", QUERY, keys))), atol=1e-6)

    def additive(v1):
        return AdditiveAttention(7, MEMORY, LENGTHS, normalize=True)(QUERY)[0]

    weights, own = session_values(additive)
    part = "bahdanau_attention/"
    hidden = (QUERY @ own[f"{part}query_layer/kernel"])[:, None] + within @ own["memory_layer/kernel"]
    v = own[f"{part}attention_v"]
    v = v / np.linalg.norm(v) * np.sqrt(1 / 7)
    np.testing.assert_allclose(weights, softmax(masked(np.tanh(hidden) @ v)), atol=1e-6)
    with pytest.raises(ValueError, match="Query has units: 6"):
        session_values(lambda v1: ProductAttention(7, MEMORY)(QUERY)[0])


def test_mechanisms_in_one_scope_have_variables_of_their_own() -> None:
    from podrun.tensorflow.sdk.sequence_attention import AdditiveAttention, ProductAttention

    def build(v1):
        products = [ProductAttention(6, MEMORY, scale=True) for _ in range(2)]
        return [
            attention(QUERY)[0] for attention in (*products, *(AdditiveAttention(7, MEMORY) for _ in "ab"))
        ]

    _, own = session_values(build)
    for name in ("luong_attention{}/attention_g", "bahdanau_attention{}/attention_v"):
        assert {name.format(""), name.format("_1")} <= set(own)


def counting_cell(v1):
    """A cell whose output is the one-hot of its input, which is a number, plus one."""
    import tensorflow as tf

    class Counting(v1.nn.rnn_cell.RNNCell):
        output_size = 6
        state_size = 1

        def call(self, inputs, state):
            following = tf.cast(inputs[:, 0], tf.int32) + 1
            return tf.one_hot(following, 6), state + 1

    return Counting()


def embedded_numbers(ids):
    import tensorflow as tf

    return tf.cast(ids, tf.float32)[:, tf.newaxis]


@pytest.mark.parametrize("impute", [False, True])
def test_a_decoder_reads_its_own_samples_until_all_have_ended(impute: bool) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import BasicSequenceDecoder, OwnSamples, dynamic_decode

    def build(v1):
        helper = OwnSamples(embedded_numbers, [0, 2], 4)
        decoder = BasicSequenceDecoder(counting_cell(v1), helper, tf.zeros([2, 1]))
        return dynamic_decode(decoder, impute_finished=impute, maximum_iterations=5)

    (outputs, state, lengths), _ = session_values(build)
    second = [3, 4, 0, 0, 0] if impute else [3, 4, 5, 0, 0]
    np.testing.assert_array_equal(outputs.sample_id, [[1, 2, 3, 4, 0], second])
    np.testing.assert_array_equal(outputs.rnn_output[0, :4].argmax(-1), [1, 2, 3, 4])
    np.testing.assert_array_equal(lengths, [4, 2])
    np.testing.assert_array_equal(state[:, 0], [4, 2 if impute else 4])


def test_a_decoder_that_is_taught_reads_the_inputs() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import BasicSequenceDecoder, TeacherForcing, dynamic_decode

    inputs = np.array([[[3], [0], [2]], [[1], [4], [0]]], np.float32)

    def build(v1):
        decoder = BasicSequenceDecoder(counting_cell(v1), TeacherForcing(inputs, [3, 2]), tf.zeros([2, 1]))
        return dynamic_decode(decoder, output_time_major=True, impute_finished=True, maximum_iterations=4)

    (outputs, _, lengths), _ = session_values(build)
    assert outputs.rnn_output.shape == (4, 2, 6)
    np.testing.assert_array_equal(outputs.sample_id, [[4, 2], [1, 5], [3, 0], [0, 0]])
    np.testing.assert_array_equal(lengths, [3, 2])


def likeliest(
    table: np.ndarray, beams: int, steps: int, weight: float
) -> list[tuple[tuple[int, ...], float]]:
    """Sequences that start behind 0 and end with the last symbol, by ``table[last, next]``, with their logarithms."""
    symbols = table.shape[1]
    logarithms = np.log(softmax(table.astype(np.float64)))
    kept: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    for _ in range(steps):
        longer = []
        for sequence, total in kept:
            last = sequence[-1] if sequence else 0
            if last == symbols - 1:
                longer.append(((*sequence, last), total))
            else:
                longer += [((*sequence, s), total + logarithms[last, s]) for s in range(symbols)]

        def score(entry: tuple[tuple[int, ...], float]) -> float:
            length = sum(s != symbols - 1 for s in entry[0])
            length += (
                max(sum(s == symbols - 1 for s in entry[0]) - 1, 0) > 0
            )  # The end counts once it is behind.
            return float(entry[1] / ((5 + length) / 6) ** weight)

        kept = sorted(longer, key=score, reverse=True)[:beams]
    return kept


@pytest.mark.parametrize(
    ("weight", "on_ipu"), [(1.0, False), pytest.param(0.0, True, marks=pytest.mark.slow)]
)
def test_beams_are_the_likeliest_sequences(ipu: Any, weight: float, on_ipu: bool) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_beams import BeamSearch, tile_batch
    from podrun.tensorflow.sdk.sequence_decoding import dynamic_decode

    tables = np.random.RandomState(0).randn(2, 5, 5).astype(np.float32) * 1.5
    v1 = tf.compat.v1

    class Looking(v1.nn.rnn_cell.RNNCell):  # type: ignore[misc, name-defined]
        """The row of a table that the input, a one-hot, chooses."""

        output_size = 5
        state_size = 25

        def call(self, inputs, state):
            return tf.squeeze(inputs[:, tf.newaxis] @ tf.reshape(state, [-1, 5, 5]), 1), state

    def decoded() -> Any:
        state = tile_batch(tf.constant(tables.reshape(2, 25)), 3)
        decoder = BeamSearch(
            Looking(), lambda ids: tf.one_hot(ids, 5), [0, 0], 4, state, 3, length_penalty_weight=weight
        )
        outputs, last, _ = dynamic_decode(decoder, maximum_iterations=4)
        return outputs.predicted_ids, last.log_probs

    with tf.Graph().as_default(), v1.Session() as session:
        if on_ipu:
            with ipu.scopes.ipu_scope("/device:IPU:0"):
                results = session.run(ipu.ipu_compiler.compile(decoded, []))
        else:
            results = session.run(decoded())
    for table, symbols, totals in zip(tables, *results, strict=True):
        expected = likeliest(table, 3, 4, weight)
        assert [tuple(column) for column in symbols.T] == [sequence for sequence, _ in expected]
        np.testing.assert_allclose(totals, [total for _, total in expected], rtol=1e-5)


def test_drawn_samples_have_the_probabilities_of_the_outputs() -> None:
    from podrun.tensorflow.sdk.sequence_decoding import DrawnSamples

    wanted = np.array([0.1, 0.6, 0.3])
    logits = np.tile(np.log(wanted).astype(np.float32) * 2, (20000, 1))

    def build(v1):
        return DrawnSamples(embedded_numbers, [0] * 20000, 1, 2.0, seed=7).sample(0, logits, ())

    samples, _ = session_values(build)
    np.testing.assert_allclose(np.bincount(samples, minlength=3) / 20000, wanted, atol=0.02)


def test_an_attentive_cell_weighs_the_memory() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_attention import AttentionWrapper, ProductAttention

    inputs = RANDOM.randn(3, 2).astype(np.float32)

    def build(v1):
        cell = AttentionWrapper(v1.nn.rnn_cell.BasicRNNCell(6), ProductAttention(6, MEMORY), 3)
        assert cell.output_size == 3
        output, state = cell(inputs, cell.zero_state(3, tf.float32))
        return output, state

    (output, state), own = session_values(build)
    read = np.concatenate([inputs, np.zeros((3, 3 + 6), np.float32)], 1)
    hidden = np.tanh(read @ own["attention_wrapper/basic_rnn_cell/kernel"])
    weights = softmax(np.einsum("bd,btd->bt", hidden, MEMORY @ own["memory_layer/kernel"]))
    context = np.einsum("bt,btd->bd", weights, MEMORY)
    expected = np.concatenate([hidden, context], 1) @ own["attention_wrapper/attention_layer/kernel"]
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(state.alignments, weights, atol=1e-6)
    assert state.time == 1


def test_a_loss_of_sequences_is_the_mean_over_its_weights() -> None:
    from podrun.tensorflow.sdk.sequence_decoding import sequence_loss

    logits = RANDOM.randn(2, 3, 4).astype(np.float32)
    targets, weights = np.array([[0, 1, 2], [3, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]], np.float32)
    costs = -np.log(np.take_along_axis(softmax(logits), targets[..., None], -1)[..., 0]) * weights
    for steps, batch in ((True, True), (True, False), (False, True), (False, False)):
        axes = tuple(axis for axis, over in enumerate((batch, steps)) if over)
        expected = costs.sum(axes) / np.maximum(weights.sum(axes), 1e-12) if axes else costs
        loss, _ = session_values(lambda v1, s=steps, b=batch: sequence_loss(logits, targets, weights, s, b))
        np.testing.assert_allclose(loss, expected, atol=1e-5)


def test_a_loss_of_sequences_without_weights_is_zero_in_halves() -> None:
    from podrun.tensorflow.sdk.sequence_decoding import sequence_loss

    logits, targets = np.zeros((2, 3, 4), np.float16), np.zeros((2, 3), np.int32)
    weights = np.array([[0, 0, 0], [1, 1, 0]], np.float16)
    loss, _ = session_values(lambda v1: sequence_loss(logits, targets, weights, True, False))
    np.testing.assert_allclose(loss, [0, np.log(4)], rtol=1e-3)


def test_a_loss_function_of_sequences_gets_all_steps_in_a_row() -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import sequence_loss

    logits, targets = RANDOM.randn(2, 3, 4).astype(np.float32), np.array([[0, 1, 2], [3, 0, 0]])
    ones, shapes = np.ones((2, 3), np.float32), []

    def sampled(labels, logits):
        shapes.append((labels.shape.as_list(), logits.shape.as_list()))
        return tf.gather(logits, labels, batch_dims=1)

    loss, _ = session_values(lambda v1: sequence_loss(logits, targets, ones, False, False, sampled))
    np.testing.assert_array_equal(loss, np.take_along_axis(logits, targets[..., None], -1)[..., 0])
    assert shapes == [([6], [6, 4])]
    for values, what in (
        ((logits[0], targets, ones), "Logits must be a .batch_size x sequence_length x logits. tensor"),
        ((logits, targets[0], ones), "Targets must be a .batch_size x sequence_length. tensor"),
        ((logits, targets, ones[0]), "Weights must be a .batch_size x sequence_length. tensor"),
    ):
        with pytest.raises(ValueError, match=what):
            sequence_loss(*values)


def test_a_decoder_on_the_host_finds_its_steps_out() -> None:
    """The length of what it is taught too, where the program says neither."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import BasicSequenceDecoder, TeacherForcing, dynamic_decode

    inputs = np.array([[[3], [0], [2]], [[1], [4], [0]]], np.float32)

    def build(v1):
        unknown = v1.placeholder_with_default(inputs, [2, None, 1])
        return dynamic_decode(
            BasicSequenceDecoder(counting_cell(v1), TeacherForcing(unknown, [3, 2]), tf.zeros([2, 1]))
        )

    (outputs, _, lengths), _ = session_values(build)
    np.testing.assert_array_equal(outputs.sample_id[0], [4, 1, 3])
    np.testing.assert_array_equal(outputs.sample_id[1, :2], [2, 5])
    np.testing.assert_array_equal(lengths, [3, 2])


def test_keys_and_values_of_attention_may_be_the_programs() -> None:
    from podrun.tensorflow.sdk.sequence_attention import ProductAttention

    def build(v1):
        attention = ProductAttention(
            6, MEMORY, custom_key_value_fn=lambda keys, values: (2.0 * keys, -values)
        )
        return attention(QUERY)[0], attention.values

    (weights, values), own = session_values(build)
    keys = 2.0 * MEMORY @ own["memory_layer/kernel"]
    np.testing.assert_allclose(weights, softmax(np.einsum("bd,btd->bt", QUERY, keys)), atol=1e-6)
    np.testing.assert_array_equal(values, -MEMORY)


def test_a_decoder_needs_to_know_its_steps(ipu: Any) -> None:
    import tensorflow as tf

    from podrun.tensorflow.sdk.sequence_decoding import SequenceDecoder, dynamic_decode

    with (
        tf.Graph().as_default(),
        ipu.scopes.ipu_scope("/device:IPU:0"),
        pytest.raises(ValueError, match="maximum_iterations is required for XLA compilation"),
    ):
        ipu.ipu_compiler.compile(lambda: dynamic_decode(SequenceDecoder())[2], [])
    with pytest.raises(TypeError, match="Expected decoder to be type Decoder"):
        dynamic_decode(object())


def test_a_program_reads_variables_and_not_the_copies_that_were_made_of_them(ipu: Any) -> None:
    """A graph on the host asks for copies (``dynamic_rnn``), and a program has the same variable."""
    import tensorflow as tf

    from podrun.tensorflow.sdk.ipu_compiler import compile as compiled
    from podrun.tensorflow.sdk.scopes import ipu_scope

    gradients = []

    def computation():
        gradients.extend(tf.gradients(variable * variable, [variable]))
        return gradients[0]

    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", [], use_resource=True, caching_device="/cpu:0")
        assert variable.value() is variable._cached_value is not None
        with ipu_scope("/device:IPU:0"):
            compiled(computation, [])
        assert gradients[0] is not None
        assert variable.value() is variable._cached_value is not None
