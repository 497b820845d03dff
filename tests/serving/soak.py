"""A long run against the real Triton: requests over gRPC, streams and HTTP while models reload, requests are
cancelled, a machine is lost and the processes of a model are killed.

    python -m tests.serving.soak --requests 100000 --json -

Counts what came of every request: none may be without an answer, none may have two, answers of a stream come in order,
and every answer has the numbers of its own rows, so that padding is never seen. Memory is that of the server and its
instances. A client of its own process: this one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tritonclient.grpc as grpcclient

from podrun.serving.compiler import Compiler
from tests.serving.test_runner import OPTIONS, expected, model, rows_of
from tests.serving.test_triton import free_ports

CONFIG = """backend: "poplar"
max_batch_size: 4
input [ { name: "x", data_type: TYPE_FP32, dims: [ 8 ] } ]
output [ { name: "y", data_type: TYPE_FP32, dims: [ 3 ] } ]
instance_group [ { kind: KIND_CPU, count: %d } ]
dynamic_batching { max_queue_delay_microseconds: 200 preserve_ordering: true }
"""
MODELS = {"steady": 2, "reloaded": 1, "killed": 1}
"""Models and their instances: one is left alone, one is reloaded all the time, one has its processes killed."""
IN_FLIGHT = 32
CONNECTIONS = 8
"""Connections of HTTP, each with one request in flight."""
PAUSE_SECONDS = 5.0
ANSWER_SECONDS = 120.0
PATTERNS = [(rows_of(1 + seed % 4, seed), seed) for seed in range(64)]
EXPECTED = [expected(x) for x, _ in PATTERNS]


@dataclass
class Tally:
    """What came of the requests. ``answers``: of each request's number, how often it was answered."""

    kinds: Counter[str] = field(default_factory=Counter)
    answers: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    protocols: Counter[str] = field(default_factory=Counter)
    asked: int = 0
    out_of_order: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def number(self, protocol: str) -> int:
        """The number of a new request."""
        with self.lock:
            self.asked += 1
            self.protocols[protocol] += 1
            return self.asked

    def answered(self, number: int, result: Any, error: Any, cancelled: bool = False) -> None:
        """Note an answer."""
        if error is not None:
            kind = "cancelled" if cancelled else "error"
        else:
            kind = kind_of(result.as_numpy("y"), EXPECTED[number % 64])
        with self.lock:
            self.answers[number] += 1
            self.kinds[kind] += 1
            if kind == "error":
                self.errors[str(error)[:90]] += 1


def kind_of(y: np.ndarray | None, wanted: np.ndarray) -> str:
    """What an answer is: ``padded`` with more rows than the request has, ``wrong`` in any other way, or ``right``."""
    if y is None or y.ndim != wanted.ndim:
        return "wrong"
    if len(y) > len(wanted):
        return "padded"
    same = y.shape == wanted.shape and np.allclose(y, wanted, rtol=1e-5, atol=1e-6)
    return "right" if same else "wrong"


