"""Arguments that few programs give: indices of no entry, halves beside floats, channels in the middle of volumes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import numpy as np
import pytest

from podrun.runtime.graph import Hints, Node
from podrun.tensorflow.execution.modelling import ModelledStep, _hinted
from tests.tensorflow.test_clusters import expected_lstm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)
_random = np.random.RandomState(3)


def _run(ipu: Any, function: Any, *values: Any) -> Any:
    import tensorflow as tf

    with ipu.ipu_strategy.IPUStrategyV1().scope() as strategy:
        return strategy.run(
            tf.function(function, autograph=False), args=[tf.constant(value) for value in values]
        )


def test_indices_of_no_entry_give_zeros_also_where_the_program_knows_them(ipu: Any) -> None:
    import tensorflow as tf

    table, places = np.arange(1, 7, dtype=np.float32).reshape(3, 2), np.int32([-1, 2, 5, 0])

    def net(x: Any, indices: Any) -> Any:
        known = tf.raw_ops.GatherV2(params=table, indices=places, axis=0)
        columns = tf.raw_ops.GatherV2(params=table, indices=np.int32([[1, 2]]), axis=-1)
        none = tf.raw_ops.GatherV2(params=table[:0], indices=np.int32([0]), axis=0)
        return known, tf.raw_ops.GatherV2(params=x, indices=indices, axis=0), columns, none

    known, fed, columns, none = _run(ipu, net, table, places)
    expected = np.float32([[0, 0], [5, 6], [0, 0], [1, 2]])
    np.testing.assert_array_equal(known, expected)
    np.testing.assert_array_equal(fed, expected)
    np.testing.assert_array_equal(columns, np.stack([table[:, 1], np.zeros(3)], 1)[:, None])
    np.testing.assert_array_equal(none, np.zeros((1, 2)))


@pytest.mark.parametrize("mixtures", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_recurrent_layers_take_halves_beside_floats(ipu: Any, mixtures: int) -> None:
    """Either is computed in float32 then: as far from the results of floats as its inputs are rounded."""
    import tensorflow as tf

    operations = importlib.import_module("tensorflow.compiler.plugin.poplar.ops.gen_popnn_ops")
    x, kernel, zeros = _random.randn(3, 2, 4), _random.randn(8, 16) * 0.3, np.zeros((2, 4))
    halves, floats = tf.float16, tf.float32

    def outcome(inputs: Any, weights: Any) -> Any:
        def net(x: Any, kernel: Any, state: Any) -> Any:
            return operations.popnn_lstm_layer(
                inputs=tf.cast(x, inputs), num_channels=4, kernel=tf.cast(kernel, weights),
                biases=tf.zeros([4, 4], weights), input_h_state=tf.cast(state, inputs),
                input_c_state=tf.cast(state, inputs), is_training=False,
            )[0]  # fmt: skip

        return _run(ipu, net, *(np.float32(value) for value in (x, kernel, zeros)))

    exact = expected_lstm(x, kernel, None)
    for inputs, weights in ((halves, floats), (floats, halves), (halves, halves))[:mixtures]:
        own = outcome(inputs, weights)
        assert own.dtype == inputs
        np.testing.assert_allclose(own, exact, atol=2e-3)


@pytest.mark.sample(2)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("data_format", "order"), [("NCDHW", (0, 4, 1, 2, 3)), ("NDHWC", (0, 1, 2, 3, 4))], ids=["second", "last"]
)
def test_norms_of_volumes_have_channels_in_either_place(
    ipu: Any, training: bool, data_format: str, order: tuple[int, ...]
) -> None:
    """Results and gradients of NDHWC and NCDHW are one another's, and those of the same rows as images."""
    import tensorflow as tf

    x, g = (_random.rand(2, 3, 4, 2, 5).astype(np.float32) for _ in range(2))
    scale, offset = _random.rand(2, 5).astype(np.float32) + 0.5
    mean, variance = x.mean((0, 1, 2, 3)), x.var((0, 1, 2, 3))

    def both(x: Any, g: Any, data_format: str) -> list[Any]:
        options = {"epsilon": 1e-3, "is_training": training, "data_format": data_format}
        forward = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=[] if training else mean, variance=[] if training else variance,
            **options,
        )  # fmt: skip
        back = tf.raw_ops.FusedBatchNormGradV3(
            y_backprop=g, x=x, scale=scale, reserve_space_1=mean, reserve_space_2=variance, reserve_space_3=0.0,
            **options,
        )  # fmt: skip
        return [forward[0], *back[:3]]

    expected = [np.array(v) for v in both(x.reshape(2, 3, 8, 5), g.reshape(2, 3, 8, 5), "NHWC")]
    own = _run(ipu, lambda x, g: both(x, g, data_format), x.transpose(order), g.transpose(order))
    back = [np.array(v).transpose(np.argsort(order)).reshape(2, 3, 8, 5) for v in own[:2]]
    for result, wanted in zip((*back, *own[2:]), expected, strict=True):
        np.testing.assert_allclose(result, wanted, rtol=2e-4, atol=2e-5)


def test_what_is_compiled_in_eager_mode_runs_at_once(ipu: Any) -> None:
    """On the IPU of the scope around it, or of one inside; the program's own errors come first."""
    import tensorflow as tf

    with ipu.scopes.ipu_scope("/device:IPU:0"):
        (sums,) = ipu.ipu_compiler.compile(lambda x, y: x + y * 2.0, [tf.ones([2]), 3.0])
        # Halves are clipped there, and infinite on the host.
        (clipped,) = ipu.ipu_compiler.compile(lambda x: x * x, [tf.constant(300.0, tf.float16)])
    assert (sums.numpy().tolist(), clipped.numpy()) == ([7.0, 7.0], 65504.0)

    def inside(x: Any) -> Any:
        with tf.device("/device:IPU:0"):
            return {"square": x * x, "rest": [x]}

    results = ipu.ipu_compiler.compile(inside, [tf.constant(300.0, tf.float16)])
    assert (results["square"].numpy(), results["rest"][0].numpy()) == (65504.0, 300.0)
    with pytest.raises(ZeroDivisionError):
        ipu.ipu_compiler.compile(lambda: 1 / 0)
    with pytest.raises(Exception, match="The computation was not placed on an IPU device: use"):
        ipu.ipu_compiler.compile(lambda x: x + 1.0, [tf.ones([2])])


def test_a_hint_of_the_configuration_leaves_the_others_of_a_node() -> None:
    """Nodes keep their own memory where only the recomputation is said, and the reverse."""
    own = Hints(available_memory=0.3, recompute=True)
    products = [
        Node("MatMul", "", label, ("a", "b"), (label,), hints=own) for label in ("one", "two", "three")
    ]

    def hints(shares: tuple[Any, ...], recomputed: dict[str, bool]) -> list[tuple[Any, Any]]:
        step = ModelledStep("step", (), {}, {}, {}, (), None, False, shares, recomputed)
        return [(n.hints.available_memory, n.hints.recompute) for n in _hinted(products, step)]

    assert hints((), {"two": False}) == [(0.3, True), (0.3, False), (0.3, True)]
    assert hints((("MatMul", 0.6),), {"one": False}) == [(0.6, False), (0.6, True), (0.6, True)]
