"""``IPULoggingTensorHook``: tensors of the device that are logged while an estimator runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.private_apis.tensorflow import private_module
from podrun.tensorflow.capture.program_graphs import TensorStructure, innermost_program
from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedMode, IPUOutfeedQueue

LoggingMode = IPUOutfeedMode
"""LAST: the newest values; ALL: all since the last message."""


class IPULoggingTensorHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Logs what the model function gives to `log`: every so many calls or seconds, or at the end. ValueError for both
    or none of these.
    """

    LoggingMode = IPUOutfeedMode

    def __init__(
        self,
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[Mapping[str, Any]], str] | None = None,
        logging_mode: IPUOutfeedMode = IPUOutfeedMode.LAST,
        feed_name: str | None = None,
        replication_factor: int = 1,
    ) -> None:
        super().__init__()
        if every_n_iter is not None and every_n_secs is not None:
            raise ValueError("Cannot provide both every_n_iter and every_n_secs")
        if every_n_iter is None and every_n_secs is None and not at_end:
            raise ValueError("Either every_n_iter, every_n_secs or at_end should be provided")
        if every_n_iter is not None and every_n_iter < 1:
            raise ValueError(f"Invalid every_n_iter={every_n_iter}.")
        if not isinstance(logging_mode, IPUOutfeedMode):
            raise ValueError("logging_mode must be an IPUOutfeedMode.")
        self._formatter, self._at_end = formatter, at_end
        only_at_end = every_n_iter is None and every_n_secs is None
        self._timer = (
            None
            if only_at_end
            else tf.compat.v1.train.SecondOrStepTimer(every_secs=every_n_secs, every_steps=every_n_iter)
        )
        self._mode = logging_mode
        self._queue: IPUOutfeedQueue | None = None
        self._dequeued: TensorStructure | None = None
        self._calls = 0

    def log(self, tensors: TensorStructure) -> tf.Operation:
        """Give a tensor, list or dictionary to the log, in the model function. RuntimeError at a second call, TypeError
        for something else.
        """
        if self._queue is not None and self._dequeued is None:
            raise RuntimeError(
                "Cannot use this hook object's log function more than once. Log all tensors in one call, as a list or "
                "dict, or make another hook."
            )
        tensors = _by_name(tensors)
        self._queue, self._dequeued = IPUOutfeedQueue(self._mode), None
        operation = self._queue.enqueue(dict(tensors))
        program = innermost_program()
        if program is not None:
            program.control_outputs.append(operation)
        return operation

    def begin(self) -> None:
        """Make the operation that takes the values. RuntimeError if `log` was not called."""
        if self._queue is None:
            raise RuntimeError(
                "This logging hook's outfeed was not enqueued. Did you forget to call the log function?"
            )
        self._dequeued = self._queue.dequeue()
        if self._timer is not None:
            self._timer.reset()
        self._calls = 0

    def after_run(
        self,
        run_context: tf.compat.v1.train.SessionRunContext,
        run_values: tf.compat.v1.train.SessionRunValues,
    ) -> None:
        """Log, if it is time."""
        self._calls += 1
        if self._timer is None or not self._timer.should_trigger_for_step(self._calls):
            return
        self._write(run_context.session)

    def end(self, session: tf.compat.v1.Session) -> None:
        """Log at the end, if so asked."""
        if self._at_end and self._calls:
            self._write(session)

    def _write(self, session: tf.compat.v1.Session) -> None:
        values = session.run(self._dequeued)
        elapsed = None
        if self._timer is not None:
            elapsed, _ = self._timer.update_last_triggered_step(self._calls)
        with np.printoptions(suppress=True, legacy="1.25"):
            if self._formatter is not None:
                text = self._formatter(values)
            else:
                text = ", ".join(f"{name} = {value}" for name, value in values.items())
                text += "" if elapsed is None else f" ({elapsed:.3f} sec)"
        private_module("platform.tf_logging").info(text)  # Looked up at each call: programs replace it.


def _by_name(tensors: Any) -> Mapping[str, tf.Tensor]:
    """Tensors with the names under which they are logged. TypeError for other values."""
    if isinstance(tensors, Mapping):
        return tensors
    listed = tensors if isinstance(tensors, (list, tuple)) else [tensors]
    for tensor in listed:
        if not tf.is_tensor(tensor):
            raise TypeError(f"Expected `tf.Tensor`, got {type(tensor)}")
    return {tensor.name: tensor for tensor in listed}
