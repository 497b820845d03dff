"""Functions that tapes record in the scope of an IPU: their gradients are those of the same function on the host."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
IPU = "/device:IPU:0"


def _on_both(program: Callable[[], list[Any]]) -> None:
    """Check that a program has the same results in the scope of an IPU and in that of the host."""
    import tensorflow as tf

    with tf.device(IPU):
        ours = program()
    with tf.device("/CPU:0"):
        theirs = program()
    assert [value is None for value in ours] == [value is None for value in theirs]
    for own, other in zip(ours, theirs, strict=True):
        if own is not None:
            np.testing.assert_allclose(tf.convert_to_tensor(own), tf.convert_to_tensor(other), rtol=1e-6)


def test_tapes_around_functions_that_write_their_variables_give_the_gradients_of_the_host(ipu: Any) -> None:
    import tensorflow as tf

    def read_before() -> list[Any]:
        u = tf.Variable(2.0)

        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            y = x * u
            u.assign_add(1.0)
            return y * u

        with tf.GradientTape() as tape:
            y = function(tf.constant(5.0))
        return [y, tape.gradient(y, u), u.read_value()]

    def written_before() -> list[Any]:
        u = tf.Variable(2.0)

        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            u.assign(x * 3.0)
            return x * u

        x = tf.constant(5.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return [y, *tape.gradient(y, [x, u])]

    _on_both(read_before)
    _on_both(written_before)


def test_a_tape_inside_a_function_counts_all_reads_of_a_variable(ipu: Any) -> None:
    import tensorflow as tf

    def program() -> list[Any]:
        u = tf.Variable(2.0)

        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            with tf.GradientTape() as tape:
                y = x * u
                u.assign_add(1.0)
                z = y * u
            return z, tape.gradient(z, u)

        return [*function(tf.constant(5.0)), u.read_value()]

    _on_both(program)


def test_a_tape_around_a_function_with_a_tape_of_its_own(ipu: Any) -> None:
    import tensorflow as tf

    def program() -> list[Any]:
        u = tf.Variable(1.0)

        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            with tf.GradientTape() as inner:
                loss = (u * x) ** 2
            return loss, inner.gradient(loss, u)

        with tf.GradientTape(persistent=True) as tape:
            loss, gradient = function(tf.constant(3.0))
        return [loss, gradient, tape.gradient(loss, u), tape.gradient(gradient, u)]

    _on_both(program)


def test_gradients_that_are_none_or_of_the_identity(ipu: Any) -> None:
    import tensorflow as tf

    u, x = tf.Variable(1.5), tf.constant(2.0)

    @tf.function(autograph=False)
    def stopped(x: Any) -> Any:
        return tf.stop_gradient(x * u), tf.constant(1.0)

    @tf.function(autograph=False)
    def identity(x: Any) -> Any:
        return x

    def program() -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            first, second = stopped(x)
            third = identity(x) * 2.0
        return [first, *tape.gradient(first, [x, u]), tape.gradient(second, u), tape.gradient(third, x)]

    _on_both(program)


def test_a_loop_of_unknown_length_under_a_tape_writes_its_variables_once(ipu: Any) -> None:
    import tensorflow as tf

    def program() -> list[Any]:
        count = tf.Variable(0)

        @tf.function
        def function(x: Any) -> Any:
            count.assign_add(1)
            total = x
            while tf.reduce_sum(total) < 100.0:
                total *= x
            return total

        x = tf.constant(2.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return [y, tape.gradient(y, x), count.read_value()]

    _on_both(program)


@pytest.mark.parametrize("behind", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_jacobians_of_functions_in_the_scope(ipu: Any, behind: bool) -> None:
    """Of the result of a function, and of what eager mode computes behind it."""
    import tensorflow as tf

    x = tf.constant([1.0, 2.0])
    weight = tf.Variable([3.0, 4.0])

    @tf.function(autograph=False)
    def function(x: Any) -> Any:
        return x * x * weight[::-1]

    def program() -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = function(x)
            z = y * x
        return [*tape.jacobian(z if behind else y, [x, weight])]

    _on_both(program)


def test_gradients_are_those_of_the_function_as_it_was_traced(ipu: Any) -> None:
    import tensorflow as tf

    def program() -> list[Any]:
        u, calls = tf.Variable(2.0), list[int]()

        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            calls.append(1)
            return x * u * float(len(calls))

        with tf.GradientTape() as tape:
            y = function(tf.constant(5.0))
        return [y, tape.gradient(y, u), len(calls)]

    _on_both(program)


def test_gradients_of_gathered_rows_are_sparse_under_a_tape(ipu: Any) -> None:
    import tensorflow as tf

    rows = tf.Variable(np.arange(8, dtype=np.float32).reshape(4, 2))
    function = tf.function(lambda places: tf.reduce_sum(tf.gather(rows, places) ** 2), autograph=False)
    with tf.device(IPU):
        with tf.GradientTape() as tape:
            total = function(tf.constant([0, 2, 2]))
        gradient = tape.gradient(total, rows)
    assert isinstance(gradient, tf.IndexedSlices)
    np.testing.assert_array_equal(tf.convert_to_tensor(gradient), [[0, 2], [0, 0], [16, 20], [0, 0]])


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One number for each program that a tape records."""
    from podrun.tensorflow.execution import recorded_calls

    counted, launch = list[int](), recorded_calls.launch_program

    def counting(*args: Any, **options: Any) -> Any:
        counted.append(len(counted))
        return launch(*args, **options)

    monkeypatch.setattr(recorded_calls, "launch_program", counting)
    return counted


