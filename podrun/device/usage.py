"""How busy something is: the share of time it computes."""

from __future__ import annotations

from collections import deque

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
