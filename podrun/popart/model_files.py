"""An ONNX model with the weights of a session: what modelToHost and saveVariables write."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from podrun.onnx_models.light_model import LightModel, put_beside
from podrun.onnx_models.tensor_proto import type_proto
from podrun.popart.tensor_info import TensorInfo
from podrun.runtime.tensor_names import STATE_PREFIXES


class ModelFiles:
    """Writes a session's model, which was read from ONNX, with other values."""

    def __init__(self, model: LightModel) -> None:
        self._model = model

    def model(
        self, weights: Mapping[str, np.ndarray], state: Mapping[str, np.ndarray] | None = None
    ) -> LightModel:
        """The model with these weights, as the model stores them; optimizer state as further initializers."""
        from onnx import helper

        model = self._model.copy().proto
        graph, values = model.graph, dict(self._model.values)
        kept = [t for t in graph.initializer if not t.name.startswith(STATE_PREFIXES)]
        for index, tensor in enumerate(kept):
            value = weights.get(tensor.name)
            if value is not None:
                stored = value.astype(helper.tensor_dtype_to_np_dtype(tensor.data_type), copy=False)
                kept[index] = put_beside(values, tensor.name, stored)
        inputs = [value for value in graph.input if not value.name.startswith(STATE_PREFIXES)]
        for name, value in sorted((state or {}).items()):
            kept.append(put_beside(values, name, value))
            inputs.append(helper.make_value_info(name, type_proto(TensorInfo(value))))
        del graph.initializer[:]
        graph.initializer.extend(kept)
        del graph.input[:]
        graph.input.extend(inputs)
        return LightModel(model, {t.name: values[t.name] for t in kept if t.name in values})
