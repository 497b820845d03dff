"""ONNX models of sessions: read with what PopART's builder notes in them, written with the weights of a session."""

from __future__ import annotations

import json
from collections.abc import Mapping

import numpy as np

from podrun.onnx_models.annotations import BROADCAST_KEY, TRANSFERS_KEY, VARIABLE_KEY
from podrun.onnx_models.light_model import LightModel, put_beside
from podrun.popart.step_data.dataflow import BESIDE
from podrun.popart.values.enums import CommGroupType, ExchangeStrategy, VariableRetrievalMode
from podrun.popart.values.tensor_info import TensorInfo, type_proto
from podrun.runtime.graph import Model, VariableGroups
from podrun.runtime.tensor_names import STATE_PREFIXES


class ModelFiles:
    """Writes a session's model, which was read from ONNX, with other values.

    The model that was read stays as it is: what is written is a copy, and large values are shared with it.
    """

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


def session_model(light: LightModel) -> Model:
    """A model for sessions: the main graph, and what PopART's builder notes in the model's metadata."""
    from podrun.onnx_models.graph_reader import read_graph
    from podrun.onnx_models.ops.registry import OPERATORS

    entries = {entry.key: entry.value for entry in light.proto.metadata_props if entry.key in _NOTED}
    noted = {key: json.loads(entries[key]) if key in entries else {} for key in _NOTED}
    return Model(
        read_graph(light.proto, light.values),
        OPERATORS,
        broadcast=frozenset(noted[BROADCAST_KEY]),
        transfers={name: BESIDE[ExchangeStrategy[kind]] for name, kind in noted[TRANSFERS_KEY].items()},
        groups={
            name: VariableGroups(CommGroupType(kind).name, size, VariableRetrievalMode(mode).name)
            for name, (kind, size, mode) in noted[VARIABLE_KEY].items()
        },
    )


_NOTED = (BROADCAST_KEY, TRANSFERS_KEY, VARIABLE_KEY)
