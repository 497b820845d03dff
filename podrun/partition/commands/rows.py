"""Partitions and agents as rows of tables, and as names with values."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from podrun.partition.host.holders import parse_holder

if TYPE_CHECKING:
    from podrun.partition.state.values import AgentInfo, PartitionInfo


PARTITION_COLUMNS = ("Partition", "Cluster", "ILDs", "GW Routing", "ILD Routing", "Size", "GCDs", "State")


def partition_row(info: PartitionInfo) -> tuple[str, ...]:
    """A partition as a row of `PARTITION_COLUMNS`."""
    return (
        info.name,
        info.cluster,
        str(info.num_ilds),
        info.gw_routing,
        info.ild_routing,
        str(info.size),
        str(info.num_gcds),
        info.state.name,
    )


def partition_fields(info: PartitionInfo) -> list[tuple[str, str]]:
    """A partition as names and values."""
    rows = list(zip(PARTITION_COLUMNS, partition_row(info), strict=True))
    rows += [
        ("Allocation", info.allocation),
        ("Reconfigurable", str(info.reconfigurable).lower()),
        ("Sync Type", info.sync_type.value),
        ("Agents", " ".join(info.agents)),
        ("Generation", str(info.generation)),
        *([("Owner", info.owner)] if info.owner else []),
        *([("Ends With", parse_holder(info.holder).in_words)] if info.holder else []),
    ]
    return rows + ([("Error", info.error)] if info.error else [])


def moment(seconds: float) -> str:
    """A time as people read it, UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def agent_fields(info: AgentInfo) -> list[tuple[str, str]]:
    """An agent as names and values."""
    return [
        ("Agent ID", info.agent_id),
        ("Host", info.host),
        ("Port", str(info.port)),
        ("Status", info.state.name.capitalize()),
        ("Health", _health_text(info)),
        ("Board serial number", info.serial),
        ("Num of IPUs", str(info.num_ipus)),
        ("Cluster", info.cluster or "-"),
        ("ILD", _ild(info)),
        ("Partitions", " ".join(info.partitions) or "-"),
        ("Endpoints", " ".join(info.endpoints) or "-"),
    ]


def _ild(info: AgentInfo) -> str:
    return str(info.ild) if info.cluster else "-"


def _health_text(info: AgentInfo) -> str:
    """Health with what is known about it."""
    parts = [info.health]
    if info.stale_seconds is not None:
        parts.append(f"no answer for {info.stale_seconds:.0f} s")
    if info.reason:
        parts.append(info.reason)
    if info.deadline:
        parts.append(f"until {moment(info.deadline)}")
    return ", ".join(parts)


def agent_row(info: AgentInfo) -> tuple[str, ...]:
    """An agent as a row of `list agents`."""
    return (
        info.agent_id,
        info.host,
        info.serial,
        info.cluster or "-",
        _ild(info),
        info.state.name,
        " ".join(info.partitions),
        info.health,
    )
