"""Node attributes and placement: Builder's methods on existing nodes, and scopes for nodes that are added inside.

Attributes whose names start with two underscores are PopART's own; ONNX's checker leaves them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.onnx_models.annotations import (
    AVAILABLE_MEMORY,
    COMM_GROUP,
    CONV_DITHERING,
    EXCLUDE_PATTERNS,
    EXECUTION_PHASE,
    INPLACE_NAMES,
    INPLACE_PRIORITIES,
    OUTLINE,
    OUTPUT_LOCATION,
    PARTIALS_TYPE,
    PIPELINE_STAGE,
    RECOMPUTE,
    SCHEDULE_PRIORITY,
    SERIALIZE_FACTOR,
    SERIALIZE_MODE,
    SERIALIZE_PRECISION,
    VIRTUAL_GRAPH,
)
from podrun.popart.options.option_groups import TensorLocation
from podrun.popart.values.enums import RecomputeType
from podrun.popart.values.exceptions import incompatible, popart_exception

if TYPE_CHECKING:
    from onnx import NodeProto

    from podrun.popart.building.builder import Builder
    from podrun.popart.building.graph_builder import GraphScope

_SCOPES = {
    VIRTUAL_GRAPH: "Virtual graph",
    PIPELINE_STAGE: "Pipeline stage",
    EXECUTION_PHASE: "Execution phase",
}
"""PopART's names of the attributes that a program may ask a scope for."""

_KINDS = {
    "INT": "an integer",
    "INTS": "an integer vector",
    "FLOAT": "a float",
    "FLOATS": "a float vector",
    "STRING": "a string",
    "STRINGS": "a string vector",
    "GRAPH": "a graph",
    "TENSOR": "a tensor",
}

_MATRIX_OPS = {"Conv", "ConvTranspose", "MatMul", "Gemm", "MultiConv", "LSTM", "GRU", "RNN"}
_SERIALIZE_MODES = ("none", "input_channels", "reducing_dim", "output_channels")

Names = str | Sequence[str] | set[str]


class Pushed:
    """A context manager that keeps ``item`` on top of ``stack``."""

    def __init__(self, stack: list[Any], item: object) -> None:
        self._stack, self._item = stack, item

    def __enter__(self) -> None:
        self._stack.append(self._item)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class NameContextManager(Pushed):
    """Prefixes the names of tensors that are added inside with ``name/``."""

    def __init__(self, builder: Builder, name: str) -> None:
        super().__init__(builder._name_scopes, name)


class AttributeContextManager(Pushed):
    """Gives nodes that are added inside the attribute ``attribute``."""

    def __init__(self, builder: Builder, attribute: str, value: object) -> None:
        super().__init__(builder._attribute_scopes, (attribute, value))


class KeyValueContextManager(AttributeContextManager):
    """Gives nodes that are added inside the outline attribute ``key`` with ``value``."""

    def __init__(self, builder: Builder, key: str, value: str) -> None:
        super().__init__(builder, OUTLINE, [str(key), str(value)])


