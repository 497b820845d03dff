"""Estimators as sessions: a model function, a folder with checkpoints, and what trains, evaluates and predicts.

`BaseEstimator` is what all share; `HostEstimator` (``tf.estimator.Estimator``) runs on the host.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from podrun.tensorflow.sdk.estimator_parts import (
    EndHook,
    EstimatorRunConfig,
    Hooks,
    ModeKeys,
    SessionPlan,
    StartHook,
    StepsHook,
    StopHook,
    WarmStart,
    called_with,
    check_elements,
    takes_argument,
)

_v1 = tf.compat.v1


class BaseEstimator:
    """A model function with a folder. Subclasses build what sessions run (`_plan`)."""

    config_class: type[EstimatorRunConfig] = EstimatorRunConfig

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | None = None,
        config: EstimatorRunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: WarmStart = None,
    ) -> None:
        if model_fn is None:
            raise ValueError("model_fn must be provided to Estimator.")
        self._model_fn, self._params, self._warm_start = model_fn, dict(params or {}), warm_start_from
        self.config: Any = config if config is not None else self.config_class()
        self.model_dir = model_dir or self.config.model_dir or tempfile.mkdtemp()

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the parameters."""
        return dict(self._params)

    def latest_checkpoint(self) -> str | None:
        """The newest checkpoint of the folder; None if there is none."""
        checkpoint: str | None = tf.train.latest_checkpoint(self.model_dir)
        return checkpoint

    def get_variable_names(self) -> list[str]:
        """The variables of the newest checkpoint."""
        return [name for name, _ in tf.train.list_variables(self._checkpoint(None))]

    def get_variable_value(self, name: str) -> np.ndarray:
        """A variable's value in the newest checkpoint."""
        return np.asarray(tf.train.load_variable(self._checkpoint(None), name))

    def _checkpoint(self, path: str | None) -> str:
        chosen = path or self.latest_checkpoint()
        if chosen is None:
            raise ValueError(f"Could not find trained model in model_dir: {self.model_dir}.")
        return chosen

    def _found_checkpoint(self, path: str | None, purpose: str) -> str | None:
        """A checkpoint to start from; None, with a line in the log, if the folder has none."""
        chosen = path or self.latest_checkpoint()
        if chosen is None:
            text = "Could not find trained model in model_dir: %s, running initialization to %s."
            _v1.logging.info(text, self.model_dir, purpose)
        return chosen

    counts_evaluation = False
    """Whether the global step grows while a model is evaluated."""

    def _plan(self, mode: str, input_fn: Callable[..., Any], steps: int | None) -> SessionPlan:
        raise NotImplementedError

    # --- Training -------------------------------------------------------------------------------------------------

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Hooks | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] | None = None,
    ) -> BaseEstimator:
        """Train for ``steps`` more steps, or until ``max_steps``; without either until the data end."""
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps.")
        if max_steps is not None:
            done = self._global_step()
            if done >= max_steps:
                return self
            steps = max_steps - done
        with tf.Graph().as_default():
            _v1.set_random_seed(self.config.tf_random_seed)
            step = _global_step()
            plan = self._plan(ModeKeys.TRAIN, input_fn, steps)
            _v1.summary.scalar("loss", plan.step["loss"])
            self._warm_up()
            with tf.control_dependencies([plan.step["train"]]):
                advance = step.assign_add(plan.steps, read_value=False)
            all_hooks = [StartHook(plan.first), *plan.hooks, *(hooks or ())]
            if steps is not None:
                all_hooks.append(StopHook(self._global_step() + steps))
            with _v1.train.MonitoredTrainingSession(
                checkpoint_dir=self.model_dir,
                hooks=all_hooks,
                chief_only_hooks=self._saving(saving_listeners, plan.steps),
                save_checkpoint_secs=None,
                save_checkpoint_steps=None,
                save_summaries_steps=self.config.save_summary_steps,
                save_summaries_secs=None,
                log_step_count_steps=self.config.log_step_count_steps,
                config=self.config.session_config,
            ) as session:
                loss = None
                while not session.should_stop():
                    _, loss = session.run([advance, plan.step["loss"]])
        if loss is not None:
            _v1.logging.info("Loss for final step: %s.", loss)
        return self

    def _global_step(self) -> int:
        checkpoint = self.latest_checkpoint()
        return 0 if checkpoint is None else int(tf.train.load_variable(checkpoint, "global_step"))

    def _saving(
        self, listeners: Sequence[tf.compat.v1.train.CheckpointSaverListener] | None, steps_of_call: int
    ) -> list[tf.compat.v1.train.SessionRunHook]:
        saver = _v1.train.Saver(max_to_keep=self.config.keep_checkpoint_max, save_relative_paths=True)
        _v1.add_to_collection(_v1.GraphKeys.SAVERS, saver)
        hook = _v1.train.CheckpointSaverHook(
            self.model_dir,
            save_secs=self.config.save_checkpoints_secs,
            save_steps=self.config.save_checkpoints_steps,
            saver=saver,
            listeners=listeners,
        )
        hook._set_steps_per_run(max(steps_of_call, 1))
        return [hook]

    def _warm_up(self) -> None:
        """Start variables from another checkpoint, unless this folder has one."""
        if self._warm_start is None or self.latest_checkpoint() is not None:
            return
        source = getattr(self._warm_start, "ckpt_to_initialize_from", self._warm_start)
        path = tf.train.latest_checkpoint(source) if os.path.isdir(source) else source
        there = {name for name, _ in tf.train.list_variables(path)} - {"global_step"}
        started = {v.op.name: v for v in _v1.global_variables() if v.op.name in there}
        _v1.train.init_from_checkpoint(path, started)

    # --- Evaluation and prediction ----------------------------------------------------------------------------------

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Hooks | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """The mean loss, the metrics and the step of a checkpoint, or of variables that are initialized where there is
        none. Without ``steps`` until the data end.
        """
        path = self._found_checkpoint(checkpoint_path, "evaluate")
        with tf.Graph().as_default():
            _v1.set_random_seed(self.config.tf_random_seed)
            step = _global_step()
            plan = self._plan(ModeKeys.EVAL, input_fn, steps)
            counted = StepsHook(step, plan.steps if self.counts_evaluation else 0)
            ended = EndHook(plan.fetched)
            losses: list[np.ndarray] = []
            values: dict[str, np.ndarray] = {}
            calls = None if steps is None else steps // plan.steps
            with self._session(path, plan, [*(hooks or ()), counted, ended]) as session:
                while calls is None or len(losses) < calls:
                    try:
                        outcome = session.run(plan.step)
                        losses.append(outcome["loss"])
                        values = outcome["values"]
                    except tf.errors.OutOfRangeError:
                        break
        loss = np.float32(np.mean(losses))
        return {**values, **ended.values, "loss": loss, "global_step": counted.first}

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Collection[str] | None = None,
        hooks: Hooks | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
        num_predictions: int | None = None,
    ) -> Iterator[Any]:
        """The predictions, example by example, or batch by batch, of all replicas together: of a checkpoint, or of
        variables that are initialized where there is none.
        """
        path = self._found_checkpoint(checkpoint_path, "predict")
        count = 0
        with tf.Graph().as_default():
            _v1.set_random_seed(self.config.tf_random_seed)
            _global_step()
            plan = self._plan(ModeKeys.PREDICT, input_fn, num_predictions)
            with self._session(path, plan, hooks) as session:
                while True:
                    try:
                        batches = session.run(plan.step["predictions"])
                    except tf.errors.OutOfRangeError:
                        return
                    if yield_single_examples and plan.replicas > 1:
                        batches = tf.nest.map_structure(lambda b: b.reshape(-1, *b.shape[2:]), batches)
                    for item in _examples(batches, predict_keys, single=yield_single_examples):
                        yield item
                        count += 1
                        if num_predictions is not None and count >= num_predictions:
                            return

    def _session(
        self, path: str | None, plan: SessionPlan, hooks: Hooks | None
    ) -> tf.compat.v1.train.MonitoredSession:
        scaffold = _v1.train.Scaffold()
        return _v1.train.MonitoredSession(
            session_creator=_v1.train.ChiefSessionCreator(
                scaffold, checkpoint_filename_with_path=path, config=self.config.session_config
            ),
            hooks=[StartHook(plan.first), *plan.hooks, *(hooks or ())],
        )