@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_functions_that_gather_of_what_they_compute_are_programs(
    ipu: Any, launches: list[int], several: bool
) -> None:
    import tensorflow as tf

    weight = tf.Variable(np.arange(12, dtype=np.float32).reshape(4, 3) / 10)
    places = tf.constant([2, 0, 2])

    def program() -> list[Any]:
        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            y = tf.tanh(x @ weight)
            own = tf.gather(y, places, batch_dims=1)
            pairs = tf.gather_nd(x, [[0, 1], [2, 2]])
            if not several:
                return tf.stop_gradient(tf.reduce_sum(own)) + tf.reduce_sum(pairs)
            rows = tf.gather(y, places) * 2.0
            columns = tf.gather(x, places, axis=1)
            return tf.reduce_sum(rows * rows) + tf.reduce_sum(columns * own[:, None]) + tf.reduce_sum(pairs)

        x = tf.reshape(tf.range(12.0), (3, 4)) / 20.0
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return [y, *tape.gradient(y, [x, weight])]

    _on_both(program)
    assert len(launches) == 2


def test_functions_that_write_what_they_read_before_are_programs(ipu: Any, launches: list[int]) -> None:
    """As batch norms do in training."""
    import tensorflow as tf

    def program() -> list[Any]:
        weight, mean, steps = tf.Variable([1.0, 2.0]), tf.Variable([0.5, 0.25]), tf.Variable(1.0)

        @tf.function(autograph=False)
        def function(x: Any) -> Any:
            here = tf.reduce_mean(x * weight, 0)
            y = tf.reduce_sum((x * weight - mean - here) ** 2) * steps
            mean.assign_sub((mean - here) * 0.5)
            steps.assign_add(1.0)
            weight.assign(weight * 0.5)
            return y

        x = tf.reshape(tf.range(6.0), (3, 2))
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        gradients = tape.gradient(y, [x, weight, mean, steps])
        return [y, *gradients, weight.read_value(), mean.read_value(), steps.read_value()]

    _on_both(program)
    assert len(launches) == 2


@pytest.mark.parametrize("all_rows", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_of_rows_of_arguments_are_sparse(ipu: Any, launches: list[int], all_rows: bool) -> None:
    import tensorflow as tf

    def sparse(function: Callable[[Any], Any]) -> bool:
        x = tf.reshape(tf.range(6.0), (3, 2))
        with tf.device(IPU), tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.function(function, autograph=False)(x)
        return isinstance(tape.gradient(y, x), tf.IndexedSlices)

    assert sparse(lambda x: tf.reduce_sum(tf.gather_nd(-tf.identity(x), [[1], [1]])))
    rows_of: list[Callable[[Any], Any]] = [lambda x: tf.identity_n([x])[0]]
    if all_rows:
        assert sparse(lambda x: tf.reduce_sum(tf.gather_nd(x, [[1], [1]])))
        assert sparse(lambda x: tf.reduce_sum(tf.gather(-tf.identity(x), [1, 1])))
        rows_of += [
            lambda x: x,
            lambda x: tf.cast(x, tf.float16),
            lambda x: tf.stop_gradient(x) + x,
            lambda x: tf.add_n([x, x]),
        ]
    for rows in rows_of:
        assert sparse(lambda x, rows=rows: tf.reduce_sum(tf.gather(rows(x), [1, 1])))
    assert not launches


def test_a_function_inside_one_that_the_host_runs_has_gradients(ipu: Any) -> None:
    """It is traced in a program first, which is refused; TensorFlow keeps it, and its backward pass is the host's."""
    import tensorflow as tf

    w, x = tf.Variable([1.0, 2.0]), tf.constant([3.0, 4.0])

    @tf.function(autograph=False)
    def inner(x: Any) -> Any:
        return w * x

    @tf.function(autograph=False)
    def function(x: Any) -> Any:
        return tf.reduce_sum(inner(x) + 0.0 * tf.random.uniform([2]))

    with tf.device(IPU), tf.GradientTape() as tape:
        tape.watch(x)
        y = function(x)
    first, second = tape.gradient(y, [x, w])
    np.testing.assert_array_equal(tf.convert_to_tensor(first), [1.0, 2.0])
    np.testing.assert_array_equal(tf.convert_to_tensor(second), [3.0, 4.0])


def test_a_program_calls_functions_that_a_tape_on_the_host_has_differentiated(ipu: Any) -> None:
    """TensorFlow adds to the results of their graphs what the gradients need."""
    import tensorflow as tf

    w, x = tf.Variable([1.0, 2.0]), tf.constant([3.0, 4.0])
    inner = tf.function(lambda x: tf.nn.relu(w * x), autograph=False)

    def chosen(x: Any) -> Any:
        return tf.cond(x[0] > 0.0, lambda: inner(x), lambda: tf.exp(x))

    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, inner(y)), [0, x])[1]

    functions = [tf.function(f, autograph=False) for f in (inner, chosen, looped)]
    for function in functions:
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(function(x))
        assert tape.gradient(y, w) is not None

    @tf.function(jit_compile=True, autograph=False)
    def program(x: Any) -> list[Any]:
        return [function(x) for function in functions]

    strategy = ipu.ipu_strategy.IPUStrategyV1()
    with strategy.scope():
        results = strategy.run(program, args=[x])
    for result, wanted in zip(results, ([3.0, 8.0], [3.0, 8.0], [3.0, 32.0]), strict=True):
        np.testing.assert_array_equal(result, wanted)
