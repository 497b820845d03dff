"""What can be wrong with a repository, a request, a disk or a server, tried on the genuine Triton: each has an error
that names what it is about, and models beside it go on answering.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from tritonclient.grpc import service_pb2
from tritonclient.utils import InferenceServerException

from podrun.core.errors import ConfigError
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.model_folder import compiled_file
from podrun.serving.triton_server import find_tritonserver
from tests.serving.servers import TritonOfTest, tensor, triton
from tests.serving.test_runner import OPTIONS, expected, model, rows_of
from tests.serving.test_triton import wait_for

X = 'input [ { name: "x", data_type: TYPE_FP32, dims: [ 8 ] } ]'
Y = 'output [ { name: "y", data_type: TYPE_FP32, dims: [ 3 ] } ]'
CONFIG = f'backend: "poplar"\n{X}\n{Y}\nmax_batch_size: 4\n'
REASONS = {
    "shapes": "input 'x' has dims [9]; the compiled model has [8]",
    "strings": "input 'x' has TYPE_STRING, which IPUs do not compute",
    "inputs": "config.pbtxt has inputs ['z']; the compiled model has ['x']",
    "unlowered": "unlowered/1/model.onnx: operator example.org.Frobnicate",
    "twice": "holds no executable.popef and 2 ONNX files",
    "damaged": "is damaged",
    "large": "no device with 8 IPUs is free",
    "open": "open/1/model.onnx: the shape of input 'x' is not known (Give it: --input_shape x=8,8",
}
"""Models that cannot be served, with what the reason of each says."""


def unlowered() -> onnx.ModelProto:
    """A model with an operator that nobody knows."""
    graph = helper.make_graph(
        [helper.make_node("Frobnicate", ["x"], ["y"], name="frob", domain="example.org")],
        "unlowered",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4, 3])],
    )
    opsets = [helper.make_opsetid("", 11), helper.make_opsetid("example.org", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def open_shape() -> onnx.ModelProto:
    """A model whose batch is open."""
    proto = model()
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "N"
    return proto


def write_repository(repository: Path) -> None:
    compiled = repository / "net" / "1" / "executable.popef"
    compiled.parent.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, compiled, OPTIONS)
    configs = dict.fromkeys(REASONS, CONFIG)
    configs["shapes"] = CONFIG.replace("dims: [ 8 ]", "dims: [ 9 ]")
    configs["strings"] = CONFIG.replace("TYPE_FP32, dims: [ 8 ]", "TYPE_STRING, dims: [ 8 ]")
    configs["inputs"] = CONFIG.replace('"x"', '"z"')
    for name, text in configs.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(text)
    for name in ("shapes", "strings", "inputs"):
        shutil.copy(compiled, repository / name / "1")
    onnx.save(unlowered(), repository / "unlowered" / "1" / "model.onnx")
    onnx.save(open_shape(), repository / "open" / "1" / "model.onnx")
    for name in ("a", "b"):
        onnx.save(model(), repository / "twice" / "1" / f"{name}.onnx")
    data = bytearray(compiled.read_bytes())
    data[-20] ^= 1
    (repository / "damaged" / "1" / "executable.popef").write_bytes(data)
    large = CompilerOptions(
        num_ipus=8, popart_options={"enableReplicatedGraphs": True, "replicatedGraphCount": 8}
    )
    Compiler.compile_and_export(model(), None, repository / "large" / "1", large)
    # Without a configuration, and half written: the server starts without it.
    (repository / "half" / "1").mkdir(parents=True)
    (repository / "half" / "1" / "executable.popef").write_bytes(compiled.read_bytes()[:1000])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonOfTest]:
    repository = tmp_path_factory.mktemp("bad") / "models"
    write_repository(repository)
    with triton(repository, ["net"], environ={**os.environ, "PODRUN_STANDALONE_IPUS": "4"}) as server:
        yield server


def still_answers(served: TritonOfTest) -> None:
    x = rows_of(3)
    result = served.client.infer("net", tensor(x), client_timeout=60)
    np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)


def reason_of(served: TritonOfTest, name: str) -> str:
    index = {entry.name: entry for entry in served.client.get_model_repository_index().models}
    end = time.monotonic() + 120
    while not index[name].reason and time.monotonic() < end:
        time.sleep(0.2)
        index = {entry.name: entry for entry in served.client.get_model_repository_index().models}
    assert index[name].state != "READY"
    return str(index[name].reason)


def post(served: TritonOfTest, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and text of an HTTP request."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(f"http://{served.http}{path}", body, named)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310
            return int(answer.status), answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


@pytest.mark.slow
@pytest.mark.system
def test_each_bad_model_has_its_reason_and_the_good_one_answers(served: TritonOfTest) -> None:
    reasons = {name: reason_of(served, name) for name in REASONS}
    wrong = {name: reason for name, reason in reasons.items() if REASONS[name] not in reason}
    assert wrong == {}
    assert not any("Traceback" in reason for reason in reasons.values())
    log = served.log.read_text()
    assert "model half has no configuration" in log
    assert "executable.popef" in reasons["damaged"]
    still_answers(served)


BODY = {"inputs": [{"name": "x", "shape": [1, 8], "datatype": "FP32", "data": [0.0] * 8}]}


def changed(**changes: object) -> bytes:
    return json.dumps({"inputs": [{**BODY["inputs"][0], **changes}]}).encode()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"{", "parse"),
        (b"", ""),
        (b"[]", ""),
        (json.dumps({"inputs": []}).encode(), "expected 1 inputs but got 0"),
        (changed(name="z"), "'z'"),
        (changed(datatype="FP64"), "FP32"),
        (changed(datatype="BYTES", data=["a"] * 8), "FP32"),
        (changed(datatype="FP31"), ""),
        (changed(shape=[1, 9], data=[0.0] * 9), "[-1,8]"),
        (changed(shape=[-1, 8]), ""),
        (changed(shape=[5, 8], data=[0.0] * 40), "batch-size must be <= 4"),
        (changed(data=[0.0] * 7), ""),
        (changed(data=["a"] * 8), ""),
    ],
)
def test_a_malformed_request_is_answered_in_the_protocols_form(
    served: TritonOfTest, body: bytes, said: str
) -> None:
    code, text = post(served, "/v2/models/net/infer", body)
    assert code in (400, 500), text  # Triton's own choice.
    assert said in json.loads(text)["error"]
    still_answers(served)


def raw(
    shape: list[int], size: int, datatype: str = "FP32", name: str = "x"
) -> service_pb2.ModelInferRequest:
    """A request over gRPC as no library would write it: what it states need not be what it has."""
    request = service_pb2.ModelInferRequest(model_name="net", raw_input_contents=[bytes(size)])
    entry = request.inputs.add(name=name, datatype=datatype)
    entry.shape.extend(shape)
    return request


@pytest.mark.slow
@pytest.mark.system
def test_a_wrong_request_over_grpc_names_what_is_wrong(served: TritonOfTest) -> None:
    x = rows_of(2)
    stub = served.client._client_stub
    wrong: dict[str, Callable[[], object]] = {
        "missing required input(s) ['x']": lambda: served.client.infer("net", []),
        "expected 1 inputs but got 2": lambda: served.client.infer("net", [*tensor(x), *tensor(x, "z")]),
        "input 'x' already exists": lambda: served.client.infer("net", [*tensor(x), *tensor(x)]),
        "Expected [-1,8], got [1,2,8]": lambda: served.client.infer("net", tensor(x[None])),
        "data-type is 'INT32'": lambda: served.client.infer("net", tensor(x.astype(np.int32), kind="INT32")),
        "Expected 32, got 0": lambda: served.client.infer("net", tensor(x[:0])),
        "Expected 32, got 8": lambda: stub.ModelInfer(raw([1, 8], 8), timeout=60),
        "Expected 32, got 800": lambda: stub.ModelInfer(raw([1, 8], 800), timeout=60),
        "Expected 32, got 67108864": lambda: stub.ModelInfer(raw([1, 8], 64 << 20), timeout=200),
        "data-type is '<invalid>'": lambda: stub.ModelInfer(raw([1, 8], 32, "FP31"), timeout=60),
        "max allowed is 4": lambda: stub.ModelInfer(raw([1 << 40, 8], 32), timeout=60),
        "unknown model: 'none'": lambda: served.client.infer("none", tensor(x)),
        "version 7 is not found": lambda: served.client.infer("net", tensor(x), model_version="7"),
        "unexpected inference output 'q'": lambda: served.client.infer(
            "net", tensor(x), outputs=[requested("q")]
        ),
        "Unable to find shared memory region: 'gone'": lambda: served.client.infer("net", in_region("gone")),
    }
    for said, ask in wrong.items():
        with pytest.raises((InferenceServerException, grpc.RpcError)) as told:
            ask()
        assert said in str(told.value)
        still_answers(served)


def requested(name: str) -> object:
    """An output that a request asks for."""
    import tritonclient.grpc as grpcclient

    return grpcclient.InferRequestedOutput(name)


def in_region(name: str) -> list[object]:
    """The inputs of a request that lie in shared memory."""
    import tritonclient.grpc as grpcclient

    entry = grpcclient.InferInput("x", [2, 8], "FP32")
    entry.set_shared_memory(name, 64)
    return [entry]


@pytest.mark.slow
@pytest.mark.system
def test_sizes_of_binary_data_are_held_against_what_comes(served: TritonOfTest) -> None:
    for size, sent in ((32, 8), (1 << 40, 32), (-1, 32)):
        entry = {"name": "x", "shape": [1, 8], "datatype": "FP32", "parameters": {"binary_data_size": size}}
        head = json.dumps({"inputs": [entry]}).encode()
        length = str(len(head))
        code, text = post(
            served, "/v2/models/net/infer", head + bytes(sent), Inference_Header_Content_Length=length
        )
        assert code in (400, 500)
        assert "error" in json.loads(text)
    still_answers(served)


@pytest.mark.slow
@pytest.mark.system
def test_half_open_clients_hinder_no_other(served: TritonOfTest) -> None:
    host, port = served.http.split(":")
    grpc_port = int(served.grpc.split(":")[1])
    with ExitStack() as stack:
        for _ in range(40):
            quiet = stack.enter_context(socket.create_connection((host, int(port)), 5))
            quiet.sendall(b"POST /v2/models/net/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{")
            stack.enter_context(socket.create_connection((host, grpc_port), 5)).sendall(b"PRI * HTTP/2.0\r\n")
        for _ in range(5):
            still_answers(served)
        code, text = post(served, "/v2/models/net/infer", json.dumps(BODY).encode())
        assert code == 200, text
    still_answers(served)


@pytest.mark.slow
@pytest.mark.system
def test_a_model_that_is_written_while_it_is_read_is_refused_then_taken(served: TritonOfTest) -> None:
    repository = served.log.with_suffix("")
    whole = (repository / "net" / "1" / "executable.popef").read_bytes()
    folder = repository / "growing" / "1"
    folder.mkdir(parents=True)
    (repository / "growing" / "config.pbtxt").write_text(CONFIG)
    for part in (0, 100, len(whole) // 2, len(whole) - 1):
        (folder / "executable.popef").write_bytes(whole[:part])
        with pytest.raises(InferenceServerException, match="growing"):
            served.client.load_model("growing", client_timeout=120)
        assert str(folder / "executable.popef") in reason_of(served, "growing")
        still_answers(served)
    (folder / "executable.popef").write_bytes(whole)
    served.client.load_model("growing", client_timeout=120)
    x = rows_of(2)
    result = served.client.infer("growing", tensor(x), client_timeout=60)
    np.testing.assert_allclose(result.as_numpy("y"), expected(x), rtol=1e-5, atol=1e-6)
    served.client.unload_model("growing")
    wait_for(
        lambda: "successfully unloaded 'growing'" in served.log.read_text(), served.process, served.log, 60.0
    )
    assert "Fatal Python error" not in served.log.read_text()  # Processes of instances end, and do not crash.


@pytest.mark.slow
@pytest.mark.system
def test_two_models_of_one_name_are_told_and_the_others_serve(tmp_path: Path) -> None:
    for name in ("models", "more"):
        for one in ("net", "same") if name == "models" else ("same",):
            folder = tmp_path / name / one / "1"
            folder.mkdir(parents=True)
            Compiler.compile_and_export(model(), None, folder, OPTIONS)
            (folder.parent / "config.pbtxt").write_text(CONFIG)
    (tmp_path / "models" / "folder" / "1").mkdir(parents=True)
    (tmp_path / "models" / "folder" / "config.pbtxt").write_text(f'name: "net"\n{CONFIG}')
    with triton(tmp_path / "models", ["net"], f"--model-repository={tmp_path / 'more'}") as server:
        still_answers(server)
        log = server.log.read_text()
        assert "unexpected directory name 'folder' for model 'net'" in log
        assert "same" in log
        assert "not unique" in log


@pytest.mark.slow
@pytest.mark.system
def test_a_server_that_crashes_is_started_again(served: TritonOfTest) -> None:
    """Triton aborts on a shape of terabytes in a request's JSON. This is the last test of its server."""
    code = 0
    with contextlib.suppress(OSError):  # The connection is closed, as all others.
        code, _ = post(served, "/v2/models/net/infer", changed(shape=[1 << 40, 8]))
    end = time.monotonic() + 200
    while code == 0:
        try:
            still_answers(served)
            break
        except InferenceServerException:
            assert time.monotonic() < end
            time.sleep(0.5)
    if code == 0:
        assert "crashed (SIG" in served.log.read_text()
    still_answers(served)


