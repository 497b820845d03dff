"""A partition as others see it: what `vipu` lists, and where its IPUs are to be reached.

Pure: from the POD, the allocator's `Partition` and, for addresses, where its machines listen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from podrun.cluster import Cluster, ipu_number
from podrun.errors import UsageError
from podrun.partition.events import Partition
from podrun.partition.machine_pool import Seat
from podrun.partition.placement import routing_of
from podrun.partition.types import AgentState, IpuofConfig, IpuofDevice, PartitionInfo


def partition_info(cluster: Cluster, partition: Partition) -> PartitionInfo:
    """What `vipu get partition` says."""
    return PartitionInfo(
        name=partition.name,
        cluster=cluster.name,
        allocation=partition.allocation,
        size=partition.size,
        state=partition.state,
        reconfigurable=partition.reconfigurable,
        num_gcds=partition.num_gcds,
        sync_type=partition.sync_type,
        num_ilds=partition.num_ilds,
        ild_routing=routing_of(cluster, partition.size, partition.num_ilds).ild_routing,
        agents=tuple(part.agent_id for part in partition.slices),
        error=partition.error,
        generation=partition.generation,
        created=partition.created,
    )


def ipuof_config(
    cluster: Cluster, partition: Partition, gcd: int, endpoints: Mapping[Seat, str]
) -> IpuofConfig:
    """Where the IPUs of one GCD are to be reached. Raises UsageError if the partition has no such GCD."""
    if gcd >= partition.num_gcds:
        raise UsageError(
            f"partition {partition.name} has no GCD {gcd}",
            hint=f"Its GCDs are 0 to {partition.num_gcds - 1}.",
        )
    share = partition.size // partition.num_gcds
    devices = tuple(d for d in _devices(partition, endpoints) if d.partition_ipu // share == gcd)
    return IpuofConfig(partition.name, partition.state, devices, _attributes(cluster, partition, gcd))


def agent_state(agent: str, lost: set[str], running: set[str]) -> AgentState:
    """What is known of an agent's machine."""
    if agent in lost:
        return AgentState.LOST
    return AgentState.UP if agent in running else AgentState.STANDBY


def _devices(partition: Partition, endpoints: Mapping[Seat, str]) -> Iterator[IpuofDevice]:
    for machine, (first, part) in enumerate(partition.machines()):
        host, _, port = endpoints.get(Seat(part.agent_id, partition.name), ":0").rpartition(":")
        for ipu in range(part.count):
            yield IpuofDevice(
                ip=host,
                server_port=int(port),
                partition_ipu=first + ipu,
                machine=machine,
                ipu=ipu,
                agent_id=part.agent_id,
                ipu_number=ipu_number(part.first_slot + ipu),
            )


def _attributes(cluster: Cluster, partition: Partition, gcd: int) -> dict[str, str]:
    routing = routing_of(cluster, partition.size, partition.num_ilds)
    return {
        "GCD Id": str(gcd),
        "Num GCDs": str(partition.num_gcds),
        "Partition Size": str(partition.size),
        "Reconfigurable": str(partition.reconfigurable).lower(),
        "Generation": str(partition.generation),
        "IPU-Link Domain Size": str(partition.size // partition.num_ilds),
        "IPU-Link Topology": routing.link_topology,
        "IPU-Link Configuration": routing.link_configuration,
        "Gateway Mode": "true",
        "Target": cluster.target,
        "Auto Reset": str(partition.auto_reset).lower(),
        "Error": partition.error,
    }
