"""Modelled time of collectives on IPU-Links and GW-Links: how fast links are, and which algorithm the SDK chooses.

The IPUs of an IPU-POD form a ladder. Two IPUs are a rung; machines stack along two rails. A step of a collective moves
a piece of data to the next IPU of a ring: it costs a fixed time, and the bytes over the links it shares. Figures are
for the modelled system, each with its source; nothing here looks at the clock of the host.

A collective among *n* ranks cuts its data into *n* fragments and walks them round a ring. `Method` names the ways to do
so. Each costs a number of steps, and each step the bytes that one link carries::

    ring            n - 1 steps of one fragment                 (one direction)
    bidirectional   n - 1 steps of half a fragment              (both directions at once)
    meet in middle  n / 2 steps of one fragment                 (both directions, half way)
    quad            n - 1 steps of a quarter                    (serpent and mirrored serpent, both directions)

All-reduce is a reduce-scatter and an all-gather. Between IPU-Link domains the fragments are all-reduced in a second
ring over GW-Links, in the middle of the two. Method choice and formulas: poplibs before its collectives moved into GCL
(graphcore/poplibs, lib/popops/ReplicatedCollectives.cpp). Held against every published all-reduce record by
``tests/collectives/test_timing.py``.
"""

from __future__ import annotations

import enum
import math
from dataclasses import replace

from podrun.core.cluster import IPUS_PER_MACHINE, MAX_ILD_IPUS
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass

EFFICIENCY = 0.85
"""Usable share of a link's raw rate. Source: the model that poplibs tests several IPUs with (graphcore/poplibs,
lib/poplibs_test/Util.cpp)."""
RAIL_LINKS = 2
"""Links up, and links down, between neighbours along a rail. Source: that of `EFFICIENCY`."""
RUNG_LINKS = {"gc2": 4, "gc200": 2, "bow": 2}
"""Links that a transfer between the two IPUs of a rung uses. GC2: the source of `EFFICIENCY`. GC200:
gc-iputraffictest's published sample, 423.3 Gb/s both ways between IPUs 2 and 3 of an IPU-M2000, is 0.83 of two links'
512. An IPU's ten links are six on its rung and two up and down each (block diagram of the IPU-M2000); the others are
for traffic that crosses rungs."""
LINK_LATENCY = 2040 / 1.6e9
"""Seconds that a neighbour exchange costs before its bytes: 2,040 cycles of a 16-chip GC2 system."""
SYNC_HOP = 15e-9
"""Seconds a sync signal takes over one hop; there and back over ``1 + ranks / 4`` hops. Source: that of
`EFFICIENCY`."""
STEP_CYCLES = 2720
"""Further tile cycles of one step: control, rearrangement, the addition. The one fitted figure, fitted to the
all-reduce records of 16 GC2 (74,752 to 101,218 cycles for the small sizes, over 16 steps).
"""
GATEWAY_RATE = 12.5e9
"""Bytes per second each way of one GW-Link port: 100 GbE, in bytes."""
GATEWAY_PORTS = 2
"""GW-Link ports of a machine, "east" and "west": racks form a loop, and of two racks both cables join the pair.
Published: Graphcore's "Switched GW-Links in large scale Pod systems"; data sheet of IPU-POD128 (cross connected)."""
GATEWAY_LATENCY = 5e-6
"""Seconds of a hop over GW-Links, gateway to gateway. Assumed: no published figure was found."""


@dataclass(frozen=True, slots=True)
class LinkModel:
    """The links of one kind of system. ``link_rate``: raw bytes per second of one link in one direction."""

    name: str
    clock_hz: float
    link_rate: float
    ild_ipus: int = MAX_ILD_IPUS
    """Most IPUs of an IPU-Link domain; between domains data takes GW-Links."""
    twisted: bool = False
    """Links configured as a twisted torus ("BarleyTwist"): four rings, one IPU per replica."""

    @property
    def rail(self) -> float:
        """Usable bytes per second between neighbours along a rail, each way."""
        return RAIL_LINKS * self.link_rate * EFFICIENCY

    @property
    def rung(self) -> float:
        """Usable bytes per second between the two IPUs of a rung, each way."""
        return RUNG_LINKS[self.name] * self.link_rate * EFFICIENCY

    @property
    def gateway(self) -> float:
        """Usable bytes per second from a machine to a neighbouring IPU-Link domain, each way, over one port."""
        return GATEWAY_RATE * EFFICIENCY

    def step_seconds(self, ranks: int) -> float:
        """Seconds that a step of a ring of ``ranks`` ranks costs before its bytes."""
        hops = 1 + ranks / 4
        return LINK_LATENCY + 2 * SYNC_HOP * hops + STEP_CYCLES / self.clock_hz


