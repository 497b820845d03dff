"""A builder's model, continued from a file or bytes and written out, and the contexts that name its operators."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from podrun.onnx_models.light_model import LightModel
from podrun.onnx_models.tensor_proto import info_from_type
from podrun.popart.graph_builder import GraphScope, scope_from_graph
from podrun.session.exceptions import popart_exception
from podrun.session.tensor_info import TensorInfo, data_type_from_onnx

if TYPE_CHECKING:
    from onnx import GraphProto

    from podrun.popart.builder import Builder

DEFAULT_OPSET = 10
OPSETS = range(6, 12)
"""Opsets that have an ``aiOnnxOpsetN`` property in PopART."""


class BuilderModel:
    """The part of a builder that makes models."""

    _scope: GraphScope
    _metadata: dict[str, Any]

    def _subgraph_proto(self, called: bool = False) -> GraphProto:
        """``called``: as a Call takes it, to which tensors of graphs around it are arguments like others."""
        return self._scope.to_proto(self._scope.arguments if called else None)

    def _model(self) -> LightModel:
        from onnx import ModelProto, helper

        opsets = {"": DEFAULT_OPSET, **self._scope.opsets}
        model = ModelProto(
            ir_version=3 if opsets[""] <= 8 else _ir_version(opsets[""]), producer_name="podrun"
        )
        self._scope.into_proto(model.graph)
        model.opset_import.extend(helper.make_opsetid(domain, version) for domain, version in opsets.items())
        if self._metadata:
            helper.set_model_props(model, {key: json.dumps(value) for key, value in self._metadata.items()})
        return LightModel(model, self._scope.values)

    def getModelProto(self) -> bytes:
        """The model as bytes, which the sessions take."""
        return self._model().to_bytes()

    def saveModelProto(self, filename: str) -> None:
        """Check the model with onnx.checker and write it. Data in other files lie beside it."""
        from onnx import checker

        model = self._model()
        data = model.to_bytes()
        target = Path(filename)
        with tempfile.NamedTemporaryFile(prefix=f".{target.name}.", dir=target.resolve().parent) as draft:
            draft.write(model.to_bytes(standard=True))  # The checker knows ONNX's form only.
            draft.flush()
            try:
                checker.check_model(draft.name)
            except checker.ValidationError as error:
                raise popart_exception(f"onnx.checker refuses the model: {error}") from error
        target.write_bytes(data)

    def saveInitializersExternally(self, ids: Sequence[str], filename: str) -> None:
        """Move values of variables out of the model into ``filename``, whose folder must exist."""
        from podrun.onnx_models.transformer import move_initializers

        move_initializers(self._scope.initializers, self._scope.values, ids, filename)


def _ir_version(opset: int) -> int:
    """PopART writes 4 for its opsets from 9 on; later opsets get the oldest IR version that knows them."""
    from onnx import helper

    if opset in OPSETS:
        return 4
    versions = {row[2]: row[1] for row in helper.VERSION_TABLE}
    return max(4, int(versions.get(opset, 4)))


def load(source: str | bytes | os.PathLike[str]) -> GraphScope:
    """A scope that continues the model in a file or in bytes."""
    from onnx import shape_inference

    from podrun.onnx_models.loader import read_light_model

    light = read_light_model(source)
    model = light.proto
    opsets = {
        ("" if entry.domain == "ai.onnx" else entry.domain): entry.version for entry in model.opset_import
    }
    inferred = shape_inference.infer_shapes(model)
    known = {value.name: info_from_type(value.type) for value in inferred.graph.value_info}
    for initializer in model.graph.initializer:
        known[initializer.name] = TensorInfo(
            data_type_from_onnx(initializer.data_type), [int(dim) for dim in initializer.dims]
        )
    scope = scope_from_graph(model.graph, opsets, known)
    scope.values.update(light.values)
    return scope


class Pushed:
    """A context manager inside of which ``item`` lies on top of ``stack``."""

    def __init__(self, stack: list[Any], item: Any) -> None:
        self._stack, self._item = stack, item

    def __enter__(self) -> None:
        self._stack.append(self._item)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class _Manager:
    """A context manager around another that the builder gives."""

    def __init__(self, inner: AbstractContextManager[Any]) -> None:
        self._inner = inner

    def __enter__(self) -> Any:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return self._inner.__exit__(kind, error, trace)


class NameContextManager(_Manager):
    """Prefixes the names of tensors that are added inside with ``name/``."""

    def __init__(self, builder: Builder, name: str) -> None:
        super().__init__(builder.nameScope(name))


class AttributeContextManager(_Manager):
    """Gives nodes that are added inside the attribute ``attribute``."""

    def __init__(self, builder: Builder, attribute: str, value: Any) -> None:
        super().__init__(builder._attribute_scope(attribute, value))


class KeyValueContextManager(_Manager):
    """Gives nodes that are added inside the outline attribute ``key`` with ``value``."""

    def __init__(self, builder: Builder, key: str, value: str) -> None:
        super().__init__(builder.outlineAttributes({key: value}))
