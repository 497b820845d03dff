"""What compiled programs of version 1 write without returning it, and loops that are differentiated."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import UnsupportedError
from tests.tensorflow.version_1_programs import Program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture
def program(ipu: Any) -> Iterator[Program]:
    """An empty graph."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        yield Program(ipu)


def test_what_a_program_writes_without_returning_it_is_written(program: Program) -> None:
    """As with XLA, whose cluster is the whole computation; what a loop's body does not return is not there."""
    tf, outfeed = program.tf, program.outfeed()

    def net(x: Any) -> Any:
        counts = [tf.get_variable(n, [], initializer=tf.zeros_initializer()) for n in ("top", "body", "cond")]
        counts[0].assign_add(x)
        seen = counts[0].read_value()

        def body(value: Any) -> Any:
            counts[1].assign_add(1.0)
            return value * 2.0, outfeed.enqueue(value)

        def chosen() -> Any:
            with tf.control_dependencies([counts[2].assign_add(1.0)]):
                return tf.identity(x)

        program.ipu.loops.repeat(2, body, [x])
        tf.cond(x > 2.0, chosen, lambda: -x)
        return x + 1.0, seen

    results = program.compiled(net, [tf.constant(3.0)])
    dequeued = outfeed.dequeue()
    with program.session() as session:
        assert [session.run(results) for _ in range(2)] == [[4.0, 3.0], [4.0, 6.0]]
        assert session.run(tf.global_variables()) == [6.0, 0.0, 2.0]
        assert session.run(dequeued).tolist() == [3, 6, 3, 6]


def test_a_program_that_returns_nothing_does_nothing(program: Program) -> None:
    tf = program.tf

    def net() -> None:
        tf.get_variable("count", [], initializer=tf.zeros_initializer()).assign_add(1.0)

    nothing = program.compiled(net)
    with program.session() as session:
        session.run(nothing)
        np.testing.assert_array_equal(session.run(tf.global_variables()), [0.0])


def loops_of(tf: Any) -> dict[str, Any]:
    """Functions with a loop, of a number and a count."""

    def stepping(x: Any, count: Any) -> Any:
        y = x
        for i in tf.range(0, 6, 2):
            y = y * x + tf.cast(i, tf.float32)
        return y

    def falling(x: Any, count: Any) -> Any:
        y = x
        for _ in tf.range(3, 0, -1):
            y = y * x
        return y

    def as_often_as_is_said(x: Any, count: Any) -> Any:
        y = x
        for _ in tf.range(count):
            y = y * x
        return y

    def broken(x: Any, count: Any) -> Any:
        y = x
        for _ in tf.range(10):
            y = y * x
            if y > 50.0:
                break
        return y

    def in_fractions(x: Any, count: Any) -> Any:
        y, at = x, tf.constant(0.0)
        while at <= 0.75:
            y, at = y * x, at + 0.25
        return y

    def limited(x: Any, count: Any) -> Any:
        return tf.while_loop(lambda y: y < 50.0, lambda y: y * x, [x], maximum_iterations=10)[0]

    functions = (stepping, falling, as_often_as_is_said, broken, in_fractions, limited)
    return {function.__name__: function for function in functions}


GRADIENTS = {
    "stepping": 4 * 2.0**3 + 2,
    "falling": 4 * 2.0**3,
    "as_often_as_is_said": 4 * 2.0**3,
    "broken": 6 * 2.0**5,
    "in_fractions": 5 * 2.0**4,
    "limited": 6 * 2.0**5,
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_pass_through_loops_that_are_counted(ipu: Any, name: str) -> None:
    import tensorflow as tf

    function = loops_of(tf)[name]

    @tf.function
    def gradient(x: Any, count: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x, count)
        return tape.gradient(y, x)

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        own = strategy.run(gradient, args=[tf.constant(2.0), tf.constant(3)])
        assert own.numpy() == GRADIENTS[name]
        if name == "as_often_as_is_said":
            assert strategy.run(gradient, args=[tf.constant(2.0), tf.constant(2)]).numpy() == 3 * 2.0**2


def test_a_loop_that_nothing_counts_is_named(ipu: Any) -> None:
    import tensorflow as tf

    @tf.function
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda y: y < 50.0, lambda y: y * x, [x], name="growing")[0]
        return tape.gradient(y, x)

    error: Any
    growing = pytest.raises(UnsupportedError, match="passes through the loop 'growing'")
    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy, growing as error:
        strategy.run(gradient, args=[tf.constant(2.0)])
    assert "maximum_iterations=100" in str(error.value.hint)


