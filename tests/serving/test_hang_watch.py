"""A server that answered and then says nothing more is ended; one that has not answered yet is waited for."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator

import pytest

from podrun.serving.hang_watch import PATIENCE_SECONDS, HangWatch, LastAnswer, server_lives

DEADLINE = 60.0


def test_silence_counts_from_the_last_answer_on() -> None:
    silence = LastAnswer()
    assert not silence.hangs(False, 10 * PATIENCE_SECONDS), "a server that loads its models says nothing"
    assert not silence.hangs(True, 1000.0)
    assert not silence.hangs(False, 1000.0 + PATIENCE_SECONDS - 1)
    assert not silence.hangs(True, 1000.0 + PATIENCE_SECONDS - 1)
    assert not silence.hangs(False, 1000.0 + PATIENCE_SECONDS)
    assert silence.hangs(False, 1000.0 + 2 * PATIENCE_SECONDS)


def test_a_server_that_hangs_is_ended_once() -> None:
    ended, times = threading.Event(), iter(range(100))
    replies = iter([True])
    watch = HangWatch(
        ended.set,
        lambda: next(replies, False),
        LastAnswer(patience=3.0),
        look_seconds=0.001,
        clock=lambda: float(next(times)),
    )
    with watch:
        assert ended.wait(DEADLINE)
    assert watch.hung
    assert next(times) == 4, "looks at moments 0 to 3"


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/v2/health/live" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    served = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.shutdown()
    thread.join(DEADLINE)
    served.server_close()


def test_a_server_is_asked_whether_it_lives(server: http.server.HTTPServer) -> None:
    address = f"127.0.0.1:{server.server_port}"
    assert server_lives(address)
    assert not server_lives("127.0.0.1:1")