def _global_step() -> tf.Variable:
    """The graph's global step: a resource on the host, which programs may read."""
    with _v1.variable_scope(_v1.get_variable_scope(), use_resource=True), tf.device("/device:CPU:0"):
        return _v1.train.get_or_create_global_step()


def _examples(
    batches: np.ndarray | Mapping[str, np.ndarray], keys: Collection[str] | None, *, single: bool
) -> Iterator[Any]:
    """Predictions ``[batches, batch, ...]`` one by one. A dictionary gives dictionaries."""
    if isinstance(batches, Mapping):
        chosen = {k: v for k, v in batches.items() if keys is None or k in keys}
        columns = [list(_rows(value, single=single)) for value in chosen.values()]
        for row in zip(*columns, strict=True):
            yield dict(zip(chosen, row, strict=True))
        return
    yield from _rows(batches, single=single)


def _rows(value: np.ndarray, *, single: bool) -> Iterator[Any]:
    for batch in value:
        if single and np.ndim(batch):
            yield from batch
        else:
            yield batch


class HostEstimator(BaseEstimator):
    """``tf.estimator.Estimator``: trains, evaluates and predicts on the host."""

    def _plan(self, mode: str, input_fn: Callable[..., Any], steps: int | None) -> SessionPlan:
        data = called_with(input_fn, params=self._params, config=self.config, mode=mode)
        first: list[tf.Operation] = []
        if isinstance(data, tf.data.Dataset):
            check_elements(data.element_spec, mode)
            iterator = _v1.data.make_initializable_iterator(data)
            first, data = [iterator.initializer], iterator.get_next()
        features, labels = data if isinstance(data, tuple) and len(data) == 2 else (data, None)
        if mode == ModeKeys.PREDICT:
            features, labels = (data[0] if isinstance(data, tuple) else data), None
        elif labels is not None and not takes_argument(self._model_fn, "labels"):
            raise ValueError("model_fn does not take labels, but input_fn returns labels.")
        named = {"mode": mode, "params": self._params, "config": self.config}
        named |= {"labels": labels} if takes_argument(self._model_fn, "labels") else {}
        spec = called_with(self._model_fn, features, **named)
        loss = None if spec.loss is None else tf.reshape(spec.loss, [])
        if mode == ModeKeys.TRAIN:
            hooks = tuple(spec.training_hooks or ())
            # The model's own operation counts the steps.
            return SessionPlan({"train": spec.train_op, "loss": loss}, first, hooks, 0)
        if mode == ModeKeys.EVAL:
            metrics = spec.eval_metric_ops or {}
            updates = [update for _, update in metrics.values()]
            values = {key: value for key, (value, _) in metrics.items()}
            fetched: dict[str, Any] = {"loss": loss, "values": {}, "updates": updates}
            return SessionPlan(fetched, first, tuple(spec.evaluation_hooks or ()), 1, values)
        predictions = tf.nest.map_structure(lambda t: t[None], spec.predictions)
        return SessionPlan({"predictions": predictions}, first, tuple(spec.prediction_hooks or ()))