def test_what_comes_after_a_loop_with_an_outfeed_may_need_constants(ipu: Any) -> None:
    """The axes of a sum are computed from constants before the loop."""
    import tensorflow as tf

    outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

    @tf.function
    def total(x: Any, count: Any) -> Any:
        s = tf.constant([0.0, 1.0])
        for _ in tf.range(count):
            s += x
            outfeed.enqueue(s)
        axes = tf.range(0, tf.constant(1), 1)
        return tf.reduce_sum(s * 2.0 + x, axes)

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        assert strategy.run(total, args=[tf.constant(2.0), tf.constant(3)]).numpy() == 2 * (6 + 7) + 4
    assert outfeed.dequeue().numpy()[:, 0].tolist() == [2, 4, 6]


def test_two_gradients_of_one_loop_have_one_mask(ipu: Any) -> None:
    """Random numbers in loops and branches are the same for the values and for all gradients, and others in each
    iteration: digit i of a sum tells what iteration i drew.
    """
    import tensorflow as tf

    weight = tf.Variable(tf.ones([128]))

    def masked() -> Any:
        return weight * tf.cast(tf.random.uniform([128]) > 0.5, tf.float32)

    def added(i: Any, total: Any) -> Any:
        return i + 1, total + masked() * tf.pow(10.0, tf.cast(i, tf.float32))

    @tf.function(autograph=False)
    def gradients() -> Any:
        with tf.GradientTape(persistent=True) as tape:
            total = tf.cond(weight[0] > 0.0, masked, lambda: weight + 0.0)
            _, total = tf.while_loop(lambda i, _: i < 3, added, [1, total])
            once, twice = tf.reduce_sum(total), tf.reduce_sum(2.0 * total)
        return total, tape.gradient(once, weight), tape.gradient(twice, weight)

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        total, once, twice = (np.array(value) for value in strategy.run(gradients))
    assert set(np.rint(total).astype(int).tolist()) == {0, 1, 10, 11, 100, 101, 110, 111}
    np.testing.assert_array_equal(once, total)
    np.testing.assert_array_equal(twice, 2 * total)


