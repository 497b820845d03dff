"""``IPUEstimator``: a model function that is trained, evaluated and run on IPUs (semantics section 11).

A call of the session runs ``iterations_per_loop`` iterations of a loop on the device. The training loss is the mean
over these and over replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass
from podrun.tensorflow.capture.markers import marked
from podrun.tensorflow.capture.program_graphs import FunctionGraph
from podrun.tensorflow.execution.device_table import DEVICES
from podrun.tensorflow.graph.importer import function_graph
from podrun.tensorflow.sdk import ipu_compiler
from podrun.tensorflow.sdk.estimator_parts import (
    Hooks,
    HostCall,
    MetricOperations,
    ModeKeys,
    SessionPlan,
    WarmStart,
    called_with,
    check_elements,
    check_mode,
    takes_argument,
)
from podrun.tensorflow.sdk.estimator_sessions import BaseEstimator
from podrun.tensorflow.sdk.ipu_infeed_queue import IPUInfeedQueue
from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedQueue
from podrun.tensorflow.sdk.ipu_run_config import RunConfig
from podrun.tensorflow.sdk.loops import repeat_loop
from podrun.tensorflow.sdk.scopes import ipu_scope


@dataclass(frozen=True)
class IPUEstimatorSpec:
    """What a model function for IPUs returns: as ``EstimatorSpec``, with ``eval_metrics`` and ``host_call``, pairs of a
    function of the host and tensors that it is called_with with.
    """

    mode: str
    predictions: tf.Tensor | Mapping[str, tf.Tensor] | None = None
    loss: tf.Tensor | None = None
    train_op: tf.Operation | tf.Tensor | None = None
    eval_metric_ops: MetricOperations | None = None
    eval_metrics: HostCall | None = None
    host_call: HostCall | None = None
    training_hooks: Hooks | None = None
    evaluation_hooks: Hooks | None = None
    prediction_hooks: Hooks | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode, self.loss, self.train_op)
        for name in ("host_call", "eval_metrics"):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, tuple) or len(value) != 2 or not callable(value[0]):
                raise ValueError(f"`{name}` must be a tuple of a function and its tensors")
            allowed, kinds = (
                ((list, tuple, dict), "list or dict") if name == "eval_metrics" else ((list, tuple), "list")
            )
            if not isinstance(value[1], allowed):
                raise TypeError(f"second element in `{name}` must be a {kinds}, not {type(value[1])}")


class IPUBaseEstimator(BaseEstimator):
    """What estimators for IPUs share: the dataset, the queues, the program of a call."""

    config_class = RunConfig
    counts_evaluation = True

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: WarmStart = None,
    ) -> None:
        if not isinstance(config, RunConfig):
            raise ValueError("`config` must be provided with type `ipu_run_config.RunConfig`")
        super().__init__(model_fn, model_dir, config, params, warm_start_from)

    @property
    def iterations(self) -> int:
        """Iterations in a call."""
        return int(self.config.ipu_run_config.iterations_per_loop)

    def _checked_steps(self, steps: int | None) -> None:
        if steps is not None and steps % self.iterations:
            raise ValueError(
                f"steps ({steps}) must be a multiple of iterations_per_loop ({self.iterations})."
            )

    def train(self, *args: Any, **kwargs: Any) -> BaseEstimator:
        """Train. ValueError for steps that are no multiple of ``iterations_per_loop``; ``max_steps`` is rounded up."""
        self._checked_steps(kwargs.get("steps", args[2] if len(args) > 2 else None))
        return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Evaluate. ValueError for steps that are no multiple of ``iterations_per_loop``."""
        self._checked_steps(kwargs.get("steps", args[1] if len(args) > 1 else None))
        return super().evaluate(*args, **kwargs)

    def infeed(self, mode: str, input_fn: Callable[..., Any]) -> IPUInfeedQueue:
        """The queue of the data. ValueError if ``input_fn`` gives no Dataset."""
        with tf.device("cpu"):
            data = called_with(input_fn, params=self._params, config=self.config, mode=mode)
        if not isinstance(data, tf.data.Dataset):
            raise ValueError("input_fn must return Dataset")
        check_elements(data.element_spec, mode)
        run_config = self.config.ipu_run_config
        run_config.configure()
        return IPUInfeedQueue(data, run_config.ordinal, run_config.prefetch_depth)

    def compiled(self, net: Callable[[], Any]) -> tf.Operation:
        """The operation that runs ``net`` on the device."""
        with ipu_scope(f"/device:IPU:{self.config.ipu_run_config.ordinal}"):
            run = ipu_compiler.compile(net)
        return run[0].op if isinstance(run, list) else run


