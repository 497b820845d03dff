"""IPU-Links and GW-Links: how fast they are, each figure with its source.

The IPUs of an IPU-POD form a ladder. Two IPUs are a rung; machines stack along two rails. A step of a
collective moves a piece of data to the next IPU of a ring: it costs a fixed time, and the bytes over the
links it shares. Figures are for the modelled system; nothing here looks at the clock of the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from podrun.core.cluster import MAX_ILD_IPUS
from podrun.core.errors import UsageError

EFFICIENCY = 0.85
"""Usable share of a link's raw rate. Source: the model that poplibs tests several IPUs with (graphcore/poplibs,
lib/poplibs_test/Util.cpp)."""
RAIL_LINKS = 2
"""Links up, and links down, between neighbours along a rail. Same source."""
RUNG_LINKS = {"gc2": 4, "gc200": 2, "bow": 2}
"""Links that a transfer between the two IPUs of a rung uses. GC2: same source. GC200: gc-iputraffictest's published
sample, 423.3 Gb/s both ways between IPUs 2 and 3 of an IPU-M2000, is 0.83 of two links' 512. An IPU's ten links are six
on its rung and two up and down each (block diagram of the IPU-M2000); the others are for traffic that crosses rungs."""
LINK_LATENCY = 2040 / 1.6e9
"""Seconds that a neighbour exchange costs before its bytes: 2,040 cycles of a 16-chip GC2 system. Section 6.
"""
SYNC_HOP = 15e-9
"""Seconds a sync signal takes over one hop; there and back over ``1 + ranks / 4`` hops. Section 5."""
STEP_CYCLES = 2720
"""Further tile cycles of one step: control, rearrangement, the addition. The one fitted figure, fitted to the
all-reduce records of 16 GC2 (74,752 to 101,218 cycles for the small sizes, over 16 steps).
"""
GATEWAY_RATE = 12.5e9
"""Bytes per second each way of one GW-RankLink port (100 GbE). Section 6, derived."""
GATEWAY_PORTS = 2
"""GW-RankLink ports of a machine, "east" and "west": racks form a loop, and of two racks both cables join the pair.
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
    """Most IPUs of an IPU-RankLink domain; between domains data takes GW-Links."""
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
        """Usable bytes per second from a machine to a neighbouring IPU-RankLink domain, each way, over one port."""
        return GATEWAY_RATE * EFFICIENCY

    def step_seconds(self, ranks: int) -> float:
        """Seconds that a step of a ring of ``ranks`` ranks costs before its bytes."""
        hops = 1 + ranks / 4
        return LINK_LATENCY + 2 * SYNC_HOP * hops + STEP_CYCLES / self.clock_hz


_MK1_LINK = 128 * 2**30 / 8
"""128 Gib/s per link and direction: section 6."""
_MK2_LINK = 320e9 / 10 / 2
"""320 GB/s over 10 links, both directions together: section 1."""

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
