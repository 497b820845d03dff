"""TensorFlow Serving's protocol in this process: answers over gRPC and REST, versions, and what is refused by name."""

from __future__ import annotations

import http.client
import json
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from podrun.core.errors import ConfigError, NotFoundError, ServiceError, UsageError
from podrun.protos import tfserving_pb2 as pb
from podrun.serving.compiler import Compiler
from podrun.serving.loaded_model import DataDescription
from podrun.serving.tfserving.rest_front import array_of_json, inputs_of_json, json_of_outputs
from podrun.serving.tfserving.running import FrontSettings, RunningFront, running_front
from podrun.serving.tfserving.tensors import NUMBERS, array_from_wire, array_to_wire
from podrun.serving.tfserving.versions import ServedVersions, VersionState
from tests.serving.test_runner import OPTIONS, expected, model, rows_of

ANY_PORT = FrontSettings(grpc_port=0, http_port=0, look_seconds=3600)
PREDICT = "/tensorflow.serving.PredictionService/Predict"


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compiled")
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    return folder / "executable.popef"


@pytest.fixture(scope="module")
def front(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    repository = tmp_path_factory.mktemp("front")
    for name, names in (("net", None), ("renamed", {"x": "features", "y": "scores"})):
        (repository / name / "3").mkdir(parents=True)
        shutil.copy(compiled, repository / name / "3")
        if names:
            (repository / name / "3" / "name_map.json").write_text(json.dumps(names))
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "1" / "executable.popef").write_bytes(b"nothing")
    with running_front(repository, ANY_PORT) as front:
        yield front


