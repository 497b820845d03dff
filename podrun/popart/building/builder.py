"""Builder: makes ONNX models operator by operator (source: graphcore/popart, willow/src/builder_impl.cpp).

    builder = Builder()
    x = builder.addInputTensor(TensorInfo("FLOAT", [4, 8]))
    w = builder.addInitializedInputTensor(numpy.ones([8, 2], numpy.float32))
    y = builder.aiOnnx.matmul([x, w])
    model = builder.getModelProto()

Types and shapes are inferred as nodes are added, so what does not fit is refused at the line that adds it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from podrun.core.kept_files import version_beside
from podrun.onnx_models.annotations import BROADCAST_KEY, TRANSFERS_KEY, VARIABLE_KEY
from podrun.popart.building.attributes import NodeAttributes, Pushed
from podrun.popart.building.graph_builder import (
    DEFAULT_OPSET,
    GRAPHCORE_DOMAIN,
    BuilderModel,
    GraphScope,
    Names,
    continued_model,
)
from podrun.popart.building.node_inference import check_windows, infer_custom, infer_graphcore
from podrun.popart.building.opsets import (
    AiGraphcore,
    AiOnnx,
    AiOnnxMl,
    check_inputs,
    debug_name,
    takes_debug_prefix,
)
from podrun.popart.operators.graphcore_ops import GraphcoreOp
from podrun.popart.step_data.dataflow import InputSettings
from podrun.popart.values.debug import TRACE, DebugContext, note
from podrun.popart.values.enums import ExchangeStrategy, ReplicatedStreamMode
from podrun.popart.values.exceptions import incompatible, popart_exception
from podrun.popart.values.names import FormerBuilder
from podrun.popart.values.tensor_info import TensorInfo, check_initializer
from podrun.popart.values.variables import VariableSettings
from podrun.private_apis.lean_imports import import_onnx

_log = logging.getLogger("podrun.popart.builder")


class Builder(NodeAttributes, BuilderModel, FormerBuilder):
    """Makes an ONNX model operator by operator: ``builder.aiOnnx.matmul([x, w])``. ``modelProtoOrFilename`` continues
    an existing model; ``opsets`` fixes the operator set versions up front, ``Builder(opsets={"ai.onnx": 9,
    "ai.graphcore": 1})``.
    """

    def __init__(
        self,
        modelProtoOrFilename: str | bytes | os.PathLike[str] | None = None,
        opsets: Mapping[str, int] | None = None,
        builderCore: Builder | None = None,
    ) -> None:
        versions = {
            ("" if domain == "ai.onnx" else domain): version for domain, version in (opsets or {}).items()
        }
        import_onnx(version_beside("onnx"))
        self._metadata: dict[str, Any] = {}
        self._replication: int | None = None
        if builderCore is not None:
            self._scope = GraphScope(builderCore._scope.names, builderCore._scope.opsets, builderCore._scope)
            self._metadata = builderCore._metadata
        elif modelProtoOrFilename is not None:
            self._scope = continued_model(modelProtoOrFilename)
        else:
            self._scope = GraphScope(Names(), versions)
        self._children: list[Builder] = []
        super().__init__()

    # -- operator families ------------------------------------------------------------------------

    @property
    def aiOnnx(self) -> AiOnnx:
        """The ai.onnx operators at this builder's opset: the first one used, or 10 if this property comes first."""
        return self.aiOnnxOpsetVersion(self._scope.opsets.get("", DEFAULT_OPSET))

    def aiOnnxOpsetVersion(self, version: int) -> AiOnnx:
        """The ai.onnx operators at ``version``. RuntimeError if the builder has another version already."""
        defined = self._scope.opsets.setdefault("", version)
        if defined != version:
            raise RuntimeError(
                f"Invalid opset 'aiOnnxOpset{version}' selected. Opset for domain ai.onnx already defined as "
                f"{defined}: a model has one version of each operator set."
            )
        return AiOnnx(self, version)

    aiOnnxOpset6 = property(lambda self: self.aiOnnxOpsetVersion(6))
    aiOnnxOpset7 = property(lambda self: self.aiOnnxOpsetVersion(7))
    aiOnnxOpset8 = property(lambda self: self.aiOnnxOpsetVersion(8))
    aiOnnxOpset9 = property(lambda self: self.aiOnnxOpsetVersion(9))
    aiOnnxOpset10 = property(lambda self: self.aiOnnxOpsetVersion(10))
    aiOnnxOpset11 = property(lambda self: self.aiOnnxOpsetVersion(11))

    @property
    def aiGraphcore(self) -> AiGraphcore:
        """The ai.graphcore operators."""
        return AiGraphcore(self)

    aiGraphcoreOpset1 = aiGraphcore

    @property
    def aiOnnxMl(self) -> AiOnnxMl:
        """The ai.onnx.ml operators (each refused by name)."""
        return AiOnnxMl(self)

    aiOnnxMlOpset1 = aiOnnxMl

    # -- tensors ----------------------------------------------------------------------------------

    @takes_debug_prefix
    def addInputTensor(self, *args: object, **kwargs: object) -> str:
        """A model input: ``(TensorInfo, debugContext="" | settings=InputSettings())`` or ``(dtype, shape, ...)``."""
        info, settings, context = _input_arguments(args, kwargs)
        name = self._scope.names.unique(self._scoped(debug_name(context) or "input"))
        self._scope.add_input(name, info)
        note(context, "addInputTensor", [name])
        if settings.replicatedStreamMode() is ReplicatedStreamMode.Broadcast:
            self._metadata.setdefault(BROADCAST_KEY, []).append(name)
        if settings.exchangeStrategy() is not ExchangeStrategy.JustInTime:
            self._metadata.setdefault(TRANSFERS_KEY, {})[name] = settings.exchangeStrategy().name
        return name

    @takes_debug_prefix
    def addUntypedInputTensor(self, debugContext: DebugContext | str = "") -> str:
        """An input of a subgraph, whose type follows from where the subgraph is called. popart_exception in the main
        graph.
        """
        if self._scope.parent is None:
            raise popart_exception(
                "Can not add untyped tensors to the top-level graph. Use addInputTensor with a TensorInfo."
            )
        name = self._scope.names.unique(self._scoped(debug_name(debugContext) or "input"))
        self._scope.add_input(name, None)
        return name

    def addInputTensorFromParentGraph(self, tensorId: str) -> None:
        """Use a tensor of an outer graph in this subgraph."""
        if self._scope.parent is None or self._scope.parent.find(tensorId) is None:
            near = (
                self._scope.parent.suggestion(tensorId) if self._scope.parent else " This is the main graph."
            )
            raise popart_exception(f"There is no tensor {tensorId!r} in a parent graph.{near}")
        self._scope.arguments.append(tensorId)

    @takes_debug_prefix
    def addInitializedInputTensor(
        self,
        initVal: np.ndarray,
        *args: Any,
        debugContext: DebugContext | str = "",
        variableSettings: VariableSettings | None = None,
    ) -> str:
        """A variable with its initial value; one that the loss depends on is trained."""
        settings, context = variableSettings, debugContext
        for value in args:
            if isinstance(value, VariableSettings):
                settings = value
            else:
                context = value
        array = check_initializer(initVal)
        info = TensorInfo(array)
        if settings is not None:
            info = self._settings_info(array, settings)
        name = self._scope.names.unique(self._scoped(debug_name(context) or "init_input"))
        note(context, "addInitializedInputTensor", [name])
        self._scope.add_initializer(name, array, info)
        if settings is not None:
            domain = settings.getSharedVariableDomain()
            self._metadata.setdefault(VARIABLE_KEY, {})[name] = [
                int(domain.type),
                domain.replicaGroupSize,
                int(settings.getRetrievalMode()),
            ]
        return name

    def _settings_info(self, array: np.ndarray, settings: VariableSettings) -> TensorInfo:
        if not settings.isUsingCommGroup():
            raise popart_exception(
                "VariableSettings made from stride and group size cannot be stored in an ONNX model; use a CommGroup."
            )
        settings.verify()
        if self._replication is None:
            return TensorInfo(array)
        shape = settings.shapeOnReplica(list(array.shape), self._replication, "init_input")
        return TensorInfo(TensorInfo(array).dataType(), shape)

    def addOutputTensor(self, outputName: str) -> None:
        """Mark a tensor as an output of the model."""
        self._scope.info(outputName)
        if outputName in self._scope.outputs and self._scope.parent is None:
            raise popart_exception(f"Tensor {outputName!r} is an output already.")
        self._scope.outputs.append(outputName)

    def customOp(
        self,
        opName: str,
        opVersion: int,
        domain: str,
        inputs: Sequence[str],
        attributes: Mapping[str, Any],
        numOutputs: int = 1,
        name: str = "",
    ) -> list[str]:
        """A node of any domain. It runs if `podrun.popart.register_op` or PopART has the operator."""
        inputs = check_inputs("customOp", inputs)
        known = "" if domain == "ai.onnx" else domain
        version = self._scope.opsets.setdefault(known, opVersion)
        if version != opVersion:
            raise popart_exception(
                f"This builder uses {domain} version {version} already, so version {opVersion} cannot be used."
            )
        plain = {key: v.tolist() if isinstance(v, np.ndarray) else v for key, v in attributes.items()}
        if known == "":
            return self._add_onnx(opName, version, list(inputs), numOutputs, plain, name)
        node = self._make_node(domain, opName, list(inputs), numOutputs, plain, name)
        self._scope.add_node(node, infer_custom(self._scope, node, version, plain))
        return list(node.output)

    @takes_debug_prefix
    def reshape_const(
        self, aiOnnx: Any, args: Sequence[str], shape: Sequence[int], debugContext: DebugContext | str = ""
    ) -> str:
        """Reshape to a constant shape, which is added as a constant."""
        target = aiOnnx.constant(np.array(shape, np.int64), False, debug_name(debugContext))
        result: str = aiOnnx.reshape([args[0], target], debugContext)
        return result

    # -- questions --------------------------------------------------------------------------------

    def getTensorShape(self, id: str) -> list[int]:
        """The shape. popart_exception if it is not known (yet)."""
        return self._known(id).shape()

    def getTensorDtypeString(self, id: str) -> str:
        """The type as NumPy names it: ``"float32"``."""
        return self._known(id).data_type_lcase()

    def isInitializer(self, id: str) -> bool:
        """True iff the tensor has an initial value."""
        self._scope.info(id)
        return id in self._scope.initializers

    def getInputTensorIds(self) -> list[str]:
        """Names of the model's inputs, variables among them."""
        return list(self._scope.inputs)

    def getOutputTensorIds(self) -> list[str]:
        """Names of the model's outputs."""
        return list(self._scope.outputs)

    def getValueTensorIds(self) -> list[str]:
        """Names of the tensors that nodes make, outputs of the model among them."""
        return list(self._scope.producers)

    def getTrainableTensorIds(self) -> list[str]:
        """Names of the model's variables."""
        return list(self._scope.initializers)

    def embedReplicationFactor(self, replicationFactor: int) -> None:
        """Let tensor infos of grouped variables show what one of ``replicationFactor`` replicas sees."""
        self._replication = replicationFactor

    def _known(self, tensor: str) -> TensorInfo:
        info = self._scope.info(tensor)
        if info is None:
            raise popart_exception(f"Type and shape of tensor {tensor!r} are not known while building.")
        return info

    # -- names and scopes -------------------------------------------------------------------------

    def nameScope(self, name: str) -> AbstractContextManager[None]:
        """Prefix ``name/`` to the names of tensors made inside."""
        return Pushed(self._name_scopes, name)

    def getNameScope(self, name: str = "") -> str:
        """The prefix in force, with ``name`` behind it."""
        return self._scoped(name)

    def _scoped(self, name: str) -> str:
        return "".join(f"{scope}/" for scope in self._name_scopes) + name

    def createSubgraphBuilder(self) -> Builder:
        """A builder for a subgraph, which sees this one's tensors."""
        child = Builder(builderCore=self)
        child._scope.name = f"{self._scope.name}_subgraph_{len(self._children)}"
        self._children.append(child)
        return child

    def setGraphName(self, name: str) -> None:
        """Name the graph."""
        self._scope.name = name

    # -- adding nodes -----------------------------------------------------------------------------

    def _add_onnx(
        self,
        op_type: str,
        version: int,
        inputs: list[str],
        outputs: int,
        attributes: Mapping[str, Any],
        name: str,
    ) -> list[str]:
        self._scope.opsets.setdefault("", version)
        node = self._make_node("", op_type, inputs, outputs, attributes, name)
        check_windows(op_type, inputs, [self._scope.info(t) if t else None for t in inputs], attributes)
        self._scope.add_node(node, self._scope.infer_onnx(node, version))
        return list(node.output)

    def _add_graphcore(
        self, op: GraphcoreOp, inputs: list[str], outputs: int, attributes: Mapping[str, Any], name: str
    ) -> list[str]:
        self._scope.opsets.setdefault(GRAPHCORE_DOMAIN, 1)
        node = self._make_node(GRAPHCORE_DOMAIN, op.op_type, inputs, outputs, attributes, name)
        self._scope.add_node(node, infer_graphcore(self._scope, op, node, attributes))
        return list(node.output)

    def _make_node(
        self,
        domain: str,
        op_type: str,
        inputs: list[str],
        outputs: int,
        attributes: Mapping[str, Any],
        name: str,
    ) -> Any:
        from onnx import AttributeProto, helper

        _log.log(TRACE, "Adding %s.%s", domain or "ai.onnx", op_type)
        for tensor in inputs:
            if tensor:
                self._scope.info(tensor)
        names = [self._scope.names.unique(self._scoped(f"{op_type}:{index}")) for index in range(outputs)]
        label = self._scoped(name) if name else ""
        node = helper.make_node(op_type, inputs, names, name=label, domain=domain)
        for key, value in {**attributes, **self._scope_attributes()}.items():
            empty = isinstance(value, (list, tuple)) and not value
            kind = AttributeProto.INTS if empty else None
            node.attribute.append(helper.make_attribute(key, list(value) if empty else value, attr_type=kind))
        return node


def _input_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[TensorInfo, InputSettings, Any]:
    """The arguments of addInputTensor in any of their forms."""
    rest = list(args)
    info = kwargs.pop("tensorInfo", None)
    if info is None and rest and isinstance(rest[0], TensorInfo):
        info = rest.pop(0)
    if info is None:
        dtype = kwargs.pop("dataType", None) or (rest.pop(0) if rest else None)
        shape = kwargs.pop("shape", None)
        shape = shape if shape is not None else (rest.pop(0) if rest else None)
        if dtype is None or shape is None:
            raise incompatible("addInputTensor", "It takes a TensorInfo, or a data type and a shape.")
        info = TensorInfo(dtype, shape)
    settings, context = kwargs.pop("settings", None), kwargs.pop("debugContext", "")
    for value in rest:
        if isinstance(value, InputSettings):
            settings = value
        else:
            context = value
    if kwargs:
        raise TypeError(f"addInputTensor(): incompatible function arguments: {sorted(kwargs)}.")
    return info, settings or InputSettings(), context
