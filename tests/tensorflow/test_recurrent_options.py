"""Recurrent layers of version 1: options, names of variables, halves. Older names and ways of Keras layers."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"
)


@pytest.mark.parametrize("kind", ["TimeMajorLstm", "TimeMajorGru"])
def test_a_proportion_of_memory_goes_to_both_passes(ipu_device: None, kind: str) -> None:
    from podrun.tensorflow.addons import time_major_layers

    make, key = getattr(time_major_layers, kind), "availableMemoryProportion"
    layer = make(3, available_memory_proportion_fwd=0.4)
    assert layer._options_with_amp == layer._options_bwd_with_amp == {key: 0.4}
    layer = make(
        3, available_memory_proportion_fwd=0.4, available_memory_proportion_bwd=-1, options={key: 0.3}
    )
    assert (layer._options_with_amp, layer._options_bwd_with_amp) == ({key: 0.3}, {})
    assert make(3)._options_with_amp == {}


def test_only_a_proportion_that_a_program_sets_twice_is_warned_of(
    ipu_device: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tensorflow as tf

    from podrun.tensorflow.addons.time_major_layers import TimeMajorLstm

    warnings: list[str] = []
    monkeypatch.setattr(tf.get_logger(), "warning", lambda text, *_: warnings.append(text))
    key = "availableMemoryProportion"
    layer = TimeMajorLstm(4, available_memory_proportion_fwd=0.3, options_bwd={key: 0.2})
    assert (layer._options_with_amp, layer._options_bwd_with_amp) == ({key: 0.3}, {key: 0.2})
    assert not warnings
    TimeMajorLstm(4, available_memory_proportion_bwd=0.3, options_bwd={key: 0.2})
    assert ["available_memory_proportion_bwd=0.3" in text for text in warnings] == [True]


def test_a_proportion_that_is_no_number_is_named() -> None:
    from podrun.tensorflow.addons.recurrent_call import least_share

    key = "availableMemoryProportion"
    assert least_share({key: "0.4"}, {key: 0.3}) == 0.3
    for options, name in (([{key: "many"}, {}], "options"), ([{}, {key: "many"}], "options_bwd")):
        with pytest.raises(ValueError, match=f"{key} of `{name}` must be a number, but is 'many'"):
            least_share(*options)


def test_layers_of_one_name_have_weights_of_their_own_and_refuse_negative_memory(ipu: Any) -> None:
    import tensorflow.compat.v1 as tf

    from podrun.tensorflow.addons.time_major_layers import TimeMajorGru, TimeMajorLstm

    def net(x: Any) -> Any:
        outputs = TimeMajorGru(2, name="same", return_state=False)(x)
        return TimeMajorLstm(2, name="same", options_bwd={"availableMemoryProportion": -1.5})(outputs)[0]

    with tf.Graph().as_default(), tf.Session() as session:
        x = tf.placeholder(tf.float32, [3, 1, 2])
        with ipu.scopes.ipu_scope("/device:IPU:0"):
            compiled = ipu.ipu_compiler.compile(net, [x])
        names = {variable.name for variable in tf.trainable_variables()}
        assert names == {f"{scope}/{part}:0" for scope in ("same", "same_1") for part in ("kernel", "biases")}
        session.run(tf.global_variables_initializer())
        with pytest.raises(tf.errors.InternalError, match="Value must be greater than or equal to 0"):
            session.run(compiled, {x: np.zeros([3, 1, 2])})


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_states_of_a_layer_of_halves_are_halves_between_steps(kind: str) -> None:
    import jax.numpy as jnp

    from podrun.numerics.recurrence import Sequences, recurrence
    from podrun.runtime.graph import Node
    from podrun.tensorflow.operators.recurrent import _cell, _weights

    random = np.random.RandomState(0)
    gates, states = (4, 2) if kind == "lstm" else (3, 1)
    attributes = {"cell": kind, "activation": "tanh", "recurrent_activation": "sigmoid", "reset_after": False}
    node = Node("Podrun:recurrence", "", "layer", (), (), attributes)
    kernels = [jnp.asarray(random.randn(3, gates * 3), jnp.float16) for _ in range(2)]
    weights = _weights(node, True, *kernels, jnp.asarray(random.randn(gates * 3), jnp.float32))
    before = tuple(jnp.asarray(random.randn(2, 3), jnp.float32) for _ in range(states))
    outputs, last = recurrence(_cell(node, True), weights, Sequences(jnp.ones([6, 2, 3])), before)
    for values in (outputs, *last):
        np.testing.assert_array_equal(values, values.astype(jnp.float16))


@pytest.mark.parametrize(("given", "trains"), [(None, False), ("words", True), (False, False)])
def test_a_keras_layer_takes_what_stands_where_trainable_should(
    ipu_device: None, given: object, trains: bool
) -> None:
    import tf_keras

    class Doubled(tf_keras.layers.Layer):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(given)

    assert Doubled().trainable is trains
    with pytest.raises(TypeError, match="trainable"):
        tf_keras.layers.Layer(trainable=3)


def test_the_ctc_loss_has_its_older_names() -> None:
    from podrun.compat._keras_names import own_module

    for root in ("tensorflow.python.ipu.keras", "keras.ipu"):
        modules = [own_module(f"{root}{below}") for below in ("", ".losses", ".losses.ctc", ".layers")]
        assert len({module.CTCLoss for module in modules if module is not None}) == 1
        assert None not in modules