class IPUEstimator(IPUBaseEstimator):
    """A model function that is trained, evaluated and run on IPUs. ``train_batch_size`` and its like: of all replicas
    and instances together; the model and input functions get ``params['batch_size']``, that of one replica.
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: WarmStart = None,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
    ) -> None:
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        self._batch_sizes = {
            ModeKeys.TRAIN: train_batch_size,
            ModeKeys.EVAL: eval_batch_size,
            ModeKeys.PREDICT: predict_batch_size,
        }
        self._sized = any(size is not None for size in self._batch_sizes.values())
        if self._sized and "batch_size" in self._params:
            raise ValueError("batch_size cannot be passed in params when a batch size argument is passed")
        replicas = self.config.ipu_run_config.num_replicas
        names = ("train_batch_size", "eval_batch_size", "predict_batch_size")
        for name, size in zip(names, self._batch_sizes.values(), strict=True):
            if size is not None and size < 1:
                raise ValueError(f"{name} (got {size}) must be positive")
            if size is not None and size % replicas:
                raise ValueError(
                    f"{name} (got {size}) must be divisible by num_workers * num_replicas (1 * {replicas})"
                )

    def _set_batch_size(self, mode: str, input_fn: Callable[..., Any]) -> None:
        size, replicas = self._batch_sizes[mode], self.config.ipu_run_config.num_replicas
        if self._sized:
            self._params.pop("batch_size", None)
        if size is None:
            return
        if not takes_argument(input_fn, "params"):
            raise ValueError("input_fn must have params argument to receive params['batch_size']")
        self._params["batch_size"] = size // replicas

    def _plan(self, mode: str, input_fn: Callable[..., Any], steps: int | None) -> SessionPlan:
        self._set_batch_size(mode, input_fn)
        infeed = self.infeed(mode, input_fn)
        call = _DeviceCall(self, mode)
        outer = self

        def net() -> Any:
            return repeat_loop(outer.iterations, call.body, infeed_queue=infeed)

        with tf.compat.v1.variable_scope(tf.compat.v1.get_variable_scope(), use_resource=True):
            run = self.compiled(net)
        if mode == ModeKeys.TRAIN:
            call.check_step_alone()
        if mode == ModeKeys.TRAIN and self.config.ipu_run_config.num_replicas > 1:
            call.check_replicated()
        return call.plan(run, infeed, self.iterations)


class _DeviceCall:
    """One call of the device: the loop's body, and what the host takes from its outfeeds."""

    def __init__(self, estimator: IPUEstimator, mode: str) -> None:
        self.estimator, self.mode = estimator, mode
        self.losses, self.others = IPUOutfeedQueue(), IPUOutfeedQueue()
        self.losses.configured = self.others.configured = True
        self.spec: IPUEstimatorSpec
        self.program: FunctionGraph
        """The graph of the body; both are there once it is traced."""

    def body(self, *args: Any, **kwargs: Any) -> tf.Operation:
        """One iteration: the model function, and what goes out."""
        spec = self.spec = self._called(args, kwargs)
        self.program = tf.compat.v1.get_default_graph()
        if self.mode == ModeKeys.PREDICT:
            return self.others.enqueue(spec.predictions)
        check_mode(self.mode, spec.loss, spec.train_op)
        effects = [self._leaving(spec)]
        if self.mode == ModeKeys.TRAIN:
            with tf.control_dependencies([_operation(spec.train_op)]):
                effects.append(self.losses.enqueue(tf.cast(spec.loss, tf.float32)))
        else:
            effects.append(self.losses.enqueue(tf.cast(spec.loss, tf.float32)))
        return tf.group(*[e for e in effects if e is not None])

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> IPUEstimatorSpec:
        if args and kwargs:
            raise ValueError("Invalid dataset with both tuple and keywords")
        if len(args) > 2:
            raise ValueError("The dataset must give features, or features and labels.")
        features, labels = (kwargs or args[0]), (args[1] if len(args) == 2 else None)
        model_fn = self.estimator._model_fn
        named = {"mode": self.mode, "params": self.estimator._params, "config": self.estimator.config}
        if takes_argument(model_fn, "labels"):
            named["labels"] = None if self.mode == ModeKeys.PREDICT else labels
        elif labels is not None and self.mode != ModeKeys.PREDICT:
            raise ValueError("model_fn does not take labels, but input_fn returns labels.")
        spec: IPUEstimatorSpec = called_with(model_fn, features, **named)
        if not hasattr(spec, "train_op"):
            raise ValueError("model_fn must return an IPUEstimatorSpec or EstimatorSpec.")
        return spec

    def _leaving(self, spec: IPUEstimatorSpec) -> tf.Operation | None:
        """What else goes out: the tensors of a host call, or of metrics."""
        host_call = getattr(spec, "host_call", None)
        if self.mode == ModeKeys.TRAIN:
            if host_call is None:
                return None
            if self.estimator.iterations > 1:
                raise ValueError("host_call is not allowed for iterations_per_loop > 1")
            return self.others.enqueue(tuple(host_call[1])) if host_call[1] else None
        metrics, operations = getattr(spec, "eval_metrics", None), spec.eval_metric_ops or {}
        if not metrics and not operations:
            raise ValueError(
                "EstimatorSpec must contain either eval_metric_ops or eval_metrics when evaluating"
            )
        if metrics and operations:
            raise ValueError("EstimatorSpec cannot contain both eval_metric_ops and eval_metrics")
        if metrics is not None:
            return self.others.enqueue(
                dict(metrics[1]) if isinstance(metrics[1], dict) else tuple(metrics[1])
            )
        updates = {key: tf.identity(update) for key, (_, update) in operations.items()}
        return self.others.enqueue(updates)

    def check_step_alone(self) -> None:
        """ValueError if the model itself lets the global step grow, which is the estimator's."""
        handle = tf.compat.v1.train.get_global_step().handle
        for operation in self.program.get_operations():
            if operation.type == "AssignAddVariableOp" and _outside(operation.inputs[0]) is handle:
                raise ValueError(
                    "Illegal increment of the `global_step` variable in the `model_fn`: the estimator lets it grow. "
                    "Leave the step out of `Optimizer.minimize()`."
                )

    def check_replicated(self) -> None:
        """ValueError unless the model reduces something over the replicas."""
        graphs, kinds = [self.program], set()
        while graphs:
            for operation in graphs.pop().get_operations():
                facts = marked(operation)
                kinds |= set() if facts is None else {facts["kind"]}
                if operation.type in ("If", "StatelessIf"):
                    names = [operation.get_attr(name).name for name in ("then_branch", "else_branch")]
                    graphs += [function_graph(operation.graph, name) for name in names]
        if not any(kind.startswith(("cross_replica", "reduce_scatter")) for kind in kinds):
            raise ValueError(
                "This is not a valid replicated training graph because no cross-replica operations were found: use "
                "ipu.optimizers.CrossReplicaOptimizer."
            )

    def plan(self, run: tf.Operation, infeed: IPUInfeedQueue, iterations: int) -> SessionPlan:
        """What a session runs."""
        first, spec = [infeed.initializer], self.spec
        hooks = tuple(getattr(spec, f"{_HOOKS[self.mode]}_hooks", None) or ())
        replicas = self.estimator.config.ipu_run_config.num_replicas
        with tf.control_dependencies([run]):
            if self.mode == ModeKeys.PREDICT:
                return SessionPlan({"predictions": _dequeued(self.others)}, first, hooks, replicas=replicas)
            loss = tf.reduce_mean(_dequeued(self.losses))
            if self.mode == ModeKeys.TRAIN:
                train = tf.group(loss, *self._host_call())
                return SessionPlan({"train": train, "loss": loss}, first, hooks, iterations)
            left = _dequeued(self.others)
        metrics = getattr(spec, "eval_metrics", None)
        if metrics is None:
            values = {
                key: tf.reduce_mean(value[-1]) for key, value in left.items()
            }  # Over replicas, as the SDK.
            return SessionPlan({"loss": loss, "values": values}, first, hooks, iterations)
        results = host_metrics(metrics[0], left)
        updates = [update for _, update in results.values()]
        step = {"loss": loss, "values": {}, "updates": updates}
        return SessionPlan(step, first, hooks, iterations, {key: v for key, (v, _) in results.items()})

    def _host_call(self) -> list[Any]:
        host_call = getattr(self.spec, "host_call", None)
        if host_call is None:
            return []
        with tf.device("/device:CPU:*"):
            result = host_call[0](*([value[0] for value in _dequeued(self.others)] if host_call[1] else ()))
        if not isinstance(result, (tf.Tensor, tf.Variable, tf.Operation)):
            raise TypeError(f"`host_call` return value must be Operation or Tensor, given: {result}")
        return [result]


