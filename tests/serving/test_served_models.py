"""The architectures that ship in the onnx wheel and a BERT behind servers, against onnxruntime: converted, compiled,
loaded by the genuine Triton, asked by its own client. Small models go the same way without a server.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.convert.auto_sharding import auto_sharded
from podrun.serving.convert.converter import Converter
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.convert.report_passes import made_up_inputs
from podrun.serving.instance import PoplarInstance
from podrun.serving.repository import write_missing_config
from tests.serving.convert.models import bert, convolutional
from tests.serving.convert.test_real_models import NAMES, real_model
from tests.serving.servers import TritonOfTest, triton

LARGEST_DIFFERENCE = 1e-4
"""Of outputs, over 1 or the largest output: sums in another order, over 50 layers."""
KINDS = {"float32": "FP32", "int32": "INT32"}
SECONDS = 400.0
"""How long a load or an answer may take on a loaded host."""


IPUS = {"vgg19": 4}
"""IPUs of models that do not fit one: the largest matrix of VGG-19 is laid out anew beside 575 MB of weights."""


def write_version(model: onnx.ModelProto, folder: Path, ipus: int = 1) -> None:
    """Convert and compile a model into a repository's folder, with its configuration."""
    (folder / "1").mkdir(parents=True)
    converted, options = (
        Converter(enable_erf_gelu=True).convert(model),
        CompilerOptions(partials_type="float"),
    )
    if ipus > 1:
        converted = auto_sharded(converted, ipus).model
        options.num_ipus, options.virtual_graph_mode = ipus, "manual"
    Compiler.compile_and_export(converted, None, folder / "1", options)
    assert write_missing_config(folder) is not None


def inputs_and_right_outputs(model: onnx.ModelProto) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Made-up inputs as servers take them (64-bit integers have become 32-bit ones), and onnxruntime's outputs."""
    inputs = made_up_inputs(model)
    right = run_onnxruntime(model, inputs)
    narrow = {n: v.astype(np.int32) if v.dtype == np.int64 else v for n, v in inputs.items()}
    return narrow, right


def check(results: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> None:
    for name, value in right.items():
        scale = max(1.0, float(np.abs(value).max()))
        assert results[name].shape == value.shape
        np.testing.assert_allclose(results[name] / scale, value / scale, rtol=0, atol=LARGEST_DIFFERENCE)


# --- Without a server ---------------------------------------------------------------------------------------------


def configuration(folder: Path) -> dict[str, Any]:
    """The configuration as Triton gives it to backends."""
    grpc = pytest.importorskip("tritonclient.grpc")
    from google.protobuf import json_format, text_format

    parsed = text_format.Parse((folder / "config.pbtxt").read_text(), grpc.model_config_pb2.ModelConfig())
    told: dict[str, Any] = json_format.MessageToDict(parsed, preserving_proto_field_name=True)
    return told


@pytest.mark.parametrize("name", [pytest.param("bert", marks=pytest.mark.slow), "convolutional"])
def test_a_small_model_behind_the_backend_gives_the_numbers_of_onnxruntime(name: str, tmp_path: Path) -> None:
    model = bert(layers=1, hidden=16, heads=2, length=5) if name == "bert" else convolutional()
    write_version(model, tmp_path / name)
    inputs, right = inputs_and_right_outputs(model)
    instance = PoplarInstance(tmp_path / name / "1", configuration(tmp_path / name))
    try:
        whole = instance.prepared(inputs)
        one_row = instance.prepared({n: v[:1] for n, v in inputs.items()})
        instance.answer([whole, one_row])
        check(instance.results(whole), right)
        check(instance.results(one_row), {n: v[:1] for n, v in right.items()})
    finally:
        instance.runner.close()


# --- With the genuine Triton --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TritonOfTest, Path]]:
    """A server without models, and its repository."""
    repository = tmp_path_factory.mktemp("real") / "models"
    repository.mkdir()
    with triton(repository, [], "--model-control-mode=explicit") as served:
        yield served, repository


def asked(served: TritonOfTest, name: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The outputs of one request."""
    import tritonclient.grpc as grpcclient

    tensors = []
    for key, value in inputs.items():
        tensors.append(grpcclient.InferInput(key, list(value.shape), KINDS[value.dtype.name]))
        tensors[-1].set_data_from_numpy(value)
    result = served.client.infer(name, tensors, client_timeout=SECONDS)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("name", [*NAMES, "bert"])
def test_a_real_model_served_by_triton_gives_the_numbers_of_onnxruntime(
    server: tuple[TritonOfTest, Path], name: str
) -> None:
    served, repository = server
    model = (
        bert(layers=4, hidden=256, heads=4, length=64, vocabulary=1000)
        if name == "bert"
        else real_model(name)
    )
    write_version(model, repository / name, IPUS.get(name, 1))
    inputs, right = inputs_and_right_outputs(model)
    served.client.load_model(name, client_timeout=SECONDS)
    try:
        for _ in range(2):
            check(asked(served, name, inputs), right)
    finally:
        served.client.unload_model(name, client_timeout=SECONDS)
        shutil.rmtree(repository / name)
