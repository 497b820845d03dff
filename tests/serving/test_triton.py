"""The genuine Triton Inference Server with the backend ``poplar``, asked by its own client in this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from podrun.core.errors import ConfigError, MissingPackageError, PodrunError, UsageError
from podrun.serving import triton_server
from podrun.serving.compiler import Compiler
from podrun.serving.instance import TensorBinding, as_anchor, bindings
from podrun.serving.loaded_model import DataDescription
from podrun.serving.model_folder import anchor_names, compiled_file
from podrun.serving.repository import check_repository
from tests.serving.test_runner import OPTIONS, expected, model, rows_of

START_SECONDS = 60.0


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    client: Any
    http: str
    metrics: str
    repository: Path
    log: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    grpcclient = pytest.importorskip("tritonclient.grpc")
    try:
        triton_server.find_tritonserver("", os.environ)
    except PodrunError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("triton")
    repository = folder / "models"
    (repository / "net" / "1").mkdir(parents=True)
    Compiler.compile_and_export(model(), None, repository / "net" / "1", OPTIONS)
    (repository / "wrong" / "1").mkdir(parents=True)
    (repository / "wrong" / "1" / "executable.popef").write_bytes(b"nothing")
    (repository / "wrong" / "config.pbtxt").write_text('backend: "poplar"\n')
    grpc, http, metrics = free_ports(3)
    words = [sys.executable, "-m", "podrun", "serve", str(repository), "--grpc-port", str(grpc)]
    words += ["--http-port", str(http), "--metrics-port", str(metrics)]
    log = folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        client = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}")
        wait_for(lambda: client.is_model_ready("net"), process, log)
        yield Served(client, f"http://127.0.0.1:{http}", f"http://127.0.0.1:{metrics}", repository, log)
        client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob(f"podrun-serve-*/{folder.name}"))


def wait_for(ready: Any, process: subprocess.Popen[bytes], log: Path, seconds: float = START_SECONDS) -> None:
    end = time.monotonic() + seconds
    while (
        time.monotonic() < end and process.poll() is None and b"failed to load 'net'" not in log.read_bytes()
    ):
        try:
            if ready():
                return
        except Exception:  # The server does not listen as yet.
            pass
        time.sleep(0.05)
    raise AssertionError(log.read_text()[-4000:])


def ask(served: Served, x: np.ndarray, name: str = "x", kind: str = "FP32", **options: Any) -> Any:
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, list(x.shape), kind)
    tensor.set_data_from_numpy(x)
    return served.client.infer("net", [tensor], client_timeout=60, **options)


@pytest.mark.system
def test_the_real_server_answers(served: Served) -> None:
    assert (served.repository / "net" / "config.pbtxt").is_file()
    for count in (1, 3, 4):
        x = rows_of(count, count)
        result = ask(served, x)
        np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)
    times = result.as_numpy("ipu_time_us")
    assert times.shape == (4, 3)
    assert (times[:, 0] > 0).all()
    metadata = served.client.get_model_metadata("net")
    assert [(i.name, i.datatype, list(i.shape)) for i in metadata.inputs] == [("x", "FP32", [-1, 8])]


@pytest.mark.system
def test_http_gives_the_same(served: Served) -> None:
    x = rows_of(2)
    body = {"inputs": [{"name": "x", "shape": [2, 8], "datatype": "FP32", "data": x.reshape(-1).tolist()}]}
    request = urllib.request.Request(f"{served.http}/v2/models/net/infer", json.dumps(body).encode())  # noqa: S310
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
        outputs = {output["name"]: output["data"] for output in json.loads(answer.read())["outputs"]}
    np.testing.assert_allclose(np.reshape(outputs["y"], (2, 3)), expected(x), rtol=1e-5, atol=1e-6)
    assert modelled_seconds(served) > 0


@pytest.mark.slow
@pytest.mark.system
def test_counters_go_on_when_a_model_is_loaded_again(served: Served) -> None:
    seconds = [modelled_seconds(served)]
    for _ in range(3):
        os.utime(served.repository / "net" / "1")  # Triton loads a version again that has changed.
        served.client.load_model("net", client_timeout=120)
        ask(served, rows_of(4))
        seconds.append(modelled_seconds(served))
    assert sorted(set(seconds)) == seconds


def modelled_seconds(served: Served) -> float:
    """What the server's metrics say of the time that IPUs computed."""
    with urllib.request.urlopen(f"{served.metrics}/metrics", timeout=30) as answer:  # noqa: S310
        lines = answer.read().decode().splitlines()
    series = 'podrun_compute_seconds_total{model="net",version="1"} '
    (line,) = [line for line in lines if line.startswith(series)]
    return float(line.removeprefix(series))


