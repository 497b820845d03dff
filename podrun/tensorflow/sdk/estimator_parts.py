"""What estimators are made of: ``tf.estimator`` as far as programs for IPUs use it, for TensorFlow has none since 2.16.

The estimators themselves are in `estimator_sessions`, `ipu_estimator` and `ipu_pipeline_estimator`. Source of meaning:
TensorFlow's documentation of ``tf.estimator``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any, TypeAlias

import tensorflow as tf

from podrun.core.quick_dataclass import dataclass

Hooks = Sequence[tf.compat.v1.train.SessionRunHook]
WarmStart: TypeAlias = "str | tf.estimator.WarmStartSettings | None"
"""A checkpoint or its folder from which variables start, or an object that names it."""
MetricOperations = Mapping[str, tuple[tf.Tensor, tf.Operation]]
"""Name of a metric -> its value, and the operation that updates it."""
HostCall = tuple[Callable[..., Any], Sequence[tf.Tensor] | Mapping[str, tf.Tensor]]
"""A function of the host, and the tensors of the program that it gets."""


LOSS_METRIC_KEY = "loss"
"""The name of the loss among the values of an evaluation."""


class ModeKeys:
    """What a model function is called for."""

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


@dataclass(frozen=True)
class EstimatorSpec:
    """What a model function returns. ValueError for a loss or training operation that a mode needs and that is not
    there.
    """

    mode: str
    predictions: tf.Tensor | Mapping[str, tf.Tensor] | None = None
    loss: tf.Tensor | None = None
    train_op: tf.Operation | tf.Tensor | None = None
    eval_metric_ops: MetricOperations | None = None
    export_outputs: Mapping[str, object] | None = None
    training_chief_hooks: Hooks | None = None
    training_hooks: Hooks | None = None
    scaffold: tf.compat.v1.train.Scaffold | None = None
    evaluation_hooks: Hooks | None = None
    prediction_hooks: Hooks | None = None

    def __post_init__(self) -> None:
        check_mode(self.mode, self.loss, self.train_op)
        if self.mode == ModeKeys.PREDICT and self.predictions is None:
            raise ValueError("Missing predictions.")


def check_mode(mode: str, loss: object, train_op: object) -> None:
    """ValueError for what a mode needs and that is not there."""
    if mode == ModeKeys.TRAIN and train_op is None:
        raise ValueError("Missing train_op.")
    if mode in (ModeKeys.TRAIN, ModeKeys.EVAL) and loss is None:
        raise ValueError("Missing loss.")
    if isinstance(loss, tf.Tensor) and loss.shape.num_elements() not in (None, 1):
        raise ValueError(f"Loss must be scalar, given: {loss}")


class EstimatorRunConfig:
    """How an estimator runs: folder, seed, checkpoints, logging. TypeError for an unknown option."""

    _DEFAULTS: Mapping[str, Any] = {
        "model_dir": None,
        "tf_random_seed": 1,
        "save_summary_steps": 100,
        "save_checkpoints_steps": None,
        "save_checkpoints_secs": None,
        "session_config": None,
        "keep_checkpoint_max": 5,
        "keep_checkpoint_every_n_hours": 10000,
        "log_step_count_steps": 100,
        "train_distribute": None,
        "eval_distribute": None,
        "device_fn": None,
        "protocol": None,
        "experimental_distribute": None,
        "experimental_max_worker_delay_secs": None,
        "session_creation_timeout_secs": 7200,
    }

    def __init__(self, model_dir: str | None = None, **options: Any) -> None:
        unknown = sorted(options.keys() - self._DEFAULTS.keys())
        if unknown:
            raise TypeError(f"RunConfig got an unexpected keyword argument {unknown[0]!r}")
        if options.get("save_checkpoints_steps") and options.get("save_checkpoints_secs"):
            raise ValueError("Can not provide both save_checkpoints_steps and save_checkpoints_secs.")
        self.__dict__.update(self._DEFAULTS)
        self.__dict__.update(options, model_dir=model_dir)
        if self.save_checkpoints_steps is None and self.save_checkpoints_secs is None:
            self.save_checkpoints_secs = 600
        self.is_chief, self.num_worker_replicas, self.global_id_in_cluster = True, 1, 0

    model_dir: str | None
    tf_random_seed: int | None
    save_checkpoints_steps: int | None
    save_checkpoints_secs: int | None
    session_config: tf.compat.v1.ConfigProto | None
    keep_checkpoint_max: int

    def replace(self, **options: Any) -> EstimatorRunConfig:
        """A copy with other options."""
        copy = type(self).__new__(type(self))
        copy.__dict__.update(self.__dict__)
        copy.__dict__.update(options)
        return copy


def called_with(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Call ``function`` with those of the named arguments that it takes."""
    try:
        taken = inspect.signature(function).parameters
    except ValueError:
        return function(*args)
    every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return function(*args, **{n: v for n, v in named.items() if every or n in taken})


