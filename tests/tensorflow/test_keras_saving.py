"""Models that are saved and loaded under an IPU strategy: their options come back, and a plain model stays plain."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from tests.tensorflow.test_keras_pipelines import nested, sequential, staged_calls, staged_sequential
from tests.tensorflow.test_keras_rules import POINTS, one_ipu

__all__ = ["one_ipu"]
pytestmark = [
    pytest.mark.slow,  # In a process of its own, as the tests of Keras' rules.
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
