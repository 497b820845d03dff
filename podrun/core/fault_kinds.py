"""Which faults there are besides those that raise errors, and where and when each kind may strike."""

from __future__ import annotations

from collections.abc import Mapping

from podrun.core.quick_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Setting:
    """A parameter of a disturbance: its type, its default (None: it must be given), and the smallest and largest value
    of a number.
    """

    type: type[int] | type[float] | type[str]
    default: int | float | str | None
    least: float = 0.0
    most: float = 1e9


@dataclass(frozen=True, slots=True)
class Disturbance:
    """A fault that raises no error by itself: it shows in results, times, processes or answers. ``lasts``: it may be
    given a number of batches (``for``). ``settings``: its parameters. ``does``: in words.
    """

    does: str
    settings: Mapping[str, Setting]
    lasts: bool = False


_FACTOR = {"factor": Setting(float, 1.01, 1.0, 1e6)}
_SECONDS = {"seconds": Setting(float, 1.0, 0.0, 3600.0)}
_LOSS = {"loss": Setting(float, 0.01, 0.0, 0.99)}
DISTURBANCES: Mapping[tuple[str, str], Disturbance] = {
    ("ipu", "corrected-parity"): Disturbance("corrects a parity error and counts it", {}),
    ("ipu", "corrupt"): Disturbance(
        "flips a bit of a variable, silently",
        {"tensor": Setting(str, None), "element": Setting(int, 0), "bit": Setting(int, 0, 0, 63)},
    ),
    ("ipu", "slow"): Disturbance("computes slower by a factor, in modelled time", _FACTOR, lasts=True),
    ("ipu", "throttled"): Disturbance(
        "computes at a lower clock, in modelled time", {"mhz": Setting(float, None, 1.0, 1e5)}, lasts=True
    ),
    ("ipu", "stream-stall"): Disturbance("waits for the host's data", _SECONDS),
    ("link", "degraded"): Disturbance(
        "runs with fewer of its 8 lanes, or repeats a share of its packets, in modelled time",
        {"lanes": Setting(int, 8, 1, 8), "error-rate": Setting(float, 0.0, 0.0, 0.99)},
        lasts=True,
    ),
    ("machine", "slow"): Disturbance("computes slower by a factor, in modelled time", _FACTOR, lasts=True),
    ("machine", "paused"): Disturbance("does and answers nothing for a time", _SECONDS),
    ("machine", "heartbeats-dropped"): Disturbance(
        "does not answer the partition service and monitors for a time, and works on", _SECONDS
    ),
    ("network", "delayed"): Disturbance("carries nothing between two machines for a time", _SECONDS),
    ("network", "lossy"): Disturbance("loses a share of packets, which are sent again", _LOSS),
    ("instance-network", "delayed"): Disturbance(
        "carries nothing between two instances for a time", _SECONDS
    ),
    ("instance-network", "lossy"): Disturbance("loses a share of packets, which are sent again", _LOSS),
    ("disk", "full"): Disturbance(
        "takes so many bytes of a checkpoint of an instance, and no more", {"bytes": Setting(int, 0, 0, 1e15)}
    ),
    ("instance", "killed"): Disturbance("kills the host process", {}),
    ("instance", "hung"): Disturbance("stops the host process for a time", _SECONDS),
    ("service", "slow"): Disturbance("answers the request late", _SECONDS),
    ("service", "answer-lost"): Disturbance("carries out the request, and the answer is lost", {}),
    ("service", "twice"): Disturbance("is given the request twice", {}),
    ("service", "killed"): Disturbance("ends after it has committed the request", {}),
}
"""Faults without an error of their own, by target and kind."""
EVENTS = ("load", "read", "partition-reset")
"""Events of a machine, besides batches, at which a fault may strike: it loads a program, gives weights to the host (as
a checkpoint needs), or is reset with its partition.
"""
CHECKPOINT_WRITE = "checkpoint-write"
COLLECTIVE = "collective"
PROGRAM_EVENTS = (CHECKPOINT_WRITE, COLLECTIVE)
"""Events of an instance at which faults may strike: it writes its part of a checkpoint to the disk, or takes part in a
collective of instances (``popdist``).
"""
REQUESTS = (
    "CreatePartition",
    "ResetPartition",
    "RemovePartition",
    "PowerCycleAgent",
    "RestartAgent",
    "GetPartition",
)
"""Requests to the partition service at which a fault of ``service`` may strike."""


def events_of(target: str, kind: str) -> tuple[str, ...]:
    """The events at which a fault of a kind may strike."""
    if target == "service":
        return REQUESTS
    if target in ("instance", "disk"):
        return (CHECKPOINT_WRITE,)
    if target == "instance-network":
        return (COLLECTIVE,)
    events: tuple[str, ...] = ("load",) if kind == "out-of-memory" else EVENTS
    if kind == "corrupt":
        events = ("read",)  # The memory is empty when a program is loaded or a partition reset.
    if (target, kind) in DISTURBANCES and DISTURBANCES[target, kind].lasts:
        events = ("load", "read")  # The effect lasts until the program is loaded again, so a reset ends it.
    if WHERE[target] == "A-B":
        events = tuple(
            event for event in events if event != "read"
        )  # The host reads over no link between machines.
    return events


def strikes_in_batches(target: str, kind: str) -> bool:
    """Whether a fault of a kind may strike in a batch, not only at events."""
    return target not in ("service", "disk") and kind != "out-of-memory"


def settings_of_kind(target: str, kind: str) -> Mapping[str, Setting]:
    """The parameters of a kind."""
    disturbance = DISTURBANCES.get((target, kind))
    return {} if disturbance is None else disturbance.settings


WHERE: Mapping[str, str] = {
    "ipu": "N",
    "link": "A-B",
    "gw-link": "A-B",
    "network": "A-B",
    "instance-network": "A-B",
    "machine": "N",
    "host": "N",
    "instance": "N",
    "disk": "N",
    "service": "vipu",
}
"""Targets, and how each is numbered."""
