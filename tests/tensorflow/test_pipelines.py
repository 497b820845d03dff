"""Pipelines of version 1 (semantics section 4) against NumPy in float64, and what the tile model reports of them.

Rules: 4.2 one update of N mini-batches, which all see the weights of its start; 4.3 counts; 4.7 reductions; 4.8 what
leaves by the outfeed; 4.9 captures; 6.2 replicas. Weights agree within 1e-6: float32 against float64.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.report.__main__ import profile_in_file

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
POINTS = np.random.RandomState(0).rand(64, 8, 4).astype(np.float32)
TARGETS = POINTS.sum(-1, keepdims=True)
FIRST = np.random.RandomState(1).rand(4, 4).astype(np.float32)
SECOND = np.random.RandomState(2).rand(4, 1).astype(np.float32)
UPDATES = 3


def _run(ipu: Any, replicas: int = 1, last: Callable[..., Any] | None = None, **options: Any) -> Any:
    """What the outfeed gives and the weights, of a pipeline in two stages with momentum."""
    import tensorflow.compat.v1 as tf

    ops = ipu.pipelining_ops
    with tf.Graph().as_default():
        infeed = ipu.ipu_infeed_queue.IPUInfeedQueue(
            tf.data.Dataset.from_tensor_slices((POINTS, TARGETS)).repeat()
        )
        outfeed = ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def first(x: Any, y: Any) -> Any:
            return tf.tanh(x @ tf.get_variable("first", initializer=FIRST)), y

        def second(h: Any, y: Any) -> Any:
            return tf.reduce_mean((h @ tf.get_variable("second", initializer=SECOND) - y) ** 2)

        def optimizer(loss: Any, *_: Any) -> Any:
            opt = tf.train.MomentumOptimizer(0.05, 0.9)
            return ops.OptimizerFunctionOutput(ipu.optimizers.CrossReplicaOptimizer(opt), loss)

        def net() -> Any:
            stages = [first, last or second]
            given = {
                "infeed_queue": infeed,
                "outfeed_queue": outfeed,
                "optimizer_function": optimizer,
                **options,
            }
            return ops.pipeline(stages, repeat_count=UPDATES, **given)

        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 2 * replicas
        config.configure_ipu_system()
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(net)
        dequeued = outfeed.dequeue()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(infeed.initializer)
            session.run(run)
            return session.run(dequeued), session.run(tf.global_variables()[:2])


def _expected(reduction: str, count: int, replicas: int) -> tuple[np.ndarray, list[np.ndarray]]:
    weights, speed = [FIRST.astype(float), SECOND.astype(float)], [0.0, 0.0]
    losses, element = [], 0
    for _ in range(UPDATES):
        total: list[Any] = [0.0, 0.0]
        for k in range(count):
            gradients: list[Any] = [0.0, 0.0]
            row = []
            for _ in range(replicas):
                x, y = POINTS[element % 64].astype(float), TARGETS[element % 64]
                element += 1
                hidden = np.tanh(x @ weights[0])
                error = hidden @ weights[1] - y
                row.append((error**2).mean())
                delta = 2 * error / error.size / replicas
                gradients[0] = gradients[0] + x.T @ ((delta @ weights[1].T) * (1 - hidden**2))
                gradients[1] = gradients[1] + hidden.T @ delta
            losses.append(row)
            for i, g in enumerate(gradients):
                total[i] = {
                    "SUM": total[i] + g,
                    "MEAN": total[i] + g / count,
                    "RUNNING_MEAN": total[i] * k / (k + 1) + g / (k + 1),
                }[reduction]
        speed = [0.9 * s + t for s, t in zip(speed, total, strict=True)]
        weights = [w - 0.05 * s for w, s in zip(weights, speed, strict=True)]
    return np.array(losses), weights


@pytest.mark.parametrize(
    ("reduction", "schedule", "count", "replicas"),
    [("SUM", "Grouped", 4, 1), ("MEAN", "Interleaved", 6, 2), ("RUNNING_MEAN", "Sequential", 3, 2)],
)
def test_updates_are_those_of_accumulated_gradients(
    ipu: Any, reduction: str, schedule: str, count: int, replicas: int
) -> None:
    chosen = ipu.pipelining_ops.PipelineSchedule[schedule]
    given, weights = _run(
        ipu,
        replicas,
        gradient_accumulation_count=count,
        pipeline_schedule=chosen,
        reduction_method=reduction,
    )
    losses, expected = _expected(reduction, count, replicas)
    assert isinstance(given, list)  # Rule 4.8: a list even if one.
    assert given[0].shape == ((UPDATES * count,) if replicas == 1 else (UPDATES * count, replicas))
    np.testing.assert_allclose(given[0].reshape(losses.shape), losses, atol=1e-6)
    for got, want in zip(weights, expected, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_loss_goes_out_alone_and_sums_go_out_once_an_update(ipu: Any) -> None:
    losses, _ = _expected("SUM", 4, 1)
    alone, _ = _run(ipu, gradient_accumulation_count=4, outfeed_loss=True)
    np.testing.assert_allclose(alone, losses[:, 0], atol=1e-6)
    (summed,), _ = _run(ipu, gradient_accumulation_count=4, accumulate_outfeed=True)
    np.testing.assert_allclose(summed, losses.reshape(UPDATES, 4).sum(1), atol=1e-5)


def test_counts_are_multiples_of_the_overlap(ipu: Any) -> None:
    import tensorflow as tf

    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 4"):
        _run(ipu, gradient_accumulation_count=6)
    with pytest.raises(ValueError, match="must be a positive number"):
        _run(ipu, gradient_accumulation_count=0)


def test_tensors_from_outside_are_refused(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    def last(h: Any, y: Any) -> Any:
        with tf.init_scope():
            outer = tf.random.uniform([])
        return tf.reduce_mean((h - y) ** 2) * outer * tf.get_variable("w", initializer=1.0)

    with pytest.raises(ValueError, match="Trying to capture the tensor"):
        _run(ipu, last=last, gradient_accumulation_count=4)


def test_the_tile_model_reports_stages_on_their_ipus(
    ipu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"autoReport.all": "true", "autoReport.directory": str(tmp_path)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(options))
    _run(ipu, gradient_accumulation_count=8)
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("tf_report__")
    profile = profile_in_file(folder / "profile.json")
    assert profile.pipelined
    assert profile.accumulation_factor == 8
    assert {stage.ipu for stage in profile.stages} == {0, 1}
    assert len(profile.ipu_memory) == 2


def _accumulated(ipu: Any, folder: Path, **options: Any) -> tuple[np.ndarray, Any]:
    """The losses and the memory of IPU 0, of two replicas that train a weight of 64 x 64 with Adam."""
    import tensorflow.compat.v1 as tf

    with tf.Graph().as_default():
        config = ipu.config.IPUConfig()
        config.auto_select_ipus = 2
        config.compilation_poplar_options = {"autoReport.all": "true", "autoReport.directory": str(folder)}
        config.configure_ipu_system()
        data = tf.data.Dataset.from_tensors(np.ones([8, 64], np.float32)).repeat()
        infeed, outfeed = ipu.ipu_infeed_queue.IPUInfeedQueue(data), ipu.ipu_outfeed_queue.IPUOutfeedQueue()

        def body(x: Any) -> Any:
            weight = tf.get_variable("w", initializer=np.ones([64, 64], np.float32), use_resource=True)
            loss = tf.reduce_mean(tf.square(x @ weight))
            kind = ipu.optimizers.CrossReplicaGradientAccumulationOptimizerV2
            return outfeed.enqueue(loss), kind(tf.train.AdamOptimizer(0.1), 4, **options).minimize(loss)

        with ipu.scopes.ipu_scope("/device:IPU:0"):
            run = ipu.ipu_compiler.compile(lambda: ipu.loops.repeat(8, body, [], infeed))
        dequeued = outfeed.dequeue()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            session.run(infeed.initializer)
            session.run(run)
            losses = session.run(dequeued)
    (report,) = folder.iterdir()
    return losses, profile_in_file(report / "profile.json").ipu_memory[0].memory


def test_state_of_an_optimizer_leaves_the_tiles(ipu: Any, tmp_path: Path) -> None:
    """Adam's slots are two copies of the weight: on the tiles, in streaming memory, or half of them there on each of
    two replicas, which then update half of the weight.
    """
    slots = 2 * 64 * 64 * 4
    plain, whole = _accumulated(ipu, tmp_path / "plain")
    offloaded, streamed = _accumulated(ipu, tmp_path / "offloaded", offload_weight_update_variables=True)
    sharded, parts = _accumulated(ipu, tmp_path / "sharded", replicated_optimizer_state_sharding=True)
    np.testing.assert_array_equal(plain, offloaded)
    np.testing.assert_array_equal(plain, sharded)
    assert whole.always_live_bytes - streamed.always_live_bytes == slots
    assert whole.always_live_bytes - parts.always_live_bytes == slots
    assert (streamed.over_time_bytes[-1], parts.over_time_bytes[-1]) == (slots, slots // 2)


def _accumulated_by_keras(ipu: Any, folder: Path, way: str, **options: Any) -> tuple[np.ndarray, Any]:
    """The weights and the memory of IPU 0, of two replicas that train a layer of 64 x 64 with Adam."""
    import tf_keras

    from podrun.tensorflow.addons.accumulating_wrappers import KerasGradientAccumulation

    config = ipu.config.IPUConfig()
    config.auto_select_ipus = 2
    config.compilation_poplar_options = {"autoReport.all": "true", "autoReport.directory": str(folder)}
    config.configure_ipu_system()
    optimizer = tf_keras.optimizers.legacy.Adam(0.1)
    with ipu.ipu_strategy.IPUStrategyV1().scope():
        layer = tf_keras.layers.Dense(64, use_bias=False, kernel_initializer="ones", input_shape=(64,))
        model = tf_keras.Sequential([layer])
        if way == "optimizer":
            optimizer = KerasGradientAccumulation(optimizer, 4, **options)
        elif way == "options":
            model.set_gradient_accumulation_options(4, **options)
        else:
            model.set_pipeline_stage_assignment([0])
            model.set_pipelining_options(4, **options)
        model.compile(optimizer, "mse", steps_per_execution=8)
        ones = np.ones([8 * 8 * 2, 64], np.float32)
        model.fit(ones, ones, batch_size=8, verbose=0)
        (weights,) = model.get_weights()
    (report,) = folder.iterdir()
    return weights, profile_in_file(report / "profile.json").ipu_memory[0].memory


@pytest.mark.parametrize("way", ["optimizer", "options", "one stage"])
def test_state_of_an_optimizer_of_keras_leaves_the_tiles(ipu: Any, tmp_path: Path, way: str) -> None:
    slots = 2 * 64 * 64 * 4
    plain, whole = _accumulated_by_keras(ipu, tmp_path / "plain", way)
    sharded, parts = _accumulated_by_keras(
        ipu, tmp_path / "sharded", way, replicated_optimizer_state_sharding=True
    )
    np.testing.assert_array_equal(plain, sharded)
    assert whole.always_live_bytes - parts.always_live_bytes == slots
    assert parts.over_time_bytes[-1] == slots // 2
    with pytest.raises(ValueError, match="optimizer state must be offloaded"):
        _accumulated_by_keras(
            ipu,
            tmp_path / "refused",
            way,
            replicated_optimizer_state_sharding=True,
            offload_weight_update_variables=False,
        )


def test_sharded_state_must_be_offloaded(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    with pytest.raises(ValueError, match="optimizer state must be offloaded"):
        ipu.optimizers.GradientAccumulationOptimizerV2(
            tf.train.AdamOptimizer(0.1), 4, False, replicated_optimizer_state_sharding=True
        )