def asked(front: RunningFront, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", front.http_port, timeout=30)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def called(front: RunningFront, method: str, request: Any, kind: Any, seconds: float = 30) -> Any:
    with grpc.insecure_channel(f"127.0.0.1:{front.grpc_port}") as channel:
        call = channel.unary_unary(
            method, request_serializer=lambda m: m.SerializeToString(), response_deserializer=kind.FromString
        )
        return call(request, timeout=seconds)


def request_for(x: np.ndarray, **spec: Any) -> pb.PredictRequest:
    request = pb.PredictRequest(model_spec=pb.ModelSpec(**{"name": "net", **spec}))
    request.inputs["x"].CopyFrom(array_to_wire(x))
    return request


def test_predict_over_grpc(front: RunningFront) -> None:
    for rows in (1, 4, 7):
        x = rows_of(rows, rows)
        response = called(front, PREDICT, request_for(x), pb.PredictResponse)
        y = array_from_wire("y", response.outputs["y"])
        np.testing.assert_allclose(y, expected(x), rtol=1e-5, atol=1e-6)
        assert (response.model_spec.version.value, response.model_spec.signature_name) == (
            3,
            "serving_default",
        )


@pytest.mark.parametrize(
    ("request_", "code", "text"),
    [
        (request_for(rows_of(1), name="other"), "NOT_FOUND", "Servable not found for request: other"),
        (request_for(rows_of(1), name=""), "INVALID_ARGUMENT", "names no model"),
        (request_for(rows_of(1), signature_name="classify"), "INVALID_ARGUMENT", '"classify" not found'),
        (request_for(rows_of(1), version_label="canary"), "INVALID_ARGUMENT", "labels are not supported"),
        (request_for(rows_of(1), name="broken"), "UNAVAILABLE", "is not a PopEF file"),
        (request_for(np.zeros((1, 9), np.float32)), "INVALID_ARGUMENT", "has shape [1, 9]"),
        (request_for(np.zeros((1, 8))), "INVALID_ARGUMENT", "type float64"),
    ],
)
def test_wrong_requests_are_told_in_the_protocols_form(
    front: RunningFront, request_: pb.PredictRequest, code: str, text: str
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        called(front, PREDICT, request_, pb.PredictResponse)
    error: Any = caught.value
    assert error.code().name == code
    assert text in error.details()
    test_predict_over_grpc(front)


def test_strings_and_other_services_are_refused_by_name(front: RunningFront) -> None:
    request = request_for(rows_of(1))
    request.inputs["x"].dtype = 7
    for method, sent, text in (
        (PREDICT, request, "DT_STRING, which IPUs do not compute"),
        ("/tensorflow.serving.PredictionService/Classify", request, "Classify is not supported"),
        ("/tensorflow.serving.ModelService/HandleReloadConfigRequest", request, "is not supported"),
        (
            "/tensorflow.serving.PredictionService/GetModelMetadata",
            pb.GetModelMetadataRequest(),
            "metadata_field",
        ),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            called(front, method, sent, pb.PredictResponse)
        details: Any = caught.value
        assert text in details.details()


def test_rows_and_columns_over_rest(front: RunningFront) -> None:
    x = rows_of(3)
    wanted = pytest.approx(expected(x).tolist()[2], rel=1e-5, abs=1e-6)
    for path, body, key in (
        ("net:predict", {"instances": x.tolist()}, "predictions"),
        ("net/versions/3:predict", {"instances": [{"x": row} for row in x.tolist()]}, "predictions"),
        ("net:predict", {"signature_name": "serving_default", "inputs": x.tolist()}, "outputs"),
        ("renamed:predict", {"inputs": {"features": x.tolist()}}, "outputs"),
    ):
        code, answer = asked(front, "POST", f"/v1/models/{path}", body)
        assert (code, list(answer)) == (200, [key])
        assert answer[key][2] == wanted


def test_status_and_metadata_over_rest(front: RunningFront) -> None:
    assert asked(front, "GET", "/v1/models/net") == (
        200,
        {
            "model_version_status": [
                {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
            ]
        },
    )
    code, broken = asked(front, "GET", "/v1/models/broken")
    assert (code, broken["model_version_status"][0]["state"]) == (200, "END")
    assert "is not a PopEF file" in broken["model_version_status"][0]["status"]["error_message"]
    code, answer = asked(front, "GET", "/v1/models/renamed/metadata")
    signature = answer["metadata"]["signature_def"]["signature_def"]["serving_default"]
    assert code == 200
    assert signature["inputs"]["features"]["dtype"] == "DT_FLOAT"
    assert [d["size"] for d in signature["inputs"]["features"]["tensor_shape"]["dim"]] == ["-1", "8"]
    assert signature["method_name"] == "tensorflow/serving/predict"


@pytest.mark.parametrize(
    ("method", "path", "body", "code", "text"),
    [
        ("POST", "/v1/models/no:predict", {"instances": [[1.0]]}, 404, "Servable not found"),
        ("POST", "/v1/models/net/versions/9:predict", {"instances": [[1.0]]}, 404, "net version 9"),
        ("POST", "/v1/models/net:classify", {}, 501, "podrun serves :predict"),
        ("POST", "/v1/models/net:regress", {}, 501, "podrun serves :predict"),
        ("GET", "/v2/models/net", None, 400, "Malformed request"),
        ("GET", "/v1/models/none", None, 404, "Could not find any versions"),
        ("POST", "/v1/models/net:predict", [], 400, "no JSON object"),
        ("POST", "/v1/models/net:predict", {}, 400, "one of the two"),
        ("POST", "/v1/models/net:predict", {"instances": [{"b64": "AA=="}]}, 400, "DT_STRING"),
        ("POST", "/v1/models/net:predict", {"instances": [["a"]]}, 400, "DT_STRING"),
        ("POST", "/v1/models/net:predict", {"instances": [[1.0] * 8, [1.0]]}, 400, "different lengths"),
        ("POST", "/v1/models/net:predict", {"instances": [[1.0] * 9]}, 400, "has shape [1, 9]"),
        ("POST", "/v1/models/net:predict", {"inputs": {"z": [[1.0] * 8]}}, 400, "the inputs are ['x']"),
        ("POST", "/v1/models/broken:predict", {"instances": [[1.0]]}, 503, "is not ready"),
    ],
)
def test_wrong_rest_requests(
    front: RunningFront, method: str, path: str, body: Any, code: int, text: str
) -> None:
    status, answer = asked(front, method, path, body)
    assert status == code
    assert text in answer["error"]


def test_half_a_request_hinders_no_other(front: RunningFront) -> None:
    with socket.create_connection(("127.0.0.1", front.http_port)) as half:
        half.sendall(b"POST /v1/models/net:predict HTTP/1.1\r\nContent-Length: 1000\r\n\r\n{")
        test_rows_and_columns_over_rest(front)
    with socket.create_connection(("127.0.0.1", front.http_port), timeout=30) as large:
        large.sendall(b"POST /v1/models/net:predict HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in large.recv(4096)


def test_ports_in_use_are_told(front: RunningFront, tmp_path: Path) -> None:
    for settings in (
        FrontSettings(grpc_port=front.grpc_port, http_port=0),
        FrontSettings(grpc_port=0, http_port=front.http_port),
    ):
        with pytest.raises(UsageError, match="cannot be listened on"), running_front(tmp_path, settings):
            pass
    with (
        pytest.raises(ConfigError, match="no model repository"),
        running_front(tmp_path / "absent", ANY_PORT),
    ):
        pass


# --- Versions, without a device --------------------------------------------------------------------------------------


class Pretended:
    """A version that is on no IPUs."""

    def __init__(self, log: list[str], name: str) -> None:
        self.inputs: dict[str, DataDescription] = {}
        self.outputs: dict[str, DataDescription] = {}
        self._log, self._name = log, name
        log.append(f"load {name}")

    def enqueue(self, inputs: object, wanted: object, label: str = "") -> Any:
        raise AssertionError

    def close(self) -> None:
        self._log.append(f"close {self._name}")


def test_a_newer_version_takes_the_place_of_the_older_one(tmp_path: Path) -> None:
    log: list[str] = []

    def load(model_name: str, folder: Path) -> Any:
        if (folder / "executable.popef").read_text() == "half":
            raise ConfigError("half a file")
        return Pretended(log, f"{model_name}/{folder.name}")

    def write(number: str, text: str) -> None:
        (tmp_path / "net" / number).mkdir(parents=True, exist_ok=True)
        (tmp_path / "net" / number / "executable.popef").write_text(text)

    versions = ServedVersions(tmp_path, load)
    write("1", "whole")
    versions.look()
    assert versions.version("net").number == 1
    write("2", "half")
    versions.look()
    versions.look()
    assert versions.version("net").number == 1
    with pytest.raises(ServiceError, match="net version 2 is not ready: half a file"):
        versions.version("net", 2)
    assert [v.state for v in versions.statuses("net")] == [VersionState.END, VersionState.AVAILABLE]
    write("2", "the whole")
    versions.look()
    assert versions.version("net").number == 2
    assert log == ["load net/1", "load net/2", "close net/1"]
    shutil.rmtree(tmp_path / "net")
    versions.look()
    with pytest.raises(NotFoundError, match="not found for request: net"):
        versions.version("net")
    assert log[-1] == "close net/2"


# --- Tensors and JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", NUMBERS)
def test_tensors_cross_as_bytes_and_as_values(number: int) -> None:
    _, kind, field = NUMBERS[number]
    array = np.array([[0, 1, 2], [3, 1, 0]]).astype(kind)
    sent = array_to_wire(array)
    np.testing.assert_array_equal(array_from_wire("x", sent), array)
    values = pb.TensorValue(dtype=number, tensor_shape=sent.tensor_shape)
    flat = array.view(np.uint16).reshape(-1) if kind == "float16" else array.reshape(-1)
    getattr(values, field).extend(flat.tolist())
    np.testing.assert_array_equal(array_from_wire("x", values), array)
    del getattr(values, field)[1:]
    np.testing.assert_array_equal(array_from_wire("x", values), np.full_like(array, array[0, 0]))


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.TensorValue(dtype=1, tensor_shape=pb.TensorShape(unknown_rank=True)), "has no shape"),
        (pb.TensorValue(dtype=1, tensor_shape=pb.TensorShape(dim=[pb.Dimension(size=-1)])), "has no shape"),
        (
            pb.TensorValue(dtype=1, tensor_shape=pb.TensorShape(dim=[pb.Dimension(size=1 << 40)] * 3)),
            "is more than",
        ),
        (
            pb.TensorValue(
                dtype=1, tensor_shape=pb.TensorShape(dim=[pb.Dimension(size=2)]), tensor_content=b"1"
            ),
            r"has 1 bytes; float32\[2\] has 8",
        ),
        (
            pb.TensorValue(dtype=6, tensor_shape=pb.TensorShape(dim=[pb.Dimension(size=1)]), int_val=[300]),
            "int8 does not hold",
        ),
        (pb.TensorValue(dtype=3, int_val=[1, 2]), "has 2 values"),
        (pb.TensorValue(dtype=99), "DataType 99"),
    ],
)
def test_hostile_tensors_are_refused(message: pb.TensorValue, text: str) -> None:
    with pytest.raises(UsageError, match=text):
        array_from_wire("x", message)


def test_json_is_held_against_the_types_of_the_model() -> None:
    ids = DataDescription("ids", (4, 2), np.dtype(np.int32))
    flags = DataDescription("flags", (4,), np.dtype(np.bool_))
    rows = [{"ids": [1, 2], "flags": True}, {"ids": [3, 4], "flags": False}]
    inputs, in_rows = inputs_of_json({"instances": rows}, {"ids": ids, "flags": flags})
    assert in_rows
    np.testing.assert_array_equal(inputs["ids"], [[1, 2], [3, 4]])
    np.testing.assert_array_equal(inputs["flags"], [True, False])
    for value, held, text in (
        ([[1.5, 2]], ids, "DT_INT32 does not hold"),
        ([[1 << 40, 2]], ids, "DT_INT32 does not hold"),
        ([[True, False]], ids, "no array of DT_INT32"),
        ([1, 0], flags, "no array of DT_BOOL"),
        ([[None, 1]], ids, "null in place"),
        ([[{"a": 1}, 1]], ids, "an object in place"),
    ):
        with pytest.raises(UsageError, match=text):
            array_of_json(held.name, value, held)
    outputs = {"a": np.array([1.0, 2.0]), "b": np.array([[3], [4]])}
    assert json_of_outputs(outputs, True) == {"predictions": [{"a": 1.0, "b": [3]}, {"a": 2.0, "b": [4]}]}
    assert json_of_outputs(outputs, False) == {"outputs": {"a": [1.0, 2.0], "b": [[3], [4]]}}
