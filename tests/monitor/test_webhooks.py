"""Webhooks for incidents: bounded, retried, never in the way; and node health for Slurm."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from podrun.core.errors import NotFoundError, UsageError
from podrun.monitor.commands.health import health_verb
from podrun.monitor.node_health import REASON_PREFIX, slurm_commands, unreachable_verdict, verdict_of
from podrun.monitor.pod_health import HealthProblem, Severity
from podrun.monitor.webhooks import ATTEMPTS, QUEUE, WebhookSender, check_webhook, post_json, problem_events
from tests.partition.conftest import Pod

LOST = HealthProblem(
    Severity.BROKEN,
    "machine lost",
    "p",
    "ipum2",
    (),
    5.0,
    (),
    "vipu-admin restart agent ipum2, then vipu reset partition p",
)
PARITY = HealthProblem(
    Severity.BROKEN, "tile parity error", "p", "ipum1", (3,), 5.0, ("1 a (b)",), "IPU_RESET: gc-reset -d 3"
)
SLOW = HealthProblem(
    Severity.ATTENTION, "clock 665 MHz", "p", "ipum1", (3,), None, (), "vipu-admin drain agent ipum1"
)


def test_events_say_what_begins_and_ends() -> None:
    events = list(problem_events([LOST], [PARITY], "h:1", 9.0))
    assert [(one["event"], one["problem"]["what"]) for one in events] == [
        ("begins", "tile parity error"),
        ("ends", "machine lost"),
    ]
    assert events[0]["text"] == "broken: p ipum1: tile parity error. IPU_RESET: gc-reset -d 3"
    assert list(problem_events([LOST], [replace(LOST, since_s=6.0)], "h:1", 9.0)) == []
    json.dumps(events)


class Receiver:
    """A receiver of events that answers as it is told."""

    def __init__(self, *answers: int | Exception) -> None:
        self.answers = list(answers)
        self.got: list[Mapping[str, Any]] = []
        self.said: list[str] = []
        self.pauses: list[float] = []

    def post(self, url: str, event: Mapping[str, Any]) -> int:
        self.got.append(event)
        answer = self.answers.pop(0) if self.answers else 200
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pause(self, seconds: float) -> bool:
        self.pauses.append(seconds)
        return False

    def sender(self) -> WebhookSender:
        return WebhookSender("http://h/x", self.said.append, self.post, self.pause)


@pytest.mark.parametrize(
    ("answers", "posts", "given_up"),
    [
        ((200,), 1, 0),
        ((503, ConnectionRefusedError(), 429, 204), 4, 0),
        ((404,), 1, 1),
        ((TimeoutError("timed out"),) * ATTEMPTS, ATTEMPTS, 1),
    ],
)
def test_events_are_sent_again_but_not_for_ever(
    answers: tuple[int | Exception, ...], posts: int, given_up: int
) -> None:
    receiver = Receiver(*answers)
    sender = receiver.sender()
    sender.send({"n": 1})
    sender.close()
    assert len(receiver.got) == posts
    assert sender.given_up == given_up
    assert len(receiver.said) == given_up
    assert receiver.pauses == sorted(receiver.pauses)


def test_a_receiver_that_never_answers_holds_nobody_up() -> None:
    waits = threading.Event()
    taken = threading.Event()

    def post(url: str, event: Mapping[str, Any]) -> int:
        taken.set()
        waits.wait(60)
        return 200

    sender = WebhookSender("http://h/x", lambda line: None, post)
    sender.send({"n": 0})
    assert taken.wait(60)
    for number in range(QUEUE + 10):
        sender.send({"n": number})
    assert sender.dropped == 10
    sender.close(seconds=0.01)
    waits.set()


@pytest.mark.parametrize("url", ["ftp://h/x", "file:///etc/passwd", "nonsense", "http://"])
def test_addresses_that_are_none_of_http_are_refused(url: str) -> None:
    with pytest.raises(UsageError, match="webhook"):
        check_webhook(url)


@pytest.fixture
def server() -> Iterator[tuple[str, list[Any]]]:
    got: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(500 if self.path == "/bad" else 204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", got
        http.shutdown()
        thread.join()


def test_a_real_receiver_gets_json(server: tuple[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    where, got = server
    assert post_json(f"{where}/good", {"a": 1}) == 204
    assert post_json(f"{where}/bad", {"a": 2}) == 500
    assert got == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("problems", "drain"),
    [([], False), ([SLOW], False), ([PARITY], False), ([LOST], True), ([SLOW, PARITY, LOST], True)],
)
def test_a_node_is_drained_for_what_needs_a_hand(problems: list[HealthProblem], drain: bool) -> None:
    verdict = verdict_of(problems)
    assert verdict.drain is drain
    assert verdict.reason == (f"{REASON_PREFIX} p ipum2: machine lost" if drain else "")
    assert not verdict_of(problems, ["another"]).drain


def test_a_reason_is_one_printable_line() -> None:
    verdict = verdict_of([replace(LOST, what='x"\n; rm -rf `y` $(z)' + "é" * 500)])
    assert verdict.reason.isprintable()
    assert not set("\"'`$;\n") & set(verdict.reason)
    assert len(verdict.reason) <= 200


@pytest.mark.parametrize(
    ("drain", "state", "reason", "expected"),
    [
        (True, "IDLE", "", "DRAIN"),
        (True, "IDLE+DRAIN", "podrun: p", ""),
        (True, "MIXED+DRAIN", "disk of the node", ""),
        (False, "IDLE+DRAIN", "podrun: p", "RESUME"),
        (False, "IDLE+DRAIN", "disk of the node", ""),
        (False, "IDLE", "", ""),
    ],
)
def test_podrun_resumes_what_it_drained_and_nothing_else(
    drain: bool, state: str, reason: str, expected: str
) -> None:
    verdict = unreachable_verdict("it is away") if drain else verdict_of([])
    commands = slurm_commands(verdict, "n1", state, reason)
    assert [word for words in commands for word in words if word.startswith("State=")] == (
        [f"State={expected}"] if expected else []
    )


def test_the_verb_prints_what_slurm_would_be_told(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod.active("p", 8)
    words = ["--slurm-node", "n1", "--dry-run"]
    done = CliRunner().invoke(health_verb, words, standalone_mode=False)
    assert (done.return_value, done.stdout) == (0, "n1: well\n")
    pod.pool.machine("ipum2", "p").die()
    done = CliRunner().invoke(health_verb, words, standalone_mode=False)
    assert done.return_value == 1
    assert "scontrol update NodeName=n1 State=DRAIN 'Reason=podrun: p ipum2: machine lost'" in done.stdout
    monkeypatch.setenv("PATH", str(tmp_path))
    done = CliRunner().invoke(health_verb, words[:2])
    assert isinstance(done.exception, NotFoundError)
    calls = tmp_path / "calls"
    (tmp_path / "scontrol").write_text(
        f'#!/bin/sh\necho "$*" >> {calls}\necho "NodeName=n1 State=IDLE+DRAIN Reason=podrun: x y"\n'
    )
    (tmp_path / "scontrol").chmod(0o755)
    pod.client.restart_agent("ipum2")
    pod.client.reset_partition("p")
    assert pod.service.wait_idle(60)
    done = CliRunner().invoke(health_verb, words[:2], standalone_mode=False)
    assert done.return_value == 0
    assert calls.read_text().splitlines()[-1] == "update NodeName=n1 State=RESUME"


def test_a_webhook_needs_a_watch() -> None:
    done = CliRunner().invoke(health_verb, ["--webhook", "http://h/x"])
    assert isinstance(done.exception, UsageError)