_MK1_LINK = 128 * 2**30 / 8
"""128 Gib/s per link and direction."""
_MK2_LINK = 320e9 / 10 / 2
"""320 GB/s over 10 links, both directions together."""

FABRICS = {
    "gc2": LinkModel("gc2", 1.6e9, _MK1_LINK, ild_ipus=16),
    "gc200": LinkModel("gc200", 1.33e9, _MK2_LINK),
    "bow": LinkModel("bow", 1.85e9, _MK2_LINK),
}
"""By target name. Bow has GC200's links and a faster tile clock."""


def fabric(target: str, *, ild_ipus: int | None = None, twisted: bool = False) -> LinkModel:
    """The fabric of a target ("gc2", "gc200", "bow"). Raises UsageError for another name."""
    if target not in FABRICS:
        raise UsageError(f"no link figures for target {target!r}", hint=f"Known: {', '.join(FABRICS)}.")
    model = FABRICS[target]
    return replace(model, ild_ipus=ild_ipus or model.ild_ipus, twisted=twisted)


_KIB, _MIB = 1024, 1024 * 1024


class Method(enum.Enum):
    """The way in which fragments travel round a ring."""

    NONE = "none"
    """One rank: no data moves."""
    RING = "ring"
    BIDIRECTIONAL = "bidirectional_ring_pair"
    MEET_IN_MIDDLE = "meet_in_middle_ring"
    QUAD = "quad_directional_ring"
    DIRECT = "direct"
    """Point to point along the shortest path."""


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """Modelled time of one collective. ``bytes``: nccl-tests' size, the larger of a rank's input and output."""

    operation: str
    method: Method
    ranks: int
    bytes: float
    steps: int
    seconds: float
    cycles: float
    link_bytes: float
    """Bytes that each IPU sends on its links."""

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second, as nccl-tests' algbw."""
        return self.bytes / self.seconds if self.seconds else math.inf

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second on the busiest link of an ideal ring, as nccl-tests' busbw."""
        return self.algorithm_bandwidth * bus_factor(self.operation, self.ranks)


def bus_factor(operation: str, ranks: int) -> float:
    """nccl-tests' busbw over algbw (its PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if operation in ("reduce_scatter", "all_gather", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    return 1.0


def choose_gather(input_bytes: float, ranks: int, ipus_per_rank: int, twisted: bool) -> Method:
    """The SDK's method for an all-gather of ``input_bytes`` from each IPU (poplibs, as above)."""
    return _choose(input_bytes, ranks, ipus_per_rank, twisted, scale=1, twist_limit=192 * _KIB)


def choose_scatter(input_bytes: float, ranks: int, ipus_per_rank: int, twisted: bool) -> Method:
    """The SDK's method for a reduce-scatter of ``input_bytes`` per IPU: thresholds of all-gather, doubled."""
    return _choose(input_bytes, ranks, ipus_per_rank, twisted, scale=2, twist_limit=192 * _KIB * ranks)


def _choose(
    nbytes: float, ranks: int, ipus_per_rank: int, twisted: bool, *, scale: int, twist_limit: float
) -> Method:
    if ranks == 1:
        return Method.NONE
    if twisted:
        if ipus_per_rank > 1:
            return Method.MEET_IN_MIDDLE
        return Method.MEET_IN_MIDDLE if nbytes < twist_limit else Method.QUAD
    if ipus_per_rank > 1 or ranks == 2:
        return Method.RING
    limit = 608 * _KIB
    if ranks > 4:
        limit = int(2.375 * _MIB)
    if ranks > 8:
        limit = 19 * _MIB
    if ranks > 16 or nbytes < limit * scale:
        return Method.MEET_IN_MIDDLE
    return Method.BIDIRECTIONAL


