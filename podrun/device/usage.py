"""How busy something is, and what it has done: for reports."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

from podrun.core.executable import Executable

_WINDOW = 1.0
_KEPT = 256


class Usage:
    """Busy time since ``begin`` (seconds). Two shares: of the last second, and since the beginning."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._total = 0.0
        self._spans: deque[tuple[float, float]] = deque(maxlen=_KEPT)

    def add(self, start: float, stop: float) -> None:
        """Busy from ``start`` to ``stop``; spans come in order."""
        self._total += max(stop - start, 0.0)
        self._spans.append((start, stop))

    def recent_percent(self, now: float, running_since: float | None = None) -> float:
        """Of the last second (or of the time since the beginning, if that is less), 0 to 100."""
        since = max(now - _WINDOW, self._begin)
        spans = [*self._spans, (running_since, now)] if running_since is not None else self._spans
        busy = sum(max(min(stop, now) - max(start, since), 0.0) for start, stop in spans)
        return _percent(busy, now - since)

    def session_percent(self, now: float, running_since: float | None = None) -> float:
        """Since the beginning, 0 to 100."""
        busy = self._total + (now - running_since if running_since is not None else 0.0)
        return _percent(busy, now - self._begin)


def _percent(busy: float, whole: float) -> float:
    return min(max(100.0 * busy / whole, 0.0), 100.0) if whole > 0 else 0.0


@dataclass(frozen=True, slots=True)
class WorkDone:
    """What a machine has done. Modelled seconds are of the IPUs, emulation seconds of this host's clock.

    ``samples``: on its replicas, counted by the first machine of each. None from a program on that does not say how
    many samples a micro-batch holds, until the next job.
    """

    batches: int = 0
    samples: int | None = 0
    modelled_s: float = 0.0
    emulation_s: float = 0.0

    def of_a_new_job(self) -> WorkDone:
        """The same, with samples counted anew where the job before did not say how many there were."""
        return self if self.samples is not None else replace(self, samples=0)

    def and_a_run(
        self,
        executable: Executable,
        passes: int,
        modelled_s: float,
        emulation_s: float,
        *,
        position: int = 0,
    ) -> WorkDone:
        """The sum of this and ``passes`` passes of a program. ``position``: of the machine within its replicas."""
        each = samples_per_pass(executable) if position == 0 else 0
        samples = None if each is None or self.samples is None else self.samples + passes * each
        batches = passes * executable.batches_per_pass
        return WorkDone(
            self.batches + batches, samples, self.modelled_s + modelled_s, self.emulation_s + emulation_s
        )


def samples_per_pass(executable: Executable) -> int | None:
    """Samples of one pass on one machine; None if the front end does not say how many a micro-batch holds."""
    each = executable.metadata.get("samples_per_micro_batch")
    if not isinstance(each, int):
        return None
    return each * executable.accumulation_factor * executable.layout.replicas_per_machine
