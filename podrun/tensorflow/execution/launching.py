"""The operation with which the host launches a program: in eager mode a call, in a graph one ``PyFunc``.

It reads the variables that the program holds, runs the program, and writes those that it changed. So savers, prints and
programs on other devices see variables as TensorFlow has them.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import (
    ApplicationRuntimeError,
    FailedAssertionError,
    GraphMemoryAllocationError,
    InvalidOptionError,
    PodrunError,
    PoplarError,
    RecoverableRuntimeError,
    UsageError,
)
from podrun.private_apis.tensorflow import private_module, symbol
from podrun.runtime.feeds import FeedEndedError
from podrun.tensorflow.execution.clusters import cluster_run
from podrun.tensorflow.execution.host_program import HostProgram
from podrun.tensorflow.execution.placed_devices import name_device
from podrun.tensorflow.execution.program_parts import PartedProgram
from podrun.tensorflow.execution.session_calls import LAUNCHES, install_session_calls
from podrun.tensorflow.operators.ipu import GroupSizeError
from podrun.tensorflow.operators.random import SampleCountError

_read_variable = symbol("ops.gen_resource_variable_ops.read_variable_op")
_assign_variable = symbol("ops.gen_resource_variable_ops.assign_variable_op")

SESSIONS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Graph -> the session that ran it last."""
_STARTING = "_ipu_starting_operations"
"""The attribute of graphs that has the initialisers of what programs keep on the device."""
_started: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Session -> how many of these it has run."""
_starting = threading.Lock()
_launched: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_raised = threading.local()
_errors: list[BaseException] = []
_runs_sessions: list[int] = []
"""The process that ran the first session, in it and in those that are forked from it."""


def variable_type(handle: tf.Tensor) -> tuple[tf.DType, tf.TensorShape]:
    """Type and shape of the variable of a handle."""
    data = getattr(handle, "_handle_data", None)
    if data is None:
        data = private_module("ops.handle_data_util").get_resource_handle_data(handle)
    entry = data.shape_and_type[0]
    return tf.as_dtype(entry.dtype), tf.TensorShape(entry.shape)


def read_handle(tensor: tf.Tensor) -> np.ndarray:
    """The value of a tensor of eager mode: that of the variable, for a handle."""
    if tensor.dtype == tf.resource:
        return np.asarray(_read_variable(tensor, variable_type(tensor)[0]))
    return np.asarray(tensor)


def value_tensor(tensor: tf.Tensor) -> tf.Tensor:
    """The tensor, or for a handle the value of its variable, in a graph."""
    return _read_variable(tensor, variable_type(tensor)[0]) if tensor.dtype == tf.resource else tensor


def launch_program(
    program: HostProgram | PartedProgram, arguments: Sequence[tf.Tensor], *, writes: bool = True
) -> list[tf.Tensor | tf.Operation]:
    """Launch a program with the values of its inputs: handles of variables, and tensors. Returns its results.
    ``writes``: whether the variables that it changed are written.
    """
    values = [value_tensor(tensor) for tensor in arguments]
    types = [t.dtype for t in program.results]
    if tf.executing_eagerly():
        try:
            outcome, written = program([np.asarray(v) for v in values])
        except BaseException as error:
            raise in_words_of_the_sdk(error) from error
        for place, key in enumerate(program.keys):
            if writes and key in written:
                assign_handle(arguments[place], written[key])
        made_here = (_tensor(v, dtype) for v, dtype in zip(outcome, types, strict=True))
        return [name_device(tensor, program.ordinal) for tensor in made_here]
    return _launched_in_graph(program, arguments, values, types, program.written_inputs() if writes else [])


def _launched_in_graph(
    program: HostProgram | PartedProgram,
    arguments: Sequence[tf.Tensor],
    values: Sequence[tf.Tensor],
    types: Sequence[tf.DType],
    places: Sequence[int],
) -> list[tf.Tensor | tf.Operation]:
    variables = [variable_type(arguments[i]) for i in places]

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        try:
            outcome, written = program(arrays)
        except BaseException as error:
            told = in_words_of_the_sdk(error)
            _errors.append(told)
            raise told from error
        fresh = [written.get(program.keys[i], arrays[i]) for i in places]
        kinds = [*types, *(dtype for dtype, _ in variables)]
        return [np.asarray(v, t.as_numpy_dtype) for v, t in zip([*outcome, *fresh], kinds, strict=True)] + [
            np.zeros((), np.int32)
        ]

    all_types = [*types, *(dtype for dtype, _ in variables), tf.int32]
    outputs = tf.numpy_function(run, list(values), all_types, name="ipu_program")
    assigned = []
    for place, output, (_, shape) in zip(places, outputs[len(types) :], variables, strict=False):
        output.set_shape(shape)
        assigned.append(_assign_variable(arguments[place], output))
    with tf.control_dependencies(assigned):
        results = [tf.identity(output) for output in outputs[: len(types)]]
        done = tf.group(outputs[-1], *assigned)
    for result, tensor in zip(results, program.results, strict=True):
        result.set_shape(tensor.shape)
    _launched[program.graph] = done
    setattr(done.graph, LAUNCHES, True)
    return [*results, done]


def launched_operation(graph: tf.Graph | None) -> tf.Operation | None:
    """The operation that runs the program of a graph; None before it is launched."""
    return None if graph is None else _launched.get(graph)


def assign_handle(handle: tf.Tensor, value: np.ndarray) -> None:
    """Write the variable of a handle."""
    dtype = variable_type(handle)[0]
    _assign_variable(handle, tf.constant(np.asarray(value, dtype.as_numpy_dtype)))


def _tensor(value: np.ndarray, dtype: tf.DType) -> tf.Tensor:
    return tf.constant(np.asarray(value, dtype.as_numpy_dtype))


def _first_line(error: BaseException) -> str:
    return str(getattr(error, "message", error)).strip().split("\n")[0][:200]


def raising_itself(function: Callable[..., object]) -> Callable[..., object]:
    """A function of the host in a graph, whose error a session raises as it is."""

    def run(*arrays: np.ndarray) -> object:
        try:
            return function(*arrays)
        except BaseException as error:
            _errors.append(error)
            raise

    return run


def start_with(graph: tf.Graph, initializer: tf.Operation) -> None:
    """Let each session of a graph run an initialiser before all else: state of a device needs none of a program's."""
    setattr(graph, _STARTING, [*getattr(graph, _STARTING, ()), initializer])