def _walk(method: Method, ranks: int) -> tuple[int, float]:
    """Steps, and the share of a fragment that one link direction carries in each."""
    if method is Method.NONE:
        return 0, 0.0
    if method is Method.MEET_IN_MIDDLE:
        return ranks // 2, 1.0
    return ranks - 1, {Method.RING: 1.0, Method.BIDIRECTIONAL: 0.5, Method.QUAD: 0.25}[method]


@dataclass(frozen=True, slots=True)
class _Part:
    """Time of one pass of fragments round a ring."""

    steps: int
    seconds: float
    link_bytes: float


def _half(method: Method, nbytes: float, ranks: int, ipus_per_rank: int, fabric: LinkModel) -> _Part:
    """A reduce-scatter or all-gather of ``nbytes`` per IPU (the whole vector), within one IPU-Link domain."""
    steps, share = _walk(method, ranks)
    if not steps:
        return _Part(0, 0.0, 0.0)
    fragment = nbytes / ranks
    # IPU k of every replica is in ring k; rings of one column share its rail: half a replica's IPUs on each
    # rail.
    sharing = max(1.0, ipus_per_rank / 2)
    pair_on_a_rung = ranks == 2 and ipus_per_rank == 1
    rate = fabric.rung if pair_on_a_rung else fabric.rail / sharing
    seconds = steps * (fabric.step_seconds(ranks) + fragment * share / rate)
    return _Part(steps, seconds, nbytes * (ranks - 1) / ranks)


def _between_domains(nbytes: float, domains: int, ild_ipus: int, fabric: LinkModel) -> _Part:
    """All-reduce of the ``nbytes`` that each IPU holds after the reduce-scatter, over the ring of domains."""
    if domains == 1:
        return _Part(0, 0.0, 0.0)
    steps = 2 * (domains - 1)
    # The IPUs of a machine share its ports, which lead round the loop of domains in both directions.
    per_port = nbytes * min(IPUS_PER_MACHINE, ild_ipus) / GATEWAY_PORTS
    seconds = steps * (GATEWAY_LATENCY + fabric.step_seconds(domains) + per_port / domains / fabric.gateway)
    return _Part(steps, seconds, steps * nbytes / domains)