def _dequeued(queue: IPUOutfeedQueue) -> Any:
    """What a run gave to a queue. A run that only compiles gives nothing, in whose place there are zeros."""
    if DEVICES.connection != "PRE_COMPILE":
        return queue.dequeue()
    return tf.nest.map_structure(
        lambda t: tf.concat([t, tf.zeros([1, *t.shape[1:]], t.dtype)], 0), queue.dequeue()
    )


def host_metrics(
    function: Callable[..., Any], left: tf.Tensor | Sequence[tf.Tensor] | Mapping[str, tf.Tensor]
) -> dict[str, Any]:
    """Metrics of the host, as ``function`` returns them: name -> value and update. It is called with what an outfeed
    holds, ``[iterations, ...]``, or ``[iterations, replicas, ...]`` of several replicas: by name if ``left`` is a
    mapping, otherwise in order.
    """
    results: dict[str, Any] = function(**left) if isinstance(left, Mapping) else function(*left)
    return results


_HOOKS = {ModeKeys.TRAIN: "training", ModeKeys.EVAL: "evaluation", ModeKeys.PREDICT: "prediction"}


def _outside(tensor: tf.Tensor) -> tf.Tensor:
    """What a tensor of a program stands for outside of all programs."""
    graph = tensor.graph
    while hasattr(graph, "captures"):
        known = {id(inner): outer for outer, inner in graph.captures}
        if id(tensor) not in known:
            return tensor
        tensor = known[id(tensor)]
        graph = getattr(tensor, "graph", None)
    return tensor


def _operation(value: tf.Tensor | tf.Operation) -> tf.Operation:
    return getattr(value, "op", value)
