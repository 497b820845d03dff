"""Fused files behind servers: a request has the inputs of one model and gets that model's outputs."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from podrun.core.errors import ConfigError, UnsupportedError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.convert.model_fusion import MFConverter
from podrun.serving.instance import PoplarInstance
from podrun.serving.repository import write_missing_config
from podrun.serving.tfserving.answers import load_version
from tests.serving.runtime.test_fusion_runner import MODELS, POWERS, ROWS, WIDTHS
from tests.serving.servers import tensor, triton

CONFIG: dict[str, Any] = {
    "max_batch_size": max(ROWS),
    "input": [
        {"name": f"graph{g}/x", "data_type": "TYPE_FP32", "dims": [WIDTHS[g]], "optional": True}
        for g in (0, 1)
    ],
    "output": [
        *({"name": f"graph{g}/y", "data_type": "TYPE_FP32", "dims": [WIDTHS[g]]} for g in (0, 1)),
        {"name": "ipu_time_us", "data_type": "TYPE_FP32", "dims": [3]},
    ],
}
WRITTEN = """backend: "poplar"
max_batch_size: 4
input [ { name: "graph0/x", data_type: TYPE_FP32, dims: [ 8 ], optional: true }, \
{ name: "graph1/x", data_type: TYPE_FP32, dims: [ 64 ], optional: true } ]
output [ { name: "graph0/y", data_type: TYPE_FP32, dims: [ 8 ] }, \
{ name: "graph1/y", data_type: TYPE_FP32, dims: [ 64 ] }, \
{ name: "ipu_time_us", data_type: TYPE_FP32, dims: [ 3 ] } ]
instance_group [ { kind: KIND_CPU, count: 1 } ]
dynamic_batching { }
"""


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version's folder with a fused file."""
    folder = tmp_path_factory.mktemp("models") / "fused" / "1"
    folder.mkdir(parents=True)
    Compiler.compile_and_export(
        MFConverter().convert(MODELS), None, folder, CompilerOptions(partials_type="float")
    )
    return folder


def rows_for(graph: int, rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, WIDTHS[graph])).astype(np.float32)


def close(graph: int, y: np.ndarray, x: np.ndarray) -> None:
    np.testing.assert_allclose(y, x.astype(np.float64) @ POWERS[graph], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("parameters", [{}, {"timeout_ns": {"string_value": "1000000"}}])
def test_requests_to_both_models_are_answered_together(version: Path, parameters: dict[str, Any]) -> None:
    instance = PoplarInstance(version, CONFIG | {"parameters": parameters})
    try:
        asked = [(n % 2, rows_for(n % 2, 1 + n % 3, n)) for n in range(7)]
        requests = [instance.prepared({f"graph{graph}/x": x}) for graph, x in asked]
        instance.answer(requests)
        for (graph, x), request in zip(asked, requests, strict=True):
            results = instance.results(request)
            assert set(results) == {f"graph{graph}/y", "ipu_time_us"}
            close(graph, results[f"graph{graph}/y"], x)
            assert results["ipu_time_us"].shape == (len(x), 3)
        for inputs, message in (
            ({}, "none of the inputs"),
            ({"graph0/x": rows_for(0, 1), "graph1/x": rows_for(1, 1)}, "the inputs of one graph"),
            ({"graph0/x": rows_for(1, 1)}, r"has shape \[1, 64\]"),
        ):
            with pytest.raises(UsageError, match=message):
                instance.prepared(inputs)
    finally:
        instance.runner.close()


def test_a_configuration_is_written_and_one_that_does_not_fit_is_told(version: Path) -> None:
    path = version.parent / "config.pbtxt"
    path.unlink(missing_ok=True)
    assert write_missing_config(version.parent) == path
    assert path.read_text() == WRITTEN
    inputs = [{**entry, "optional": False} for entry in CONFIG["input"]]
    with pytest.raises(ConfigError, match="'graph0/x' is not optional"):
        PoplarInstance(version, {**CONFIG, "input": inputs})
    with pytest.raises(UnsupportedError, match="is a fused model"):
        load_version("fused", version)


@pytest.mark.slow
@pytest.mark.system
def test_triton_serves_a_fused_file(version: Path) -> None:
    (version.parent / "config.pbtxt").unlink(missing_ok=True)
    with triton(version.parents[1], ["fused"]) as served:
        answers: queue.Queue[tuple[int, np.ndarray, Any, Any]] = queue.Queue()
        for n in range(24):
            graph, x = n % 2, rows_for(n % 2, 1 + n % 4, n)
            served.client.async_infer(
                "fused",
                tensor(x, f"graph{graph}/x"),
                lambda result, error, graph=graph, x=x: answers.put((graph, x, result, error)),
            )
        for _ in range(24):
            graph, x, result, error = answers.get(timeout=120)
            assert error is None
            close(graph, result.as_numpy(f"graph{graph}/y"), x)
            assert result.as_numpy(f"graph{1 - graph}/y") is None
        both = [*tensor(rows_for(0, 1), "graph0/x"), *tensor(rows_for(1, 1), "graph1/x")]
        with pytest.raises(Exception, match="inputs of one graph"):
            served.client.infer("fused", both, client_timeout=60)
        x = rows_for(1, 3)
        close(1, served.client.infer("fused", tensor(x, "graph1/x")).as_numpy("graph1/y"), x)