def _start_state(plain: Callable[..., object], session: tf.compat.v1.Session) -> None:
    operations = getattr(session.graph, _STARTING, ())
    if len(operations) <= _started.get(session, 0):
        return
    with _starting:
        waiting = operations[_started.get(session, 0) :]
        if waiting:
            plain(session, waiting)
            _started[session] = len(operations)


def _needs_no_threads(session: tf.compat.v1.Session, options: object) -> bool:
    """Whether a run with these ``RunOptions`` is in the caller's thread, or in threads that the session starts."""
    config = session._config
    if getattr(options, "inter_op_thread_pool", 0) < 0:
        return True
    if config is None:
        return False
    own_pool = any(not pool.global_name for pool in config.session_inter_op_thread_pool)
    return config.use_per_session_threads or config.inter_op_parallelism_threads < 0 or own_pool


def _check_process(session: tf.compat.v1.Session, options: object = None) -> None:
    """Raise UsageError in a process that was forked from one that has run sessions: TensorFlow would wait without end
    for threads that are not here, unless the run needs none of them.
    """
    if not _runs_sessions:
        _runs_sessions.append(os.getpid())
    if _runs_sessions[0] != os.getpid() and not _needs_no_threads(session, options):
        raise UsageError(
            f"process {_runs_sessions[0]} has run sessions of TensorFlow, and this one was forked from it: "
            "TensorFlow's threads stayed behind",
            hint="Run sessions in one of both, or start processes by multiprocessing.get_context('spawn').",
        )


def install_sessions() -> None:
    """Let sessions tell which of them runs a graph, and raise what a program raised."""
    base = private_module("client.session").BaseSession
    if getattr(base.run, "launches", False):
        return
    plain = base.run

    def run(self: tf.compat.v1.Session, *args: Any, **options: Any) -> Any:
        _check_process(
            self, options["options"] if "options" in options else args[2] if len(args) > 2 else None
        )
        SESSIONS[self.graph] = self
        _start_state(plain, self)
        try:
            return cluster_run(plain, self, args, options)
        except PodrunError as error:
            told = in_words_of_the_sdk(error)
            raise told from (None if told is error else error)
        except tf.errors.OpError as error:
            own = next((e for e in _errors if _first_line(e) in str(error)), None)
            _errors.clear()
            if own is None:
                raise
            raise own from None

    run.launches = True  # type: ignore[attr-defined]
    base.run = run
    install_session_calls(base, _check_process)


ENDED = (
    "Infeed dataset iterator out of range. Are you trying to dequeue more elements than are in the dataset?"
)


def in_words_of_the_sdk(error: BaseException) -> BaseException:
    """The error that the program sees."""
    if isinstance(error, FeedEndedError):
        return _op_error(tf.errors.OutOfRangeError, ENDED, error)
    if isinstance(error, PoplarError):
        return _op_error(tf.errors.InternalError, _poplar_text(error), error)
    if isinstance(error, (GroupSizeError, SampleCountError)):
        return _op_error(tf.errors.InvalidArgumentError, error.message, error)
    return error


def _poplar_text(error: PoplarError) -> str:
    """An error of the emulated system as the SDK's TensorFlow words it."""
    compiling = isinstance(error, (GraphMemoryAllocationError, InvalidOptionError))
    message = error.message.removeprefix("engineOptions: ")
    text = f"[Poplar][{'Compile' if compiling else 'Execute'} engine] {error.type}: {message}"
    action = error.recovery_action.name if isinstance(error, RecoverableRuntimeError) else ""
    if isinstance(error, ApplicationRuntimeError) and not isinstance(error, FailedAssertionError):
        action = "IPU_RESET"
    if not action:
        return text
    return f"{text} [Recovery action: {action}] IPU will be reset the next time a program is executed."


def _op_error(kind: type[tf.errors.OpError], message: str, cause: BaseException) -> BaseException:
    error: BaseException = kind(None, None, message)
    hint = cause.hint if isinstance(cause, PodrunError) else ""
    if hint:
        error.add_note(hint)
    error.__cause__ = cause
    return error
