"""Facts about IPU chips and the systems built from them: each number with its source and how sure it is.

A `Fact` is a number with a unit, a `Status` (published, derived, assumed) and a source in words. Chips and
systems are made of facts; code that needs the bare number reads the property of the same name
(``chip.tiles``), documents and reports list ``chip.facts``. Pure data: nothing here imports anything heavy.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from podrun.errors import InvalidOptionError


class Status(enum.Enum):
    """How a number is known."""

    PUBLISHED = "published"
    """Read in a public document, repository or figure."""
    DERIVED = "derived"
    """Arithmetic on published numbers."""
    ASSUMED = "assumed"
    """Our choice where nothing is published."""


@dataclass(frozen=True, slots=True)
class Fact:
    """One number with its unit, status and source."""

    value: float
    unit: str
    status: Status
    source: str


def _published(value: float, unit: str, source: str) -> Fact:
    return Fact(value, unit, Status.PUBLISHED, source)


def _derived(value: float, unit: str, source: str) -> Fact:
    return Fact(value, unit, Status.DERIVED, source)


def _assumed(value: float, unit: str, source: str) -> Fact:
    return Fact(value, unit, Status.ASSUMED, source)


@dataclass(frozen=True, slots=True)
class Chip:
    """One IPU. ``facts`` by name; properties give the bare numbers that the model reads."""

    name: str
    title: str
    facts: Mapping[str, Fact]

    def _int(self, name: str) -> int:
        return int(self.facts[name].value)

    @property
    def tiles(self) -> int:
        """Tiles on the chip."""
        return self._int("tiles")

    @property
    def workers(self) -> int:
        """Worker threads of a tile, time-sliced round robin."""
        return self._int("workers")

    @property
    def tile_bytes(self) -> int:
        """SRAM of one tile."""
        return self._int("tile_bytes")

    @property
    def clock_hz(self) -> float:
        """Tile clock."""
        return self.facts["clock_hz"].value

    @property
    def load_bytes(self) -> int:
        """Bytes a tile loads per cycle from interleaved memory."""
        return self._int("load_bytes")

    @property
    def store_bytes(self) -> int:
        """Bytes a tile stores per cycle."""
        return self._int("store_bytes")

    @property
    def exchange_bytes(self) -> int:
        """Bytes a tile sends, and receives, per cycle of an exchange."""
        return self._int("exchange_bytes")

    @property
    def link_bytes_per_second(self) -> float:
        """All IPU-Links of the chip together, one direction."""
        return self.facts["link_bytes_per_second"].value

    @property
    def sram_bytes(self) -> int:
        """SRAM of the whole chip."""
        return self.tiles * self.tile_bytes

    def conv_units(self, input_type: str, partials_type: str) -> int:
        """Output channels the AMP unit computes side by side: 16, or 8 where the rate is halved."""
        narrow = f"conv_units_{input_type}_{partials_type}"
        return self._int(narrow if narrow in self.facts else "conv_units")

    def amp_inputs(self, input_type: str) -> int:
        """Input channels each unit takes per cycle."""
        return self._int(f"amp_inputs_{input_type}")

    def amp_macs(self, input_type: str, partials_type: str) -> float:
        """Peak multiply-adds of a tile per cycle on the AMP unit."""
        rate = self.facts.get(f"amp_macs_{input_type}_{partials_type}")
        if rate is not None:
            return rate.value
        return float(self.conv_units(input_type, partials_type) * self.amp_inputs(input_type))

    def peak_flops(self, input_type: str = "float16", partials_type: str = "float16") -> float:
        """Peak arithmetic rate of the chip, multiply and add counted separately."""
        return 2.0 * self.amp_macs(input_type, partials_type) * self.tiles * self.clock_hz


@dataclass(frozen=True, slots=True)
class System:
    """IPUs in machines: what a partition is cut from."""

    name: str
    title: str
    chip: Chip
    ipus: int
    ipus_per_machine: int
    facts: Mapping[str, Fact]

    @property
    def machines(self) -> int:
        """Machines (or cards) in the system."""
        return -(-self.ipus // self.ipus_per_machine)

    @property
    def ild_ipus(self) -> int:
        """IPUs in one IPU-Link domain."""
        return int(self.facts["ild_ipus"].value)


_FACTS = "chip facts table (vendor pages, product briefs, library sources)"
_MK2_MEMORY = _published(638_976, "B", "624 KiB per tile, 900 MB in all: vendor data sheet")


def _chip(name: str, title: str, **facts: Fact) -> Chip:
    common = {
        "workers": _published(6, "threads", "six worker contexts per tile"),
        "load_bytes": _published(16, "B/cycle", "two 64-bit loads per cycle from interleaved memory"),
        "exchange_bytes": _published(4, "B/cycle", "one 32-bit word per cycle each way: 8 TB/s on GC200"),
        "memcpy_bytes": _published(8, "B/cycle", "memcpy rate in the library's target description"),
        "exchange_latency_cycles": _derived(213, "cycles", "133 ns tile to tile on GC2 at 1.6 GHz"),
        "sync_cycles": _derived(76, "cycles", "106 per tiny compute set less its launch; gaps 30-150"),
        "compute_set_cycles": _derived(30, "cycles", "worker launch: an instrumented set adds 20-60"),
        "supervisor_overhead_cycles": _published(11, "cycles", "library's supervisor call overhead"),
        "vector_bytes": _published(8, "B", "FP32 x2 or FP16 x4 per instruction"),
    }
    return Chip(name, title, MappingProxyType({**common, **facts}))


def _mk2_amp() -> dict[str, Fact]:
    return {
        "tiles": _published(1472, "tiles", "vendor data sheet"),
        "tile_bytes": _MK2_MEMORY,
        "store_bytes": _published(8, "B/cycle", "ld2xst64 beside two loads: 24 B/cycle x 1472 = 47 TB/s"),
        "conv_units": _published(16, "units", "16 conv units on Mk2"),
        "conv_units_float16_float32": _derived(
            8, "units", "library instantiates half->float with 8 units only (half rate)"
        ),
        "amp_inputs_float16": _published(4, "elements", "64 multiply-adds per cycle with half partials"),
        "amp_inputs_float32": _derived(1, "elements", "62.4 TFLOPS / 1472 / 1.33 GHz = 32 FLOP per cycle"),
    }


GC2 = _chip(
    "gc2",
    "Colossus GC2 (Mk1)",
    tiles=_published(1216, "tiles", "4 tiles x 19 islands x 16 columns"),
    tile_bytes=_published(262_144, "B", "256 KiB per tile"),
    clock_hz=_published(1.6e9, "Hz", "product brief; cards may run at 1.3 GHz for power"),
    store_bytes=_derived(8, "B/cycle", "64-bit store path; loads and stores share the ports on Mk1"),
    conv_units=_derived(8, "units", "124.5 TFLOPS FP16 / 1216 / 1.6 GHz = 64 FLOP per cycle"),
    amp_inputs_float16=_derived(4, "elements", "as above"),
    amp_inputs_float32=_derived(1, "elements", "31.1 TFLOPS FP32 / 1216 / 1.6 GHz = 16 FLOP per cycle"),
    link_bytes_per_second=_published(96e9, "B/s", "C2 card: 3 x 64 GB/s both directions between its chips"),
)
GC200 = _chip(
    "gc200",
    "Colossus Mk2 GC200",
    **_mk2_amp(),
    clock_hz=_published(1.33e9, "Hz", "1.325 to 1.33 GHz"),
    link_bytes_per_second=_published(160e9, "B/s", "10 links, 320 GB/s both directions together"),
)
BOW = _chip(
    "bow",
    "Bow",
    **_mk2_amp(),
    clock_hz=_published(1.85e9, "Hz", "vendor data sheet"),
    link_bytes_per_second=_published(160e9, "B/s", "same electrical links as GC200"),
)
C600 = _chip(
    "c600",
    "C600 card's chip",
    **_mk2_amp(),
    amp_inputs_float8=_published(8, "elements", "560 TFLOPS FP8: 16 units x 8 elements"),
    clock_hz=_derived(1.5e9, "Hz", "280 TFLOPS / 1472 / 128 = 1.486 GHz, quoted as about 1.5 GHz"),
    link_bytes_per_second=_published(64e9, "B/s", "32 lanes, 64 GB/s each way"),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (GC2, GC200, BOW, C600)})
"""Chips by name."""


def _system(
    name: str, title: str, chip: Chip, ipus: int, per_machine: int, ild: int, **facts: Fact
) -> System:
    common = {"ild_ipus": _published(ild, "IPUs", "an IPU-Link domain is at most 64 IPUs")}
    return System(name, title, chip, ipus, per_machine, MappingProxyType({**common, **facts}))


def _machine_facts(chip: Chip) -> dict[str, Fact]:
    return {
        "ddr_bytes_per_second": _derived(38.4e9, "B/s", "two DDR4-2400 DIMMs per machine"),
        "ddr_usable_bytes_per_second": _assumed(20e9, "B/s", "commonly quoted streaming-memory rate"),
        "gateway_memory_bytes": _published(128 * 2**30, "B", "2 x 64 GB by default, 256 GB at most"),
        "host_bytes_per_second": _derived(12.5e9, "B/s", "100 GbE RoCEv2 per machine"),
        "host_usable_bytes_per_second": _published(8e9, "B/s", "the SDK's IPU model; measured 5.5 to 8 GB/s"),
        "gw_link_bytes_per_second": _derived(25e9, "B/s", "two 100 GbE GW-Links per machine, one direction"),
        "gw_link_latency_seconds": _assumed(2.5e-6, "s", "not published: taken as a switchless Ethernet hop"),
        "link_latency_seconds": _derived(1.3e-6, "s", "GC2 neighbour exchange: 2,040 cycles + bytes / rate"),
        "power_watts": _published(
            1500.0 if chip is not BOW else 1250.0, "W", "cap of an IPU-M2000; average of a Bow-2000"
        ),
    }


def _pods() -> dict[str, System]:
    systems: dict[str, System] = {}
    machine = {"ipu-m2000": ("IPU-M2000", GC200), "bow-2000": ("Bow-2000", BOW)}
    for name, (title, chip) in machine.items():
        systems[name] = _system(name, title, chip, 4, 4, 4, **_machine_facts(chip))
    for prefix, chip, family in (("", GC200, "IPU-POD"), ("bow-", BOW, "Bow Pod")):
        for ipus in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
            name = f"{prefix}pod{ipus}"
            systems[name] = _system(
                name, f"{family}{ipus}", chip, ipus, 4, min(ipus, 64), **_machine_facts(chip)
            )
    return systems


SYSTEMS: Mapping[str, System] = MappingProxyType(_pods())
"""Machines and PODs by name: ``ipu-m2000``, ``bow-2000``, ``pod4`` to ``pod1024``, ``bow-pod4`` and on."""


def chip(name: str) -> Chip:
    """The chip called ``name``, or the chip of the system called so.

    Raises:
        InvalidOptionError: no chip or system of that name; lists the names.
    """
    key = name.lower()
    if key in CHIPS:
        return CHIPS[key]
    if key in SYSTEMS:
        return SYSTEMS[key].chip
    raise InvalidOptionError(
        f"unknown target {name!r}",
        hint=f"Chips: {', '.join(CHIPS)}. Systems: {', '.join(SYSTEMS)}.",
    )


def system(name: str) -> System:
    """The system called ``name``.

    Raises:
        InvalidOptionError: no system of that name; lists the names.
    """
    key = name.lower()
    if key not in SYSTEMS:
        raise InvalidOptionError(f"unknown system {name!r}", hint=f"Systems: {', '.join(SYSTEMS)}.")
    return SYSTEMS[key]
