"""Operations of eager mode in the scope of an IPU: their values as an IPU gives them, and the IPU as their device.

Each runs by itself, as one operation on an IPU does. TensorFlow's own kernels compute it, on the host; what differs on
an IPU is put right in its results: halves that overflow become the greatest ones, or NaN with ``nanoo``, and a half
divided by zero is NaN. Float64, which an IPU does not have, stays on the host, or is refused where a program switches
soft placement off, as TensorFlow does it for devices of its own.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import ApplicationRuntimeError, UnsupportedError
from podrun.private_apis.tensorflow import private_module, symbol
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.execution.launching import in_words_of_the_sdk
from podrun.tensorflow.execution.placed_devices import ipu_in, name_device, named_variables
from podrun.tensorflow.operators.table import EXACT, HANDLERS, load_table

_DIVISIONS = ("RealDiv", "Div")
_WIDE = (tf.float64, tf.complex128)


class _Scopes(threading.local):
    """The scopes of this thread."""

    def __init__(self) -> None:
        self.ordinals: list[int | None] = []
        """The IPU devices of the scopes, the innermost last; None for a scope of the host."""
        self.correcting = False
        """Whether results are being put right, by operations of the host."""


_scopes = _Scopes()
_lock = threading.Lock()


class _Hooks:
    """Podrun's replacements for TensorFlow's two functions that run an eager operation, while any scope is open."""

    def __init__(self) -> None:
        self.users = 0
        self.fast: Callable[..., Any] = lambda *_: None
        self.slow: Callable[..., Any] = lambda *_: None

    def enter(self) -> None:
        """Put podrun's two functions in place of TensorFlow's when the first scope of the process is entered."""
        with _lock:
            self.users += 1
            if self.users == 1:
                fast, slow = private_module("pywrap_tfe"), private_module("eager.execute")
                self.fast, self.slow = fast.TFE_Py_FastPathExecute, slow.execute
                fast.TFE_Py_FastPathExecute, slow.execute = self.run_fast, self.run_slow

    def leave(self) -> None:
        """Put TensorFlow's functions back when the last scope of the process is left."""
        with _lock:
            self.users -= 1
            if self.users == 0:
                private_module("pywrap_tfe").TFE_Py_FastPathExecute = self.fast
                private_module("eager.execute").execute = self.slow

    def run_fast(self, context: object, op_name: str, name: object, *arguments: object) -> object:
        """Run an operation whose inputs and attributes follow one another."""
        return _on_device(op_name, arguments, self.fast(context, op_name, name, *arguments))

    def run_slow(
        self, op_name: str | bytes, num_outputs: int, inputs: Sequence[object], *rest: object, **named: object
    ) -> object:
        """Run an operation of these inputs."""
        label = op_name.decode() if isinstance(op_name, bytes) else str(op_name)
        return _on_device(label, inputs, self.slow(op_name, num_outputs, inputs, *rest, **named))


_hooks = _Hooks()


@contextlib.contextmanager
def eager_scope(ordinal: int | None) -> Iterator[None]:
    """A context in which eager operations give an IPU's values; None: the host's, inside an IPU's scope."""
    _scopes.ordinals.append(ordinal)
    _hooks.enter()
    try:
        yield
    finally:
        _hooks.leave()
        _scopes.ordinals.pop()


def eager_ordinal() -> int | None:
    """The number of the IPU in whose scope eager operations are made; None outside of any."""
    return _scopes.ordinals[-1] if _scopes.ordinals else None


def install_eager_devices() -> None:
    """Let ``tf.device`` take names of IPUs in eager mode, once."""
    context_class = private_module("eager.context").Context
    plain = context_class.device
    if getattr(plain, "ipus", False):
        return

    def device(self: object, name: object) -> contextlib.AbstractContextManager[object]:
        ordinal = ipu_in(getattr(name, "to_string", lambda: name)())
        if ordinal is not None:
            return _placed(ordinal)
        own: contextlib.AbstractContextManager[object] = plain(self, name)
        return _unplaced(own) if _scopes.ordinals else own

    device.ipus = True  # type: ignore[attr-defined]
    context_class.device = device
    function_class = function_type()
    function_class.__call__ = _placed_call(function_class.__call__)


def function_type() -> Any:
    """The class of what ``tf.function`` gives."""
    return private_module("eager.polymorphic_function.polymorphic_function").Function


class NoProgramError(UnsupportedError):
    """A function that cannot be compiled for an IPU. It is raised before any of it has run."""


_STATIC = (int, float, complex, str, bytes, type(None), enum.Enum, tf.DType, tf.TensorShape)
_HANDLES = (tf.resource, tf.variant)


def _takes_values(arguments: object) -> bool:
    """Whether all arguments of a function are dense tensors, variables and plain values: no dataset or iterator."""
    return all(
        leaf.dtype not in _HANDLES
        if isinstance(leaf, tf.Tensor)
        else isinstance(leaf, (tf.Variable, np.ndarray, np.generic, *_STATIC))
        for leaf in tf.nest.flatten(arguments)
    )


