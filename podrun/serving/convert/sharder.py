"""Which IPU, and which pipeline stage, each node of a model is on: from a few named nodes to all.

    Sharder({"encoder_5_add": 0, "encoder_11_add": 1}, {"encoder_5_add": 0, "encoder_11_add": 1}).run(model)

Named nodes are taken in the order in which they run. Each claims itself and, walking towards the inputs, every node
that is not claimed yet. What remains is on the IPU (or stage) after the last. The answer is in the nodes'
attributes, under PopART's names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto, NodeProto

from podrun.core.errors import UsageError
from podrun.onnx_models.annotations import PIPELINE_STAGE, VIRTUAL_GRAPH
from podrun.serving.convert.graph_walk import names_used, node_by_name, set_attribute


class Sharder:
    """See the module's text. ``sharding_info``: node name -> IPU; ``pipelining_info``: node name -> stage."""

    def __init__(
        self, sharding_info: Mapping[str, int], pipelining_info: Mapping[str, int] | None = None
    ) -> None:
        if not sharding_info:
            raise UsageError("sharding_info names no node", hint='As in {"layer_5": 0}.')
        self.sharding_info = _numbers(sharding_info, "sharding_info")
        self.pipelining_info = _numbers(pipelining_info or {}, "pipelining_info")

    def run(self, model: ModelProto) -> ModelProto:
        """The model with a place on every node. UsageError for names that do not exist or are not unique."""
        names = [node.name for node in model.graph.node]
        if len(set(names)) != len(names) or "" in names:
            twice = next((n for n in names if not n or names.count(n) > 1), "")
            raise UsageError(
                f"sharding: {'a node has no name' if not twice else f'several nodes are called {twice!r}'}",
                hint="Run the pass unique_name_for_nodes first.",
            )
        for key, info, what in (
            (VIRTUAL_GRAPH, self.sharding_info, "sharding_info"),
            (PIPELINE_STAGE, self.pipelining_info, "pipelining_info"),
        ):
            for name in info:
                node_by_name(model, name, what)
            if info:
                for node, number in zip(model.graph.node, claimed(list(model.graph.node), info), strict=True):
                    set_attribute(node, key, number)
        return model


def claimed(nodes: list[NodeProto], info: Mapping[str, int]) -> list[int]:
    """The number of each node, by the rule of this module."""
    makers = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    numbers: list[int | None] = [None] * len(nodes)
    for start, node in enumerate(nodes):
        if node.name not in info:
            continue
        pending = [start]
        while pending:
            index = pending.pop()
            if numbers[index] is not None:
                continue
            numbers[index] = info[node.name]
            pending += [makers[name] for name in names_used(nodes[index]) if name in makers]
    rest = max(info.values()) + 1
    return [rest if number is None else number for number in numbers]


def _numbers(info: Mapping[str, int], what: str) -> dict[str, int]:
    if not isinstance(info, Mapping):
        raise UsageError(f"{what} is a dictionary of node names and numbers, not {type(info).__name__}")
    for name, number in info.items():
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise UsageError(f"{what}: {name!r}: a number from 0 on, not {number!r}")
    return dict(info)


def read_sharding_file(path: str | os.PathLike[str]) -> Sharder:
    """The places of a YAML file: a list of ``{node, device, stage}``. UsageError naming what is wrong in it."""
    from podrun.serving.convert.config_file import read_yaml

    entries = read_yaml(Path(path), "manual_sharding_config")
    return sharder_of(entries, os.fspath(path))


def sharder_of(entries: object, label: str) -> Sharder:
    """A `Sharder` of a list of ``{node, device, stage}``."""
    if not isinstance(entries, list) or not entries:
        raise UsageError(
            f"{label}: a list of nodes is wanted", hint="As in: - {node: Add_3, device: 0, stage: 0}"
        )
    devices: dict[str, int] = {}
    stages: dict[str, int] = {}
    for index, entry in enumerate(entries, 1):
        if not isinstance(entry, Mapping) or not {"node", "device"} <= set(entry):
            raise UsageError(f"{label}: entry {index} has no node and device: {entry!r}")
        unknown = sorted(set(map(str, entry)) - {"node", "device", "stage"})
        if unknown:
            raise UsageError(f"{label}: entry {index} has the unknown key {unknown[0]!r}")
        name = str(entry["node"])
        if name in devices:
            raise UsageError(f"{label}: node {name!r} stands there twice")
        devices[name] = entry["device"]
        if entry.get("stage") is not None:
            stages[name] = entry["stage"]
    if stages and len(stages) != len(devices):
        missing = next(name for name in devices if name not in stages)
        raise UsageError(f"{label}: node {missing!r} has no stage, others have")
    return Sharder(devices, stages or None)
