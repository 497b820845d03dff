"""The requests of a runner: futures, the queue that decides which run together, and the parts that a run has of
them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import numpy as np

from podrun.core.errors import DeadlineError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.batching import BatchDecision, BatchingRule
from podrun.serving.loaded_model import ModelledTime


class RunFuture:
    """A request that was given to a runner."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self.on_wait: Callable[[], None] | None = None
        """Called when somebody waits: a runner may then stop waiting for other requests."""
        self.modelled: ModelledTime | None = None
        """What the run cost that answered the request, when it is done; of the last run, if there were several."""
        self.queue_seconds = 0.0
        """Seconds between the call and the run."""

    def wait(self, seconds: float | None = None) -> None:
        """Return when the outputs are filled; raises the request's error, DeadlineError after ``seconds``."""
        self.wait_for_answer(seconds)
        if self._error is not None:
            raise self._error

    def wait_for_answer(self, seconds: float | None = None) -> None:
        """Return when the request is answered, by results or by an error. DeadlineError after ``seconds``."""
        if self.on_wait is not None and not self._done.is_set():
            self.on_wait()
        if not self._done.wait(seconds):
            raise DeadlineError(f"the request was not answered within {seconds:g} s")

    @property
    def done(self) -> bool:
        """True iff the request was answered."""
        return self._done.is_set()

    @property
    def error(self) -> BaseException | None:
        """The request's error; None if there is none, or none as yet."""
        return self._error

    def when_done(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` once, when the request is answered: in the runner's thread, or now."""
        self._listeners.append(listener)
        if self._done.is_set():
            self._tell()

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the request as answered; the first error stays."""
        if self._done.is_set():
            return
        self._error = error
        self._done.set()
        self._tell()

    def _tell(self) -> None:
        while self._listeners:
            try:
                listener = self._listeners.pop()
            except IndexError:  # Another thread has taken it.
                return
            listener()


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A request in a runner's queue. ``rows``: along the first axis of its arrays."""

    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    rows: int
    future: RunFuture = field(default_factory=RunFuture)
    since: float = field(default_factory=time.monotonic)
    taken: int = 0
    """Rows that runs have taken."""
    answered: int = 0
    """Rows that were answered."""
    label: str = ""
    """The client's id."""


@dataclass(frozen=True, slots=True)
class RequestPart:
    """The rows ``begin`` to ``end`` of a request, in one run."""

    request: QueuedRequest
    begin: int
    end: int

    @property
    def rows(self) -> int:
        """How many rows of the batch the part has."""
        return self.end - self.begin

    @property
    def whole(self) -> bool:
        """True iff that is the request."""
        return self.rows == self.request.rows


class RequestQueue:
    """Requests that wait, and the thread that takes them, by a `BatchingRule`. Thread-safe.

    ``delay_s``: of so many waiting rows, which takes the place of the rule's delay.
    """

    def __init__(self, rule: BatchingRule, delay_s: Callable[[int], float]) -> None:
        self._rule, self._delay = rule, delay_s
        self._waiting: deque[QueuedRequest] = deque()
        self._changed = threading.Condition()
        self._closed = self._flush = False

    def put(self, request: QueuedRequest) -> bool:
        """Add a request. False if the queue is closed."""
        with self._changed:
            if self._closed:
                return False
            self._waiting.append(request)
            self._changed.notify()
            return True

    def flush(self, request: QueuedRequest | None = None) -> None:
        """Run what waits without waiting for more; with a request: if that waits."""
        with self._changed:
            if request is None or request in self._waiting:
                self._flush = True
                self._changed.notify()

    def close(self) -> None:
        """Take no more requests; those that wait are still taken."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> list[RequestPart] | None:
        """The parts of requests that run together next, when it is time; None when the queue is closed and empty."""
        with self._changed:
            while True:
                decision = self._decide(time.monotonic())
                if decision.rows:
                    parts = self._take(decision.rows)
                    self._flush = self._flush and bool(self._waiting)
                    return parts
                if self._closed and not self._waiting:
                    return None
                left = decision.until - time.monotonic()
                self._changed.wait(min(left, threading.TIMEOUT_MAX) if left > 0 else 0.0)

    def _decide(self, now: float) -> BatchDecision:
        sizes = [request.rows - request.taken for request in self._waiting]
        if not sizes:
            return BatchDecision(0)
        delay = 0.0 if self._closed or self._flush else self._delay(sum(sizes))
        rule = BatchingRule(self._rule.most_rows, delay, self._rule.preferred_rows, self._rule.whole_requests)
        return rule.decide(sizes, self._waiting[0].since, now)

    def _take(self, rows: int) -> list[RequestPart]:
        parts = []
        while rows:
            request = self._waiting[0]
            end = min(request.rows, request.taken + rows)
            parts.append(RequestPart(request, request.taken, end))
            rows -= end - request.taken
            request.taken = end
            if end == request.rows:
                self._waiting.popleft()
        return parts


def whole_parts(requests: Sequence[QueuedRequest]) -> list[RequestPart]:
    """The parts of a run that has whole requests."""
    return [RequestPart(request, 0, request.rows) for request in requests]