def test_a_gradient_function_reads_no_tensor_of_another_function(ipu: Any) -> None:
    """One of the same name, type and shape is no substitute: the gradient was 7 times 21."""
    import tensorflow as tf

    kept: list[Any] = []

    @tf.function(autograph=False)
    def other(x: Any) -> Any:
        kept.append(x * 2.0)
        return kept[-1]

    other.get_concrete_function(tf.TensorSpec([], tf.float32))

    @tf.custom_gradient
    def same(x: Any) -> Any:
        return tf.identity(x), lambda gradient: gradient * kept[0]

    @tf.function(autograph=False)
    def derived(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = same(x * 7.0)
        return tape.gradient(y, x)

    refused = pytest.raises(UnsupportedError, match="reads 'mul:0' of 'other', which has no value")
    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy, refused:
        strategy.run(derived, args=[tf.constant(3.0)])
    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:  # Without a gradient nothing reads it.
        assert (
            strategy.run(tf.function(lambda x: same(x * 7.0), autograph=False), args=[tf.constant(3.0)])
            == 21.0
        )
    with (
        tf.Graph().as_default(),
        tf.compat.v1.Session() as session,
    ):  # As layers built in a graph are called again.
        kept[:] = [tf.compat.v1.placeholder(tf.float32, [])]
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            result = ipu.ipu_compiler.compile(same, [tf.constant(4.0)])
            changed = ipu.ipu_compiler.compile(lambda x: tf.gradients(same(x), x), [tf.constant(4.0)])
        assert session.run(result) == [4.0]
        with pytest.raises(UnsupportedError, match="of the graph around the program, which has no value"):
            session.run(changed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["looped", "scaled", "written", "chosen"])
def test_a_gradient_function_reads_what_no_result_needs(ipu: Any, name: str) -> None:
    """Also in a loop and in a branch, and what reads a variable before the program writes it."""
    import tensorflow as tf

    weight = tf.Variable(2.0)

    @tf.custom_gradient
    def scaled(x: Any) -> Any:
        factor = tf.exp(x) * weight
        return x * x, lambda gradient, variables=None: (gradient * factor, [None])

    def looped(x: Any) -> Any:
        total = tf.constant(0.0)
        for i in tf.range(3):
            total += scaled(x * tf.cast(i, tf.float32))
        return total

    def chosen(x: Any) -> Any:
        return scaled(x) if x > 0.0 else x

    def written(x: Any) -> Any:
        kept = tf.sin(x) * weight
        weight.assign_add(1.0)
        return tf.custom_gradient(lambda a: (2.0 * a, lambda gradient: gradient * kept))(x)

    def derivative(function: Any) -> Any:
        @tf.function
        def derived(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return tape.gradient(y, x)

        return derived

    function, expected = {
        "scaled": (scaled, 2 * np.exp(0.5)),
        "looped": (looped, sum(2 * i * np.exp(0.5 * i) for i in range(3))),
        "chosen": (chosen, 2 * np.exp(0.5)),
        "written": (written, 2 * np.sin(0.5)),
    }[name]
    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        own = strategy.run(derivative(function), args=[tf.constant(0.5)])
    np.testing.assert_allclose(own, expected, rtol=1e-6)
    assert weight.numpy() == (3.0 if name == "written" else 2.0)


def test_a_gradient_function_may_contain_its_own_function(ipu: Any) -> None:
    """Derivatives of three orders; a fourth is refused."""
    import tensorflow as tf

    @tf.custom_gradient
    def growing(x: Any) -> Any:
        return tf.exp(2.0 * x), lambda gradient: gradient * 2.0 * growing(x)

    def derivative(function: Any, order: int) -> Any:
        def derived(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = function(x)
            return tape.gradient(y, x)

        return function if order == 0 else derivative(derived, order - 1)

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        for order in (1, 3):
            own = strategy.run(
                tf.function(derivative(growing, order), autograph=False), args=[tf.constant(0.5)]
            )
            np.testing.assert_allclose(own, 2.0**order * np.exp(1.0), rtol=1e-6)
        with pytest.raises(UnsupportedError, match="too often"):
            strategy.run(tf.function(derivative(growing, 4), autograph=False), args=[tf.constant(0.5)])


def test_a_list_leaves_a_loop_with_queues(ipu: Any) -> None:
    """A ``tf.TensorArray`` that the loop wrote, the values after it, and a result that waits for effects."""
    import tensorflow as tf

    outfeed, total = ipu.ipu_outfeed_queue.IPUOutfeedQueue(), tf.Variable(0.0)

    @tf.function
    def looped(start: Any) -> Any:
        rows = tf.TensorArray(tf.float32, size=3)
        for i in tf.range(3):
            value = start + tf.cast(i, tf.float32)
            total.assign_add(value)
            rows = rows.write(i, [value, 2.0 * value])
            outfeed.enqueue(value)
        return rows.stack()

    @tf.function(jit_compile=True)
    def called(start: Any) -> Any:
        rows = looped(start)
        return {
            "rows": rows,
            "mean": tf.reduce_mean([rows[2, 0], total]),
            "size": tf.shape(tf.zeros([3, 4]))[0],
        }

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        results = strategy.run(called, args=[tf.constant(1.0)])
    np.testing.assert_array_equal(results["rows"], [[1, 2], [2, 4], [3, 6]])
    assert [results["mean"].numpy(), results["size"].numpy()] == [(3 + 6) / 2, 3]
    assert outfeed.dequeue().numpy().tolist() == [1, 2, 3]


@pytest.mark.parametrize("writes", [True, False])
def test_an_element_outside_of_a_list_is_refused_by_name(ipu: Any, writes: bool) -> None:
    """TensorFlow's programs for the host raise; a write was dropped, and a read gave the last element."""
    import tensorflow as tf

    @tf.function(autograph=False, jit_compile=True)
    def program(x: Any) -> Any:
        items = tf.TensorArray(tf.float32, size=2, element_shape=[], clear_after_read=False)
        items = items.write(0, x).write(1, x * 2)
        return items.write(3, x).stack() if writes else items.read(2)

    with (
        ipu.ipu_strategy.IPUStrategyV1().scope() as strategy,
        pytest.raises(UnsupportedError, match=f"element {3 if writes else 2} of a list of size 2") as refused,
    ):
        strategy.run(program, args=[tf.constant(1.0)])
    assert f"at least {4 if writes else 3}" in refused.value.hint


def test_a_place_of_a_list_that_a_run_finds_out_is_the_nearest_there_is(ipu: Any) -> None:
    """As in TensorFlow's XLA, whose slices are moved inside."""
    import tensorflow as tf

    def program(place: Any) -> Any:
        items = tf.TensorArray(tf.float32, size=3, element_shape=[], clear_after_read=False)
        items = items.unstack([1.0, 2.0, 3.0])
        return items.read(place), items.write(place, 9.0).stack()

    strategy = ipu.ipu_strategy.IPUStrategyV1()
    for place, row, rows in ((7, 3.0, [1.0, 2.0, 9.0]), (-2, 1.0, [9.0, 2.0, 3.0])):
        compiled = tf.function(program, autograph=False, jit_compile=True)
        with strategy.scope():
            read, written = strategy.run(compiled, args=[tf.constant(place)])
        assert (float(read), written.numpy().tolist()) == (row, rows)
