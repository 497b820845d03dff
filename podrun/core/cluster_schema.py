"""What a POD description may hold: the schema of ``cluster_configs/*.yaml`` and its complaints.

Only here is pydantic needed to read one, and only for a description that podrun's tests have not held against the
schema (`podrun.core.cluster_file`): importing it takes 0.1 s of a core.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podrun.core.cluster import ID_PATTERN, IPUS_PER_MACHINE, MAX_ILD_IPUS, GatewayTopology, LinkTopology
from podrun.core.documents import KeyPath
from podrun.core.errors import ConfigError

Complain = Callable[[KeyPath, str], ConfigError]
"""Makes the error for the value at a place, with what is wrong there."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MachineModel(_Strict):
    """What each machine of the POD is."""

    model: Literal["IPU-M2000", "Bow-2000"]
    gateway_memory_gib: Annotated[int, Field(ge=1, le=4096)]


class IpuLinks(_Strict):
    """IPU-Links within a domain."""

    topology: LinkTopology
    domain_size: Annotated[int, Field(ge=IPUS_PER_MACHINE, le=MAX_ILD_IPUS)]


class GatewayLinks(_Strict):
    """GW-Links between domains."""

    topology: GatewayTopology


class AgentGroup(_Strict):
    """A row of agents. ``{n}``, ``{ild}``, ``{position}`` in a text stand for numbers; ``{n:3}`` pads with zeros."""

    count: Annotated[int, Field(ge=1, le=16384)]
    id: Annotated[str, Field(min_length=1)]
    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)] = 8080
    serial: Annotated[str, Field(min_length=1)]


class AllocationModel(_Strict):
    """Who may use which agents."""

    name: Annotated[str, Field(pattern=ID_PATTERN)]
    agents: Literal["all"] | list[str]


class ClusterModel(_Strict):
    """The whole content of a cluster file."""

    schema_version: Literal[1]
    name: Annotated[str, Field(pattern=ID_PATTERN)]
    description: str
    target: Literal["gc200", "bow"]
    machine: MachineModel
    ipu_links: IpuLinks
    gateway_links: GatewayLinks
    agents: Annotated[list[AgentGroup], Field(min_length=1)]
    allocations: Annotated[list[AllocationModel], Field(min_length=1)]


def validated(data: Mapping[str, object], complain: Complain) -> ClusterModel:
    """The content of a description. Raises ConfigError."""
    try:
        return ClusterModel.model_validate(data)
    except ValidationError as error:
        raise _first_error(complain, error) from None


def _first_error(complain: Complain, error: ValidationError) -> ConfigError:
    """The complaint to show first: a misspelt key goes before the missing key that it causes."""
    items = error.errors()
    misspelt = [item for item in items if item["type"] == "extra_forbidden"]
    return _complaint(complain, dict((misspelt or items)[0]))


def _complaint(complain: Complain, item: Mapping[str, Any]) -> ConfigError:
    at = tuple(part for part in item["loc"] if not str(part).startswith(("literal", "list[")))
    context = item.get("ctx") or {}
    kind = item["type"]
    if kind == "missing":
        return complain(at, "is missing")
    if kind == "extra_forbidden":
        known = _keys_at(at[:-1])
        close = difflib.get_close_matches(str(at[-1]), known, n=1)
        suffix = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
        return complain(at, f"is no key of a POD description; {suffix}")
    expected = context.get("expected")
    if expected is None:
        message = str(item["msg"])
        expected = message.removeprefix("Input should be ").removeprefix("String should ")
    return complain(at, f"is {item['input']!r}; expected {expected}")


def _keys_at(at: KeyPath) -> list[str]:
    """Keys that the schema has at a place."""
    kinds: dict[str, type[BaseModel]] = {
        "machine": MachineModel,
        "ipu_links": IpuLinks,
        "gateway_links": GatewayLinks,
        "agents": AgentGroup,
        "allocations": AllocationModel,
    }
    kind = kinds.get(str(at[0]), ClusterModel) if at else ClusterModel
    return list(kind.model_fields)
