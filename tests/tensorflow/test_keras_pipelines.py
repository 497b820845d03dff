"""Pipelines of Keras models: stages by scope and by assignment, their rules, and training beside one device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.tensorflow.staged_models import (
    assigned_subclass,
    nested,
    sequential,
    staged_calls,
    staged_sequential,
    staged_subclass,
    subclass_in_functional,
    subclass_in_subclass,
    subclass_inside,
)
from tests.tensorflow.test_keras_rules import (
    FEATURES,
    POINTS,
    TARGETS,
    configure,
    one_ipu,
    two_replicas,
)

if TYPE_CHECKING:
    from tf_keras import Model

__all__ = ["one_ipu", "two_replicas"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]
KINDS = [
    subclass_in_functional,
    subclass_in_subclass,
    staged_sequential,
    staged_calls,
    staged_subclass,
    assigned_subclass,
    nested,
]


def fitted(model: Model, accumulated: int | None, **options: object) -> list[np.ndarray]:
    from tensorflow import keras

    model.compile(keras.optimizers.SGD(0.02, 0.9), "mse", steps_per_execution=8, metrics=["mae"])
    if accumulated is not None:
        model.set_gradient_accumulation_options(accumulated)
    model.fit(POINTS, TARGETS, batch_size=4, epochs=2, shuffle=False, verbose=0)
    return list(model.get_weights())


@pytest.mark.parametrize("make", KINDS)
def test_a_pipeline_trains_as_accumulation_on_one_ipu(two_replicas: None, make: Callable[[], Model]) -> None:
    model = make()
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4, device_mapping=[0, 1])
    weights = fitted(model, None)
    program = next(iter(model.train_function._traced.values())).program
    assert program.pipeline is not None
    assert program.pipeline.mapping == (0, 1)
    assert program.pipeline.micro_batches == 4
    stages = {place.stage for place in program.step.places.values()}
    assert stages == {0, 1}
    losses = model.evaluate(POINTS, TARGETS, batch_size=4, verbose=0)
    outputs = model.predict(POINTS, batch_size=4, verbose=0)
    configure(1)
    alone = sequential()
    for mine, expected in zip(weights, fitted(alone, 4), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(losses, alone.evaluate(POINTS, TARGETS, batch_size=4, verbose=0), rtol=1e-4)
    np.testing.assert_allclose(outputs, alone.predict(POINTS, batch_size=4, verbose=0), rtol=1e-4)


def test_counts_that_a_pipeline_cannot_have(two_replicas: None) -> None:
    import tensorflow as tf

    model = staged_sequential()
    model.compile("sgd", "mse", steps_per_execution=6)
    with pytest.raises(ValueError, match="gradient_accumulation_steps_per_replica"):
        model.fit(POINTS[:24], TARGETS[:24], batch_size=4, verbose=0)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=6)
    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 4"):
        model.fit(POINTS[:24], TARGETS[:24], batch_size=4, verbose=0)
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    with pytest.raises(RuntimeError, match="not divisible"):
        model.fit(POINTS[:24], TARGETS[:24], batch_size=4, verbose=0)
    model.compile("sgd", "mse", steps_per_execution=1)
    with pytest.raises(tf.errors.FailedPreconditionError, match="must be a multiple of 2"):
        model.predict(POINTS, batch_size=4, verbose=0)


def test_the_device_must_have_the_ipus(one_ipu: None) -> None:
    model = staged_sequential()
    model.set_pipelining_options(gradient_accumulation_steps_per_replica=4)
    model.compile("sgd", "mse", steps_per_execution=4)
    with pytest.raises(ValueError, match="requires a multiple of 2"):
        model.fit(POINTS, TARGETS, batch_size=4, verbose=0)


def test_scopes_of_stages_are_checked(one_ipu: None) -> None:
    import tensorflow as tf
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    for stage in (-1, 0.5, "0"):
        with pytest.raises(ValueError, match="not a valid pipeline stage"), PipelineStage(stage):
            pass
    with pytest.raises(RuntimeError, match="must not be nested"), PipelineStage(0), PipelineStage(1):
        pass
    default = tf.distribute.get_strategy().__class__
    assert default.__name__ == "IPUStrategyV1"
    inputs = keras.Input(FEATURES)
    with PipelineStage(1):
        x = keras.layers.Dense(2)(inputs)
    with PipelineStage(0):
        y = keras.layers.Dense(2)(x)
    with pytest.raises(
        ValueError, match="has a dependency from a pipeline stage which has not yet been executed"
    ):
        keras.Model(inputs, y)
    with pytest.raises(ValueError, match="must have an associated pipeline stage"):
        keras.Model(inputs, keras.layers.Dense(1)(x))


def test_the_call_goes_before_the_layer(one_ipu: None) -> None:
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    inputs = keras.Input(FEATURES)
    with PipelineStage(0):
        first, shared = keras.layers.Dense(3), keras.layers.Dense(3)
    x = shared(first(inputs))
    with PipelineStage(1):
        x = shared(x)
    model = keras.Model(inputs, x)
    assert [e.pipeline_stage for e in model.get_pipeline_stage_assignment()] == [0, 0, 1]
    assert [e.node_index for e in model.get_pipeline_stage_assignment()] == [0, 0, 1]
    model.reset_pipeline_stage_assignment()
    assert [e.pipeline_stage for e in model.get_pipeline_stage_assignment()] == [None] * 3


def test_a_shared_layer_lies_on_one_ipu(two_replicas: None) -> None:
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    inputs = keras.Input(FEATURES)
    shared = keras.layers.Dense(FEATURES)
    with PipelineStage(0):
        x = shared(inputs)
    with PipelineStage(1):
        x = shared(x)
    model = keras.Model(inputs, x)
    model.compile("sgd", "mse", steps_per_execution=4)
    with pytest.raises(ValueError, match="on IPUs 0 and 1"):
        model.predict(POINTS, batch_size=4, verbose=0)


def test_assignments_of_sequential_models_are_checked(one_ipu: None) -> None:
    from tensorflow import keras

    model = sequential()
    cases = [
        ([0.0, 0.0], "All elements of `pipeline_stage_assignment`"),
        ([0], r"\(1\) does not match the number of layers in the graph \(2\)"),
        ([1, 1], "to the 0th pipeline stage, however it was assigned to 1"),
        ([0, 2], "sequential index 1 has been assigned to pipeline stage 2"),
        ((0, 0), "needs to be a list"),
        (
            list(reversed(model.get_pipeline_stage_assignment())),
            r"index 0 `pipeline_stage_assignment` is for layer dense.*, but the layer in the Sequential model",
        ),
    ]
    for assignment, text in cases:
        with pytest.raises(ValueError, match=text):
            model.set_pipeline_stage_assignment(assignment)
    assert not model._pipeline_stage_assignment_valid
    model.set_pipeline_stage_assignment([0, 1])
    assert model._pipeline_stage_assignment_valid
    model.add(keras.layers.Dense(1))
    assert not model._pipeline_stage_assignment_valid


def test_assignments_of_graphs_are_checked(one_ipu: None) -> None:
    from podrun.tensorflow.keras.stage_classes import ModelLayerPipelineStageAssignment

    model = staged_calls()
    entries = model.get_pipeline_stage_assignment()
    wrong = [ModelLayerPipelineStageAssignment(e.layer, e.node_index, 0) for e in entries]
    for assignment, text in [
        (entries[:1], r"\(1\) does not match the number of layers in the graph \(2\)"),
        (entries[::-1], "does not match the post-order"),
        (wrong, "must be an instance of `FunctionalLayerPipelineStageAssignment`"),
    ]:
        with pytest.raises(ValueError, match=text):
            model.set_pipeline_stage_assignment(assignment)
    entries[1].pipeline_stage = None
    with pytest.raises(ValueError, match="has not been assigned a pipeline stage"):
        model.set_pipeline_stage_assignment(entries)


def test_calls_are_listed_by_depth(one_ipu: None) -> None:
    from tensorflow import keras

    def branches(inputs: object) -> list[object]:
        first, second = (dense(keras.layers.Flatten()(i)) for dense, i in zip(denses, inputs, strict=True))
        return [shared(first), shared(second)]

    class Branches(keras.Model):
        def call(self, inputs: object) -> object:
            return branches(inputs)

    denses, shared = [keras.layers.Dense(2), keras.layers.Dense(2)], keras.layers.Dense(3)
    inputs = [keras.Input(2), keras.Input(2)]
    entries = keras.Model(inputs, branches(inputs)).get_pipeline_stage_assignment()
    # Keras runs a graph by depth; the SDK's own test has the first call of the shared layer as the last entry.
    kinds = ["Flatten", "Flatten", "Dense", "Dense", "Dense", "Dense"]
    assert [type(e.layer).__name__ for e in entries] == kinds
    assert {entries[2].layer, entries[3].layer} == set(denses)
    assert [(e.layer, e.node_index) for e in entries[4:]] == [(shared, 1), (shared, 0)]
    subclass = Branches()
    subclass.build([(1, 2), (1, 2)])
    assert [type(e.layer).__name__ for e in subclass.get_pipeline_stage_assignment()] == kinds


def test_inputs_of_one_dimension_are_columns(one_ipu: None) -> None:
    from tensorflow import keras

    class Line(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs: object) -> object:
            return self.dense(inputs)

    x = np.arange(8, dtype=np.float32) / 8
    weights = []
    for data in (x, x[:, np.newaxis]):
        for make in (Line, lambda: keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])):
            model = make()
            model.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=2)
            model.fit(data, 2 * x, batch_size=2, shuffle=False, verbose=0)
            assert model.predict(data, batch_size=2, verbose=0).shape == (8, 1)
            weights.append(model.get_weights())
    assert all(np.array_equal(a, b) for other in weights[1:] for a, b in zip(weights[0], other, strict=True))


def test_a_subclass_must_be_built(one_ipu: None) -> None:
    from tensorflow import keras

    class Bare(keras.Model):
        def call(self, inputs: object) -> object:
            return inputs

    with pytest.raises(
        RuntimeError,
        match=r"Cannot get pipeline stage assignments for model `.*` which has not been built yet",
    ):
        Bare().get_pipeline_stage_assignment()


def test_a_stage_without_layers_is_refused(two_replicas: None) -> None:
    model = staged_calls()
    entries = model.get_pipeline_stage_assignment()
    entries[1].pipeline_stage = 2
    model.set_pipeline_stage_assignment(entries)
    model.compile("sgd", "mse", steps_per_execution=4)
    with pytest.raises(RuntimeError, match="must have at lease one layer"):
        model.predict(POINTS, batch_size=4, verbose=0)


def test_the_summary_shows_stages(one_ipu: None) -> None:
    lines: list[str] = []
    model = staged_calls()
    model.print_pipeline_stage_assignment_summary(print_fn=lines.append)
    assert lines[0] == f'Model: "{model.name}"'
    assert lines[2].split() == ["Layer", "(type)", "(node", "index)", "Input", "Layers", "Pipeline", "Stage"]
    assert lines[4].split()[1:] == ["(Dense)", "(0)", model.layers[0].name, "0"]
    lines.clear()
    staged_sequential().print_pipeline_stage_assignment_summary(line_length=60, print_fn=lines.append)
    assert lines[2] == "Layer (type)".ljust(30) + "Pipeline Stage".ljust(30)
    assert lines[6].split()[1:] == ["(Dense)", "1"]
    assert lines[-1] == "=" * 60


def test_stages_inside_a_subclass_inside(one_ipu: None) -> None:
    import podrun.tensorflow.keras.stage_classes as classes

    wanted = {
        "graph": classes.FunctionalNestedModelPipelineStageAssignment,
        "subclass": classes.NestedModelPipelineStageAssignment,
        "sequence": classes.SequentialNestedModelPipelineStageAssignment,
    }
    for outer, kind in wanted.items():
        model = subclass_inside(outer)
        (call,) = model.get_pipeline_stage_assignment()
        assert type(call) is kind
        inside = call.pipeline_stage_assignments
        assert [entry.pipeline_stage for entry in inside] == [0, 1]
        assert {type(entry) for entry in inside} == {classes.ModelLayerPipelineStageAssignment}
        inside[0].pipeline_stage, inside[1].pipeline_stage = 1, 0
        with pytest.raises(ValueError, match=r"has not yet been executed|needs to be assigned to the 0th"):
            model.set_pipeline_stage_assignment([call])


def test_a_subclass_inside_comes_after_the_layers_before_it(one_ipu: None) -> None:
    from tensorflow import keras

    inner = assigned_subclass()
    inputs = keras.Input(FEATURES)
    model = keras.Model(inputs, inner(keras.layers.Dense(FEATURES)(inputs)))
    entries = model.get_pipeline_stage_assignment()
    assert [e.pipeline_stage for e in entries[1].pipeline_stage_assignments] == [0, 1]
    assert entries[0].pipeline_stage is None
    entries[0].pipeline_stage = 1
    with pytest.raises(
        ValueError, match="has a dependency from a pipeline stage which has not yet been executed"
    ):
        model.set_pipeline_stage_assignment(entries)


def test_symbolic_inputs_build_a_subclass(one_ipu: None) -> None:
    """Their types count: an embedding takes integers, and they come to a layer as what the data are."""
    from tensorflow import keras

    class Looks(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows = keras.layers.Embedding(4, 3)
            self.types: set[str] = set()

        def call(self, inputs: dict[str, object]) -> object:
            self.types.add(inputs["place"].dtype.name)  # type: ignore[attr-defined]
            return self.rows(inputs["place"]) + inputs["more"]

    model = Looks()
    place = keras.Input((2,), batch_size=4, dtype="int32")
    model.build({"place": place, "more": keras.Input((2, 3), batch_size=4)})
    assert model.built
    assert type(model.get_pipeline_stage_assignment()[0].layer).__name__ == "Embedding"
    values = {"place": np.int32([[0, 1], [2, 3]] * 2), "more": np.ones((4, 2, 3), np.float32)}
    outputs = model.predict(values, batch_size=4, verbose=0)
    np.testing.assert_array_equal(outputs, model.get_weights()[0][values["place"]] + 1)
    assert model.types == {"int32"}
