"""When a checkpoint is due and what it costs, as a value: training loops and `podrun chaos` take the same one.

An interval is work between two writes and does not include the write. Young (CACM 1974): sqrt(2 C M); Daly (FGCS 2006)
adds higher orders, with C the seconds that a write holds training up and M the mean time between failures. Intervals
are whole batches.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import Any

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass


class Spacing(enum.Enum):
    """How the interval between checkpoints is chosen."""

    BATCHES = "batches"
    """Every ``value`` batches."""
    SECONDS = "seconds"
    """Every ``value`` seconds of work."""
    YOUNG = "young"
    """Young's interval."""
    DALY = "daly"
    """Daly's interval."""
    COUNT = "count"
    """``value`` checkpoints over the whole run."""


class WriteMode(enum.Enum):
    """What a write holds up."""

    BLOCKING = "blocking"
    """Training waits until the file is there."""
    BACKGROUND = "background"
    """Training waits for a copy in memory; the file is written meanwhile."""
    PEERS = "peers"
    """The copy goes to other machines' memory; it is read back from there."""


def young_interval(cost_s: float, mttf_s: float) -> float:
    """Seconds of work between writes by Young."""
    return math.sqrt(2.0 * cost_s * mttf_s)


def daly_interval(cost_s: float, mttf_s: float) -> float:
    """Seconds of work between writes by Daly's higher order formula; the mean time between failures itself where a
    write costs more than twice that."""
    if cost_s >= 2.0 * mttf_s:
        return mttf_s
    root = math.sqrt(cost_s / (2.0 * mttf_s))
    return young_interval(cost_s, mttf_s) * (1.0 + root / 3.0 + root * root / 9.0) - cost_s


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When to write a checkpoint and what that costs.

    ``size_bytes``: of the state of the whole job. ``write_bytes_s``, ``copy_bytes_s``, ``read_bytes_s``: bandwidths of
    the store, of copies in memory or to peers, and of reading back (0: as writing). ``latency_s``: of each. Without a
    size, ``cost_s`` is what a write holds training up. Raises UsageError for a policy that contradicts itself.
    """

    spacing: Spacing = Spacing.SECONDS
    value: float = 3600.0
    mode: WriteMode = WriteMode.BLOCKING
    size_bytes: float = 0.0
    write_bytes_s: float = 0.0
    copy_bytes_s: float = 0.0
    read_bytes_s: float = 0.0
    latency_s: float = 0.0
    cost_s: float = 0.0
    restore_s: float = 0.0
    keep: int = 2

    def __post_init__(self) -> None:
        numbers = (self.size_bytes, self.write_bytes_s, self.copy_bytes_s, self.read_bytes_s, self.latency_s)
        if min(*numbers, self.cost_s, self.restore_s) < 0 or not all(map(math.isfinite, numbers)):
            raise _contradiction("sizes, bandwidths and times are not below 0")
        if self.spacing not in (Spacing.YOUNG, Spacing.DALY) and not self.value > 0:
            raise _contradiction(f"a checkpoint every {self.value:g} {self.spacing.value} is none")
        if self.spacing in (Spacing.BATCHES, Spacing.COUNT) and self.value != int(self.value):
            raise _contradiction(f"{self.value:g} {self.spacing.value} are no whole number")
        if self.size_bytes and self.cost_s:
            raise _contradiction("the cost is given twice: by size-bytes and by cost-seconds")
        if self.size_bytes and not self.write_bytes_s:
            raise _contradiction("a size needs write-bytes-per-second")
        if self.size_bytes and self.mode is not WriteMode.BLOCKING and not self.copy_bytes_s:
            raise _contradiction(f"{self.mode.value} writes need copy-bytes-per-second")
        if self.keep < 1:
            raise _contradiction("at least one checkpoint has to stay")
        if self.spacing in (Spacing.YOUNG, Spacing.DALY) and not self.blocking_s:
            raise _contradiction(
                f"{self.spacing.value} divides the cost of a write by the rate of failures, and writes cost nothing"
            )

    @property
    def blocking_s(self) -> float:
        """Seconds by which a write holds training up."""
        if not self.size_bytes:
            return self.cost_s
        rate = self.write_bytes_s if self.mode is WriteMode.BLOCKING else self.copy_bytes_s
        return self.latency_s + self.size_bytes / rate

    @property
    def durable_s(self) -> float:
        """Seconds after the hold-up until a failure finds the checkpoint."""
        if self.mode is not WriteMode.BACKGROUND or not self.size_bytes:
            return 0.0
        return self.latency_s + self.size_bytes / self.write_bytes_s

    @property
    def reading_s(self) -> float:
        """Seconds to read it back."""
        if not self.size_bytes:
            return self.restore_s
        rate = self.read_bytes_s or (
            self.copy_bytes_s if self.mode is WriteMode.PEERS else self.write_bytes_s
        )
        return self.restore_s + self.latency_s + self.size_bytes / rate

    def interval_s(self, step_s: float, mttf_s: float = math.inf, run_s: float = math.inf) -> float:
        """Seconds of work between writes: whole batches of ``step_s``, not below the time that a write in the
        background takes. ``run_s``: work of the whole run, for a fixed count. Infinite if none is due."""
        wanted = {
            Spacing.BATCHES: self.value * step_s,
            Spacing.SECONDS: self.value,
            Spacing.YOUNG: young_interval(self.blocking_s, mttf_s),
            Spacing.DALY: daly_interval(self.blocking_s, mttf_s) if math.isfinite(mttf_s) else math.inf,
            Spacing.COUNT: run_s / (self.value + 1) if math.isfinite(run_s) else math.inf,
        }[self.spacing]
        wanted = max(wanted, self.durable_s - self.blocking_s, step_s)
        return wanted if math.isinf(wanted) else max(1, round(wanted / step_s)) * step_s

    def due(self, batches: int, seconds: float, *, mttf_s: float = math.inf, total_batches: int = 0) -> bool:
        """Whether a checkpoint is due ``batches`` and ``seconds`` after the last one. ``total_batches``: of the whole
        run, for a fixed count."""
        if batches <= 0:
            return False
        if self.spacing is Spacing.BATCHES:
            return batches >= self.value
        if self.spacing is Spacing.COUNT:
            return total_batches > 0 and batches >= total_batches / (self.value + 1)
        step_s = max(seconds / batches, 1e-9)
        return seconds + step_s / 2 >= self.interval_s(step_s, mttf_s)


def _contradiction(why: str) -> UsageError:
    return UsageError(
        f"the checkpoint policy contradicts itself: {why}",
        hint="As in checkpoint: {every-seconds: 1800, mode: background, size-bytes: 1e12, "
        "write-bytes-per-second: 2e10, copy-bytes-per-second: 2e11}.",
    )


_SPACINGS = {
    "every-batches": Spacing.BATCHES,
    "every-seconds": Spacing.SECONDS,
    "count": Spacing.COUNT,
}
_NUMBERS = {
    "size-bytes": "size_bytes",
    "write-bytes-per-second": "write_bytes_s",
    "copy-bytes-per-second": "copy_bytes_s",
    "read-bytes-per-second": "read_bytes_s",
    "latency-seconds": "latency_s",
    "cost-seconds": "cost_s",
    "restore-seconds": "restore_s",
    "keep": "keep",
}
POLICY_KEYS = (*_SPACINGS, "interval", "mode", *_NUMBERS)
"""Keys of ``checkpoint:`` in a policy file; ``interval`` is ``young`` or ``daly``."""


def checkpoint_policy_of(values: Mapping[str, Any]) -> CheckpointPolicy:
    """The policy in ``checkpoint:`` of a policy file. Raises UsageError for unknown keys, values of another type, two
    intervals, and a policy that contradicts itself."""
    unknown = [name for name in values if name not in POLICY_KEYS]
    if unknown:
        raise UsageError(f"checkpoint has no key {unknown[0]!r}", hint=f"Known: {', '.join(POLICY_KEYS)}.")
    spacings = [name for name in (*_SPACINGS, "interval") if name in values]
    if len(spacings) > 1:
        raise _contradiction(f"{spacings[0]} and {spacings[1]} are two intervals")
    fields: dict[str, Any] = {}
    for name, value in values.items():
        if name in ("interval", "mode"):
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UsageError(f"checkpoint: {name} is {value!r}, not a number", hint=f"As in {name}: 60.")
        if name in _SPACINGS:
            fields |= {"spacing": _SPACINGS[name], "value": float(value)}
        else:
            fields[_NUMBERS[name]] = int(value) if name == "keep" else float(value)
    try:
        if "interval" in values:
            fields["spacing"] = Spacing(values["interval"])
        if "mode" in values:
            fields["mode"] = WriteMode(values["mode"])
    except ValueError:
        raise UsageError(
            "interval is young or daly, and mode is blocking, background or peers",
            hint="As in checkpoint: {interval: daly, cost-seconds: 20}.",
        ) from None
    return CheckpointPolicy(**fields)


def periodic_efficiency(
    period: float, cost: float, mttf: float, restore: float = 0.0, down: float = 0.0
) -> float:
    """Exact share of useful time with a checkpoint in each period, which includes the write; failures are exponential
    and strike restores and writes too."""
    return (period - cost) / ((mttf + down) * math.exp(restore / mttf) * math.expm1(period / mttf))


def optimal_period(cost: float, mttf: float) -> float:
    """The period, including the write, with the best `periodic_efficiency`: where 1 - exp(-x) = x - C/M for x = T/M.
    Restores and pauses do not move it."""
    low, high = 0.0, 60.0 + cost / mttf
    for _ in range(200):
        middle = (low + high) / 2
        if middle - cost / mttf + math.expm1(-middle) < 0:
            low = middle
        else:
            high = middle
    return low * mttf
