"""TensorFlow Serving's REST: ``/v1/models/NAME[/versions/V]:predict`` (rows or columns), status and metadata.

Numbers are JSON's, with NaN and Infinity as TensorFlow Serving takes them; ``{"b64": ...}`` is a string, and refused as
that. An error is ``{"error": TEXT}``. A connection that says nothing for `IDLE_SECONDS` is closed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import grpc
import numpy as np

from podrun.core.errors import UsageError
from podrun.core.http_service import BoundedHTTPServer, QuietHandler
from podrun.serving.loaded_model import DataDescription
from podrun.serving.tfserving.answers import METHOD, SIGNATURE, ModelChoice, predict, shape_for_clients
from podrun.serving.tfserving.grpc_front import status_code, told_error
from podrun.serving.tfserving.tensors import type_name
from podrun.serving.tfserving.versions import ModelVersion, ServedVersions

PATH = re.compile(
    r"/v1/models/(?P<name>[^/:]+)(?:/versions/(?P<version>\d+)|/labels/(?P<label>[^/:]+))?"
    r"(?::(?P<verb>\w+)|(?P<metadata>/metadata))?/?"
)
IDLE_SECONDS = 30.0
MOST_BYTES = 256 << 20
MOST_CONNECTIONS = 64
_HTTP = {
    grpc.StatusCode.NOT_FOUND: 404,
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.UNIMPLEMENTED: 501,
}


def http_code(error: Exception) -> int:
    """The status that tells a client whose fault an error is."""
    return _HTTP.get(status_code(error), 500)


def array_of_json(name: str, value: object, description: DataDescription) -> np.ndarray:
    """The array of JSON numbers in lists. UsageError that names the input for strings, lists of unequal lengths and
    numbers that its type does not hold.
    """
    _refuse_strings(name, value)
    dtype = description.dtype
    try:
        array = np.array(value)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"input {name!r} is no array: its lists have different lengths") from error
    if array.size == 0:
        return array.astype(dtype)
    if array.dtype.kind not in "biuf" or (array.dtype.kind == "b") != (dtype.kind == "b"):
        raise UsageError(f"input {name!r} is no array of {type_name(dtype)}")
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if array.dtype.kind == "f" or array.min() < bounds.min or array.max() > bounds.max:
            raise UsageError(f"input {name!r} has numbers that {type_name(dtype)} does not hold")
    return array.astype(dtype)


def _refuse_strings(name: str, value: object) -> None:
    """UsageError for the first value in nested lists that is a string, in base64 or not, or null."""
    while isinstance(value, list) and value:
        for item in value:
            if isinstance(item, (str, dict)) or item is None:
                _refuse_strings(name, item)
        value = value[0]
    if isinstance(value, str) or (isinstance(value, dict) and "b64" in value):
        raise UsageError(f"input {name!r} has strings (DT_STRING), which IPUs do not compute")
    if isinstance(value, dict) or value is None:
        raise UsageError(
            f"input {name!r} has {'an object' if value is not None else 'null'} in place of a number"
        )


def inputs_of_json(
    body: Mapping[str, Any], known: Mapping[str, DataDescription]
) -> tuple[dict[str, np.ndarray], bool]:
    """The inputs of a request, and whether they came in rows. UsageError for what is neither rows nor columns."""
    if ("instances" in body) == ("inputs" in body):
        raise UsageError('the request has "instances" (rows) or "inputs" (columns), one of the two')
    if "inputs" in body:
        value = body["inputs"]
        columns = value if isinstance(value, dict) and "b64" not in value else {_only(known): value}
        return {name: array_of_json(name, columns[name], d) for name, d in _matched(columns, known)}, False
    rows = body["instances"]
    if not isinstance(rows, list) or not rows:
        raise UsageError('"instances" is a list of at least one row')
    named = isinstance(rows[0], dict) and "b64" not in rows[0]
    if not named:
        return {_only(known): array_of_json(_only(known), rows, known[_only(known)])}, True
    for row in rows:
        if not isinstance(row, dict) or row.keys() != rows[0].keys():
            raise UsageError("the rows of a request name the same inputs")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: array_of_json(name, columns[name], d) for name, d in _matched(columns, known)}, True


def _only(known: Mapping[str, DataDescription]) -> str:
    if len(known) != 1:
        raise UsageError(f"values without a name, but the model has the inputs {sorted(known)}")
    return next(iter(known))


def _matched(
    columns: Mapping[str, Any], known: Mapping[str, DataDescription]
) -> list[tuple[str, DataDescription]]:
    if columns.keys() != known.keys():
        raise UsageError(f"the inputs are {sorted(known)}, not {sorted(columns)}")
    return list(known.items())


def json_of_outputs(outputs: Mapping[str, np.ndarray], rows: bool) -> dict[str, Any]:
    """The answer to a request that came in rows, or in columns."""
    lists = {name: value.tolist() for name, value in outputs.items()}
    single = next(iter(lists.values())) if len(lists) == 1 else None
    if not rows:
        return {"outputs": lists if single is None else single}
    if single is not None:
        return {"predictions": single}
    names = list(lists)
    return {"predictions": [dict(zip(names, row, strict=True)) for row in zip(*lists.values(), strict=True)]}


def metadata_json(version: ModelVersion) -> dict[str, Any]:
    """The metadata of a version, as the protocol's JSON has them: integers of 64 bits as text."""

    def tensors(known: Mapping[str, DataDescription]) -> dict[str, Any]:
        return {
            name: {
                "dtype": type_name(d.dtype),
                "tensor_shape": {
                    "dim": [{"size": str(size), "name": ""} for size in shape_for_clients(d)],
                    "unknown_rank": False,
                },
                "name": f"{d.name}:0",
            }
            for name, d in known.items()
        }

    runner = version.runner
    signature = {
        "inputs": tensors(runner.inputs if runner is not None else {}),
        "outputs": tensors(runner.outputs if runner is not None else {}),
        "method_name": METHOD,
    }
    return {
        "model_spec": {"name": version.model, "signature_name": "", "version": str(version.number)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE: signature}}},
    }