@pytest.mark.system
def test_requests_in_flight_are_each_answered_once(served: Served) -> None:
    import queue

    import tritonclient.grpc as grpcclient

    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    asked = [rows_of(1 + i % 4, i) for i in range(60)]
    for i, x in enumerate(asked):
        tensor = grpcclient.InferInput("x", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x)
        served.client.async_infer("net", [tensor], lambda result, error, i=i: answers.put((i, result, error)))
    seen = set()
    for _ in asked:
        i, result, error = answers.get(timeout=60)
        assert error is None
        assert i not in seen
        seen.add(i)
        np.testing.assert_allclose(result.as_numpy("y"), expected(asked[i]), rtol=1e-5, atol=1e-6)


@pytest.mark.system
def test_what_does_not_fit_is_refused_and_disturbs_nothing(served: Served) -> None:
    from tritonclient.utils import InferenceServerException

    for x, name, kind in (
        (np.zeros((1, 9), np.float32), "x", "FP32"),
        (np.zeros((1, 8), np.float32), "z", "FP32"),
        (np.zeros((1, 8), np.float64), "x", "FP64"),
        (np.zeros((99, 8), np.float32), "x", "FP32"),
    ):
        with pytest.raises(InferenceServerException):
            ask(served, x, name, kind)
    index = {m.name: m for m in served.client.get_model_repository_index().models}
    assert index["wrong"].state == "UNAVAILABLE"
    assert "is not a PopEF file of podrun" in index["wrong"].reason
    x = rows_of(3)
    np.testing.assert_allclose(ask(served, x).as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)


# --- Without a server ---------------------------------------------------------------------------------------------


CONFIG = {
    "max_batch_size": 8,
    "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": ["8"]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": ["3"]}],
}
X = DataDescription("x", (4, 8), np.dtype(np.float32))


def test_a_configuration_is_held_against_the_file() -> None:
    (binding,) = bindings(CONFIG, "input", [X], {"x": "a"})
    assert (binding.name, binding.anchor) == ("a", X)
    for changes, names, message in (
        ({}, {}, r"has inputs \['a'\]; the compiled model has \['x'\]"),
        ({"data_type": "TYPE_STRING"}, {"x": "a"}, "TYPE_STRING, which IPUs do not compute"),
        ({"data_type": "TYPE_FP16"}, {"x": "a"}, "TYPE_FP16; the compiled model has float32"),
        ({"dims": ["9"]}, {"x": "a"}, r"dims \[9\]; the compiled model has \[8\]"),
    ):
        config = {**CONFIG, "input": [{**CONFIG["input"][0], **changes}]}  # type: ignore[index]
        with pytest.raises(ConfigError, match=message):
            bindings(config, "input", [X], names)


def test_wide_integers_are_taken_where_they_fit() -> None:
    ids = DataDescription("ids", (4,), np.dtype(np.int32))
    binding = TensorBinding("ids", ids, np.dtype(np.int64))
    assert as_anchor(np.array([1, -2]), binding).dtype == np.int32
    with pytest.raises(UsageError, match="32 bits do not hold"):
        as_anchor(np.array([1 << 40]), binding)
    with pytest.raises(UsageError, match="type float32"):
        as_anchor(np.zeros(1, np.float32), binding)


def test_a_version_folder_holds_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODRUN_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match="no ONNX file"):
        compiled_file(tmp_path)
    onnx.save(model(), tmp_path / "net.onnx")
    first = compiled_file(tmp_path)
    stamp = first.stat().st_mtime_ns
    assert compiled_file(tmp_path).stat().st_mtime_ns == stamp
    (tmp_path / "other.onnx").write_bytes(b"")
    with pytest.raises(ConfigError, match="2 ONNX files"):
        compiled_file(tmp_path)
    (tmp_path / "name_map.json").write_text("[1]")
    with pytest.raises(ConfigError, match="does not map"):
        anchor_names(tmp_path)


def test_a_server_that_is_not_there_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_server.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(triton_server, "USUAL_PLACE", tmp_path / "none")
    with pytest.raises(MissingPackageError, match="no tritonserver") as caught:
        triton_server.find_tritonserver("", {"PATH": str(tmp_path)})
    assert "pip install --no-deps nvidia-pytriton" in str(caught.value.hint)
    with pytest.raises(UsageError, match="is no program"):
        triton_server.find_tritonserver(str(tmp_path / "x"))
    program = tmp_path / "bin" / "tritonserver"
    program.parent.mkdir()
    program.write_text("")
    program.chmod(0o755)
    with pytest.raises(UsageError, match="has no Python backend"):
        triton_server.find_tritonserver("", {"PATH": str(program.parent)})
    with pytest.raises(ConfigError, match="no model repository"):
        check_repository(tmp_path / "absent")