def _placed_call(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a tf.function, which is a program in the scope of an IPU. What no program can be runs on the host, as
    TensorFlow places softly, or is refused where a program switches that off. Of functions that a tape records, those
    that draw random numbers or use queues always run on the host (`recorded_calls`).
    """
    recorded = symbol("eager.record.could_possibly_record")

    def call(self: object, *args: object, **kwargs: object) -> object:
        ordinal = eager_ordinal()
        if ordinal is None or _scopes.correcting or not tf.executing_eagerly():
            return plain(self, *args, **kwargs)
        strategy = _strategy(ordinal)
        if strategy is None or not _takes_values((args, kwargs)):
            return plain(self, *args, **kwargs)
        taped = recorded()
        try:
            return strategy.run_if_program(self, args, kwargs, recorded=taped)
        except NoProgramError:
            if not taped and not tf.config.get_soft_device_placement():
                raise
        return plain(self, *args, **kwargs)

    return call


def _strategy(ordinal: int) -> Any:
    """The strategy that holds, if it is one of IPUs; None under another one; else the placement on this device."""
    module = importlib.import_module("podrun.tensorflow.sdk.ipu_strategy")
    if tf.distribute.has_strategy():
        current = tf.distribute.get_strategy()
        return current if isinstance(current, module.IPUStrategyV1) else None
    if ordinal not in _strategies:
        _strategies[ordinal] = module.DevicePlacement(f"/device:IPU:{ordinal}")
    return _strategies[ordinal]


_strategies: dict[int, Any] = {}


@contextlib.contextmanager
def _placed(ordinal: int) -> Iterator[None]:
    """A context in which operations give an IPU's values, and new variables name the IPU as their device."""
    with named_variables(ordinal), eager_scope(ordinal):
        yield


@contextlib.contextmanager
def _unplaced(own: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """A context in which operations give the host's values, inside the scope of an IPU."""
    with own, eager_scope(None):
        yield


def _on_device(op_name: str, inputs: Sequence[object], result: object) -> object:
    """The result of an operation as the innermost scope's device gives it."""
    ordinal = eager_ordinal()
    if ordinal is None or _scopes.correcting or not tf.executing_eagerly():
        return result
    _scopes.correcting = True
    try:
        if isinstance(result, (list, tuple)):
            return [_as_given(op_name, inputs, item, ordinal) for item in result]
        return _as_given(op_name, inputs, result, ordinal)
    finally:
        _scopes.correcting = False


def _as_given(op_name: str, inputs: Sequence[object], value: object, ordinal: int) -> object:
    if not isinstance(value, tf.Tensor):
        return value
    tensors = [item for item in inputs if isinstance(item, tf.Tensor)]
    if any(t.dtype in _WIDE for t in (*tensors, value)):
        _refuse_if_strict(op_name)
        return value
    half = value.dtype == tf.float16 and op_name not in EXACT
    own: tf.Tensor = _half(op_name, inputs, value) if half else value
    if DEVICES.stops_at_exceptions and tensors and own.dtype.is_floating:
        _check_finite(op_name, tensors, own, ordinal)
    return name_device(own, ordinal)


def _check_finite(op_name: str, inputs: Sequence[tf.Tensor], value: tf.Tensor, ordinal: int) -> None:
    """InternalError, as a program's, for a result that is not finite although all inputs are. No arithmetic: operations
    without floating-point inputs, which move values or make them of bits, and reductions of nothing.
    """
    if op_name == "Bitcast" or np.isfinite(value.numpy()).all():
        return
    numbers = [t.numpy() for t in inputs if t.dtype.is_floating]
    if numbers and all(n.size and np.isfinite(n).all() for n in numbers):
        what = (
            f"{op_name} has values that are {'no numbers' if np.isnan(value.numpy()).any() else 'infinite'}"
        )
        raise in_words_of_the_sdk(
            ApplicationRuntimeError(
                f"Tiles in excepted state: IPU {ordinal}: floating-point exception: {what}",
                hint="Look at its inputs, or leave inv, div0 and oflo of floating_point_behaviour out.",
            )
        )


def _refuse_if_strict(op_name: str) -> None:
    load_table()
    if op_name in HANDLERS and not tf.config.get_soft_device_placement():
        raise tf.errors.InvalidArgumentError(
            None, None, f"Cannot run {op_name} on an IPU: no supported kernel for IPU devices is available."
        )


def _half(op_name: str, inputs: Sequence[object], value: tf.Tensor) -> tf.Tensor:
    """A float16 tensor with values beyond 65504 clipped, or NaN with ``nanoo``, as an IPU gives it."""
    held = value.numpy()
    limit = np.nan if DEVICES.nan_on_overflow else np.sign(held) * np.finfo(np.float16).max
    corrected = np.where(np.isinf(held), limit, held)
    if op_name in _DIVISIONS:
        corrected = np.where(np.broadcast_to(np.asarray(inputs[1]) == 0, held.shape), np.nan, corrected)
    if np.array_equal(corrected, held, equal_nan=True):
        return value
    result: tf.Tensor = _replaced(value, corrected.astype(np.float16))
    return result


def _replaced(value: tf.Tensor, corrected: np.ndarray) -> tf.Tensor:
    """The values ``corrected`` in the place of a tensor, whose gradient is theirs."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def replace(_: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]]:
        return tf.constant(corrected), lambda gradient: gradient

    return replace(value)
