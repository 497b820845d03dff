"""``podrun top --web``: who is let in, what is sent, and how it ends; in a browser too, where there is one."""

from __future__ import annotations

import http.client
import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from podrun.core.errors import ServiceError
from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess
from podrun.monitor.live.sighting import PodSighting, look_at_pod
from podrun.monitor.web.serving import COOKIE, LISTENERS, SightingFeed, make_web_server, new_token
from tests.partition.conftest import Pod

TOKEN = "token-of-the-test"


class Web:
    """A server of some looks."""

    def __init__(self, feed: SightingFeed, port: int) -> None:
        self.feed, self.port = feed, port

    def get(self, path: str, **headers: str) -> tuple[int, str, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read().decode()
        connection.close()
        return answer.status, body, dict(answer.getheaders())

    @contextmanager
    def events(self) -> Iterator[Iterator[dict[str, Any]]]:
        """The events as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/events", headers={"Cookie": f"{COOKIE}={TOKEN}"})
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"

        def each() -> Iterator[dict[str, Any]]:
            while line := answer.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])

        yield each()
        answer.close()
        connection.close()


@contextmanager
def serving(look: Any, interval_s: float = 0.02) -> Iterator[Web]:
    feed = SightingFeed(look, interval_s)
    with make_web_server(feed, 0, TOKEN) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield Web(feed, server.server_address[1])
        finally:
            feed.close()
            server.shutdown()
            thread.join()


@pytest.fixture
def seen(pod: Pod) -> PodSighting:
    pod.active("p", 8)
    pod.active("q", 4)
    name = "<script>alert(1)</script>"
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4711, "justina", name, 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    return look_at_pod(pod.client, 1000.0)


def test_a_browser_without_the_token_is_told_what_to_do(seen: PodSighting) -> None:
    with serving(lambda: seen) as web:
        for path in ("/", "/events", "/?token=wrong", "/?token=", "/?token=%F0%9F"):
            status, text, _ = web.get(path)
            assert status == 401
            assert "?token=" in text
        assert web.get("/", Cookie="podrun_top=wrong; \x01=;;=")[0] == 401
        assert web.get("/", Host="evil.example", Cookie=f"{COOKIE}={TOKEN}")[0] == 421
        assert web.get("/other", Cookie=f"{COOKIE}={TOKEN}")[0] == 404


def test_the_token_becomes_a_cookie_and_leaves_the_address(seen: PodSighting) -> None:
    with serving(lambda: seen) as web:
        status, _, headers = web.get(f"/?token={TOKEN}")
        assert (status, headers["Location"]) == (303, "/")
        assert {"HttpOnly", "SameSite=Strict"} <= set(headers["Set-Cookie"].split("; "))
        status, page, headers = web.get("/", Cookie=headers["Set-Cookie"].split(";")[0])
    assert status == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "EventSource" in page
    assert len(new_token()) >= 32


def test_the_page_is_one_file_that_loads_nothing_else() -> None:
    page = (resources.files("podrun.monitor.web") / "page.html").read_text()
    assert re.findall(r"(?:src|href)=\"(?!data:)[^\"]*\"", page) == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)\S+", page) == []
    assert "innerHTML" not in page


def test_events_have_sightings_rates_and_changes(seen: PodSighting) -> None:
    from dataclasses import replace

    later = replace(
        seen, time_s=1001.0, jobs=(replace(seen.jobs[0], batches=30), *seen.jobs[1:]), problems=()
    )
    looks, first_read = iter([seen, later]), threading.Event()

    def look() -> PodSighting | None:
        one = next(looks, None)
        if one is later:
            assert first_read.wait(60)
        return one

    with serving(look) as web, web.events() as events:
        first = next(events)
        first_read.set()
        assert first["sighting"] == json.loads(json.dumps(seen.plain()))
        second = next(events)
        assert second["rates"]["p"] == 30.0
        assert any("over: p ipum2" in line for line in second["changes"])


def test_a_service_that_is_away_is_said_and_asked_again(seen: PodSighting) -> None:
    looks = iter([ServiceError("no server answers", hint="vipu-server"), seen])

    def look() -> PodSighting | None:
        one = next(looks, None)
        if isinstance(one, ServiceError):
            raise one
        return one

    with serving(look) as web, web.events() as events:
        texts = [next(events)]
        if "error" in texts[0]:
            assert texts[0]["hint"] == "vipu-server"
            texts.append(next(events))
        assert "sighting" in texts[-1]


def test_nobody_looks_while_nobody_listens_and_listeners_are_bounded(seen: PodSighting) -> None:
    count: list[int] = []
    feed = SightingFeed(lambda: count.append(1), 0.001)  # type: ignore[func-returns-value]
    try:
        assert count == []
        assert all(feed.join() for _ in range(LISTENERS))
        assert not feed.join()
    finally:
        feed.close()
    assert feed.stopped
    assert feed.wait(0) is None


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)])
def test_a_browser_shows_the_pod(
    seen: PodSighting, tmp_path: Path, width: int, height: int, scheme: str
) -> None:
    """The page in headless Chromium: its text, no errors, nothing wider than the window, a picture in its colours."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    page = (resources.files("podrun.monitor.web") / "page.html").read_text()
    event = json.dumps({"sighting": seen.plain(), "rates": {"p": 3.5}, "changes": ["09:00:00  x"],
                        "totals": {"machines": 3, "machines_answering": 2, "ipus": 12, "ipus_held": 4,
                                   "ipus_in_error": 1, "busy_percent": None, "power_w": None}})  # fmt: skip
    check = """
      <script>
      window.EventSource = class { constructor() { setTimeout(() => { this.onmessage({data: EVENT}); setTimeout(() => {
        document.body.dataset.width = document.documentElement.scrollWidth + "/" + innerWidth;
        document.body.dataset.colour = getComputedStyle(document.body).backgroundColor;
      }, 50); }, 0); } };
      </script>""".replace("EVENT", json.dumps(event).replace("</", "<\\/"))
    file = tmp_path / "page.html"
    if (
        scheme == "dark"
    ):  # Headless Chromium has no switch that is stable over releases: apply the dark rules.
        page = page.replace("(prefers-color-scheme:dark)", "all")
    file.write_text(page.replace('<script>\n"use strict"', check + '<script>\n"use strict"'))
    picture = tmp_path / "page.png"
    words = [
        chromium,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={tmp_path / 'profile'}",
    ]
    words += ["--force-device-scale-factor=1", "--virtual-time-budget=3000"]
    shown = subprocess.run(
        [*words, f"--window-size={width},{height}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert "3 machines" in re.sub(r"<[^>]+>", "", shown).replace("2/3", "3")
    assert "ERROR" in shown
    assert "<script>alert" not in shown.split("<main>")[1].split("<dialog")[0]
    inside, window = map(int, re.search(r'data-width="(\d+)/(\d+)"', shown).groups())  # type: ignore[union-attr]
    assert inside <= window
    colour = re.search(r'data-colour="rgb\((\d+)', shown)
    assert colour is not None
    assert (int(colour.group(1)) < 80) == (scheme == "dark")
    subprocess.run(
        [*words, f"--window-size={width},{height}", f"--screenshot={picture}", file.as_uri()],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert picture.stat().st_size > 5_000
