"""Incidents to a webhook: each problem of a POD that begins or ends is one POST of a JSON object.

`WebhookSender` never blocks who reports: events go into a bounded queue, the oldest is dropped when it is full (and
counted), and one thread sends them in order, each with a deadline, a few times with growing pauses. A receiver that
answers 4xx does not want the event: it is not sent again.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from podrun.core.errors import UsageError
from podrun.monitor.pod_health import HealthProblem

EVENT_VERSION = 1
QUEUE = 256
ATTEMPTS = 5
TIMEOUT_S = 5.0
"""Seconds for one attempt."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0)
END_S = 6.0
"""Longest wait for what is still to be sent at the end."""


def check_webhook(url: str) -> str:
    """The address, if it is one of HTTP. Raises UsageError."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(
            f"a webhook is an http or https address, not {url!r}", hint="As in: https://HOST/PATH"
        )
    return url


def problem_events(
    before: Iterable[HealthProblem], after: Iterable[HealthProblem], server: str, now: float
) -> Iterator[dict[str, Any]]:
    """Events for problems that began (``event`` "begins") and that are over ("ends") between two looks."""
    old = {_key(problem): problem for problem in before}
    new = {_key(problem): problem for problem in after}
    for event, ours, others in (("begins", new, old), ("ends", old, new)):
        for key, problem in ours.items():
            if key not in others:
                yield {
                    "version": EVENT_VERSION,
                    "event": event,
                    "time_s": now,
                    "server": server,
                    **_plain(problem),
                }


def _key(problem: HealthProblem) -> tuple[object, ...]:
    return (problem.what, problem.partition, problem.agent, problem.ipus)


def _plain(problem: HealthProblem) -> dict[str, Any]:
    from dataclasses import asdict

    where = " ".join(filter(None, [problem.partition, problem.agent])) or "POD"
    # Chat services show "text".
    text = f"{problem.severity.value}: {where}: {problem.what}. {problem.remedy}"
    return {"problem": asdict(problem), "text": text}


def post_json(url: str, event: Mapping[str, Any], timeout_s: float = TIMEOUT_S) -> int:
    """POST an object; the status. Raises OSError where there is no answer in time."""
    body = json.dumps(event).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json", "User-Agent": "podrun"})  # noqa: S310 - `check_webhook`
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310 - `check_webhook`
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


class WebhookSender:
    """Sends each problem of a POD that begins or ends to a webhook. ``post``: sends one event to an address and returns
    its status; ``say``: told of events that were given up; ``pause``: waits some seconds, or returns True at once when
    it is over.
    """

    def __init__(
        self,
        url: str,
        say: Callable[[str], None],
        post: Callable[[str, Mapping[str, Any]], int] = post_json,
        pause: Callable[[float], bool] | None = None,
    ) -> None:
        self._url, self._say, self._post = check_webhook(url), say, post
        self._queue: deque[Mapping[str, Any]] = deque()
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._pause = pause or self._ended.wait
        self._sending = False
        self.dropped = self.given_up = 0
        self._thread = threading.Thread(target=self._run, name="podrun-webhook", daemon=True)
        self._thread.start()

    def send(self, event: Mapping[str, Any]) -> None:
        """Send an event soon. Returns at once."""
        with self._changed:
            if len(self._queue) >= QUEUE:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append(event)
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._sending = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._queue or self._ended.is_set())
                if not self._queue:
                    return
                event = self._queue.popleft()
                self._sending = True
            self._deliver(event)

    def _deliver(self, event: Mapping[str, Any]) -> None:
        why = ""
        for attempt in range(ATTEMPTS):
            try:
                status = self._post(self._url, event)
            except (OSError, ValueError) as error:  # ValueError: an answer that is no HTTP.
                why = str(error)
            else:
                if 200 <= status < 300:
                    return
                why = f"it answered {status}"
                if 400 <= status < 500 and status not in (408, 429):
                    break
            if attempt == ATTEMPTS - 1 or self._pause(PAUSES_S[attempt]):
                break
        self.given_up += 1
        self._say(f"note: the webhook {urlsplit(self._url).hostname} did not take an event: {why}")

    def close(self, seconds: float = END_S) -> None:
        """Wait briefly for what is to be sent, then end."""
        with self._changed:
            self._changed.wait_for(lambda: not self._queue and not self._sending, seconds)
            self._queue.clear()
        self._ended.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(0.1)
