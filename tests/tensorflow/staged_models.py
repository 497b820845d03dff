"""Models of Keras with two layers and two pipeline stages, each written in another way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.tensorflow.test_keras_rules import FEATURES

if TYPE_CHECKING:
    from tf_keras import Model

UNITS = 5
_random = np.random.RandomState(1)
WEIGHTS = [
    _random.rand(FEATURES, UNITS).astype(np.float32),
    np.zeros(UNITS, np.float32),
    _random.rand(UNITS, 1).astype(np.float32),
    np.zeros(1, np.float32),
]


def sequential() -> Model:
    from tensorflow import keras

    model = keras.Sequential(
        [keras.layers.Dense(UNITS, "tanh", input_shape=(FEATURES,)), keras.layers.Dense(1)]
    )
    model.set_weights(WEIGHTS)
    return model


def staged_sequential() -> Model:
    model = sequential()
    model.set_pipeline_stage_assignment([0, 1])
    return model


def staged_calls() -> Model:
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    inputs = keras.Input(FEATURES)
    with PipelineStage(0):
        x = keras.layers.Dense(UNITS, "tanh")(inputs)
    with PipelineStage(1):
        x = keras.layers.Dense(1)(x)
    model = keras.Model(inputs, x)
    model.set_weights(WEIGHTS)
    return model


def staged_subclass() -> Model:
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    class Staged(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(UNITS, "tanh")
            self.second = keras.layers.Dense(1)

        def call(self, inputs: object) -> object:
            with PipelineStage(0):
                x = self.first(inputs)
            with PipelineStage(1):
                return self.second(x)

    model = Staged()
    model.build((4, FEATURES))
    model.set_weights(WEIGHTS)
    return model


def assigned_subclass() -> Model:
    from tensorflow import keras

    class Assigned(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(UNITS, "tanh")
            self.second = keras.layers.Dense(1)

        def call(self, inputs: object) -> object:
            return self.second(self.first(inputs))

    model = Assigned()
    model.build((4, FEATURES))
    model.set_weights(WEIGHTS)
    assignment = model.get_pipeline_stage_assignment()
    for stage, entry in enumerate(assignment):
        entry.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignment)
    return model


def nested() -> Model:
    from tensorflow import keras

    inner = keras.Sequential(
        [keras.layers.Dense(UNITS, "tanh", input_shape=(FEATURES,)), keras.layers.Dense(1)]
    )
    inputs = keras.Input(FEATURES)
    model = keras.Model(inputs, inner(inputs))
    model.set_weights(WEIGHTS)
    assignment = model.get_pipeline_stage_assignment()
    for stage, entry in enumerate(assignment[0].pipeline_stage_assignments):
        entry.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignment)
    return model


def subclass_inside(outer: str) -> Model:
    """A subclass of two layers inside a model, with a stage for each layer."""
    from tensorflow import keras

    class Inner(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(UNITS, "tanh")
            self.second = keras.layers.Dense(1)

        def call(self, inputs: object) -> object:
            return self.second(self.first(inputs))

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.inner.build((4, FEATURES))

        def call(self, inputs: object) -> object:
            return self.inner(inputs)

    if outer == "subclass":
        model = Outer()
        model.build((4, FEATURES))
    else:
        inner = Inner()
        inner.build((4, FEATURES))
        inputs = keras.Input(FEATURES)
        model = (
            keras.Sequential([inputs, inner]) if outer == "sequence" else keras.Model(inputs, inner(inputs))
        )
    model.set_weights(WEIGHTS)
    assignment = model.get_pipeline_stage_assignment()
    (call,) = assignment
    assert call.is_nested_model
    assert [type(e.layer).__name__ for e in call.pipeline_stage_assignments] == ["Dense", "Dense"]
    for stage, entry in enumerate(call.pipeline_stage_assignments):
        entry.pipeline_stage = stage
    model.set_pipeline_stage_assignment(assignment)
    return model


def subclass_in_functional() -> Model:
    return subclass_inside("graph")


def subclass_in_subclass() -> Model:
    return subclass_inside("subclass")