def request(number: int) -> list[Any]:
    """The inputs of a request: its number says which."""
    x, _ = PATTERNS[number % 64]
    tensor = grpcclient.InferInput("x", list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def ask_model(address: str, name: str, requests: int, tally: Tally, seed: int) -> None:
    """Requests to one model, `IN_FLIGHT` at a time; one in fifty is cancelled at once."""
    client, chance = grpcclient.InferenceServerClient(address), random.Random(seed)
    room = threading.Semaphore(IN_FLIGHT)
    for _ in range(requests):
        if not room.acquire(timeout=ANSWER_SECONDS):
            return  # What is without an answer is counted at the end.
        number, cancelled = tally.number("grpc"), chance.random() < 0.02

        def done(result: Any, error: Any, number: int = number, cancelled: bool = cancelled) -> None:
            tally.answered(number, result, error, cancelled)
            room.release()

        call = client.async_infer(name, request(number), done, request_id=str(number), client_timeout=60)
        if cancelled:
            call.cancel()
    for _ in range(IN_FLIGHT):
        if not room.acquire(timeout=ANSWER_SECONDS):
            return
    client.close()


def ask_stream(address: str, requests: int, tally: Tally) -> None:
    """Requests over one stream to the steady model; answers are to come in the order of the requests."""
    client, answers = grpcclient.InferenceServerClient(address), queue.Queue[tuple[Any, Any]]()
    client.start_stream(lambda result, error: answers.put((result, error)))
    waiting: list[int] = []

    def take() -> None:
        result, error = answers.get(timeout=ANSWER_SECONDS)
        first = waiting.pop(0)
        said = first if result is None else int(result.get_response().id)
        if said != first:
            tally.out_of_order += 1
        tally.answered(said, result, error)

    for _ in range(requests):
        number = tally.number("stream")
        waiting.append(number)
        client.async_stream_infer("steady", request(number), request_id=str(number))
        if len(waiting) >= IN_FLIGHT:
            take()
    while waiting:
        take()
    client.stop_stream()
    client.close()


class HttpAnswer:
    """The outputs of an answer over HTTP: the head is JSON, the arrays lie behind it in its order."""

    def __init__(self, body: bytes, head: int) -> None:
        self._arrays: dict[str, np.ndarray] = {}
        for output in json.loads(body[:head])["outputs"]:
            end = head + int(output["parameters"]["binary_data_size"])
            self._arrays[output["name"]] = np.frombuffer(body[head:end], "<f4").reshape(output["shape"])
            head = end

    def as_numpy(self, name: str) -> np.ndarray | None:
        """An output; None if there is none of that name."""
        return self._arrays.get(name)


def http_answer(connection: http.client.HTTPConnection, name: str, number: int) -> HttpAnswer:
    """The answer to a request over HTTP with binary arrays. Raises for any error."""
    x, _ = PATTERNS[number % 64]
    entry = {"name": "x", "shape": list(x.shape), "datatype": "FP32"}
    entry["parameters"] = {"binary_data_size": x.nbytes}
    outputs = [{"name": "y", "parameters": {"binary_data": True}}]
    head = json.dumps({"id": str(number), "inputs": [entry], "outputs": outputs}).encode()
    size = {"Inference-Header-Content-Length": str(len(head))}
    connection.request("POST", f"/v2/models/{name}/infer", head + x.tobytes(), size)
    answer = connection.getresponse()
    body = answer.read()
    if answer.status != 200:
        raise RuntimeError(f"HTTP {answer.status}: {body[:80].decode(errors='replace')}")
    return HttpAnswer(body, int(answer.headers["Inference-Header-Content-Length"]))


def ask_http(address: str, requests: int, tally: Tally) -> None:
    """Requests over one HTTP connection, one after the other, to the steady and the reloaded model in turns."""
    connection = http.client.HTTPConnection(address, timeout=ANSWER_SECONDS)
    for turn in range(requests):
        number = tally.number("http")
        try:
            result = http_answer(connection, ("steady", "reloaded")[turn % 2], number)
        except Exception as error:
            connection.close()  # The next request opens it again.
            tally.answered(number, None, error)
        else:
            tally.answered(number, result, None)
    connection.close()


def stubs(server: int, name: str) -> list[psutil.Process]:
    """The processes of a model's instances."""
    family = psutil.Process(server).children(recursive=True)
    return [
        p for p in family if "stub" in p.name() and any(f"/{name}/" in w or w == name for w in p.cmdline())
    ]


def disturb(server: int, address: str, models: Path, ended: threading.Event, told: Counter[str]) -> None:
    """Change and load one model again while it serves, and kill the processes of another, which `podrun serve` loads
    again, until told to end.
    """
    client, turn = grpcclient.InferenceServerClient(address), 0
    while turn == 0 or not ended.wait(PAUSE_SECONDS):
        turn += 1
        try:
            os.utime(models / "reloaded" / "1")  # Triton makes instances anew where a version has changed.
            client.load_model("reloaded", client_timeout=120)
            told["reloads"] += 1
            if turn % 3 == 2:
                for process in stubs(server, "killed"):
                    process.kill()
                    told["killed"] += 1
        except Exception as error:
            told[f"disturbance failed: {type(error).__name__}: {str(error)[:80]}"] += 1
    client.close()


def memory(server: int) -> float:
    """Megabytes of the server and what it started, shared memory counted once."""
    total = 0.0
    for process in [psutil.Process(server), *psutil.Process(server).children(recursive=True)]:
        try:
            total += process.memory_full_info().uss / 1e6
        except psutil.Error:
            continue
    return total


@contextmanager
def served(folder: Path) -> Iterator[tuple[int, str, str]]:
    """A server of the models: its process id, its addresses of gRPC and of HTTP. A fault loses the machine of each
    first instance.
    """
    compiled = folder / "executable.popef"
    Compiler.compile_and_export(model(), None, compiled, OPTIONS)
    for name, instances in MODELS.items():
        version = folder / "models" / name / "1"
        version.mkdir(parents=True)
        (version / "executable.popef").write_bytes(compiled.read_bytes())
        (version.parent / "config.pbtxt").write_text(CONFIG % instances)
    grpc, web, metrics = free_ports(3)
    words = [sys.executable, "-m", "podrun", "serve", str(folder / "models"), "--grpc-port", str(grpc)]
    words += ["--http-port", str(web), "--metrics-port", str(metrics)]
    words += [
        "--fault",
        "ipu:0@batch=500:tile-parity:optional",
        "--fault",
        "machine:0@batch=900:lost:optional",
    ]
    words += ["--incidents", str(folder / "incidents.jsonl")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}")
        end = time.monotonic() + 300
        while not _ready(client):
            if time.monotonic() > end or process.poll() is not None:
                raise SystemExit((folder / "log").read_text()[-3000:])
            time.sleep(0.2)
        client.close()
        yield process.pid, f"127.0.0.1:{grpc}", f"127.0.0.1:{web}"
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def _ready(client: Any) -> bool:
    try:
        return all(client.is_model_ready(name) for name in MODELS)
    except Exception:  # It does not listen as yet.
        return False


def shares(
    requests: int, address: str, web: str, tally: Tally
) -> Iterator[tuple[Callable[..., None], tuple[Any, ...]]]:
    """Who asks: a sixth of the requests for each model over gRPC, twice for the steady one, a sixth over HTTP
    connections, the rest over a stream.
    """
    share = requests // 6
    for seed, name in enumerate([*MODELS, "steady"]):
        yield ask_model, (address, name, share, tally, seed)
    for connection in range(CONNECTIONS):
        yield (
            ask_http,
            (web, share * (connection + 1) // CONNECTIONS - share * connection // CONNECTIONS, tally),
        )
    yield ask_stream, (address, requests - 5 * share, tally)


def run(requests: int) -> dict[str, Any]:
    """All of it; what came of the requests."""
    tally, told, ended = Tally(), Counter[str](), threading.Event()
    with (
        tempfile.TemporaryDirectory(prefix="podrun-soak-") as place,
        served(Path(place)) as (server, address, web),
    ):
        works = [
            threading.Thread(target=target, args=arguments, daemon=True)
            for target, arguments in shares(requests, address, web, tally)
        ]
        disturbing = threading.Thread(
            target=disturb, args=(server, address, Path(place, "models"), ended, told), daemon=True
        )
        begin = time.monotonic()
        for work in (*works, disturbing):
            work.start()
        samples = []
        while any(work.is_alive() for work in works):
            samples.append((tally.asked, memory(server)))
            time.sleep(1.0)
        seconds = time.monotonic() - begin
        ended.set()
        disturbing.join(300)
        file = Path(place, "incidents.jsonl")
        incidents = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
        log = Path(place, "log").read_text(errors="replace")
    steady = [mb for asked, mb in samples if asked > requests / 4] or [0.0]
    third = max(1, len(steady) // 3)
    return {
        "requests": tally.asked,
        "seconds": round(seconds, 1),
        "protocols": dict(tally.protocols),
        "kinds": dict(tally.kinds),
        "unanswered": sum(1 for number in range(1, tally.asked + 1) if not tally.answers[number]),
        "answered_twice": sum(1 for count in tally.answers.values() if count > 1),
        "out_of_order": tally.out_of_order,
        "errors": dict(tally.errors.most_common(12)),
        "disturbances": dict(told),
        "crashes": log.count("Fatal Python error") + log.count("and is started again"),
        "incidents": len(incidents),
        "requests_named_by_incidents": sum(len(entry["cost"]["requests"]) for entry in incidents),
        "memory_mb": {
            "median_early": round(float(np.median(steady[:third])), 1),
            "median_late": round(float(np.median(steady[-third:])), 1),
            "most": round(max(steady), 1),
        },
    }


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", default="-")
    options = parser.parse_args()
    text = json.dumps(run(options.requests), indent=1)
    if options.json == "-":
        print(text)
    else:
        Path(options.json).write_text(text)


if __name__ == "__main__":
    main()