# --- Without requests ---------------------------------------------------------------------------------------------


def test_a_full_disk_is_told_with_the_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit of file sizes stands for a full disk: writes fail in the middle of a file."""
    monkeypatch.setenv("PODRUN_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "net" / "1"
    folder.mkdir(parents=True)
    onnx.save(model(), folder / "net.onnx")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(ConfigError, match="File too large") as told:
            compiled_file(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(tmp_path / "cache") in told.value.message
    assert list((tmp_path / "cache").rglob("*.popef*")) == []
    assert compiled_file(folder).is_file()


@pytest.mark.slow
@pytest.mark.system
def test_a_repository_without_room_for_a_configuration_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "models" / "net" / "1"
    folder.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    server = fake_server(tmp_path / "fake", "sleep 0.1")
    words = [sys.executable, "-m", "podrun", "serve", str(tmp_path / "models"), "--tritonserver", str(server)]
    limited = ["sh", "-c", 'ulimit -f 0 && exec "$@"', "sh", *words]
    done = subprocess.run(limited, capture_output=True, text=True, timeout=120, check=False)
    assert "net/config.pbtxt cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder.parent / "config.pbtxt").exists()


def fake_server(folder: Path, script: str) -> Path:
    """A tritonserver of another version: a script, with what stands beside one."""
    backends = folder / "backends" / "python"
    (folder / "bin").mkdir(parents=True)
    backends.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_stub"):
        (backends / name).write_bytes(b"")
    program = folder / "bin" / "tritonserver"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    assert find_tritonserver(str(program)).program == program.resolve()
    return program


@pytest.mark.system
def test_a_server_of_another_version_is_told_with_the_one_that_is_tried(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    script = "echo \"tritonserver: unrecognized option '--allow-gpu-metrics=0'\" >&2\nexit 1"
    words = [sys.executable, "-m", "podrun", "serve", str(tmp_path / "models")]
    words += ["--tritonserver", str(fake_server(tmp_path / "fake", script))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "unrecognized option" in done.stderr
    assert "ended with exit code 1" in done.stderr
    assert "tritonserver 2.51: pip install --no-deps nvidia-pytriton==0.7.0" in done.stderr
