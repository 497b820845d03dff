"""The partition that a test tool uses, how the tool attaches to its IPUs, and the modelled time of its work.

`attach` takes IPUs over IPUoF, exclusively and at once, and always releases them. They run programs written by hand
(`podrun.monitor.tool_programs`). Each figure of the times has its source; `docs/monitor.md` compares the model with the
published samples of the tools.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from podrun.core.access import OWN_SERVER
from podrun.core.cluster import LinkTopology, ladder_links
from podrun.core.environment import (
    IPUOF_VIPU_API_HOST,
    IPUOF_VIPU_API_PARTITION_ID,
    IPUOF_VIPU_API_PORT,
    PODRUN_LAUNCH_ID,
    environment,
)
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.identity import own_user_name
from podrun.core.quick_dataclass import dataclass

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.costmodel.target import Chip
    from podrun.device.connection import Connection
    from podrun.monitor.devices import View


@dataclass(frozen=True, slots=True)
class ToolPartition:
    """The active partition, and the environment in which IPUoF reaches its IPUs."""

    view: View
    environ: dict[str, str]

    @property
    def chip(self) -> Chip:
        """The kind of IPU that the partition has."""
        from podrun.costmodel.target import chip

        return chip(self.view.config.attributes["Target"])

    @property
    def domain_ipus(self) -> int:
        """IPUs of the partition in each IPU-Link domain."""
        return self.view.info.size // self.view.info.num_ilds

    @property
    def topology(self) -> LinkTopology:
        """The topology of its IPU-Links."""
        return LinkTopology(self.view.config.attributes["IPU-Link Topology"])

    def links(self) -> list[tuple[int, int]]:
        """The partition's IPU-Links, as pairs of its IPUs, lower first."""
        size = self.domain_ipus
        return [
            link
            for first in range(0, self.view.info.size, size)
            for link in ladder_links(size, self.topology, first)
        ]

    def ipus_of(self, device: int) -> IpuRange:
        """The IPUs of a device id. Raises NotFoundError with the range of ids."""
        from podrun.core.layout import IpuRange
        from podrun.monitor.devices import ipus_of_device

        ipus = ipus_of_device(device, self.view.info.size, self.view.info.reconfigurable)
        return IpuRange(ipus[0], len(ipus))

    def smallest_with(self, ipus: tuple[int, ...]) -> IpuRange:
        """The IPUs of the smallest device with all of ``ipus``, which must be attached to use them together."""
        from podrun.core.layout import IpuRange
        from podrun.monitor.devices import device_sets

        sets = device_sets(self.view.info.size, self.view.info.reconfigurable)
        members = min((s for s in sets if set(ipus) <= set(s)), key=len)
        return IpuRange(members[0], len(members))


def find_partition(api_host: str | None, api_port: int | None) -> ToolPartition:
    """The active partition of the service that options, environment or discovery name.

    Raises ConflictError if several services could be meant, NotFoundError if there is no partition.
    """
    from podrun.monitor.devices import connect_monitor, on_stderr, views

    with connect_monitor(api_host, api_port, say=on_stderr, one=True) as client:
        view = views(client)[0]
        where = {
            IPUOF_VIPU_API_HOST: client.host,
            IPUOF_VIPU_API_PORT: str(client.port),
            IPUOF_VIPU_API_PARTITION_ID: view.info.name,
            OWN_SERVER: "1" if client.own else "",
        }
    return ToolPartition(view, {**environment(), **where})


@contextlib.contextmanager
def attach(
    partition: ToolPartition, ipus: IpuRange, *, job: IpuRange | None = None, name: str = ""
) -> Iterator[Connection]:
    """A connection with exclusive use of ``ipus``; ``job``: all IPUs of a program that other processes share.

    Raises ApplicationRuntimeError with the reason: who holds the IPUs, or what is broken and what repairs it.
    """
    from podrun.device.connection import AttachRequest
    from podrun.device.host.connecting import connect

    connection = connect(partition.environ)
    try:
        launch = partition.environ.get(PODRUN_LAUNCH_ID, "")
        command = " ".join([name, *sys.argv[1:]])
        request = AttachRequest(job or ipus, ipus, os.getpid(), own_user_name(), command, launch)
        refusal = connection.try_attach(request)
        if refusal is not None:
            raise ApplicationRuntimeError(
                f"Failed to attach to device: {refusal}", hint="gc-monitor shows who uses the IPUs."
            )
        yield connection
    finally:
        connection.close()


def strings(value: Any) -> Any:
    """A value of JSON with every number and truth value as a string, as the SDK's test tools print it."""
    if isinstance(value, dict):
        return {key: strings(item) for key, item in value.items()}
    if isinstance(value, list):
        return [strings(item) for item in value]
    if value is None:
        return "N/A"
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- the fabric -----------------------------------------------------------------------------------------------

