"""Which operators there are: OperatorIdentifier and the functions that list them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class OperatorIdentifier:
    """Domain, type and version of an operator."""

    domain: str
    type: str
    version: int


@dataclass(frozen=True, slots=True)
class OpDefinition:
    """What an operator takes and gives, as ONNX's schema says it."""

    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)


def getSupportedOperations(includeInternal: bool) -> list[OperatorIdentifier]:
    """Every operator and version that sessions run. There are no internal ones to include."""
    from podrun.popart.ops.registry import operators

    return [OperatorIdentifier(item.domain, item.name, item.since) for item in operators()]


def getUnsupportedOperations(opsetVersion: int) -> list[OperatorIdentifier]:
    """Operators of an ai.onnx opset that sessions do not run."""
    from onnx import defs

    from podrun.popart.building.schemas import onnx_methods
    from podrun.popart.ops.registry import find

    return [
        OperatorIdentifier("ai.onnx", name, defs.get_schema(name, opsetVersion, "").since_version)
        for name in sorted(onnx_methods(opsetVersion).values())
        if find("ai.onnx", name, opsetVersion) is None
    ]


def getSupportedOperationsDefinition(includeInternal: bool) -> dict[OperatorIdentifier, OpDefinition]:
    """What each supported ai.onnx operator takes and gives."""
    from onnx import defs

    found = {}
    for identifier in getSupportedOperations(includeInternal):
        if identifier.domain != "ai.onnx" or not defs.has(identifier.type, identifier.version, ""):
            continue
        schema = defs.get_schema(identifier.type, identifier.version, "")
        found[identifier] = OpDefinition(
            [item.name for item in schema.inputs],
            [item.name for item in schema.outputs],
            {name: str(item.type) for name, item in schema.attributes.items()},
        )
    return found
