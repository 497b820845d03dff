"""Features of the genuine Triton server with the backend ``poplar``: model control, cancelled requests, streams, shared
memory and names of their own.
"""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import PodrunError
from podrun.serving import triton_server
from podrun.serving.compiler import Compiler
from tests.serving.test_runner import OPTIONS, expected, model, rows_of
from tests.serving.test_triton import free_ports, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.system]
WAIT_SECONDS = 60.0
QUEUE_US = 3_000_000
"""How long the batcher of ``patient`` waits for a full batch: long enough to cancel a request that waits there."""
RENAMED = """backend: "poplar"
max_batch_size: 4
input [ { name: "features", data_type: TYPE_FP32, dims: [ 8 ] } ]
output [ { name: "scores", data_type: TYPE_FP32, dims: [ 3 ] } ]
"""
PATIENT = f"""backend: "poplar"
max_batch_size: 4
input [ {{ name: "x", data_type: TYPE_FP32, dims: [ 8 ] }} ]
output [ {{ name: "y", data_type: TYPE_FP32, dims: [ 3 ] }} ]
dynamic_batching {{ preferred_batch_size: [ 4 ], max_queue_delay_microseconds: {QUEUE_US} }}
"""
CONFIGS = {"net": "", "other": "", "renamed": RENAMED, "patient": PATIENT}
"""Models and their configurations; `podrun serve` writes the empty ones."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A client of a server with explicit model control, which has loaded all models."""
    grpcclient = pytest.importorskip("tritonclient.grpc")
    try:
        triton_server.find_tritonserver("", os.environ)
    except PodrunError as error:
        pytest.skip(error.message)
    folder = tmp_path_factory.mktemp("features")
    repository = _repository(folder / "models")
    grpc, http, metrics = free_ports(3)
    words = [sys.executable, "-m", "podrun", "serve", str(repository), "--grpc-port", str(grpc)]
    words += ["--http-port", str(http), "--metrics-port", str(metrics), "--", "--model-control-mode=explicit"]
    words += [f"--load-model={name}" for name in CONFIGS]
    log = folder / "log"
    with open(log, "wb") as output:
        process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        asking = grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}")
        wait_for(lambda: all(asking.is_model_ready(name) for name in CONFIGS), process, log)
        yield asking
        asking.close()
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _repository(repository: Path) -> Path:
    compiled = repository / "net" / "1" / "executable.popef"
    compiled.parent.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, compiled, OPTIONS)
    for name, config in CONFIGS.items():
        version = repository / name / "1"
        if name != "net":
            version.mkdir(parents=True)
            shutil.copy(compiled, version)
        if config:
            (repository / name / "config.pbtxt").write_text(config)
    (repository / "renamed" / "1" / "name_map.json").write_text('{"x": "features", "y": "scores"}')
    return repository


def sent(x: np.ndarray, name: str = "x") -> list[Any]:
    import tritonclient.grpc as grpcclient

    tensor = grpcclient.InferInput(name, list(x.shape), "FP32")
    tensor.set_data_from_numpy(x)
    return [tensor]


def close_to(y: np.ndarray, x: np.ndarray) -> None:
    np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_names_of_a_configuration_stand_for_anchors(client: Any) -> None:
    x = rows_of(3)
    close_to(client.infer("renamed", sent(x, "features"), client_timeout=60).as_numpy("scores"), x)
    metadata = client.get_model_metadata("renamed")
    assert ([t.name for t in metadata.inputs], [t.name for t in metadata.outputs]) == (
        ["features"],
        ["scores"],
    )


def test_a_model_is_unloaded_and_loaded_while_another_serves(client: Any) -> None:
    from tritonclient.utils import InferenceServerException

    stop, answered, errors = threading.Event(), [0], []

    def ask_all_the_time() -> None:
        while not stop.is_set():
            x = rows_of(1 + answered[0] % 4, answered[0])
            try:
                close_to(client.infer("net", sent(x), client_timeout=60).as_numpy("y"), x)
            except Exception as error:
                errors.append(error)
                return
            answered[0] += 1

    asking = threading.Thread(target=ask_all_the_time, daemon=True)
    asking.start()
    try:
        for _ in range(2):
            before = answered[0]
            client.unload_model("other", client_timeout=60)
            until(lambda: not client.is_model_ready("other"))
            with pytest.raises(InferenceServerException, match=r"not (found|ready)|unavailable|no available"):
                client.infer("other", sent(rows_of(1)), client_timeout=60)
            client.load_model("other", client_timeout=60)
            x = rows_of(2)
            close_to(client.infer("other", sent(x), client_timeout=60).as_numpy("y"), x)
            until(lambda before=before: answered[0] > before or bool(errors))
    finally:
        stop.set()
        asking.join(WAIT_SECONDS)
    assert not errors
    assert not asking.is_alive()