STREAM_BYTES = 64 * 1024
"""Bytes of one transfer of one tile. Published: gc-iputraffictest moves 64 KB per tile and iteration."""
STREAM_TILES = 32
"""Tiles that send in each direction. Derived: the published sample moves 64 such transfers an iteration."""


@dataclass(frozen=True, slots=True)
class Route:
    """How two IPUs of a partition are joined: ``kind`` "IPU-Link" or "GW-Link", number of hops, and whether the two
    form a ``rung`` of the ladder."""

    kind: str
    hops: int
    rung: bool = False


def route(a: int, b: int, domain_ipus: int, topology: LinkTopology) -> Route:
    """The route between two IPUs: across the rung, then along the rail; between domains over GW-Links."""
    if a // domain_ipus != b // domain_ipus:
        domains = abs(a // domain_ipus - b // domain_ipus)
        return Route("GW-Link", domains)
    a, b = a % domain_ipus, b % domain_ipus
    along = abs(a // 2 - b // 2)
    if topology is LinkTopology.TORUS:
        along = min(along, domain_ipus // 2 - along)
    return Route("IPU-Link", along + (a % 2 != b % 2), rung=a // 2 == b // 2)


def route_seconds(chip: Chip, way: Route, nbytes: float) -> float:
    """``nbytes`` each way at once between two IPUs: the latency of every hop, and the bytes over one of them.

    How many links they get is a fact of `podrun.collectives.timing`; the tool's published sample (IPUs 2 and 3 of an
    IPU-M2000, 423.3 Gb/s both ways together) comes to 428.
    """
    from podrun.collectives.timing import GATEWAY_LATENCY, LINK_LATENCY
    from podrun.costmodel.exchange import fabric_of

    fabric = fabric_of(chip)
    if way.kind == "GW-Link":
        return GATEWAY_LATENCY * way.hops + nbytes / fabric.gateway
    return LINK_LATENCY * way.hops + nbytes / (fabric.rung if way.rung else fabric.rail)


# --- the matrix unit ------------------------------------------------------------------------------------------


def streamed_product_cycles(chip: Chip, input_type: str, rows: int) -> float:
    """A tile's cycles of one launch that streams ``rows`` rows through the weights that its matrix unit holds.

    The tile model's vertex for a further block of input channels: it loads the block's weights, starts the workers and
    adds to the existing partial sums.
    """
    from podrun.costmodel import product_vertices

    units, block = chip.conv_units(input_type, input_type), product_vertices.in_group(input_type)
    cycles = [
        float(
            product_vertices.matmul_cycles(
                rows, k, units, input_type=input_type, partials_type=input_type, units=units
            )
        )
        for k in (block, 2 * block)
    ]
    return cycles[1] - cycles[0]


# --- the host -------------------------------------------------------------------------------------------------

HOST_TILES, HOST_BLOCKS, BLOCK_BYTES = 32, 4, 64
"""Number of tiles, and number and bytes of the blocks of a transfer. Published: the configuration of
gc-hosttraffictest's sample."""
TILE_BYTES = 4096
"""Bytes that a tile moves in an iteration. Derived: 13,107,200,000 B of 32 tiles in 100,000 iterations."""
ROUND_SECONDS = 32.3e-6
"""Cost of an iteration besides its bytes. Fitted: the mean over the sample's four tests (28.3 to 36.0 us)."""
HOST_SHARE = {"to": 0.745, "from": 0.353}
"""Share of the host link that remains while tiles read the buffer ("to") or write it ("from"). Fitted: geometric
means of the sample's pairs (56.5 and 40.2, 21.8 and 23.5 Gb/s) over the model's 64."""


BUFFER_BYTES_PER_SECOND = 20e9
"""Rate at which tiles use the gateway's memory. Assumed: the commonly quoted rate of streaming memory."""


def tile_round_seconds() -> float:
    """One iteration of the tiles' side: every tile moves `TILE_BYTES` to or from the gateway's memory."""
    return ROUND_SECONDS + HOST_TILES * TILE_BYTES / BUFFER_BYTES_PER_SECOND


def host_rate(tile_direction: str) -> float:
    """Bytes per second of the host's side at the same time."""
    from podrun.costmodel.exchange import STREAM_BYTES_PER_SECOND

    return HOST_SHARE[tile_direction] * STREAM_BYTES_PER_SECOND


SYNC_SECONDS = 1485e-6 / 4095 - 160 / 1.33e9
"""A bare sync between IPU and host over a mark count: 0.242 us. Derived: 4,095 of them in 1,485 us, each after 32
delays of 5 cycles; the clock is taken as 1.33 GHz, since the sample does not name its hardware."""


def sync_train_seconds(chip: Chip, syncs: int, delay_cycles: int, delays: int) -> float:
    """``syncs`` syncs with the host, each after ``delays`` delays of ``delay_cycles`` tile cycles."""
    return syncs * (SYNC_SECONDS + delay_cycles * delays / chip.clock_hz)
