"""Facts about IPU chips, each with its source and how sure it is, and the systems built from them.

A `Fact` is a number with a unit, a `Status` (published, derived, supposed) and a source in words. Chips are
made of facts; code that needs the bare number reads the property of the same name
(``chip.tiles``). Pure data: nothing here imports anything heavy.

A target may be a supposed chip: ``pod16:tiles=2944,tile_kib=312`` names a POD16 of such chips wherever a target is
named.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from types import MappingProxyType

# Also for rooms that may import chips and machines, but not PODs.
from podrun.core.cluster import IPUS_PER_MACHINE as IPUS_PER_MACHINE
from podrun.core.errors import InvalidOptionError
from podrun.core.quick_dataclass import dataclass


class Status(enum.Enum):
    """How a number is known."""

    PUBLISHED = "published"
    """Read in a public document, repository or figure."""
    DERIVED = "derived"
    """Arithmetic on published numbers."""
    SUPPOSED = "supposed"
    """Supposed by the user, for a chip that does not exist."""


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


@dataclass(frozen=True, slots=True)
class Chip:
    """One IPU. ``facts`` by name; properties give the bare numbers that the model reads."""

    name: str
    title: str
    facts: Mapping[str, Fact]

    @property
    def base(self) -> str:
        """The chip's own name, or for a supposed chip the name of the chip from which it differs."""
        return self.name.partition(":")[0]

    def with_tiles(self, tiles: int) -> Chip:
        """The chip with so many of its tiles at work."""
        return replace(self, facts={**self.facts, "tiles": replace(self.facts["tiles"], value=tiles)})

    def _int(self, name: str) -> int:
        return int(self.facts[name].value)

    @property
    def tiles(self) -> int:
        """Tiles on the chip."""
        return self._int("tiles")

    @property
    def tile_bytes(self) -> int:
        """SRAM of one tile."""
        return self._int("tile_bytes")

    @property
    def clock_hz(self) -> float:
        """Frequency of the tiles' clock, in Hz."""
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


@dataclass(frozen=True, slots=True)
class System:
    """IPUs in machines, from which partitions are cut."""

    name: str
    title: str
    chip: Chip
    ipus: int


_MK2_MEMORY = _published(638_976, "B", "624 KiB per tile, 900 MB in all: vendor data sheet")


def _chip(name: str, title: str, **facts: Fact) -> Chip:
    common = {
        "load_bytes": _published(16, "B/cycle", "two 64-bit loads per cycle from interleaved memory"),
        "exchange_bytes": _published(4, "B/cycle", "one 32-bit word per cycle each way: 8 TB/s on GC200"),
        "memcpy_bytes": _published(8, "B/cycle", "memcpy rate in the library's target description"),
        "exchange_latency_cycles": _derived(213, "cycles", "133 ns tile to tile on GC2 at 1.6 GHz"),
        "sync_cycles": _derived(76, "cycles", "106 per tiny compute set less its launch; gaps 30-150"),
        "compute_set_cycles": _derived(30, "cycles", "worker launch: an instrumented set adds 20-60"),
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
)
GC200 = _chip(
    "gc200",
    "Colossus Mk2 GC200",
    **_mk2_amp(),
    clock_hz=_published(1.33e9, "Hz", "1.325 to 1.33 GHz"),
)
BOW = _chip(
    "bow",
    "Bow",
    **_mk2_amp(),
    clock_hz=_published(1.85e9, "Hz", "vendor data sheet"),
)
C600 = _chip(
    "c600",
    "C600 card's chip",
    **_mk2_amp(),
    amp_inputs_float8=_published(8, "elements", "560 TFLOPS FP8: 16 units x 8 elements"),
    clock_hz=_derived(1.5e9, "Hz", "280 TFLOPS / 1472 / 128 = 1.486 GHz, quoted as about 1.5 GHz"),
)

CHIPS: Mapping[str, Chip] = MappingProxyType({chip.name: chip for chip in (GC2, GC200, BOW, C600)})
"""Chips by name."""


