"""``IPUPipelineEstimator``: an estimator whose model is a pipeline (semantics section 11, rule 9)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from podrun.tensorflow.sdk.estimator_parts import Hooks, ModeKeys, SessionPlan, called_with, takes_argument
from podrun.tensorflow.sdk.gradient_accumulation import GradientAccumulationReductionMethod
from podrun.tensorflow.sdk.ipu_estimator import IPUBaseEstimator, host_metrics
from podrun.tensorflow.sdk.ipu_outfeed_queue import IPUOutfeedQueue
from podrun.tensorflow.sdk.pipelining_ops import run_pipeline


class IPUPipelineEstimatorSpec:
    """What a model function of a pipeline returns. Further keywords go to ``pipelining_ops.pipeline``. ValueError for a
    function that a mode needs and that is not there, and for ``accumulate_outfeed``.
    """

    def __init__(
        self,
        mode: str,
        computational_stages: Sequence[Callable[..., Any]],
        gradient_accumulation_count: int | None = None,
        eval_metrics_fn: Callable[..., Any] | None = None,
        optimizer_function: Callable[..., Any] | None = None,
        device_mapping: Sequence[int] | None = None,
        loss_accumulator_dtype: tf.DType | None = None,
        training_hooks: Hooks | None = None,
        evaluation_hooks: Hooks | None = None,
        prediction_hooks: Hooks | None = None,
        reduction_method: GradientAccumulationReductionMethod | str = GradientAccumulationReductionMethod.SUM,
        **pipeline_op_kwargs: Any,
    ) -> None:
        if mode == ModeKeys.TRAIN and optimizer_function is None:
            raise ValueError("`IPUPipelineEstimatorSpec` must contain `optimizer_function` when training")
        if mode == ModeKeys.EVAL and eval_metrics_fn is None:
            raise ValueError("`IPUPipelineEstimatorSpec` must contain `eval_metrics_fn` when evaluating")
        if mode == ModeKeys.TRAIN and gradient_accumulation_count is None:
            raise ValueError("`gradient_accumulation_count` must be provided in mode TRAIN.")
        if "accumulate_outfeed" in pipeline_op_kwargs:
            raise ValueError("`accumulate_outfeed` is set by the estimator.")
        self.mode, self.stages, self.count = mode, list(computational_stages), gradient_accumulation_count
        self.eval_metrics_fn, self.optimizer_function = eval_metrics_fn, optimizer_function
        self.mapping, self.loss_dtype, self.method = device_mapping, loss_accumulator_dtype, reduction_method
        self.hooks = {
            ModeKeys.TRAIN: training_hooks,
            ModeKeys.EVAL: evaluation_hooks,
            ModeKeys.PREDICT: prediction_hooks,
        }
        self.options = pipeline_op_kwargs


class IPUPipelineEstimator(IPUBaseEstimator):
    """``iterations_per_loop`` counts mini-batches: a multiple of ``gradient_accumulation_count``."""

    def _plan(self, mode: str, input_fn: Callable[..., Any], steps: int | None) -> SessionPlan:
        spec = self._specified(mode)
        infeed, outfeed = self.infeed(mode, input_fn), IPUOutfeedQueue()
        outfeed.configured = True
        count = self._count(spec)
        options = dict(spec.options)
        if mode == ModeKeys.TRAIN:
            options |= {
                "optimizer_function": spec.optimizer_function,
                "outfeed_loss": True,
                "accumulate_outfeed": True,
                "accumulate_outfeed_dtype": spec.loss_dtype or tf.float32,
                "reduction_method": spec.method,
            }

        def net() -> Any:
            return run_pipeline(
                spec.stages,
                gradient_accumulation_count=count,
                repeat_count=self.iterations // count,
                infeed_queue=infeed,
                outfeed_queue=outfeed,
                device_mapping=spec.mapping,
                **options,
            )

        run = self.compiled(net)
        return self._fetched(mode, spec, run, infeed.initializer, outfeed, count)

    def _specified(self, mode: str) -> IPUPipelineEstimatorSpec:
        for name in ("features", "labels"):
            if takes_argument(self._model_fn, name):
                raise ValueError(
                    "model_fn must not have `features` or `labels` arguments: the first stage has them."
                )
        spec = called_with(self._model_fn, mode=mode, params=self._params, config=self.config)
        if not isinstance(spec, IPUPipelineEstimatorSpec):
            raise TypeError("`model_fn` must return `IPUPipelineEstimatorSpec`")
        shards = self.config.ipu_run_config.num_shards
        mapping = spec.mapping if spec.mapping is not None else range(len(spec.stages))
        used = len(set(mapping))
        if not shards / 2 < used <= shards:
            raise ValueError(
                f"This pipeline requires {used} devices, but `IPURunConfig.num_shards` was set to {shards}"
            )
        return spec

    def _count(self, spec: IPUPipelineEstimatorSpec) -> int:
        """Mini-batches in a pass: those of an update, or without updates all of a call."""
        count = spec.count or self.iterations
        if self.iterations < count:
            raise ValueError(
                f"`IPURunConfig.iterations_per_loop` (got {self.iterations}) cannot be less than "
                f"`gradient_accumulation_count` (got {count})"
            )
        if self.iterations % count:
            raise ValueError(
                f"`IPURunConfig.iterations_per_loop` (got {self.iterations}) must be divisible by "
                f"`gradient_accumulation_count` (got {count})"
            )
        return count

    def _fetched(
        self,
        mode: str,
        spec: IPUPipelineEstimatorSpec,
        run: tf.Operation,
        start: tf.Operation,
        outfeed: IPUOutfeedQueue,
        count: int,
    ) -> SessionPlan:
        replicas, hooks = self.config.ipu_run_config.num_replicas, tuple(spec.hooks[mode] or ())
        with tf.control_dependencies([run]):
            left = outfeed.dequeue()
        if mode == ModeKeys.TRAIN:
            loss = tf.reduce_mean(left) / count
            return SessionPlan({"train": loss.op, "loss": loss}, [start], hooks, self.iterations)
        values = [left] if isinstance(left, tf.Tensor) else left
        if mode == ModeKeys.PREDICT:
            if not isinstance(values, dict) and len(values) != 1:
                raise ValueError(
                    "The last pipeline stage must return exactly one prediction tensor, or a dict, when predicting"
                )
            chosen = values if isinstance(values, dict) else values[0]
            return SessionPlan({"predictions": chosen}, [start], hooks, replicas=replicas)
        return self._evaluated(spec, values, [start], hooks)

    def _evaluated(
        self,
        spec: IPUPipelineEstimatorSpec,
        values: tf.Tensor | Sequence[tf.Tensor] | Mapping[str, tf.Tensor],
        first: list[tf.Operation],
        hooks: Hooks,
    ) -> SessionPlan:
        if spec.eval_metrics_fn is None:
            raise ValueError("`IPUPipelineEstimatorSpec` must contain `eval_metrics_fn` when evaluating")
        results = host_metrics(spec.eval_metrics_fn, values)
        if not isinstance(results, dict):
            raise TypeError("The `eval_metrics_fn` must return a dict.")
        if "loss" not in results:
            raise KeyError("The `eval_metrics_fn` must return a dict, which must contain 'loss'")
        loss = results.pop("loss")
        pairs = {key: value for key, value in results.items() if isinstance(value, tuple)}
        plain = {key: value for key, value in results.items() if key not in pairs}
        step = {"loss": tf.reduce_mean(loss), "values": plain, "updates": [u for _, u in pairs.values()]}
        return SessionPlan(step, first, hooks, self.iterations, {key: v for key, (v, _) in pairs.items()})