def _split(ranks: int, ipus_per_rank: int, fabric: LinkModel) -> tuple[int, int]:
    """Ranks within a domain, and domains."""
    if ranks < 1 or ipus_per_rank < 1:
        raise UsageError(f"no collective among {ranks} ranks of {ipus_per_rank} IPUs")
    inside = max(1, min(ranks, fabric.ild_ipus // ipus_per_rank))
    if ranks % inside:
        raise UsageError(f"{ranks} ranks do not fill IPU-Link domains of {inside} ranks")
    return inside, ranks // inside


def all_reduce_time(
    nbytes: float, ranks: int, fabric: LinkModel, *, ipus_per_rank: int = 1, method: Method | None = None
) -> CollectiveTime:
    """All-reduce of ``nbytes`` on each IPU, in IPU-Link domains of ``fabric.ild_ipus``. ``method`` None: the SDK's."""
    inside, domains = _split(ranks, ipus_per_rank, fabric)
    scatter = method or choose_scatter(nbytes, inside, ipus_per_rank, fabric.twisted)
    gather = method or choose_gather(nbytes / inside, inside, ipus_per_rank, fabric.twisted)
    parts = (
        _half(scatter, nbytes, inside, ipus_per_rank, fabric),
        _between_domains(nbytes / inside, domains, inside * ipus_per_rank, fabric),
        _half(gather, nbytes, inside, ipus_per_rank, fabric),
    )
    return _estimate("all_reduce", scatter, ranks, nbytes, fabric, *parts)


def reduce_scatter_time(
    nbytes: float, ranks: int, fabric: LinkModel, *, ipus_per_rank: int = 1, method: Method | None = None
) -> CollectiveTime:
    """Reduce-scatter of ``nbytes`` on each IPU, leaving ``nbytes / ranks``."""
    inside, domains = _split(ranks, ipus_per_rank, fabric)
    chosen = method or choose_scatter(nbytes, inside, ipus_per_rank, fabric.twisted)
    across = _halved(_between_domains(nbytes / inside, domains, inside * ipus_per_rank, fabric))
    half = _half(chosen, nbytes, inside, ipus_per_rank, fabric)
    return _estimate("reduce_scatter", chosen, ranks, nbytes, fabric, half, across)


def all_gather_time(
    nbytes: float, ranks: int, fabric: LinkModel, *, ipus_per_rank: int = 1, method: Method | None = None
) -> CollectiveTime:
    """All-gather to ``nbytes`` on each IPU, from ``nbytes / ranks``."""
    inside, domains = _split(ranks, ipus_per_rank, fabric)
    chosen = method or choose_gather(nbytes / ranks, inside, ipus_per_rank, fabric.twisted)
    across = _halved(_between_domains(nbytes / inside, domains, inside * ipus_per_rank, fabric))
    half = _half(chosen, nbytes, inside, ipus_per_rank, fabric)
    return _estimate("all_gather", chosen, ranks, nbytes, fabric, across, half)


def send(nbytes: float, fabric: LinkModel, *, hops: int = 1, same_rung: bool = False) -> CollectiveTime:
    """A copy of ``nbytes`` from one IPU to another: ``hops`` rail hops away, or on the same rung."""
    rate = fabric.rung if same_rung else fabric.rail
    seconds = fabric.step_seconds(2) + (hops - 1) * SECONDS_PER_HOP + nbytes / rate
    return _estimate("send", Method.DIRECT, 2, nbytes, fabric, _Part(1, seconds, nbytes))


SECONDS_PER_HOP = 2 * 15e-9
"""Seconds that a further hop adds to a copy: links forward data as it arrives. `SYNC_HOP`, at both ends."""


def broadcast_time(nbytes: float, ranks: int, fabric: LinkModel) -> CollectiveTime:
    """Time to send data from one rank to all: a stream in pieces in both directions of the ring."""
    if ranks == 1:
        return _estimate("broadcast", Method.NONE, 1, nbytes, fabric)
    steps = ranks // 2
    seconds = steps * fabric.step_seconds(ranks) + nbytes / fabric.rail
    return _estimate("broadcast", Method.MEET_IN_MIDDLE, ranks, nbytes, fabric, _Part(steps, seconds, nbytes))


def gather_time(nbytes: float, ranks: int, fabric: LinkModel) -> CollectiveTime:
    """Time to collect ``nbytes`` in all on one rank: bound by the links into it. A scatter takes as long."""
    if ranks == 1:
        return _estimate("gather", Method.NONE, 1, nbytes, fabric)
    steps = ranks // 2
    arriving = nbytes * (ranks - 1) / ranks
    seconds = steps * fabric.step_seconds(ranks) + arriving / (2 * fabric.rail)
    return _estimate("gather", Method.DIRECT, ranks, nbytes, fabric, _Part(steps, seconds, arriving))


def all_to_all(nbytes: float, ranks: int, fabric: LinkModel) -> CollectiveTime:
    """The *k*-th of every rank's *n* pieces to rank *k*: pieces travel ``n / 4`` hops on average, both ways."""
    if ranks == 1:
        return _estimate("all_to_all", Method.NONE, 1, nbytes, fabric)
    steps = ranks // 2
    per_link = nbytes / ranks * sum(range(1, steps + 1))
    seconds = steps * fabric.step_seconds(ranks) + per_link / fabric.rail
    return _estimate("all_to_all", Method.DIRECT, ranks, nbytes, fabric, _Part(steps, seconds, 2 * per_link))


def _halved(part: _Part) -> _Part:
    """Half of an all-reduce: its reduce-scatter, or its all-gather."""
    return _Part(part.steps // 2, part.seconds / 2, part.link_bytes / 2)


def _estimate(
    operation: str, method: Method, ranks: int, nbytes: float, fabric: LinkModel, *parts: _Part
) -> CollectiveTime:
    seconds = sum(part.seconds for part in parts)
    return CollectiveTime(
        operation=operation,
        method=method,
        ranks=ranks,
        bytes=nbytes,
        steps=sum(part.steps for part in parts),
        seconds=seconds,
        cycles=seconds * fabric.clock_hz,
        link_bytes=sum(part.link_bytes for part in parts),
    )
