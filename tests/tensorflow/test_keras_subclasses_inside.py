"""Subclasses of Keras' ``Model`` inside other models: which have stages of their own, and what finding these runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.tensorflow.test_keras_rules import FEATURES, POINTS
from tests.tensorflow.test_keras_rules import one_ipu as one_ipu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


@pytest.mark.parametrize(
    ("kind", "outer"),
    [("two inputs", "graph")]
    + [(kind, outer) for kind in ("training", "branch", "counts") for outer in ("graph", "sequence")],
)
def test_a_subclass_that_is_only_called_is_a_layer(one_ipu: None, kind: str, outer: str) -> None:
    import tensorflow as tf
    from tensorflow import keras

    from podrun.tensorflow.keras import stage_classes

    class Double(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.count = self.add_weight("count", (), initializer="zeros", trainable=False)

    class Pair(Double):
        def call(self, x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            return x + y

    class Told(Double):
        def call(self, x: tf.Tensor, training: bool) -> tf.Tensor:
            return x * (2.0 if training is not None else 0.0)

    class Branch(Double):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return tf.cond(tf.reduce_sum(x) > -1e9, lambda: x * 2, lambda: x)

    class Counts(Double):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.count.assign_add(1.0)
            return x * 2

    block = {"two inputs": Pair, "training": Told, "branch": Branch, "counts": Counts}[kind]()
    inputs = keras.Input(FEATURES)
    if outer == "graph":
        model = keras.Model(inputs, block(inputs, inputs) if kind == "two inputs" else block(inputs))
        entry = stage_classes.FunctionalLayerPipelineStageAssignment
    else:
        model = keras.Sequential([inputs, block])
        entry = stage_classes.SequentialLayerPipelineStageAssignment
    assert [type(e) for e in model.get_pipeline_stage_assignment()] == [entry]
    assert float(block.count) == 0
    model.compile("sgd", "mse", steps_per_execution=1)
    np.testing.assert_array_equal(model.predict(POINTS[:4], batch_size=4, verbose=0), POINTS[:4] * 2)
    assert float(block.count) == (kind == "counts")


def test_a_subclass_whose_code_takes_no_symbols_is_a_layer(one_ipu: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    class Counts(keras.Model):
        def __init__(self, branches: bool) -> None:
            super().__init__()
            self.branches, self.dense = branches, keras.layers.Dense(2)
            self.count = self.add_weight("count", (), initializer="zeros", trainable=False)

        def call(self, x: tf.Tensor, training: bool) -> tf.Tensor:
            self.count.assign_add(1.0)
            if self.branches:
                x = tf.cond(tf.reduce_sum(x) > 0, lambda: x * 2, lambda: x)
            return self.dense(x)

    for branches in (False, True):
        inner = Counts(branches)
        inner.build((4, FEATURES))
        inputs = keras.Input(FEATURES)
        model = keras.Model(inputs, inner(inputs))
        (entry,) = model.get_pipeline_stage_assignment()
        assert entry.is_nested_model is not branches
        assert float(inner.count) == 0
    with pytest.raises(
        RuntimeError, match=r"`counts.*`: its `call` cannot run with symbolic inputs \(TypeError"
    ):
        inner.get_pipeline_stage_assignment()


def test_a_model_that_is_made_in_a_scope_keeps_the_stages_of_its_calls(one_ipu: None) -> None:
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    class Block(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x: object) -> object:
            return self.dense(x)

    for builds in (False, True):
        inputs, block = keras.Input(FEATURES), Block()
        if builds:
            block.build((4, FEATURES))
        with PipelineStage(0):
            x = block(inputs)
        with PipelineStage(1):
            model = keras.Model(inputs, keras.layers.Dense(1)(x))
        first, last = model.get_pipeline_stage_assignment()
        assert first.is_nested_model is builds
        assert [e.pipeline_stage for e in (first.pipeline_stage_assignments if builds else [first])] == [0]
        assert last.pipeline_stage == 1
        if builds:
            with pytest.raises(AttributeError, match="is a model with an entry for each of its layers"):
                first.pipeline_stage = 0


@pytest.mark.parametrize("form", ["folder", "model.keras"])
def test_saved_stages_tell_which_subclasses_were_built(one_ipu: None, tmp_path: Path, form: str) -> None:
    from tensorflow import keras

    class Block(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(FEATURES)

        def call(self, x: object) -> object:
            return self.dense(x)

        def get_config(self) -> dict[str, object]:
            return {}

        @classmethod
        def from_config(cls, config: object, custom_objects: object = None) -> Block:
            return cls()

    called, built, inputs = Block(), Block(), keras.Input(FEATURES)
    built.build((None, FEATURES))
    model = keras.Model(inputs, built(called(inputs)))
    first, second = model.get_pipeline_stage_assignment()
    first.pipeline_stage = 0
    second.pipeline_stage_assignments[0].pipeline_stage = 1
    model.set_pipeline_stage_assignment([first, second])
    model.save(str(tmp_path / form))
    again = keras.models.load_model(str(tmp_path / form), custom_objects={"Block": Block})
    first, second = again.get_pipeline_stage_assignment()
    assert (first.is_nested_model, first.pipeline_stage) == (False, 0)
    assert [entry.pipeline_stage for entry in second.pipeline_stage_assignments] == [1]