class NodeAttributes:
    """The part of Builder whose methods concern nodes rather than tensors. A node is named by all of its outputs."""

    _scope: GraphScope

    def __init__(self) -> None:
        self._name_scopes: list[str] = []
        self._attribute_scopes: list[tuple[str, Any]] = []

    # -- generic ----------------------------------------------------------------------------------

    def _node(self, outputs: Names) -> NodeProto:
        names = {outputs} if isinstance(outputs, str) else set(outputs)
        if not names:
            raise popart_exception("A node is named by its outputs; none were given.")
        node = self._scope.producers.get(next(iter(names)))
        if node is None or {name for name in node.output if name} != names:
            raise popart_exception(
                f"Could not find a node with outputs {', '.join(sorted(names))}. A node is named by all of its outputs"
                + (f", here {list(node.output)}." if node is not None else ".")
            )
        return node

    def addNodeAttribute(self, attributeName: str, attributeValue: object, nodeOutputNames: Names) -> None:
        """Give a node an attribute. popart_exception if it has one of that name."""
        if self.nodeHasAttribute(attributeName, nodeOutputNames):
            raise popart_exception(f"Node already has attribute {attributeName}.")
        self._set(nodeOutputNames, attributeName, attributeValue)

    def _set(self, outputs: Names, name: str, value: object) -> None:
        from onnx import helper

        node = self._node(outputs)
        kept = [attribute for attribute in node.attribute if attribute.name != name]
        plain = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
        try:
            changed = helper.make_attribute(name, int(plain) if isinstance(plain, bool) else plain)
        except (TypeError, ValueError) as error:
            raise incompatible("addNodeAttribute", f"{name!r} cannot be {value!r}: {error}.") from error
        del node.attribute[:]
        node.attribute.extend([*kept, changed])

    def nodeHasAttribute(self, attributeName: str, nodeOutputNames: Names) -> bool:
        """True iff the node has the attribute."""
        return any(attribute.name == attributeName for attribute in self._node(nodeOutputNames).attribute)

    def removeNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> None:
        """Remove an attribute. popart_exception if the node does not have it."""
        node = self._node(nodeOutputNames)
        if not self.nodeHasAttribute(attributeName, nodeOutputNames):
            raise popart_exception(f"Cannot remove attribute {attributeName} as it does not exist.")
        kept = [attribute for attribute in node.attribute if attribute.name != attributeName]
        del node.attribute[:]
        node.attribute.extend(kept)

    def getAllNodeAttributeNames(self, nodeOutputNames: Names) -> list[str]:
        """Names of a node's attributes."""
        return [attribute.name for attribute in self._node(nodeOutputNames).attribute]

    def _attribute(self, name: str, outputs: Names, kind: str | None = None) -> Any:
        from onnx import AttributeProto, helper

        for attribute in self._node(outputs).attribute:
            if attribute.name == name:
                stored_kind = AttributeProto.AttributeType.Name(attribute.type)
                if kind is not None and stored_kind != kind:
                    raise popart_exception(
                        f"Node attribute {name} is not {_KINDS[kind]}, it is {_KINDS.get(stored_kind, stored_kind)}."
                    )
                return helper.get_attribute_value(attribute)
        raise popart_exception(
            f"Node does not have an attribute {name}.",
            hint=f"It has {', '.join(self.getAllNodeAttributeNames(outputs)) or 'none'}.",
        )

    def getInt64NodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> int:
        """The value of an attribute that is an integer. popart_exception for one of another kind."""
        return int(self._attribute(attributeName, nodeOutputNames, "INT"))

    def getInt64VectorNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> list[int]:
        """The value of an attribute that is a list of integers. popart_exception for one of another kind."""
        return list(self._attribute(attributeName, nodeOutputNames, "INTS"))

    def getFloatNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> float:
        """The value of an attribute that is a float. popart_exception for one of another kind."""
        return float(self._attribute(attributeName, nodeOutputNames, "FLOAT"))

    def getFloatVectorNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> list[float]:
        """The value of an attribute that is a list of floats. popart_exception for one of another kind."""
        return list(self._attribute(attributeName, nodeOutputNames, "FLOATS"))

    def getStringNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> str:
        """The value of an attribute that is a string. popart_exception for one of another kind."""
        return str(self._attribute(attributeName, nodeOutputNames, "STRING").decode())

    def getStringVectorNodeAttribute(self, attributeName: str, nodeOutputNames: Names) -> list[str]:
        """The value of an attribute that is a list of strings. popart_exception for one of another kind."""
        return [value.decode() for value in self._attribute(attributeName, nodeOutputNames, "STRINGS")]

    # -- scopes -----------------------------------------------------------------------------------

    def _attribute_scope(self, name: str, value: object) -> AbstractContextManager[None]:
        return Pushed(self._attribute_scopes, (name, value))

    def _scope_attributes(self) -> dict[str, Any]:
        """Attributes that the open scopes give to a node added now; an inner scope overrides an outer one."""
        return dict(self._attribute_scopes)

    def _in_scope(self, name: str) -> Any:
        values = self._scope_attributes()
        if name not in values:
            raise popart_exception(f"{_SCOPES[name]} not set in current scope.")
        return values[name]

    def _place(self, name: str, first: Any, value: int) -> AbstractContextManager[None] | None:
        """``method(outputs, value)`` writes the attribute; ``method(value)`` gives a scope."""
        if isinstance(first, (int, np.integer)) and not isinstance(first, bool):
            return self._attribute_scope(name, int(first))
        self._set(first, name, value)
        return None

    def virtualGraph(self, nodeOutputNames: object = None, value: int = 0) -> Any:
        """Place a node on IPU ``value`` of its replica, or ``with builder.virtualGraph(1):`` the nodes added inside."""
        return self._place(VIRTUAL_GRAPH, value if nodeOutputNames is None else nodeOutputNames, value)

    def pipelineStage(self, nodeOutputNames: object = None, value: int = 0) -> Any:
        """Put a node into a pipeline stage, or the nodes added inside ``with builder.pipelineStage(1):``."""
        return self._place(PIPELINE_STAGE, value if nodeOutputNames is None else nodeOutputNames, value)

    def executionPhase(self, nodeOutputNames: object = None, value: int = 0) -> Any:
        """Put a node into an execution phase, or the nodes added inside a ``with``."""
        return self._place(EXECUTION_PHASE, value if nodeOutputNames is None else nodeOutputNames, value)

    def schedulePriority(self, value: float) -> AbstractContextManager[None]:
        """Schedule nodes added inside sooner (greater) or later."""
        return self._attribute_scope(SCHEDULE_PRIORITY, float(value))

    def outlineAttributes(self, attributes: Mapping[str, Any]) -> AbstractContextManager[None]:
        """Keep nodes added inside apart from others in outlining."""
        flat = [str(item) for pair in attributes.items() for item in pair]
        return self._attribute_scope(OUTLINE, flat)

    def commGroup(self, type: Any = 0, groupSize: int = 0) -> AbstractContextManager[None]:
        """Set the group of replicas for collective nodes added inside."""
        return self._attribute_scope(COMM_GROUP, [int(type), groupSize])

    def recomputeOutput(
        self, nodeOutputNames: Any = None, value: RecomputeType = RecomputeType.Undefined
    ) -> Any:
        """Compute outputs again in the backward pass: on a node, or nodes added inside a ``with``."""
        if isinstance(nodeOutputNames, RecomputeType):
            return self._attribute_scope(RECOMPUTE, int(nodeOutputNames))
        if nodeOutputNames is None:
            return self._attribute_scope(RECOMPUTE, int(value))
        self._set(nodeOutputNames, RECOMPUTE, int(value))
        return None

    def outputTensorLocation(self, nodeOutputNames: Any = None, value: TensorLocation | None = None) -> Any:
        """Where outputs live: on a node, or nodes added inside a ``with``."""
        where = nodeOutputNames if isinstance(nodeOutputNames, TensorLocation) else value or TensorLocation()
        flat = [
            int(where.storage),
            int(where.loadTileSet),
            int(where.storageTileSet),
            int(where.replicatedTensorSharding),
        ]
        if nodeOutputNames is None or isinstance(nodeOutputNames, TensorLocation):
            return self._attribute_scope(OUTPUT_LOCATION, flat)
        self._set(nodeOutputNames, OUTPUT_LOCATION, flat)
        return None

    # -- asking -----------------------------------------------------------------------------------

    def getVirtualGraph(self, nodeOutputNames: Names | None = None) -> int:
        """The IPU of a node, or of the scope. popart_exception if there is none."""
        if nodeOutputNames is None:
            return int(self._in_scope(VIRTUAL_GRAPH))
        return self.getInt64NodeAttribute(VIRTUAL_GRAPH, nodeOutputNames)

    def hasVirtualGraph(self) -> bool:
        """True iff inside a virtualGraph scope."""
        return VIRTUAL_GRAPH in self._scope_attributes()

    def getPipelineStage(self) -> int:
        """The stage of the scope."""
        return int(self._in_scope(PIPELINE_STAGE))

    def hasPipelineStage(self) -> bool:
        """True iff inside a pipelineStage scope."""
        return PIPELINE_STAGE in self._scope_attributes()

    def getExecutionPhase(self) -> int:
        """The phase of the scope."""
        return int(self._in_scope(EXECUTION_PHASE))

    def hasExecutionPhase(self) -> bool:
        """True iff inside an executionPhase scope."""
        return EXECUTION_PHASE in self._scope_attributes()

    def getPartialsType(self, nodeOutputName: Names) -> str:
        """The type of partial sums: FLOAT unless set."""
        if not self.nodeHasAttribute(PARTIALS_TYPE, nodeOutputName):
            return "FLOAT"
        return self.getStringNodeAttribute(PARTIALS_TYPE, nodeOutputName)

    def getRecomputeOutputInBackwardPass(self, nodeOutputNames: Names) -> bool:
        """True iff the node's outputs are computed again in the backward pass."""
        return (
            self.nodeHasAttribute(RECOMPUTE, nodeOutputNames)
            and self.getInt64NodeAttribute(RECOMPUTE, nodeOutputNames) == RecomputeType.Recompute.value
        )

    # -- hints on nodes ---------------------------------------------------------------------------

    def recomputeOutputInBackwardPass(
        self, nodeOutputName: Names, value: RecomputeType = RecomputeType.Recompute
    ) -> None:
        """Compute the node's outputs again in the backward pass instead of keeping them."""
        self._set(nodeOutputName, RECOMPUTE, int(value))

    def setAvailableMemoryProportion(self, nodeOutputName: Names, availableMemoryProportion: float) -> None:
        """Share of tile memory that the node may use for temporary data, in (0, 1]."""
        if not 0 < availableMemoryProportion <= 1:
            raise popart_exception(
                f"availableMemoryProportion must be in (0,1], but was set to {availableMemoryProportion}"
            )
        self._set(nodeOutputName, AVAILABLE_MEMORY, float(availableMemoryProportion))

    def setPartialsType(self, nodeOutputName: Names, partialsType: str) -> None:
        """FLOAT or HALF partial sums, on convolutions and matrix products."""
        node = self._node(nodeOutputName)
        if node.op_type not in _MATRIX_OPS:
            raise popart_exception(
                "Builder::setPartialsType should only be called on convolutions and matrix products but was given: "
                f"{node.op_type}"
            )
        if partialsType.upper() not in ("FLOAT", "HALF"):
            raise popart_exception(f"The partials type is FLOAT or HALF, not {partialsType!r}.")
        self._set(nodeOutputName, PARTIALS_TYPE, partialsType.upper())

    def setEnableConvDithering(self, nodeOutputName: Names, enableConvDithering: int) -> None:
        """Spread a convolution's tiles differently. Convolutions only."""
        node = self._node(nodeOutputName)
        if node.op_type not in ("Conv", "MultiConv", "ConvTranspose"):
            raise popart_exception(
                f"Builder::setEnableConvDithering should only be called on convolutions but was given: {node.op_type}"
            )
        if enableConvDithering not in (0, 1):
            raise popart_exception("enableConvDithering must be a bool value")
        self._set(nodeOutputName, CONV_DITHERING, int(enableConvDithering))

    def setInplacePreferences(self, nodeOutputName: Names, prefs: Mapping[str, float]) -> None:
        """Priorities of in-place variants of the node."""
        self._set(nodeOutputName, INPLACE_NAMES, list(prefs))
        self._set(nodeOutputName, INPLACE_PRIORITIES, [float(value) for value in prefs.values()])

    def excludePatterns(self, nodeOutputName: Names, patternNames: Sequence[str]) -> None:
        """Exclude the node from patterns."""
        self._set(nodeOutputName, EXCLUDE_PATTERNS, list(patternNames))

    def setSerializeMatMul(
        self, nodeOutputName: Names, mode: str, factor: int = 0, keep_precision: bool = False
    ) -> None:
        """Cut a matrix product into ``factor`` pieces along a dimension; a session checks that it divides."""
        node = self._node(nodeOutputName)
        if node.op_type != "MatMul":
            raise popart_exception(f"Only MatMul can be serialised, not {node.op_type}.")
        if mode not in _SERIALIZE_MODES:
            raise popart_exception(
                f"Unsupported mat mul serialization mode '{mode}'. Supported modes are 'input_channels', "
                "'reducing_dim', 'output_channels' or 'none'"
            )
        self._set(nodeOutputName, SERIALIZE_MODE, mode)
        self._set(nodeOutputName, SERIALIZE_FACTOR, int(factor))
        self._set(nodeOutputName, SERIALIZE_PRECISION, int(keep_precision))

    def checkpointOutput(self, nodeOutputNames: Sequence[str]) -> list[str]:
        """Keep these tensors for the backward pass. Returns new tensors, which the program must use from here on."""
        checkpoints = []
        for name in nodeOutputNames:
            output = self.aiOnnx.identity([name])  # type: ignore[attr-defined]
            self._set(output, RECOMPUTE, RecomputeType.Checkpoint.value)
            checkpoints.append(output)
        return checkpoints
