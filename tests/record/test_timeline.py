"""A record on the clock of the wall: times beside it, spans, and what a collector gets."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from podrun.core.errors import ConfigError, NotFoundError, ServiceError, UsageError
from podrun.launcher.commands.trace import trace_verb
from podrun.record.events import LAUNCH, Event, LaunchHeader, Record, TimedEvent, to_lines
from podrun.record.otlp import send_trace, traces_address
from podrun.record.timeline import spans_of, timed_events, times_text

HEADER = LaunchHeader(("--num-replicas=4", "--", "train.py"), "/", ())


def launch() -> list[TimedEvent]:
    """Two runs, a checkpoint, an error, a restart, and a run that goes well."""

    def at(seconds: float, actor: str, life: int, clock: int, kind: str, **data: Any) -> TimedEvent:
        return TimedEvent(Event(actor, life, clock, kind, data), 1000.0 + seconds)

    one = "instance 0"
    return [
        at(0.0, LAUNCH, 0, 0, "start", replicas=4, instances=1, ipus=4),
        at(1.0, one, 0, 0, "load", program="abc"),
        at(2.0, one, 0, 1, "run", batch=0, batches=5),
        at(2.5, one, 0, 2, "ran", batch=0, batches=5),
        at(2.6, one, 0, 2, "run", batch=5, batches=5),
        at(3.0, one, 0, 3, "ran", batch=5, batches=5),
        at(3.1, one, 0, 3, "saving", batch=10),
        at(3.3, one, 0, 3, "run", batch=10, batches=5),
        at(4.0, one, 0, 4, "error", type="X", message="link down"),
        at(4.5, LAUNCH, 0, 5, "restart", text="reset the partition"),
        at(6.0, one, 1, 0, "resumed", batch=10),
        at(6.5, one, 1, 1, "run", batch=10, batches=5),
        at(7.0, one, 1, 2, "ran", batch=10, batches=5),
        at(8.0, LAUNCH, 1, 3, "end", code=0),
    ]


def test_spans_have_their_times_parents_and_errors() -> None:
    spans = spans_of(launch())
    whole, first = spans[0], spans[1]
    assert (whole.start_s, whole.end_s, whole.parent) == (1000.0, 1008.0, None)
    assert (first.name, first.failed, first.end_s) == ("instance 0", "link down", 1004.0)
    by_name = {(span.name, span.start_s): span for span in spans}
    batches = by_name["batches 0 to 9", 1002.0]
    assert (batches.end_s, batches.parent, batches.attributes) == (1003.0, 1, {"first": 0, "batches": 10})
    assert by_name["batches from 10", 1003.3].failed == "link down"
    assert by_name["checkpoint", 1003.1].end_s == 1003.3
    assert by_name["recovery", 1004.0].end_s == 1004.5
    incident = by_name["incident", 1004.0]
    assert (incident.end_s, incident.failed) == (1007.0, "")
    for span in spans[1:]:
        assert span.parent is not None
        parent = spans[span.parent]
        assert parent.start_s <= span.start_s <= span.end_s <= parent.end_s


def test_an_incident_that_nothing_ends_fails() -> None:
    events = [timed for timed in launch() if timed.event.life == 0 and timed.event.kind != "restart"]
    events.append(TimedEvent(Event(LAUNCH, 0, 9, "end", {"code": 1}), 1009.0))
    assert [span.failed for span in spans_of(events) if span.name == "incident"] == ["link down"]
    assert spans_of([]) == []


@pytest.fixture
def record(tmp_path: Path) -> Path:
    events = launch()
    file = tmp_path / "run.record"
    file.write_text("\n".join(to_lines(Record(HEADER, tuple(t.event for t in events)))) + "\n")
    (tmp_path / "run.record.times.json").write_text(times_text(events))
    return file


def test_times_beside_a_record_are_read_again(record: Path) -> None:
    from podrun.record.events import read_record

    times = record.with_name("run.record.times.json")
    assert timed_events(read_record(record), times) == launch()
    shorter = replace(read_record(record), events=read_record(record).events[:-1])
    with pytest.raises(ConfigError, match="not of this record"):
        timed_events(shorter, times)
    for text in ("{", "[]", '{"podrun_times": 9, "seconds": []}', '{"podrun_times": 1, "seconds": [NaN]}'):
        times.write_text(text)
        with pytest.raises(ConfigError):
            timed_events(read_record(record), times)
    times.unlink()
    with pytest.raises(NotFoundError):
        timed_events(read_record(record), times)


def test_the_verb_prints_spans(record: Path) -> None:
    rows = [
        json.loads(line)
        for line in CliRunner().invoke(trace_verb, [str(record), "--format", "jsonl"]).stdout.splitlines()
    ]
    assert rows[0]["name"] == "launch"
    text = CliRunner().invoke(trace_verb, [str(record)]).stdout
    assert "    4.000 s     0.500 s    recovery" in text
    assert "FAILED: link down" in text


class Collector:
    """A collector of OpenTelemetry that keeps what it gets."""

    def __init__(self) -> None:
        self.status, self.bodies, self.port = 200, list[bytes](), 0


@pytest.fixture
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/traces":
                kept.bodies.append(body)
            self.send_response(kept.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield kept
        server.shutdown()
        thread.join()


def test_a_collector_gets_the_trace(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otlp")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = spans_of(launch())
    where = f"http://127.0.0.1:{collector.port}"
    ids = [send_trace(spans, where, "seed") for _ in range(2)]
    assert ids[0] == ids[1] != send_trace(spans, where, "another")
    (scope,) = ExportTraceServiceRequest.FromString(collector.bodies[0]).resource_spans[0].scope_spans
    sent = {(one.name, one.start_time_unix_nano): one for one in scope.spans}
    assert len(scope.spans) == len(spans)
    whole = next(one for one in scope.spans if one.name == "launch")
    assert whole.trace_id.hex() == ids[0]
    assert not whole.parent_span_id
    first = next(one for one in scope.spans if one.name == "instance 0")
    assert first.parent_span_id == whole.span_id
    assert (first.status.code, first.status.message) == (2, "link down")
    batches = sent["batches 0 to 9", 1_002_000_000_000]
    assert batches.end_time_unix_nano == 1_003_000_000_000
    assert {a.key: a.value.int_value for a in batches.attributes} == {"podrun.first": 0, "podrun.batches": 10}


def test_a_collector_that_refuses_is_named(collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otlp")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    collector.status = 400
    with pytest.raises(ServiceError, match=f"127.0.0.1:{collector.port}/v1/traces did not take"):
        send_trace(spans_of(launch()), f"http://127.0.0.1:{collector.port}/", "seed")


@pytest.mark.parametrize(
    ("endpoint", "address"),
    [("http://h:4318", "http://h:4318/v1/traces"), ("https://h/x/y", "https://h/x/y")],
)
def test_addresses_of_collectors(endpoint: str, address: str) -> None:
    assert traces_address(endpoint) == address
    with pytest.raises(UsageError):
        traces_address("collector:4317")