def test_a_cancelled_request_disturbs_no_other(client: Any) -> None:
    answers: queue.Queue[tuple[str, Any, Any]] = queue.Queue()

    def asked(name: str, x: np.ndarray) -> Any:
        return client.async_infer(
            "patient", sent(x), lambda result, error: answers.put((name, result, error)), request_id=name
        )

    before = _rows(client)
    given_up, kept = rows_of(1, 5), rows_of(2, 6)
    call = asked("given up", given_up)
    asked("kept", kept)
    call.cancel()
    ended = {name: (result, error) for name, result, error in (answers.get(timeout=60) for _ in range(2))}
    assert "cancelled" in str(ended["given up"][1]).lower()
    assert ended["kept"][1] is None
    close_to(ended["kept"][0].as_numpy("y"), kept)
    assert _rows(client) == before + 2
    full = rows_of(4, 7)
    close_to(client.infer("patient", sent(full), client_timeout=60).as_numpy("y"), full)


def _rows(client: Any) -> int:
    """How many rows the model ``patient`` has answered."""
    (statistics,) = client.get_inference_statistics("patient").model_stats
    return int(statistics.inference_count)


def test_a_stream_answers_each_request_once(client: Any) -> None:
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    asked = [rows_of(1 + i % 4, i) for i in range(20)]
    client.start_stream(lambda result, error: answers.put((result, error)))
    try:
        for i, x in enumerate(asked):
            client.async_stream_infer("net", sent(x), request_id=str(i))
        client.async_stream_infer("net", sent(np.zeros((1, 9), np.float32)), request_id="wrong")
        results, errors = {}, []
        for _ in range(len(asked) + 1):
            result, error = answers.get(timeout=60)
            if error is not None:
                errors.append(str(error))
            else:
                results[int(result.get_response().id)] = result.as_numpy("y")
    finally:
        client.stop_stream()
    assert sorted(results) == list(range(len(asked)))
    for i, x in enumerate(asked):
        close_to(results[i], x)
    assert len(errors) == 1
    assert "shape" in errors[0]


def test_system_shared_memory_carries_inputs_and_outputs(client: Any) -> None:
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import InferenceServerException
    from tritonclient.utils import shared_memory as shm

    x = rows_of(4, 9)
    sizes = {"in": x.nbytes, "out": 4 * 3 * 4}
    names = {name: f"podrun_test_{os.getpid()}_{name}" for name in sizes}
    regions = {
        name: shm.create_shared_memory_region(names[name], "/" + names[name], sizes[name]) for name in sizes
    }
    try:
        for name, size in sizes.items():
            client.register_system_shared_memory(names[name], "/" + names[name], size)
        shm.set_shared_memory_region(regions["in"], [x])
        tensor, y = grpcclient.InferInput("x", [4, 8], "FP32"), grpcclient.InferRequestedOutput("y")
        tensor.set_shared_memory(names["in"], sizes["in"])
        y.set_shared_memory(names["out"], sizes["out"])
        result = client.infer("net", [tensor], outputs=[y], client_timeout=60)
        assert not any(result.get_response().raw_output_contents)
        close_to(shm.get_contents_as_numpy(regions["out"], np.float32, [4, 3]), x)
        tensor.set_shared_memory(names["in"], sizes["in"] + 64)
        with pytest.raises(InferenceServerException):
            client.infer("net", [tensor], outputs=[y], client_timeout=60)
    finally:
        client.unregister_system_shared_memory()
        for region in regions.values():
            shm.destroy_shared_memory_region(region)
    close_to(client.infer("net", sent(x), client_timeout=60).as_numpy("y"), x)
