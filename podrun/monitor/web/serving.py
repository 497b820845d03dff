"""Serves the live view to browsers: the page at ``/``, sightings as server-sent events at ``/events``.

One thread looks at the POD while somebody listens, and all listeners get the same sighting. The token is in the address
that ``podrun top --web`` prints; after the first request it is a cookie of this page alone (``SameSite=Strict``,
``HttpOnly``), and the address loses it. Requests whose ``Host`` is not this server's are refused, so that no other site
reaches it by a name of its own.
"""

from __future__ import annotations

import functools
import hmac
import json
import secrets
import threading
from collections.abc import Callable
from http.cookies import SimpleCookie
from http.server import ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, urlsplit

from podrun.core.errors import PodrunError
from podrun.core.http_service import QuietHandler
from podrun.monitor.live.arrangement import batch_rates, changes_between, totals_of
from podrun.monitor.live.sighting import PodSighting

COOKIE = "podrun_top"
LISTENERS = 32
"""Most browsers at a time."""
KEPT_CHANGES = 200
SILENCE_S = 10.0
"""Longest time without an event, so that a listener that is gone is noticed."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class SightingFeed:
    """Looks at a POD every ``interval_s`` seconds while anybody listens, and keeps the latest event as JSON text."""

    def __init__(self, look: Callable[[], PodSighting | None], interval_s: float) -> None:
        self._look, self._interval_s = look, interval_s
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._listeners = 0
        self._event, self._number = "", 0
        self._seen: PodSighting | None = None
        self._changes: list[str] = []
        self._thread = threading.Thread(target=self._run, name="podrun-web-feed", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            with self._changed:
                self._changed.wait_for(lambda: self._listeners or self._stop.is_set())
            if self._stop.is_set():
                return
            try:
                seen = self._look()
                event = None if seen is None else self._event_of(seen)
            except PodrunError as error:
                event = {"error": error.message, "hint": error.hint or ""}
            if event is not None:
                with self._changed:
                    self._event, self._number = json.dumps(event, separators=(",", ":")), self._number + 1
                    self._changed.notify_all()
            self._stop.wait(self._interval_s)

    def _event_of(self, seen: PodSighting) -> dict[str, Any]:
        if self._seen is not None:
            self._changes = (self._changes + changes_between(self._seen, seen))[-KEPT_CHANGES:]
        rates = batch_rates(self._seen, seen)
        self._seen = seen
        totals = totals_of(seen)
        return {
            "sighting": seen.plain(),
            "rates": rates,
            "changes": self._changes,
            "totals": {name: getattr(totals, name) for name in totals.__slots__},
        }

    def wait(self, after: int) -> tuple[int, str] | None:
        """The latest event with its number, once that is larger than ``after``; None after a silence or at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._number > after or self._stop.is_set(), SILENCE_S)
            return (self._number, self._event) if self._number > after and not self._stop.is_set() else None

    @property
    def stopped(self) -> bool:
        """Whether the feed has ended."""
        return self._stop.is_set()

    def join(self) -> bool:
        """Begin to listen. False if too many do."""
        with self._changed:
            if self._listeners >= LISTENERS:
                return False
            self._listeners += 1
            self._changed.notify_all()
            return True

    def leave(self) -> None:
        """Note that a listener has gone."""
        with self._changed:
            self._listeners -= 1

    def close(self) -> None:
        """End the thread and all listeners."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(SILENCE_S)


def make_web_server(feed: SightingFeed, port: int, token: str) -> ThreadingHTTPServer:
    """The server on loopback; the caller runs ``serve_forever`` and closes the feed."""
    server = ThreadingHTTPServer(("127.0.0.1", port), functools.partial(_PageHandler, feed=feed, token=token))
    server.daemon_threads = True
    return server


def new_token() -> str:
    """A token that nobody guesses."""
    return secrets.token_urlsafe(24)


_SAFE = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of all answers."""


class _PageHandler(QuietHandler):
    """Answers one browser."""

    timeout = 30.0

    def __init__(self, *args: Any, feed: SightingFeed, token: str) -> None:
        self._feed, self._token = feed, token
        super().__init__(*args)  # It answers within.

    def do_GET(self) -> None:
        """The page, the events, or a refusal that says what to do."""
        url = urlsplit(self.path)
        port = self.connection.getsockname()[1]
        if self.headers.get("Host", "") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self._text(421, "This server is 127.0.0.1 alone.")
        elif url.path == "/" and self._matches("".join(parse_qs(url.query).get("token", []))):
            self.send_response(303)
            self.send_header("Location", "/")
            self.send_header("Set-Cookie", f"{COOKIE}={self._token}; Path=/; HttpOnly; SameSite=Strict")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif not self._matches(self._cookie()):
            self._text(401, "Open the whole address that podrun top --web printed: it ends in ?token=...")
        elif url.path == "/":
            self._page()
        elif url.path == "/events":
            self._events()
        else:
            self._text(404, "There are / and /events.")

    def _matches(self, shown: str) -> bool:
        return hmac.compare_digest(shown.encode(), self._token.encode())

    def _cookie(self) -> str:
        try:
            cookies: SimpleCookie = SimpleCookie(self.headers.get("Cookie", ""))
        except Exception:  # Malformed cookies are no cookies.
            return ""
        return cookies[COOKIE].value if COOKIE in cookies else ""

    def _page(self) -> None:
        body = (resources.files("podrun.monitor.web") / "page.html").read_bytes()
        self.answer(200, "text/html; charset=utf-8", body, _SAFE)

    def _text(self, status: int, text: str) -> None:
        self.answer(status, "text/plain; charset=utf-8", f"{text}\n".encode(), _SAFE)

    def _events(self) -> None:
        if not self._feed.join():
            self._text(503, f"{LISTENERS} browsers look already.")
            return
        try:
            self.send_response(200)
            for name, value in ({"Content-Type": "text/event-stream"} | _SAFE).items():
                self.send_header(name, value)
            self.end_headers()
            number = 0
            while not self._feed.stopped:
                event = self._feed.wait(number)
                if event is None:
                    self.wfile.write(b": still here\n\n")
                else:
                    number = event[0]
                    self.wfile.write(f"id: {number}\ndata: {event[1]}\n\n".encode())
                self.wfile.flush()
        except OSError:
            return  # The browser is gone.
        finally:
            self._feed.leave()
