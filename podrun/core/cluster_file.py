"""Reads a POD description (``cluster_configs/*.yaml``): YAML, checked against one schema, into a `Cluster`.

pydantic and PyYAML are only here, and only imported when a description is read. Every error names the file,
the line, the key and what was expected.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from podrun.core.cluster import (
    ANNOUNCED,
    IPUS_PER_MACHINE,
    MAX_ILD_IPUS,
    Agent,
    Allocation,
    Cluster,
    GatewayTopology,
    LinkTopology,
    Topology,
    cluster_names,
    config_directory,
)
from podrun.core.documents import compose_yaml, read_text
from podrun.core.errors import ConfigError, NotFoundError

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
SERIAL_PATTERN = r"^\d{4}\.\{board\}\.\d{7}$"

Path_ = tuple[str | int, ...]


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


class _Marked:
    """YAML data with the line of every key and item, for errors."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: dict[Path_, int] = {}
        node = compose_yaml(read_text(path, hint=_SEE), str(path), hint=_SEE)
        if node is None:
            raise ConfigError(f"{path}:1: the file is empty; expected the description of a POD", hint=_SEE)
        self.data = self._value(node, ())

    def _value(self, node: yaml.Node, at: Path_) -> Any:
        self.lines.setdefault(at, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            result: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(key_node.value)
                if key in result:
                    raise self.error((*at, key), "is there twice", key_node.start_mark.line + 1)
                self.lines[(*at, key)] = key_node.start_mark.line + 1
                result[key] = self._value(value_node, (*at, key))
            return result
        if isinstance(node, yaml.SequenceNode):
            return [self._value(item, (*at, i)) for i, item in enumerate(node.value)]
        try:
            return yaml.SafeLoader("").construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise self.error(at, f"is no plain value: {node.value!r}"[:200]) from error

    def error(self, at: Path_, problem: str, line: int | None = None) -> ConfigError:
        """A ConfigError for the key at ``at``; a key that is missing is reported where its parent starts."""
        place = at
        while line is None:
            line = self.lines.get(place)
            place = place[:-1]
        return ConfigError(f"{self.path}:{line}: {_dotted(at)} {problem}", hint=_SEE)


_SEE = "podrun help vipu describes the keys, with an example."


def _dotted(at: Path_) -> str:
    text = ""
    for part in at:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def find_cluster_file(name_or_path: str | Path, *, simulated: bool = False) -> Path:
    """The file of a POD by name, or the file itself if ``name_or_path`` is a path. Raises NotFoundError.

    ``simulated``: the error lists PODs that were never built as well.
    """
    text = str(name_or_path)
    named = config_directory() / f"{text}.yaml"
    if re.fullmatch(ID_PATTERN, text) and named.is_file():
        return named
    path = Path(name_or_path)
    if path.is_file():
        return path
    names = [*cluster_names(), *(ANNOUNCED if simulated else ())]
    if "/" in text or text.endswith((".yaml", ".yml")):
        raise NotFoundError(f"there is no cluster file {text}", hint=f"Known clusters: {', '.join(names)}.")
    close = difflib.get_close_matches(text.lower(), names, n=1)
    did_you_mean = f"Did you mean {close[0]}? " if close else ""
    raise NotFoundError(
        f"unknown cluster {text!r}", hint=f"{did_you_mean}Known clusters: {', '.join(names)}."
    )


def load_cluster(name_or_path: str | Path, *, simulated: bool = False) -> Cluster:
    """The POD of that name (``pod16``) or in that file.

    Raises NotFoundError, which lists the known names (``simulated``: also those of PODs that were never built), and
    ConfigError, which names file, line, key and what was expected.
    """
    return read_cluster(find_cluster_file(name_or_path, simulated=simulated))


@functools.cache
def smallest_holding(ipus: int, target: str) -> Cluster | None:
    """The smallest named POD that has at least ``ipus`` IPUs of that target (``gc200``, ``bow``); None if there is
    none.
    """
    pods = (load_cluster(name) for name in cluster_names())
    return next((pod for pod in pods if pod.target == target and pod.ipu_count >= ipus), None)


def read_cluster(path: Path) -> Cluster:
    """The Cluster a file describes. Raises ConfigError."""
    marked = _Marked(path)
    if not isinstance(marked.data, dict):
        raise marked.error((), "holds no keys; expected the description of a POD")
    try:
        model = ClusterModel.model_validate(marked.data)
    except ValidationError as error:
        raise _first_error(marked, error) from None
    return _build(marked, model)


def _first_error(marked: _Marked, error: ValidationError) -> ConfigError:
    """The complaint to show first: a misspelt key goes before the missing key that it causes."""
    items = error.errors()
    misspelt = [item for item in items if item["type"] == "extra_forbidden"]
    return _complaint(marked, dict((misspelt or items)[0]))


def _complaint(marked: _Marked, item: Mapping[str, Any]) -> ConfigError:
    at = tuple(part for part in item["loc"] if not str(part).startswith(("literal", "list[")))
    context = item.get("ctx") or {}
    kind = item["type"]
    if kind == "missing":
        return marked.error(at, "is missing")
    if kind == "extra_forbidden":
        known = _keys_at(at[:-1])
        close = difflib.get_close_matches(str(at[-1]), known, n=1)
        suffix = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
        return marked.error(at, f"is no key of a POD description; {suffix}")
    expected = context.get("expected")
    if expected is None:
        message = str(item["msg"])
        expected = message.removeprefix("Input should be ").removeprefix("String should ")
    return marked.error(at, f"is {item['input']!r}; expected {expected}")


def _keys_at(at: Path_) -> list[str]:
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


def _build(marked: _Marked, model: ClusterModel) -> Cluster:
    domain = model.ipu_links.domain_size
    if domain & (domain - 1):
        raise marked.error(("ipu_links", "domain_size"), f"is {domain}; expected a power of two, 4 to 64")
    agents = tuple(_agents(marked, model, domain // IPUS_PER_MACHINE))
    ipus = len(agents) * IPUS_PER_MACHINE
    if ipus % domain:
        problem = f"is {domain}, which does not divide the {ipus} IPUs of {len(agents)} agents"
        raise marked.error(("ipu_links", "domain_size"), problem)
    several = ipus > domain
    if several == (model.gateway_links.topology is GatewayTopology.NONE):
        why = "looped: there are several" if several else "none: there is only one"
        problem = f"is {model.gateway_links.topology.value!r}; expected {why} IPU-Link domain"
        raise marked.error(("gateway_links", "topology"), problem + ("s" if several else ""))
    return Cluster(
        name=model.name,
        description=model.description,
        target=model.target,
        machine_model=model.machine.model,
        gateway_memory_bytes=model.machine.gateway_memory_gib << 30,
        topology=Topology(model.ipu_links.topology, domain, model.gateway_links.topology),
        agents=agents,
        allocations=_allocations(marked, model, agents),
    )


def _agents(marked: _Marked, model: ClusterModel, per_ild: int) -> Iterator[Agent]:
    seen: set[str] = set()
    index = 0
    for i, group in enumerate(model.agents):
        for _ in range(group.count):
            ild, position = divmod(index, per_ild)
            numbers = {"n": index + 1, "ild": ild + 1, "position": position + 1}
            texts = {}
            for key in ("id", "host", "serial"):
                texts[key] = _fill(marked, ("agents", i, key), getattr(group, key), numbers)
            if not re.fullmatch(ID_PATTERN, texts["id"]) or texts["id"] in seen:
                problem = f"gives {texts['id']!r}; expected a different name for each agent (use {{n}})"
                raise marked.error(("agents", i, "id"), problem)
            if not re.fullmatch(SERIAL_PATTERN, texts["serial"]):
                problem = f"gives {texts['serial']!r}; expected NNNN.{{board}}.YYYYYYY (4 and 7 digits)"
                raise marked.error(("agents", i, "serial"), problem)
            seen.add(texts["id"])
            yield Agent(texts["id"], index, texts["host"], group.port, texts["serial"], ild, position)
            index += 1


def _fill(marked: _Marked, at: Path_, text: str, numbers: Mapping[str, int]) -> str:
    """Put numbers in place of ``{n}`` and the like. ``{board}`` stays: it differs within a machine."""

    def number(match: re.Match[str]) -> str:
        name, width = match["name"], int(match["width"] or 0)
        if name == "board" and at[-1] == "serial":
            return "{board}"
        if name not in numbers:
            raise marked.error(at, f"has {{{name}}}; expected {{n}}, {{ild}} or {{position}}")
        return f"{numbers[name]:0{width}d}"

    return re.sub(r"\{(?P<name>[^{}:]*)(?::(?P<width>\d))?\}", number, text)


def _allocations(marked: _Marked, model: ClusterModel, agents: tuple[Agent, ...]) -> tuple[Allocation, ...]:
    known = {agent.id for agent in agents}
    taken: dict[str, str] = {}
    result: list[Allocation] = []
    for i, entry in enumerate(model.allocations):
        if entry.name in {allocation.name for allocation in result}:
            raise marked.error(("allocations", i, "name"), f"is {entry.name!r}, which is there already")
        ids = tuple(agent.id for agent in agents) if entry.agents == "all" else tuple(entry.agents)
        for agent in ids:
            if agent not in known:
                raise marked.error(("allocations", i, "agents"), f"names {agent!r}, which is no agent")
            if agent in taken:
                problem = f"names {agent!r}, which is in allocation {taken[agent]!r} already"
                raise marked.error(("allocations", i, "agents"), problem)
            taken[agent] = entry.name
        result.append(Allocation(entry.name, ids))
    return tuple(result)