def _systems() -> Iterator[System]:
    yield System("ipu-m2000", "IPU-M2000", GC200, IPUS_PER_MACHINE)
    yield System("bow-2000", "Bow-2000", BOW, IPUS_PER_MACHINE)
    for prefix, chip, family in (("", GC200, "IPU-POD"), ("bow-", BOW, "Bow Pod")):
        for ipus in (4, 8, 16, 32, 64, 128, 256, 512, 1024):
            yield System(f"{prefix}pod{ipus}", f"{family}{ipus}", chip, ipus)


SYSTEMS: Mapping[str, System] = MappingProxyType({system.name: system for system in _systems()})
"""Machines and PODs by name: ``ipu-m2000``, ``bow-2000``, ``pod4`` to ``pod1024``, ``bow-pod4`` and on."""


@dataclass(frozen=True, slots=True)
class _Supposition:
    """A setting of a supposed target: the fact that it sets, in units of ``scale``, and its range."""

    fact: str
    unit: str
    scale: float
    least: float
    most: float


SUPPOSITIONS: Mapping[str, _Supposition] = MappingProxyType(
    {
        "tiles": _Supposition("tiles", "tiles", 1, 1, 65_536),
        "tile_kib": _Supposition("tile_bytes", "B", 1024, 16, 65_536),
        "clock_ghz": _Supposition("clock_hz", "Hz", 1e9, 0.1, 10),
        "exchange_bytes": _Supposition("exchange_bytes", "B/cycle", 1, 1, 256),
        "link_gbps": _Supposition("link_rate", "B/s", 1e9 / 8, 1, 10_000),
    }
)
"""What a supposed target may change. ``link_gbps``: gigabits per second of one IPU-Link each way (GC200's: 128)."""
_EXAMPLE = "As in pod16:tiles=2944,tile_kib=312"


def chip(name: str) -> Chip:
    """The chip called ``name``, or the chip of the system called so; ``NAME:fact=value,...`` supposes another.

    Raises:
        InvalidOptionError: no chip or system of that name, or nothing that can be supposed; lists what can.
    """
    key, _, changes = name.lower().partition(":")
    if key in CHIPS:
        return _supposed(key, changes) if changes else CHIPS[key]
    if key in SYSTEMS:
        known = SYSTEMS[key].chip
        return _supposed(known.name, changes) if changes else known
    raise InvalidOptionError(
        f"unknown target {name!r}",
        hint=f"Chips: {', '.join(CHIPS)}. Systems: {', '.join(SYSTEMS)}.",
    )


def system(name: str) -> System:
    """The system called ``name``; ``NAME:fact=value,...`` is one of supposed chips.

    Raises:
        InvalidOptionError: as `chip`, but for systems alone.
    """
    key, _, changes = name.lower().partition(":")
    if key not in SYSTEMS:
        raise InvalidOptionError(f"unknown system {name!r}", hint=f"Systems: {', '.join(SYSTEMS)}.")
    known = SYSTEMS[key]
    return replace(known, name=name.lower(), chip=_supposed(known.chip.name, changes)) if changes else known


@cache
def _supposed(base: str, changes: str) -> Chip:
    """A chip that differs from ``base`` in some facts."""
    values: dict[str, float] = {}
    for change in changes.split(","):
        word, _, text = change.partition("=")
        known = SUPPOSITIONS.get(word.strip())
        if known is None:
            raise InvalidOptionError(
                f"a supposed target cannot change {word.strip()!r}",
                hint=f"It can change {', '.join(SUPPOSITIONS)}. {_EXAMPLE}",
            )
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not known.least <= value <= known.most:
            raise InvalidOptionError(
                f"{word.strip()}={text} is no number from {known.least:g} to {known.most:g}", hint=_EXAMPLE
            )
        values[word.strip()] = value
    facts = {
        SUPPOSITIONS[word].fact: Fact(
            float(int(value * SUPPOSITIONS[word].scale)),
            SUPPOSITIONS[word].unit,
            Status.SUPPOSED,
            f"what if {word}",
        )
        for word, value in values.items()
    }
    name = f"{base}:{','.join(f'{word}={values[word]:.12g}' for word in sorted(values))}"
    base_chip = CHIPS[base]
    return Chip(name, f"{base_chip.title}, supposed", MappingProxyType({**base_chip.facts, **facts}))