def check_elements(structure: object, mode: str) -> None:
    """ValueError for elements of a dataset that are a tuple of another length than two."""
    if mode != ModeKeys.PREDICT and isinstance(structure, (list, tuple)) and len(structure) != 2:
        raise ValueError("input_fn should return (features, labels) as a len 2 tuple.")


def takes_argument(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has a parameter of that name."""
    return name in inspect.signature(function).parameters


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What a session of an estimator runs. ``step``: fetched in a call: ``train`` and ``loss``, or ``loss`` and
    ``values``, or ``predictions``; ``first``: operations that start it; ``steps``: steps that a call counts for;
    ``fetched``: metrics that are read after a call; ``replicas``: if more than 1, predictions have an axis for them
    behind that of iterations.
    """

    step: Mapping[str, Any]
    first: Sequence[tf.Operation] = ()
    hooks: Hooks = ()
    steps: int = 1
    fetched: Mapping[str, tf.Tensor] = field(default_factory=dict)
    replicas: int = 1


class StartHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Runs operations when a session is made."""

    def __init__(self, operations: Sequence[tf.Operation]) -> None:
        super().__init__()
        self._operations = list(operations)

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Run the operations in the new session."""
        session.run(self._operations)


class StepsHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Lets the global step grow by ``steps`` after each call. ``first``: the step when the session was made."""

    def __init__(self, step: tf.Variable, steps: int) -> None:
        super().__init__()
        self._step, self._grown = step, step.assign_add(steps, read_value=False) if steps else tf.no_op()
        self.first = 0

    def after_create_session(self, session: tf.compat.v1.Session, coord: tf.train.Coordinator) -> None:
        """Note the step."""
        self.first = int(session.run(self._step))

    def after_run(
        self,
        run_context: tf.compat.v1.train.SessionRunContext,
        run_values: tf.compat.v1.train.SessionRunValues,
    ) -> None:
        """Count the call."""
        run_context.session.run(self._grown)


class EndHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Reads tensors when a session ends, without a run that other hooks would see."""

    def __init__(self, fetched: Mapping[str, tf.Tensor]) -> None:
        super().__init__()
        self._fetched = dict(fetched)
        self.values: dict[str, Any] = {}

    def end(self, session: tf.compat.v1.Session) -> None:
        """Read the tensors."""
        self.values = session.run(self._fetched)


class StopHook(tf.compat.v1.train.SessionRunHook):  # type: ignore[misc]
    """Ends a session when the global step, which may grow by several in a call, reaches ``last``."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self._last = last
        self._step: tf.Variable | None = None

    def begin(self) -> None:
        """Note the step's variable."""
        self._step = tf.compat.v1.train.get_global_step()

    def after_run(
        self,
        run_context: tf.compat.v1.train.SessionRunContext,
        run_values: tf.compat.v1.train.SessionRunValues,
    ) -> None:
        """Look at the step."""
        if int(run_context.session.run(self._step)) >= self._last:
            run_context.request_stop()
