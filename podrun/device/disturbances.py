"""Faults that raise no error by themselves: what they do to a machine's memory, time, and host processes.

Slow and throttled IPUs, slow machines and degraded links lengthen the modelled time of batches; the rest happens at the
moment of the strike. `podrun.faults.DISTURBANCES` has the kinds.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from podrun.core.errors import UsageError
from podrun.core.executable import Executable
from podrun.faults import FaultSpec, Strike

log = logging.getLogger("podrun.device")

LINK_CAUSES = ("copies", "all_reduce", "collectives")
"""Causes of modelled time that are spent on links between IPUs."""
LANES = 8
"""Lanes of an IPU-Link."""


@dataclass(frozen=True, slots=True)
class _Lasting:
    """A fault that lengthens batches ``first`` to ``last`` (None: all that follow)."""

    spec: FaultSpec
    first: int
    last: int | None

    def covers(self, batch: int) -> bool:
        return self.first <= batch and (self.last is None or batch <= self.last)


class LastingFaults:
    """What lengthens the batches of a job on one machine. Ends with the program that is loaded."""

    def __init__(self) -> None:
        self._found: list[_Lasting] = []

    def begin(self, strike: Strike) -> None:
        """A fault begins with its batch."""
        spec = strike.spec
        last = strike.batch + spec.lasts - 1 if spec.lasts else None
        self._found.append(_Lasting(spec, strike.batch, last))

    def extra_seconds(self, executable: Executable, done: int, batches: int) -> float:
        """Modelled seconds that the faults add to ``batches`` batches after ``done``; 0 without a model."""
        step = executable.tile_report.get("step")
        if not self._found or not isinstance(step, Mapping) or not step.get("seconds"):
            return 0.0
        each = executable.batches_per_pass
        total = float(step["seconds"]) / each
        causes: Mapping[str, float] = step.get("seconds_by_cause", {})
        links = sum(float(causes.get(name, 0.0)) for name in LINK_CAUSES) / each
        clock = float(step.get("cycles", 0)) / float(step["seconds"])
        added = 0.0
        for batch in range(done, done + batches):
            now = [entry.spec for entry in self._found if entry.covers(batch)]
            chip = max((_chip_factor(spec, clock) for spec in now), default=1.0)
            link = max((_link_factor(spec) for spec in now), default=1.0)
            added += (total - links) * (chip - 1.0) + links * (link - 1.0)
        return added


def _chip_factor(spec: FaultSpec, clock_hz: float) -> float:
    if spec.kind == "throttled":
        return max(1.0, clock_hz / (spec.number("mhz") * 1e6))
    return spec.number("factor") if spec.kind == "slow" else 1.0


def _link_factor(spec: FaultSpec) -> float:
    """Fewer lanes carry the same bytes, and packets with errors are sent again."""
    if spec.kind != "degraded":
        return 1.0
    return LANES / spec.number("lanes") / (1.0 - spec.number("error-rate"))


LASTING = ("slow", "throttled", "degraded")


def flip_bit(value: np.ndarray, spec: FaultSpec) -> None:
    """Flip one bit of an array, in place. Raises UsageError if it has no such element or bit."""
    flat = value.reshape(-1)
    if not np.shares_memory(flat, value):
        raise UsageError(f"fault {spec.text}: the variable does not lie in one piece")
    element, bit = int(spec.number("element")), int(spec.number("bit"))
    if element >= flat.size or bit >= 8 * flat.dtype.itemsize:
        raise UsageError(
            f"fault {spec.text}: the variable has elements 0 to {flat.size - 1} of {8 * flat.dtype.itemsize} bits"
        )
    octets = flat.view(np.uint8).reshape(flat.size, -1)
    octets[element, bit // 8] ^= np.uint8(1 << bit % 8)


def signal_process(pid: int, host: str, spec: FaultSpec, kill: Callable[[int, int], Any] = os.kill) -> None:
    """Kill a host process, or stop it for a time. One on another host is out of reach, which is logged."""
    if host not in ("", socket.gethostname()):
        log.warning("fault %s: process %d is on %s, out of reach of this machine", spec.text, pid, host)
        return
    if spec.kind == "killed":
        kill(pid, signal.SIGKILL)
        return
    kill(pid, signal.SIGSTOP)
    timer = threading.Timer(spec.number("seconds"), _continue, (pid, kill))
    timer.daemon = True
    timer.name = "podrun-fault-hung"
    timer.start()


def _continue(pid: int, kill: Callable[[int, int], Any]) -> None:
    try:
        kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        log.debug("process %d has ended while it was stopped", pid)


def instances_here(first: int, count: int, owners: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Instances whose first IPU is among ``count`` from ``first``, by index: the place of their owner in ``owners``,
    which are the first IPU within the job and the number of IPUs of each.
    """
    found = {}
    for place, (start, size) in enumerate(owners):
        if first <= start < first + count:
            found[start // size] = place
    return found
