"""How often which units fail: ``rates.yaml`` and the presets.

A source says for one kind of unit (`UNITS`) which fault strikes it (a kind of `--fault`), how often, in exactly one of
four units of rate, after which distribution, how unevenly over the units, in which bursts, when it is noticed and how
long the repair takes. Presets hold published figures with their sources; all were measured on GPUs and are labelled so,
because nothing is published for IPUs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from podrun.core.cluster import Cluster, ladder_links
from podrun.core.documents import Document, read_document
from podrun.core.errors import NotFoundError
from podrun.core.fault_effects import kinds_of
from podrun.core.quick_dataclass import dataclass

CHIPS_PER_NODE = 8
"""GPUs of the servers that published rates are about."""
MACHINES_PER_HOST = 4
UNITS: Mapping[str, str] = {
    "ipu": "ipu",
    "machine": "machine",
    "node": "machine",
    "host": "host",
    "ipu-link": "link",
    "gw-link": "gw-link",
    "pod": "machine",
    "switch": "machine",
}
"""Units, and the targets of ``--fault`` that they are. A node is `CHIPS_PER_NODE` chips, as published rates count; a
pod and a switch strike all machines of an IPU-Link domain."""
RATE_KEYS = ("fit", "per-1000-node-days", "mtbf-hours", "per-year")
HOURS_PER_YEAR = 8766.0
_KEYS = (
    "unit",
    "kind",
    *RATE_KEYS,
    "trace",
    "weibull-shape",
    "lemons",
    "bursts",
    "detect-seconds",
    "repair",
    "source",
)
_HINT = "As in sources: [{unit: machine, kind: lost, per-1000-node-days: 6.5}] (podrun help simulate)."


@dataclass(frozen=True, slots=True)
class Lemons:
    """How unevenly units fail: a share of them fails ``factor`` times as often, or gamma factors of a shape."""

    share: float = 0.0
    factor: float = 1.0
    shape: float = 0.0


@dataclass(frozen=True, slots=True)
class Bursts:
    """A share of failures strikes more units at once: so many on average (geometric), of one IPU-Link domain."""

    share: float = 0.0
    mean_size: float = 1.0


@dataclass(frozen=True, slots=True)
class RepairTimes:
    """How long a unit that was replaced stays away: lognormal by median and mean, cut at a longest; a repair fails with
    a probability and begins again; ``crews`` work at a time (0: as many as are needed)."""

    median_h: float = 0.0
    mean_h: float = 0.0
    longest_h: float = 0.0
    fails: float = 0.0
    crews: int = 0


@dataclass(frozen=True, slots=True)
class FailureSource:
    """One source of failures. ``per_hour``: of one unit. ``shape``: of the Weibull distribution; 1: exponential,
    without memory. ``trace``: (hours, unit) instead of a rate."""

    unit: str
    kind: str
    per_hour: float
    shape: float = 1.0
    lemons: Lemons = Lemons()
    bursts: Bursts = Bursts()
    detect_s: float = 60.0
    repair: RepairTimes = RepairTimes()
    trace: tuple[tuple[float, int], ...] = ()
    source: str = ""

    @property
    def target(self) -> str:
        """The target of ``--fault`` that it strikes."""
        return UNITS[self.unit]


@dataclass(frozen=True, slots=True)
class FailureRates:
    """All sources, and where they come from. ``carried_over``: what they were measured on, if not on IPUs."""

    name: str
    sources: tuple[FailureSource, ...]
    carried_over: str = ""
    notes: tuple[str, ...] = field(default=())

    def scaled(self, factor: float) -> FailureRates:
        """Failure rates of which each is ``factor`` times this one."""
        from dataclasses import replace

        return replace(self, sources=tuple(replace(s, per_hour=s.per_hour * factor) for s in self.sources))

    def per_hour(self, pod: Cluster) -> float:
        """Failures of a whole POD in an hour, bursts counted once."""
        return math.fsum(
            len(s.trace) / max(s.trace[-1][0], 1e-9) if s.trace else s.per_hour * unit_count(pod, s.unit)
            for s in self.sources
        )


def unit_count(pod: Cluster, unit: str) -> int:
    """How many of a unit a POD has."""
    machines, domains = len(pod.agents), max(1, pod.ipu_count // pod.topology.ild_ipus)
    if unit == "ipu-link":
        return domains * len(ladder_links(pod.topology.ild_ipus, pod.topology.ipu_links))
    return {
        "ipu": pod.ipu_count,
        "machine": machines,
        "node": -(-pod.ipu_count // CHIPS_PER_NODE),
        "host": -(-machines // MACHINES_PER_HOST),
        "gw-link": machines if domains > 1 else 0,
        "pod": domains,
        "switch": domains,
    }[unit]


def machines_of_unit(pod: Cluster, unit: str, number: int) -> range:
    """The machines, by their index, that a unit is or lies on."""
    per_domain = pod.topology.ild_ipus // 4
    if unit == "ipu":
        return range(number // 4, number // 4 + 1)
    if unit == "node":
        first = number * CHIPS_PER_NODE // 4
        return range(first, min(first + 1, len(pod.agents)))
    if unit == "host":
        return range(number * MACHINES_PER_HOST, min((number + 1) * MACHINES_PER_HOST, len(pod.agents)))
    if unit in ("pod", "switch"):
        return range(number * per_domain, (number + 1) * per_domain)
    if unit == "ipu-link":
        links = ladder_links(pod.topology.ild_ipus, pod.topology.ipu_links)
        domain, link = divmod(number, len(links))
        machine = domain * per_domain + links[link][0] // 4
        return range(machine, machine + 1)
    return range(number, number + 1)


# --- files ---------------------------------------------------------------------------------------------------------


def preset_names() -> list[str]:
    """Names of the presets."""
    return sorted(path.stem for path in (Path(__file__).parent / "presets").glob("*.yaml"))


def read_rates(name_or_path: str) -> FailureRates:
    """The rates of a preset or in a file. Raises NotFoundError, which lists the presets, and ConfigError, which names
    file, line and key."""
    preset = Path(__file__).parent / "presets" / f"{name_or_path}.yaml"
    path = preset if name_or_path in preset_names() else Path(name_or_path)
    if not path.is_file():
        raise NotFoundError(
            f"there are no rates {name_or_path!r}", hint=f"Presets: {', '.join(preset_names())}; or a file."
        )
    document = read_document(path, hint=_HINT)
    values = document.value
    if not isinstance(values, dict) or values.get("version") != 1:
        raise document.error((), "version: 1 and sources are needed", hint=_HINT)
    for name in values:
        if name not in ("version", "sources", "carried-over", "notes"):
            raise document.error(
                (name,), f"there is no key {name!r}", hint="version, sources, carried-over, notes"
            )
    entries = values.get("sources")
    if not isinstance(entries, list) or not entries:
        raise document.error(("sources",), "sources is a list of what fails", hint=_HINT)
    sources = tuple(_source_of(document, place) for place in range(len(entries)))
    return FailureRates(
        path.stem, sources, str(values.get("carried-over", "")), tuple(map(str, values.get("notes", ())))
    )


def _source_of(document: Document, place: int) -> FailureSource:
    at, values = ("sources", place), document.value["sources"][place]
    if not isinstance(values, dict):
        raise document.error(at, "a source is a table of unit, kind and a rate", hint=_HINT)
    for name in values:
        if name not in _KEYS:
            raise document.error((*at, name), f"there is no key {name!r}", hint=f"Known: {', '.join(_KEYS)}.")
    unit, kind = str(values.get("unit")), str(values.get("kind"))
    if unit not in UNITS:
        raise document.error((*at, "unit"), f"there is no unit {unit!r}", hint=f"Units: {', '.join(UNITS)}.")
    if kind not in kinds_of(UNITS[unit]):
        raise document.error(
            (*at, "kind"), f"{unit} has no fault {kind!r}", hint=f"Kinds: {', '.join(kinds_of(UNITS[unit]))}."
        )
    trace = values.get("trace")
    return FailureSource(
        unit,
        kind,
        0.0 if trace is not None else _rate_of(document, at, values),
        _number(document, at, values, "weibull-shape", 1.0, least=0.01),
        Lemons(**_fields(document, at, values, "lemons", ("share", "factor", "shape"))),
        Bursts(**_fields(document, at, values, "bursts", ("share", "mean_size"))),
        _number(document, at, values, "detect-seconds", 60.0),
        _repair_of(document, at, values),
        () if trace is None else _trace_of(document, at, values),
        str(values.get("source", "")),
    )


def _rate_of(document: Document, at: tuple[str | int, ...], values: Mapping[str, Any]) -> float:
    names = [name for name in RATE_KEYS if name in values]
    if len(names) != 1:
        said = f"here are {' and '.join(names)}" if names else "here is none"
        raise document.error(
            at, f"a unit has exactly one rate, and {said}", hint=f"One of: {', '.join(RATE_KEYS)}."
        )
    value = _number(document, at, values, names[0], 0.0)
    if names[0] == "mtbf-hours":
        if value <= 0:
            raise document.error(
                (*at, names[0]), "a time between failures is above 0", hint="mtbf-hours: 1000"
            )
        return 1 / value
    return {"fit": value * 1e-9, "per-1000-node-days": value / 24_000, "per-year": value / HOURS_PER_YEAR}[
        names[0]
    ]


def _number(
    document: Document,
    at: tuple[str | int, ...],
    values: Mapping[str, Any],
    name: str,
    usual: float,
    least: float = 0.0,
) -> float:
    value = values.get(name, usual)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise document.error((*at, name), f"{name} is {value!r}, not a number from {least:g}", hint=_HINT)
    return float(value)


def _fields(
    document: Document,
    at: tuple[str | int, ...],
    values: Mapping[str, Any],
    name: str,
    known: tuple[str, ...],
) -> dict[str, float]:
    entry = values.get(name, {})
    if not isinstance(entry, dict) or any(key.replace("-", "_") not in known for key in entry):
        keys = ", ".join(key.replace("_", "-") for key in known)
        raise document.error((*at, name), f"{name} is a table", hint=f"Keys: {keys}.")
    return {key.replace("-", "_"): _number(document, (*at, name), entry, key, 0.0) for key in entry}


def _repair_of(document: Document, at: tuple[str | int, ...], values: Mapping[str, Any]) -> RepairTimes:
    known = ("median_hours", "mean_hours", "longest_hours", "fails", "crews")
    entry = _fields(document, at, values, "repair", known)
    median, mean = entry.get("median_hours", 0.0), entry.get("mean_hours", entry.get("median_hours", 0.0))
    if mean < median or (mean and not median):
        raise document.error(
            (*at, "repair"),
            "the mean of a lognormal repair is not below its median, and both are needed",
            hint=_HINT,
        )
    if entry.get("fails", 0.0) >= 1:
        raise document.error(
            (*at, "repair"), "a repair that always fails never ends: mean / (1 - fails)", hint="fails: 0.2"
        )
    longest, crews = entry.get("longest_hours", 0.0), int(entry.get("crews", 0))
    return RepairTimes(median, mean, longest, entry.get("fails", 0.0), crews)


def _trace_of(
    document: Document, at: tuple[str | int, ...], values: Mapping[str, Any]
) -> tuple[tuple[float, int], ...]:
    """Failures from a file of lines ``hours unit``."""
    if any(name in values for name in RATE_KEYS):
        raise document.error(at, "a source has a trace or a rate, not both", hint=_HINT)
    path = Path(document.where).parent / str(values["trace"])
    if not path.is_file():
        raise document.error((*at, "trace"), f"there is no file {path}", hint="Lines of: hours unit")
    events: list[tuple[float, int]] = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            hours, unit = text.split()
            events.append((float(hours), int(unit)))
        except ValueError:
            raise document.error(
                (*at, "trace"), f"{path}:{line}: not hours and a unit", hint="12.5 7"
            ) from None
        if len(events) > 1 and events[-1][0] < events[-2][0]:
            raise document.error(
                (*at, "trace"), f"{path}:{line}: the clock runs backwards", hint="Sort the lines."
            )
    return tuple(events)
