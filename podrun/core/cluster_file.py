"""Reads a POD description (``cluster_configs/*.yaml``): YAML, checked against one schema, into a `Cluster`.

The schema is in `podrun.core.cluster_schema`. PyYAML is only imported when a description is read. Every error names the
file, the line, the key and what was expected.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import yaml

from podrun.core.cluster import (
    ANNOUNCED,
    ID_PATTERN,
    IPUS_PER_MACHINE,
    Agent,
    Allocation,
    Cluster,
    GatewayTopology,
    LinkTopology,
    Topology,
    cluster_names,
    config_directory,
)
from podrun.core.documents import KeyPath, compose_yaml, read_text
from podrun.core.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from podrun.core.cluster_schema import ClusterModel

SERIAL_PATTERN = r"^\d{4}\.\{board\}\.\d{7}$"

CHECKED = frozenset(
    {
        "22380ff3baacabb3ae6a3f25c7e5255f3a1e50e21998c3140755f4eabc163da9",  # bow-2000
        "b003fe356b765f7ce35e52288a0606b2a0ee8845f8b899cec1d44f71766419a7",  # bow-pod128
        "3aa382da6ee6b0e6e3e50723892e3610a8fb2274ec08da1b52a6ec639cbfd140",  # bow-pod16
        "f485448f6a6d5f1932fed541652cc41bc6ab240209abe46f3032b927f6053cf6",  # bow-pod256
        "fd8d0256a8abdf14e8558d8eddf203fee4c98c78bcecc51e338fd9df0e71a5fa",  # bow-pod64
        "103133f8f2e74148af3db85e47d12b58865cfb2649095641da4caa72fad5beea",  # ipu-m2000
        "782fe6735b1b98a19931319900c2ba45087e3acfa2beca54b082f2d2f0da1aaf",  # pod128
        "7de925c02fc946505210bb5adbbf646a5798fb69638f7beb50017c36a71bda9e",  # pod16
        "a0c07c411413bcfd8a04380bbdce42be162d53faaf0d9a7f053efe77871faa29",  # pod256
        "d9d7766c5cea118c0c9c5b4758a9a8322a5bc4dfa59b795c5cc1f58b658a516f",  # pod64
        "7c91d329d778eb8e0f5670893092563c9f0bb9a8659783b1969314ee2217ab76",  # pod64k
    }
)
"""Digests of the descriptions that come with podrun. Tests hold these against the schema, so that a launch need not."""


class _Marked:
    """YAML data with the line of every key and item, for errors."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines: dict[KeyPath, int] = {}
        node = compose_yaml(text, str(path), hint=_SEE)
        if node is None:
            raise ConfigError(f"{path}:1: the file is empty; expected the description of a POD", hint=_SEE)
        self.data = self._value(node, ())

    def _value(self, node: yaml.Node, at: KeyPath) -> Any:
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

    def error(self, at: KeyPath, problem: str, line: int | None = None) -> ConfigError:
        """A ConfigError for the key at ``at``; a key that is missing is reported where its parent starts."""
        place = at
        while line is None:
            line = self.lines.get(place)
            place = place[:-1]
        return ConfigError(f"{self.path}:{line}: {_dotted(at)} {problem}", hint=_SEE)


_SEE = "podrun help vipu describes the keys, with an example."


def _dotted(at: KeyPath) -> str:
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
    text = read_text(path, hint=_SEE)
    marked = _Marked(path, text)
    if not isinstance(marked.data, dict):
        raise marked.error((), "holds no keys; expected the description of a POD")
    if text_digest(text) in CHECKED:
        return _build(marked, _of_checked(marked.data))
    from podrun.core.cluster_schema import validated

    return _build(marked, validated(marked.data, marked.error))


def text_digest(text: str) -> str:
    """The digest by which `CHECKED` names a description's text."""
    return hashlib.sha256(text.encode()).hexdigest()


def _of_checked(data: Mapping[str, Any]) -> ClusterModel:
    """The values that the schema would give, built without it from data that is known to fit it."""
    links, gateways = data["ipu_links"], data["gateway_links"]
    parts = {
        "machine": SimpleNamespace(**data["machine"]),
        "ipu_links": SimpleNamespace(**links | {"topology": LinkTopology(links["topology"])}),
        "gateway_links": SimpleNamespace(topology=GatewayTopology(gateways["topology"])),
        "agents": [SimpleNamespace(**group) for group in data["agents"]],
        "allocations": [SimpleNamespace(**entry) for entry in data["allocations"]],
    }
    return cast("ClusterModel", SimpleNamespace(**{**data, **parts}))


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


def _fill(marked: _Marked, at: KeyPath, text: str, numbers: Mapping[str, int]) -> str:
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
