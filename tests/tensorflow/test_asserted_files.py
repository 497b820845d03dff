"""Requests to a file whose assertions fail: what is answered, what is not, and what stays as it was."""

from __future__ import annotations

import contextlib
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import FailedAssertionError
from podrun.serving.compiler import ServedModel
from podrun.serving.request_incidents import IncidentLog
from podrun.serving.runner import ModelRunner, RuntimeConfig
from podrun.serving.runtime.live_runner import LiveRunner
from podrun.serving.runtime.pack_runner import PackRunner, PackRunnerConfig
from podrun.serving.runtime.session import PopefSession

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.fixture(scope="module")
def square_roots(ipu: Any, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """The square root of two rows of three numbers, which it asserts to be positive."""
    import tensorflow as tf

    def step(x: Any) -> Any:
        tf.debugging.assert_positive(x)
        return tf.sqrt(x)

    folder = tmp_path_factory.mktemp("asserted") / "exported"
    spec = tf.TensorSpec([2, 3], tf.float32)
    ipu.serving.export_single_step(step, str(folder), 1, predict_step_signature=(spec,))
    return ServedModel(str(folder / "executable.popef"))


def rows(value: float, count: int = 2) -> np.ndarray:
    return np.full([count, 3], value, np.float32)


def run_together(runner: ModelRunner | LiveRunner, *inputs: np.ndarray) -> list[np.ndarray | None]:
    """What requests of one run are answered with; None for a failed assertion."""
    (source,), (target,) = runner.get_execute_inputs(), runner.get_execute_outputs()
    outputs = [np.zeros_like(x) for x in inputs]
    requests = [
        runner.prepared({source.name: x}, {target.name: y}) for x, y in zip(inputs, outputs, strict=True)
    ]
    runner.run_now(requests)
    answers: list[np.ndarray | None] = []
    for request, output in zip(requests, outputs, strict=True):
        answers.append(output)
        try:
            request.future.wait(0)
        except FailedAssertionError:
            answers[-1] = None
    return answers


def test_requests_fail_for_the_assertions_of_their_own_batches(square_roots: ServedModel) -> None:
    with ModelRunner(square_roots, RuntimeConfig(batching_dim=0)) as runner:
        first, bad, third = run_together(runner, rows(4), rows(-1), rows(9))
        assert bad is None
        np.testing.assert_array_equal(first, rows(2))
        np.testing.assert_array_equal(third, rows(3))
        # The middle batch has rows of two requests; the last one is filled with zeros and is not checked.
        first, left, right, last = run_together(runner, rows(4), rows(-1, 1), rows(9, 1), rows(16, 1))
        assert left is None
        assert right is None
        np.testing.assert_array_equal(first, rows(2))
        np.testing.assert_array_equal(last, rows(4, 1))
        assert run_together(runner, rows(-1), rows(4, 1))[0] is None
        np.testing.assert_array_equal(run_together(runner, rows(25, 1))[0], rows(5, 1))


def test_failed_assertions_are_no_incidents_and_reset_nothing(
    square_roots: ServedModel, tmp_path: Path
) -> None:
    log = tmp_path / "incidents"
    incidents = IncidentLog("net/1", {"PODRUN_INCIDENTS": str(log)})
    live = LiveRunner(square_roots, RuntimeConfig(batching_dim=0, auto_reset=True), incidents)
    with contextlib.closing(live):
        good, bad = run_together(live, rows(4), rows(-1))
    assert bad is None
    np.testing.assert_array_equal(good, rows(2))
    assert not log.exists() or not [json.loads(line) for line in log.read_text().splitlines()]


def test_assertions_of_packed_samples_end_one_run(square_roots: ServedModel) -> None:
    config = PackRunnerConfig(
        dynamic_input_name=square_roots.metadata.inputs()[0].name, single_row=True, max_valid_num=2
    )
    with PackRunner(square_roots, config) as runner:
        (source,), (target,) = runner.get_execute_inputs(), runner.get_execute_outputs()
        y = np.zeros([3], np.float32)
        runner.execute({source.name: np.full([3], 4, np.float32)}, {target.name: y})
        np.testing.assert_array_equal(y, [2, 2, 2])  # Zeros in the other row are not checked.
    config.timeout_microseconds = 600_000_000  # A pack of two samples is full, and runs without the time.
    with PackRunner(square_roots, config) as runner:
        for value, failing in ((-1.0, True), (9.0, False)):
            pair = [np.full([3], value, np.float32), np.full([3], 4, np.float32)]
            outputs = [np.zeros([3], np.float32) for _ in pair]
            futures = [
                runner.execute_async({source.name: x}, {target.name: y})
                for x, y in zip(pair, outputs, strict=True)
            ]
            for future in futures:
                with pytest.raises(FailedAssertionError) if failing else contextlib.nullcontext():
                    future.wait(60)
        np.testing.assert_array_equal(outputs, [[3, 3, 3], [2, 2, 2]])


def test_sessions_take_the_arrays_of_a_failed_run(square_roots: ServedModel) -> None:
    with contextlib.closing(PopefSession(square_roots.label)) as session:
        run_with_failures(session)


def run_with_failures(session: PopefSession) -> None:
    from podrun.tensorflow.execution.launching import in_words_of_the_sdk

    told: list[str] = []
    queues = session.createQueueManager()
    source, target = session.getUserInputAnchors()[0].name, session.getUserOutputAnchors()[0].name
    results = {name: np.zeros([2, 3], np.float32) for name in ("bad", "good", "late", "last")}
    for name, value in (("bad", -1), ("good", 4)):
        queues.inputQueue(source).enqueue(rows(value), lambda name=name: told.append(f"in {name}"))
        queues.outputQueue(target).enqueue(results[name], lambda name=name: told.append(f"out {name}"))
    with pytest.raises(FailedAssertionError, match="An assertion of the program failed"):
        session.runMainPrograms()
    assert told == ["in bad", "out bad"]
    assert session.runMainPrograms()
    assert told == ["in bad", "out bad", "in good", "out good"]
    np.testing.assert_array_equal(results["good"], rows(2))
    # The output array of a failed run may come after it.
    queues.inputQueue(source).enqueue(rows(-1))
    with pytest.raises(FailedAssertionError) as caught:
        session.runMainPrograms()
    assert "Recovery action" not in str(in_words_of_the_sdk(caught.value))
    queues.outputQueue(target).enqueue(results["late"], lambda: told.append("out late"))
    assert told[-1] == "out late"
    queues.inputQueue(source).enqueue(rows(9))
    queues.outputQueue(target).enqueue(results["last"])
    assert session.runMainPrograms()
    np.testing.assert_array_equal(results["last"], rows(3))
    assert not results["bad"].any()
    assert not results["late"].any()
