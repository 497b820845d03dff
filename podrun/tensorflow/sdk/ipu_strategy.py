"""``IPUStrategy``: functions of version-2 programs on an IPU."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.core.errors import UnimplementedError, UnsupportedError
from podrun.private_apis.tensorflow import original_of, private_module
from podrun.tensorflow.capture.markers import mark_like
from podrun.tensorflow.capture.program_graphs import (
    FunctionGraph,
    IpuGraph,
    TensorStructure,
    check_host_free,
    in_program,
    parameter,
    trace,
)
from podrun.tensorflow.execution.eager_devices import NoProgramError
from podrun.tensorflow.execution.host_program import HostProgram
from podrun.tensorflow.execution.launching import launch_program
from podrun.tensorflow.execution.placed_devices import named_variables
from podrun.tensorflow.execution.program_parts import PartedProgram, program_of
from podrun.tensorflow.execution.recorded_calls import recorded_call
from podrun.tensorflow.sdk.ipu_infeed_queue import IPUOwnedIterator

_one_device: Any = private_module("distribute.one_device_strategy")
_UNSUPPORTED = (tf.float64, tf.complex64, tf.complex128, tf.string)


class IPUExtended(_one_device.OneDeviceExtended):  # type: ignore[misc]
    """One device to TensorFlow; sums over replicas where gradients are reduced."""

    def _reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, value: tf.Tensor, destinations: object, options: object
    ) -> tf.Tensor:
        return reduced_over_replicas(reduce_op, value)

    def _batch_reduce_to(
        self, reduce_op: tf.distribute.ReduceOp, pairs: Sequence[tuple[tf.Tensor, object]], options: object
    ) -> list[tf.Tensor]:
        return [reduced_over_replicas(reduce_op, value) for value, _ in pairs]

    def _replica_ctx_all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: TensorStructure, options: object = None
    ) -> TensorStructure:
        return tf.nest.map_structure(lambda v: reduced_over_replicas(reduce_op, v), value)


_reduced = threading.local()
"""``already``: whether gradients are applied that are sums over replicas."""


@contextlib.contextmanager
def reduced_already() -> Iterator[None]:
    """A context in which `reduced_over_replicas` returns values as they are."""
    before = getattr(_reduced, "already", False)
    _reduced.already = True
    try:
        yield
    finally:
        _reduced.already = before


def reduced_over_replicas(reduce_op: tf.distribute.ReduceOp, value: tf.Tensor) -> tf.Tensor:
    """The sum or mean over the replicas in a program; the value itself on the host, and in the scope of a strategy that
    leaves such reductions to the program.
    """
    already = getattr(_reduced, "already", False)
    if already or not in_program() or not getattr(tf.distribute.get_strategy(), "adds_reductions", True):
        return value
    kind = "cross_replica_mean" if reduce_op == tf.distribute.ReduceOp.MEAN else "cross_replica_sum"
    return mark_like(kind, tf.convert_to_tensor(value), group=None)


class IPUReplicaContext(_one_device._OneDeviceReplicaContext):  # type: ignore[misc]
    """The context of a replica: reductions are over the replicas of the device."""

    def all_reduce(
        self, reduce_op: tf.distribute.ReduceOp, value: TensorStructure, options: object = None
    ) -> TensorStructure:
        """The sum or mean over the replicas."""
        if isinstance(reduce_op, str):
            reduce_op = tf.distribute.ReduceOp(reduce_op.upper())
        return tf.nest.map_structure(lambda v: reduced_over_replicas(reduce_op, v), value)


class IPUStrategyV1(_one_device.OneDeviceStrategy):  # type: ignore[misc]
    """Variables made in its scope belong to the IPU, and ``run`` runs a tf.function there."""

    def __init__(
        self,
        ipu_device: str = "/device:IPU:0",
        cpu_device: str = "/device:CPU:0",
        enable_dataset_iterators: bool = True,
        enable_keras_extensions: bool = True,
    ) -> None:
        tf.distribute.Strategy.__init__(self, IPUExtended(self, cpu_device))
        self._ipu_device = ipu_device
        self.ordinal = int(ipu_device.rpartition(":")[2])
        self._enable_iterators, self._enable_keras_extensions = (
            enable_dataset_iterators,
            enable_keras_extensions,
        )
        self._programs: dict[tuple[object, ...], tuple[Any, ...]] = {}
        self._refused: dict[tuple[object, ...], tuple[Any, ...]] = {}
        """Why what cannot be a program is refused, with what keeps the identities in its signature."""

    @property
    def supports_loss_scaling(self) -> bool:
        """True: optimizers in the strategy's scope may scale losses."""
        return True

    @property
    def num_replicas_in_sync(self) -> int:
        """1, whatever the number of IPUs."""
        return 1

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[Any]:
        with super().scope() as scope, named_variables(self.ordinal), _ITERATION.changed():
            yield scope

    def scope(self) -> Any:
        """The scope in which variables, models and iterators are made."""
        return self._in_scope()

    def replica(self) -> IPUReplicaContext:
        """The context of a replica, in which functions of the strategy are traced."""
        return IPUReplicaContext(self)

    def experimental_run_v2(
        self, fn: Callable[..., Any], args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> Any:
        """The name of `run` until SDK 2.4, with a warning; later SDKs refuse it."""
        warnings.warn("`experimental_run_v2` is deprecated. Use `run` instead.", stacklevel=2)
        return self.run(fn, args, kwargs)

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: object = None,
    ) -> Any:
        """Run a tf.function on the IPU. ValueError for a plain function in eager mode."""
        eager = tf.compat.v1.executing_eagerly_outside_functions()
        if in_program() or not (eager or _is_function(fn)):
            return self._run_inside(fn, args, kwargs or {})
        if tf.executing_eagerly() and not _is_function(fn):
            raise ValueError(
                "IPUStrategy.run(fn, ...) does not support eager execution. Either convert `fn` into a tf.function or "
                "consider calling strategy.run inside a tf.function."
            )
        args = tf.nest.map_structure(_as_tensor, tuple(args), expand_composites=False)
        kwargs = dict(kwargs or {})
        return self._launched(*self._traced(fn, args, kwargs), (args, kwargs))

    def run_if_program(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        recorded: bool = False,
    ) -> TensorStructure:
        """Run a tf.function on the IPU in eager mode, ``recorded`` by tapes, with plain results as tensors.
        NoProgramError if it cannot be a program: what it calls, takes or returns is not computed on IPUs.
        """
        args, kwargs = tf.nest.map_structure(_as_tensor, tuple(args), expand_composites=False), dict(kwargs)
        key = _signature(fn, args, kwargs)
        if (key, recorded) in self._refused:
            raise _no_program(self._refused[key, recorded][0])
        try:
            program, template = self._traced(fn, args, kwargs)
            _check_values(program.graph, template)
            result = self._launched(program, template, (args, kwargs), recorded=recorded)
        except (UnsupportedError, UnimplementedError, UnsupportedTypeError) as error:
            why = str(getattr(error, "message", error))
            if not recorded:  # A program that tapes cannot record is one without them.
                self._programs.pop(key, None)
            named = [v for v in tf.nest.flatten((args, kwargs)) if not isinstance(v, tf.Tensor)]
            self._refused[key, recorded] = why, fn, named
            raise _no_program(why) from error
        return tf.nest.map_structure(lambda r: r if r is None else tf.convert_to_tensor(r), result)

    def _launched(
        self,
        program: HostProgram | PartedProgram,
        template: Any,
        arguments: tuple[Any, Any],
        *,
        recorded: bool = False,
    ) -> TensorStructure:
        """The results of a program, in the places of a template. ``recorded``: whether tapes record it."""
        flat = [v for v in tf.nest.flatten(arguments) if isinstance(v, tf.Tensor)]
        flat += [outer for outer, _ in program.graph.captures]
        if recorded:
            results = recorded_call(program, flat)
        else:
            with self.scope():
                results = launch_program(program, flat)
        it = iter(results)
        return tf.nest.map_structure(lambda t: next(it) if t is _TENSOR else t, template)

    def _run_inside(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> TensorStructure:
        """Add a function's operations to the program or graph of version 1 that is being made; gives its results."""
        with contextlib.ExitStack() as contexts:
            if not in_program():
                contexts.enter_context(tf.device(self._ipu_device))
            if tf.distribute.get_strategy() is not self:
                contexts.enter_context(self.scope())
            if tf.distribute.in_cross_replica_context():
                contexts.enter_context(self.replica())
            return fn(*args, **kwargs)

    def reduce(
        self, reduce_op: tf.distribute.ReduceOp | str, value: TensorStructure, axis: int | None = None
    ) -> TensorStructure:
        """The sum or mean of a value over the replicas, and over one of its dimensions if ``axis`` says so."""
        return super().reduce(reduce_op, value, axis)

    def _traced(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[HostProgram | PartedProgram, Any]:
        key = _signature(fn, args, kwargs)
        if key not in self._programs:
            named = [v for v in tf.nest.flatten((args, kwargs)) if not isinstance(v, tf.Tensor)]
            self._programs[key] = (*self._trace(fn, args, kwargs), fn, named)
        program, template, *_ = self._programs[key]
        return program, template

    def _trace(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[HostProgram | PartedProgram, Any]:
        name = getattr(fn, "__name__", "program")
        with self.scope(), self.replica():
            graph = IpuGraph(f"ipu_{name}", self.ordinal, automatic=True)

        def inner(value: Any, place: int) -> Any:
            if not isinstance(value, tf.Tensor):
                return value
            _check_type(value, "input")
            return parameter(graph, value, f"argument_{place}")

        flat = [inner(v, i) for i, v in enumerate(tf.nest.flatten((args, kwargs)))]
        own_args, own_kwargs = tf.nest.pack_sequence_as((args, kwargs), flat)
        function, converts = original_of(fn)
        with self.scope(), self.replica():
            outcome = trace(graph, function, own_args, own_kwargs, convert=converts)
        check_host_free(graph)
        tensors = [t for t in tf.nest.flatten(outcome) if isinstance(t, tf.Tensor)]
        for tensor in tensors:
            _check_type(tensor, "output")
        template = tf.nest.map_structure(lambda t: _TENSOR if isinstance(t, tf.Tensor) else t, outcome)
        graph.inputs.extend(t for _, t in graph.captures if all(t is not i for i in graph.inputs))
        return program_of(graph, tensors, graph.control_outputs), template


IPUStrategy = IPUStrategyV1


class DevicePlacement(IPUStrategyV1):
    """Programs of functions that are called in the scope of a device. It is no strategy to TensorFlow and Keras, which
    refuse variables and models of another one than that of the scope.
    """

    @contextlib.contextmanager
    def _in_scope(self) -> Iterator[Any]:
        with named_variables(self.ordinal):
            yield self

    def replica(self) -> IPUReplicaContext:
        """The context of a replica under TensorFlow's own default strategy."""
        return IPUReplicaContext(tf.distribute.get_strategy())


_TENSOR = object()


def _is_function(fn: Callable[..., Any]) -> bool:
    """Whether ``fn`` is a tf.function, or one that was traced for a signature."""
    return any(hasattr(fn, n) for n in ("python_function", "structured_input_signature"))


def _as_tensor(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return tf.constant(value)
    return value


class UnsupportedTypeError(TypeError):
    """An input or output of a program whose type no IPU computes."""


def _signature(fn: object, args: Sequence[object], kwargs: Mapping[str, object]) -> tuple[object, ...]:
    """What tells programs of functions apart: shapes and types of tensors, and which objects the rest are."""
    flat = tf.nest.flatten((args, kwargs))
    marks = tuple((tuple(v.shape), v.dtype) if isinstance(v, tf.Tensor) else id(v) for v in flat)
    return (id(fn), marks, len(tf.nest.flatten(args)), tuple(sorted(kwargs)))


def _no_program(why: str) -> NoProgramError:
    return NoProgramError(
        why,
        hint="Call the function outside of the scope, or let TensorFlow place it: "
        "tf.config.set_soft_device_placement(True).",
    )


def _check_values(graph: FunctionGraph, template: Any) -> None:
    """UnsupportedError for a function that captures other than variables and dense tensors, or returns other than
    tensors and plain values.
    """
    for outer, _ in graph.captures:
        data = getattr(outer, "_handle_data", None)
        if outer.dtype in (tf.variant, tf.string) or (
            outer.dtype == tf.resource and not (data is not None and data.is_set)
        ):
            raise UnsupportedError(
                f"The function takes a {outer.dtype.name} from outside that is no variable."
            )
    for leaf in tf.nest.flatten(template):
        if leaf is not _TENSOR and not isinstance(
            leaf, (int, float, str, bytes, type(None), np.ndarray, np.generic)
        ):
            raise UnsupportedError(f"The function returns a {type(leaf).__name__}.")


def _check_type(tensor: tf.Tensor, role: str) -> None:
    if tensor.dtype in _UNSUPPORTED:
        raise UnsupportedTypeError(
            f"Unsupported data type for {role}: {tensor.dtype.name}. An IPU computes float32, float16, int32 and bool."
        )


class _Iteration:
    """While a strategy's scope is open, ``iter(dataset)`` in that scope gives an iterator for programs on IPUs. Other
    threads, and programs of version 1, iterate as they always do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._plain: Callable[[tf.data.Dataset], Iterator[Any]] | None = None

    @contextlib.contextmanager
    def changed(self) -> Iterator[None]:
        """Let ``iter`` look at the strategy of its thread; as before when the last scope is closed."""
        dataset = private_module("data.ops.dataset_ops").DatasetV2
        with self._lock:
            self._open += 1
            if self._open == 1:
                self._plain = dataset.__iter__
                dataset.__iter__ = _iterating(self._plain)
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if not self._open:
                    dataset.__iter__ = self._plain


def _iterating(plain: Callable[..., Any]) -> Callable[..., Any]:
    def iterate(self: tf.data.Dataset) -> Any:
        strategy = tf.distribute.get_strategy()
        for_ipus = isinstance(strategy, IPUStrategyV1) and strategy._enable_iterators
        if not for_ipus or HOST_ITERATION or not tf.executing_eagerly():
            return plain(self)
        return IPUOwnedIterator(_HostDataset(self, plain))

    iterate.plain = plain  # type: ignore[attr-defined]
    return iterate


_ITERATION = _Iteration()
HOST_ITERATION: list[bool] = []
"""Not empty while Keras iterates over datasets itself."""


class _HostDataset:
    """A dataset whose iteration is the host's own."""

    def __init__(self, dataset: tf.data.Dataset, plain: Callable[..., Any]) -> None:
        self._dataset, self._plain = dataset, plain
        self.element_spec = dataset.element_spec

    def __iter__(self) -> Any:
        return self._plain(self._dataset)
