"""Models that are saved and loaded under an IPU strategy: their options come back, and a plain model stays plain."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.tensorflow.test_keras_pipelines import nested, sequential, staged_calls, staged_sequential
from tests.tensorflow.test_keras_rules import POINTS, one_ipu

if TYPE_CHECKING:
    from tf_keras import Model

__all__ = ["one_ipu"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed"),
]


@pytest.mark.parametrize("path", ["model.h5", "model"])
@pytest.mark.parametrize("make", [staged_sequential, staged_calls, nested])
def test_options_are_saved(one_ipu: None, make: object, path: str, tmp_path: Path) -> None:
    import tf_keras

    from podrun.tensorflow.keras.model_options import options_of
    from podrun.tensorflow.keras.stage_assignment import entry_stages

    model = make()  # type: ignore[operator]
    model.set_pipelining_options(4, device_mapping=[0, 0], gradient_accumulation_reduction_method="mean")
    model.set_gradient_accumulation_options(2, "mean")
    model.set_asynchronous_callbacks(True)
    model.set_replication_options("SUM")
    model.save(str(tmp_path / path))
    loaded = tf_keras.models.load_model(str(tmp_path / path))
    options = options_of(loaded)
    assert (options.pipeline_steps, options.accumulation_steps, options.device_mapping) == (4, 2, [0, 0])
    assert (options.reduction.name, options.metric_reduction.name) == ("MEAN", "SUM")
    assert options.asynchronous
    assert loaded._pipeline_stage_assignment_valid
    assert entry_stages(loaded.get_pipeline_stage_assignment()) == [0, 1]
    np.testing.assert_allclose(loaded(POINTS), model(POINTS), rtol=1e-6)


def test_a_model_without_options_has_a_plain_configuration(one_ipu: None) -> None:
    assert "ipu_options" not in sequential().get_config()


def test_a_configuration_that_loses_options_is_refused(one_ipu: None, tmp_path: Path) -> None:
    import tf_keras

    class Own(tf_keras.Sequential):
        def get_config(self) -> dict[str, object]:
            return {"name": self.name}

    model = Own([tf_keras.layers.Dense(1, input_shape=(3,))])
    model.set_gradient_accumulation_options(2)
    with pytest.raises(RuntimeError, match="`get_config`"):
        model.save(str(tmp_path / "model.h5"))


def subclass() -> type:
    from tensorflow import keras

    class Twice(keras.Model):
        """Two layers for each of two inputs, made again from its configuration."""

        def __init__(self) -> None:
            super().__init__()
            self.flat, self.dense = keras.layers.Flatten(), keras.layers.Dense(2)

        def call(self, inputs: list[object]) -> list[object]:
            return [self.dense(self.flat(one)) for one in inputs]

        def get_config(self) -> dict[str, object]:
            return {**super().get_config(), "flat": self.flat, "dense": self.dense}

        @classmethod
        def from_config(cls, config: dict[str, object], custom_objects: object = None) -> Model:
            model = cls()
            model.flat, model.dense = config["flat"], config["dense"]
            return model

    return Twice


def test_a_subclass_is_saved_with_its_stages(one_ipu: None, tmp_path: Path) -> None:
    from tensorflow import keras

    kind = subclass()
    model = kind()
    model.build([(1, 3), (1, 3)])
    entries = model.get_pipeline_stage_assignment()
    first, second = (
        next(i for i, e in enumerate(entries) if e.layer is model.flat and e.node_index == n) for n in (0, 1)
    )
    for place, entry in enumerate(entries):
        entry.pipeline_stage = place
    swapped = list(entries)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(ValueError, match="does not match the post-order"):
        model.set_pipeline_stage_assignment(swapped)
    model.set_pipeline_stage_assignment(entries)
    model.set_pipelining_options(device_mapping=[0] * 4)
    model.save(tmp_path / "model")
    loaded = keras.models.load_model(tmp_path / "model", custom_objects={"Twice": kind})
    assert loaded._is_pipelined()
    assert loaded._pipelining_device_mapping == [0] * 4
    assert [e.pipeline_stage for e in loaded.get_pipeline_stage_assignment()] == [0, 1, 2, 3]


def test_scopes_make_a_subclass_a_pipeline(one_ipu: None) -> None:
    from tensorflow import keras

    from podrun.tensorflow.keras.stage_classes import PipelineStage

    class Partly(keras.Model):
        def __init__(self, stage: int | None) -> None:
            super().__init__()
            self.stage, self.first, self.second = stage, keras.layers.Flatten(), keras.layers.Dense(2)

        def call(self, inputs: object) -> object:
            with PipelineStage(0):
                hidden = self.first(inputs)
            if self.stage is None:
                return self.second(hidden)
            with PipelineStage(self.stage):
                return self.second(hidden)

    whole = Partly(1)
    whole.build((4, 3))
    assert whole._is_pipelined()
    whole.reset_pipeline_stage_assignment()
    assert not whole._is_pipelined()
    partly = Partly(None)
    partly.set_pipelining_options(device_mapping=[0, 0])
    with pytest.raises(ValueError, match=r"However, dense.* has not been assigned to one"):
        partly.build((4, 3))
    partly = Partly(None)
    partly.set_pipelining_options(gradient_accumulation_steps_per_replica=2)
    partly.compile("sgd", "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match=r"However, dense.* has not been assigned to one"):
        partly.predict(POINTS, batch_size=4, verbose=0)


@pytest.mark.parametrize("structure", ["single", "list", "tuple", "dict", "embedding"])
def test_subclasses_built_with_shapes_alone_are_saved(one_ipu: None, tmp_path: Path, structure: str) -> None:
    import tensorflow as tf
    import tf_keras

    class Built(tf_keras.Model):
        def __init__(self) -> None:
            super().__init__()
            embedded = structure == "embedding"
            self.first = tf_keras.layers.Embedding(5, 3) if embedded else tf_keras.layers.Dense(3)

        def call(self, inputs: object) -> tf.Tensor:
            parts = tf.nest.flatten(inputs)
            return self.first(parts[0] + parts[-1])

    model, shape = Built(), (2, 4)
    shapes = {"list": [shape] * 2, "tuple": (shape, shape), "dict": {"a": shape, "b": shape}}
    if structure == "tuple":
        model.call(tuple(tf.zeros(part) for part in shapes["tuple"]))
        model.built, model._build_input_shape = True, shapes["tuple"]
    else:
        model.build(shapes.get(structure, shape))
    assert not model._is_pipelined()
    model.get_pipeline_stage_assignment()
    if structure == "embedding":  # Its indices may be of any type.
        with pytest.raises(ValueError, match="cannot be saved"):
            model.save(str(tmp_path / "model"))
        model(tf.zeros(shape, tf.int32))
    model.save(str(tmp_path / "model"))
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    specs = tf.nest.flatten(loaded.signatures["serving_default"].structured_input_signature)
    kind = tf.int32 if structure == "embedding" else tf.float32
    assert [spec.dtype for spec in specs] == [kind] * (1 if structure in ("single", "embedding") else 2)
    data = tf.ones(shape, kind)
    given = {"list": [data] * 2, "tuple": (data, data), "dict": {"a": data, "b": data}}.get(structure, data)
    np.testing.assert_allclose(tf_keras.models.load_model(str(tmp_path / "model"))(given), model(given))
