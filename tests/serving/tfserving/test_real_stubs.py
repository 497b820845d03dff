"""The stubs of ``tensorflow-serving-api``, in a process of their own, against `podrun serve --protocol
tensorflow-serving`.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from podrun.serving.compiler import Compiler
from tests.serving.test_runner import OPTIONS, expected, model, rows_of
from tests.serving.test_triton import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.system]
CLIENT = """
import sys
import grpc
import numpy as np
import tensorflow as tf
from tensorflow_serving.apis import (
    get_model_metadata_pb2, get_model_status_pb2, model_service_pb2_grpc, predict_pb2, prediction_service_pb2_grpc)
x = np.load(sys.argv[2])
with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = prediction_service_pb2_grpc.PredictionServiceStub(channel)
    request = predict_pb2.PredictRequest()
    request.model_spec.name = "net"
    request.model_spec.signature_name = "serving_default"
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(x))
    response = stub.Predict(request, 60)
    np.save(sys.argv[3], tf.make_ndarray(response.outputs["y"]))
    print("version", response.model_spec.version.value)
    asked = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
    asked.model_spec.name = "net"
    signatures = get_model_metadata_pb2.SignatureDefMap()
    assert stub.GetModelMetadata(asked, 60).metadata["signature_def"].Unpack(signatures)
    held = signatures.signature_def["serving_default"]
    print(held.method_name, tf.dtypes.as_dtype(held.inputs["x"].dtype).name,
          [dim.size for dim in held.inputs["x"].tensor_shape.dim])
    models = model_service_pb2_grpc.ModelServiceStub(channel)
    state = get_model_status_pb2.GetModelStatusRequest()
    state.model_spec.name = "net"
    told = models.GetModelStatus(state, 60).model_version_status[0]
    print(told.version, told.State.Name(told.state), told.status.error_code)
    request.inputs["x"].CopyFrom(tf.make_tensor_proto(["a", "b"]))
    try:
        stub.Predict(request, 60)
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


def test_the_real_stubs_are_answered(tmp_path: Path) -> None:
    if importlib.util.find_spec("tensorflow_serving") is None:
        pytest.skip("tensorflow-serving-api is not installed")
    repository = tmp_path / "models"
    (repository / "net" / "5").mkdir(parents=True)
    Compiler.compile_and_export(model(), None, repository / "net" / "5", OPTIONS)
    x = rows_of(7)
    np.save(tmp_path / "x.npy", x)
    ports = free_ports(2)
    words = [sys.executable, "-m", "podrun", "serve", str(repository), "--protocol", "tensorflow-serving"]
    words += ["--grpc-port", str(ports[0]), "--http-port", str(ports[1])]
    with open(tmp_path / "log", "wb") as log:
        server = subprocess.Popen(words, stderr=log)
    try:
        end = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{ports[1]}/v1/models/net", timeout=60).close()
                break
            except OSError:
                assert time.monotonic() < end, (tmp_path / "log").read_text()
                assert server.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
        client = [sys.executable, "-c", CLIENT, f"127.0.0.1:{ports[0]}", "x.npy", "y.npy"]
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        result = subprocess.run(
            client, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=240, check=False
        )
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.splitlines() == [
        "version 5",
        "tensorflow/serving/predict float32 [-1, 8]",
        "5 AVAILABLE 0",
        "INVALID_ARGUMENT input 'x' has DT_STRING, which IPUs do not compute",
    ]
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), expected(x), rtol=1e-5, atol=1e-6)
