"""A POD as a simulation starts from it: agents, partitions, queue, reservations, written down as JSON and read again.

The rows are those of a state file, read with the same checks. Processes that hold partitions, and planned faults, are
left out. Times are seconds since 1970; `CapturedPod.since_capture` counts from the capture.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun import __version__
from podrun.core.cluster import Cluster, GatewayTopology, LinkTopology, Topology
from podrun.core.documents import parse_json, read_text
from podrun.core.errors import ConfigError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state.allocator import Plans
from podrun.partition.state.records import Partition
from podrun.partition.state.stored_rows import StateRows, checked, plain_row
from podrun.partition.state.stored_state import StoredState, layout_rows, state_from_rows

if TYPE_CHECKING:
    from podrun.partition.state.allocator import Allocator

CAPTURE_VERSION = 1
_HINT = "Make it from a running server: vipu capture FILE"
_POD_FIELDS: Mapping[str, type] = {
    "name": str,
    "description": str,
    "target": str,
    "machine_model": str,
    "gateway_memory_bytes": int,
}


def capture_json(allocator: Allocator, now: float) -> str:
    """The state of an allocator as JSON."""
    pod = allocator.cluster
    partitions = [replace(p, holder="", faults=()) for p in allocator.partitions.values()]
    queue = [
        replace(entry, needs=replace(entry.needs, holder="", faults=()))
        for entry in allocator.queue.values()
        if not entry.needs.reservation or entry.needs.reservation in allocator.reservations
    ]
    plans = [
        *(("maintenance", entry.agent, entry) for entry in allocator.maintenance.values()),
        *(("queue", entry.needs.name, entry) for entry in queue),
        *(("reservations", entry.name, entry) for entry in allocator.reservations.values()),
    ]
    document = {
        "schema_version": CAPTURE_VERSION,
        "podrun_version": __version__,
        "taken_s": now,
        "pod": {name: getattr(pod, name) for name in _POD_FIELDS},
        "layout": [[kind, place, json.loads(row)] for kind, place, row in layout_rows(pod)],
        "allocations": [[entry.name, list(entry.agents)] for entry in allocator.allocations.values()],
        "partitions": [[entry.name, plain_row(entry)] for entry in partitions],
        "lost": sorted(allocator.lost),
        "plans": [[kind, name, plain_row(entry)] for kind, name, entry in plans],
    }
    return json.dumps(document)


@dataclass(frozen=True, slots=True)
class CapturedPod:
    """A POD as it was at ``taken``, seconds since 1970."""

    taken: float
    pod: Cluster
    state: StoredState

    def since_capture(self) -> CapturedPod:
        """The same POD with times that count from the capture; time limits that had passed by then end at once."""

        def earlier(partition: Partition) -> Partition:
            ends = max(partition.ends - self.taken, 1e-6) if partition.ends else 0.0
            return replace(partition, created=partition.created - self.taken, ends=ends)

        plans = self.state.plans
        shifted = Plans(
            tuple(
                replace(
                    e,
                    since=e.since - self.taken,
                    deadline=max(e.deadline - self.taken, 1e-6) if e.deadline else 0.0,
                )
                for e in plans.maintenance
            ),
            tuple(replace(e, since=e.since - self.taken) for e in plans.queue),
            tuple(
                replace(e, start=e.start - self.taken, end=e.end - self.taken)
                for e in plans.reservations
                if e.end > self.taken
            ),
        )
        partitions = tuple(map(earlier, self.state.partitions))
        return replace(self, taken=0.0, state=replace(self.state, partitions=partitions, plans=shifted))


def read_capture(path: Path) -> CapturedPod:
    """The POD in a file that `capture_json` filled. Raises ConfigError that names what of it makes no sense."""
    document = parse_json(read_text(path, hint=_HINT), str(path), hint=_HINT)
    try:
        return _captured(document)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} is no capture of a POD: {error}", hint=_HINT) from error


def _captured(document: object) -> CapturedPod:
    if not isinstance(document, dict) or document.get("schema_version") != CAPTURE_VERSION:
        raise ValueError(f"it has no schema_version {CAPTURE_VERSION}")
    described = document.get("pod")
    if not isinstance(described, dict):
        raise ValueError("pod is no object")
    facts = {name: checked(kind, described.get(name), f"pod.{name}") for name, kind in _POD_FIELDS.items()}
    links = Topology(LinkTopology.MESH, 64, GatewayTopology.NONE)  # Those of the clusters follow.
    base = Cluster(**facts, topology=links, agents=(), allocations=())
    rows = StateRows(
        {"name": facts["name"]},
        partitions=tuple((name, json.dumps(row)) for name, row in _entries(document, "partitions", 2)),
        allocations=tuple((name, json.dumps(row)) for name, row in _entries(document, "allocations", 2)),
        lost=tuple(_entries(document, "lost", 0)),
        plans=tuple((kind, name, json.dumps(row)) for kind, name, row in _entries(document, "plans", 3)),
        layout=tuple((kind, place, json.dumps(row)) for kind, place, row in _entries(document, "layout", 3)),
    )
    state = state_from_rows(base, rows)
    taken = checked(float, document.get("taken_s"), "taken_s")
    return CapturedPod(taken, state.layout or base, state)


def _entries(document: Mapping[str, Any], name: str, length: int) -> list[Any]:
    """The entries of a list, each with so many parts (0: with none)."""
    entries = document.get(name)
    if not isinstance(entries, list):
        raise ValueError(f"{name} is no list")
    for place, entry in enumerate(entries):
        if length and not (isinstance(entry, list) and len(entry) == length):
            raise ValueError(f"{name}[{place}] has not {length} parts")
    return entries