def status_json(versions: list[ModelVersion]) -> dict[str, Any]:
    """The states of versions."""
    return {
        "model_version_status": [
            {
                "version": str(v.number),
                "state": v.state.name,
                "status": {
                    "error_code": "OK" if v.error is None else status_code(v.error).name,
                    "error_message": "" if v.error is None else told_error(v.error),
                },
            }
            for v in versions
        ]
    }


def rest_answer(versions: ServedVersions, method: str, path: str, body: bytes) -> dict[str, Any]:
    """The JSON that answers a request. Raises a PodrunError for one that is wrong."""
    asked = PATH.fullmatch(path)
    if asked is None:
        raise UsageError(f"Malformed request: {method} {path}")
    number = int(asked["version"]) if asked["version"] else None
    choice = ModelChoice(asked["name"], number, asked["label"] or "")
    choice.check()
    if method == "GET" and not asked["verb"]:
        if asked["metadata"]:
            return metadata_json(versions.version(choice.name, number))
        return status_json(versions.statuses(choice.name, number))
    if method != "POST" or asked["verb"] != "predict":
        raise UsageError(f"Malformed request: {method} {path}: podrun serves :predict, which takes POST")
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"JSON Parse error: {error}") from error
    if not isinstance(request, dict):
        raise UsageError("the request is no JSON object")
    choice = ModelChoice(choice.name, number, "", str(request.get("signature_name", "")))
    choice.check()
    runner = versions.version(choice.name, number).runner
    inputs, rows = inputs_of_json(request, runner.inputs if runner is not None else {})
    _, outputs = predict(versions, choice, inputs)
    return json_of_outputs(outputs, rows)


class RestServer(BoundedHTTPServer):
    """The HTTP server. At most `MOST_CONNECTIONS` at a time: others wait to be accepted."""

    def __init__(self, versions: ServedVersions, address: tuple[str, int]) -> None:
        self.versions = versions
        try:
            super().__init__(address, RestHandler, MOST_CONNECTIONS, waits=True)
        except OSError as error:
            raise UsageError(
                f"{address[0]}:{address[1]} cannot be listened on: {error.strerror}",
                hint="Name another port.",
            ) from error


class RestHandler(QuietHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    server_version = "podrun"
    timeout = IDLE_SECONDS
    server: RestServer

    def do_GET(self) -> None:
        """Answer a request for the status or the metadata of a model."""
        self._reply("GET", b"")

    def do_POST(self) -> None:
        """Answer a request to predict; those to classify or regress are refused."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            self.close_connection = True
            return self._send(
                411 if not length else 413, {"error": f"a request has Content-Length, at most {MOST_BYTES}"}
            )
        return self._reply("POST", self.rfile.read(int(length)))

    def _reply(self, method: str, body: bytes) -> None:
        try:
            self._send(200, rest_answer(self.server.versions, method, self.path, body))
        except (ConnectionError, TimeoutError):
            raise
        except Exception as error:
            verb = PATH.fullmatch(self.path)
            refused = verb is not None and verb["verb"] in ("classify", "regress")
            self._send(501 if refused else http_code(error), {"error": told_error(error)})

    def _send(self, code: int, value: Mapping[str, Any]) -> None:
        self.answer(code, "application/json", json.dumps(value).encode())
