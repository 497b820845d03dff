"""``podrun load`` against a small server of the v2 protocol in this process, whose behaviour is known."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from click.testing import CliRunner, Result

from podrun.core.documents import load_schema
from podrun.core.errors import PodrunError
from podrun.serving.commands.load import load_range, load_verb
from podrun.serving.load.windows import LoadWindow, ServerAnswer, are_refused, are_stable, joined

pytest.importorskip("hdrh")
pytest.importorskip("aiohttp")


class _Handler(BaseHTTPRequestHandler):
    """A model ``double`` that batches, an ``open`` one, and one that is broken."""

    protocol_version = "HTTP/1.1"
    pause_s = 0.0

    def log_message(self, *words: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        name = self.path.split("/")[3] if self.path.startswith("/v2/models/") else ""
        shape = [-1, -1] if name == "open" else [-1, 4]
        if self.path == "/v2/health/live":
            self._answer(200, b"")
        elif name not in ("double", "open", "broken", "text"):
            self._answer(404, json.dumps({"error": f"unknown model '{name}'"}).encode())
        elif self.path.endswith("/config"):
            self._answer(200, b'{"max_batch_size": 8}')
        else:
            kind = "BYTES" if name == "text" else "FP32"
            inputs = [{"name": "x", "datatype": kind, "shape": shape}]
            outputs = [{"name": "y", "datatype": "FP32", "shape": shape}]
            outputs.append({"name": "ipu_time_us", "datatype": "FP32", "shape": [-1, 3]})
            self._answer(200, json.dumps({"name": name, "inputs": inputs, "outputs": outputs}).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        size = int(self.headers["Inference-Header-Content-Length"])
        head = json.loads(body[:size])
        x = np.frombuffer(body[size:], "<f4").reshape(head["inputs"][0]["shape"])
        if "broken" in self.path:
            self._answer(400, b'{"error": "the IPU is away; ask again"}')
            return
        time.sleep(self.pause_s)  # What the server computes for so long.
        parts = [(x * 2).tobytes(), np.tile(np.array([80, 20, 5], "<f4"), (len(x), 1)).tobytes()]
        outputs = [
            {"name": name, "parameters": {"binary_data_size": len(part)}}
            for name, part in zip(("y", "ipu_time_us"), parts, strict=True)
        ]
        text = json.dumps({"outputs": outputs}).encode()
        self._answer(200, b"".join([text, *parts]), Inference_Header_Content_Length=str(len(text)))


@contextmanager
def serving(pause_s: float = 0.0) -> Iterator[str]:
    handler = type("Handler", (_Handler,), {"pause_s": pause_s})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)


SHORT = (
    "--warm-up",
    "20",
    "--max-trials",
    "3",
    "--stability-percentage",
    "100",
)


def asked(*words: str, interval_ms: int = 60) -> Result:
    every = ("--measurement-interval", str(interval_ms))
    return CliRunner().invoke(load_verb, [*words, *SHORT, *every], standalone_mode=False)


def measured(figures: Path, *words: str, least: int = 1) -> Any:
    """The figures of a measurement in which each level had so many answers: on a busy host, of longer windows."""
    for interval_ms in (60, 600, 6000):
        result = asked(*words, "--json", str(figures), interval_ms=interval_ms)
        document = json.loads(figures.read_text())
        if all(level["answered"] >= least for level in document["levels"]):
            break
    assert result.return_value == 0, result.exception
    return document


def test_levels_are_measured_with_the_modelled_time_beside(tmp_path: Path) -> None:
    figures = tmp_path / "load.json"
    with serving() as url:
        document = measured(figures, url, "-m", "double", "-b", "2", "--concurrency-range", "1:3:2")
    jsonschema.validate(document, load_schema("podrun.serving.load", "load.schema.json"))
    assert [level["concurrency"] for level in document["levels"]] == [1, 3]
    for level in document["levels"]:
        assert level["answered"] > 0
        assert level["errors"] == {}
        assert level["modelled_s"] == pytest.approx({"compute": 80e-6, "transfer": 20e-6, "queue": 5e-6})
        assert level["inferences_per_s"] == pytest.approx(2 * level["answered_per_s"])


def test_a_rate_is_kept_whatever_the_answers_take(tmp_path: Path) -> None:
    figures = tmp_path / "load.json"
    with serving(0.05) as url:
        (level,) = measured(figures, url, "-m", "double", "--request-rate-range", "100", least=3)["levels"]
    assert level["latency_s"]["p50"] >= 0.05
    assert level["answered"] >= 3  # One client that waits for answers would have had one or two a window.


def test_figures_that_cannot_be_written_are_refused_before_any_request(tmp_path: Path) -> None:
    """Nothing listens at the address, which would be told if it were asked."""
    for place in (tmp_path, tmp_path / "none" / "load.json"):
        result = asked("localhost:1", "-m", "net", "--json", str(place))
        assert f"{place} cannot be written" in str(result.exception)


def test_errors_are_counted_by_kind_and_none_answered_is_exit_code_1() -> None:
    with serving() as url:
        result = asked(url, "-m", "broken")
    assert result.return_value == 1
    assert "errors: HTTP 400: the IPU is away" in result.output


def test_arrays_of_a_file_are_sent(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.ones((3, 4), np.float32))
    with serving() as url:
        assert asked(url, "-m", "double", "--input-data", str(tmp_path / "data.npz")).return_value == 0
        np.savez(tmp_path / "wide.npz", x=np.ones((3, 5), np.float32))
        result = asked(url, "-m", "double", "--input-data", str(tmp_path / "wide.npz"))
    assert "takes float32 [1, 4]" in str(result.exception)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-m", "nothing"), "does not serve nothing: unknown model"),
        (("-m", "open"), "leaves a dimension open"),
        (("-m", "double", "-b", "9"), "takes 8 rows at most"),
        (("-m", "double", "--shape", "z:3"), "has no input 'z'"),
        (("-m", "double", "--shape", "z"), "no shape"),
        (("-m", "text"), "is BYTES, which has no arrays"),
        (("-m", "double", "--concurrency-range", "4:1"), "no range"),
        (("-m", "double", "--concurrency-range", "1", "--request-rate-range", "1"), "exclude each other"),
        (("-m", "double", "--input-data", "nowhere.npz"), "no file of arrays"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(words: tuple[str, ...], said: str) -> None:
    with serving() as url:
        result = asked(url, *words)
    assert isinstance(result.exception, PodrunError), result.exception
    assert said in str(result.exception)
    assert result.exception.hint


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:1", "no server answers at 127.0.0.1:1"),
        ("127.0.0.1:1", "no server answers"),
        ("x", "no address"),
    ],
)
def test_a_server_that_is_not_there_is_said(url: str, said: str) -> None:
    pytest.importorskip("tritonclient.grpc")
    result = asked(url, "-m", "double", "--timeout", "10")
    assert isinstance(result.exception, PodrunError)
    assert said in str(result.exception)


def window(rate: int, latency_ns: int) -> LoadWindow:
    counted = LoadWindow(span_s=1.0)
    for _ in range(rate):
        counted.count(latency_ns, ServerAnswer())
    return counted


def test_windows_are_stable_when_three_agree_in_rate_and_latency() -> None:
    even = [window(100, 1_000_000)] * 3
    assert are_stable(even, 0.1, 99)
    assert not are_stable(even[:2], 0.1, 99)
    assert not are_stable([*even, window(150, 1_000_000)], 0.1, 99)
    assert not are_stable([*even, window(100, 2_000_000)], 0.1, 99)
    whole = joined(even)
    assert (whole.answered, whole.span_s, whole.rate) == (300, 3.0, 100.0)
    assert whole.latency_s(99) == pytest.approx(1e-3, rel=1e-3)


def test_three_windows_with_errors_alone_say_enough() -> None:
    refused = LoadWindow(errors=Counter({"HTTP 500": 2}))
    assert are_refused([window(3, 1_000_000), *[refused] * 3])
    assert not are_refused([refused] * 2)
    assert not are_refused([refused, LoadWindow(), refused])
    assert not are_refused([window(3, 1_000_000), refused, refused])


def test_ranges_hold_their_ends() -> None:
    assert load_range("1:16:5", "--x") == [1, 6, 11, 16]
    assert load_range("0.5", "--x") == [0.5]
