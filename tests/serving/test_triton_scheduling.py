"""What the genuine Triton does with requests before and after podrun's backend: sequences, ensembles, priorities,
limits, timeouts, statistics, traces; and what the parameters of a model do.
"""

from __future__ import annotations

import json
import queue
import shutil
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from podrun.serving.compiler import Compiler
from tests.serving.servers import TritonOfTest, tensor, triton
from tests.serving.test_runner import OPTIONS, expected, model, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.system]
X = 'input [ { name: "x", data_type: TYPE_FP32, dims: [ 8 ] } ]'
Y = 'output [ { name: "y", data_type: TYPE_FP32, dims: [ 3 ] } ]'
BASE = f'backend: "poplar"\n{X}\n{Y}\n'
SLOW_S = 0.3
"""Seconds of a run of the slow models: each waits so long for others, which do not come."""
LONG_S = 2.0
"""The same of a model behind whose run others wait for longer than they may."""


def slow(seconds: float) -> str:
    """Parameters of a model whose runs take so long."""
    return (
        f'parameters [ {{ key: "timeout_ns" value: {{ string_value: "{int(seconds * 1e9)}" }} }}, '
        '{ key: "synchronous_execution" value: { string_value: "1" } } ]\n'
    )


ENSEMBLE = """platform: "ensemble"
max_batch_size: 4
input [ { name: "a", data_type: TYPE_FP32, dims: [ 8 ] } ]
output [ { name: "z", data_type: TYPE_FP32, dims: [ 3 ] } ]
ensemble_scheduling { step [
  { model_name: "net" model_version: -1 input_map { key: "x" value: "a" } output_map { key: "y" value: "h" } },
  { model_name: "negated" model_version: -1 input_map { key: "y" value: "h" } output_map { key: "z" value: "z" } }
] }
"""
NEGATED = """backend: "poplar"
max_batch_size: 4
input [ { name: "y", data_type: TYPE_FP32, dims: [ 3 ] } ]
output [ { name: "z", data_type: TYPE_FP32, dims: [ 3 ] } ]
"""
CONFIGS = {
    "net": f"{BASE}max_batch_size: 4\ndynamic_batching {{ }}\n",
    "negated": NEGATED,
    "both": ENSEMBLE,
    "sequence": f"{BASE}max_batch_size: 4\nsequence_batching {{ max_sequence_idle_microseconds: 60000000 }}\n",
    "ranked": f"{BASE}{slow(SLOW_S)}max_batch_size: 1\n"
    "dynamic_batching { priority_levels: 2 default_priority_level: 2 }\n",
    "hasty": f"{BASE}{slow(LONG_S)}max_batch_size: 1\n"
    "dynamic_batching { default_queue_policy { timeout_action: REJECT "
    "default_timeout_microseconds: 100000 allow_timeout_override: true } }\n",
    "limited": f"{BASE}{slow(SLOW_S)}max_batch_size: 1\ninstance_group [ {{ kind: KIND_CPU count: 2 "
    'rate_limiter { resources [ { name: "lane" count: 1 } ] } } ]\n',
    "shared": f"{BASE}max_batch_size: 4\ndynamic_batching {{ max_queue_delay_microseconds: 60000000 }}\n",
    "apart": f"{BASE}max_batch_size: 4\ndynamic_batching {{ max_queue_delay_microseconds: 60000000 }}\n"
    'parameters { key: "synchronous_execution" value: { string_value: "1" } }\n',
    "late": f'{BASE}max_batch_size: 4\nparameters {{ key: "timeout_ns" value: {{ string_value: "soon" }} }}\n',
    "words": BASE.replace("TYPE_FP32, dims: [ 8 ]", "TYPE_STRING, dims: [ 8 ]") + "max_batch_size: 4\n",
}
UNREADY = {
    "late": "parameter timeout_ns is 'soon'",
    "words": "input 'x' has TYPE_STRING, which IPUs do not compute",
}


def negation() -> onnx.ModelProto:
    """``z = -y``."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Neg", ["y"], ["z"])],
        "negation",
        [value("y", TensorProto.FLOAT, [4, 3])],
        [value("z", TensorProto.FLOAT, [4, 3])],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=8)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonOfTest]:
    repository = tmp_path_factory.mktemp("scheduling") / "models"
    compiled = repository / "net" / "1" / "executable.popef"
    compiled.parent.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, compiled, OPTIONS)
    for name, config in CONFIGS.items():
        (repository / name / "1").mkdir(parents=True, exist_ok=True)
        (repository / name / "config.pbtxt").write_text(config)
        if name not in ("net", "both", "negated"):
            shutil.copy(compiled, repository / name / "1")
    Compiler.compile_and_export(negation(), None, repository / "negated" / "1", OPTIONS)
    trace = repository.parent / "trace.json"
    words = ["--rate-limit=execution_count", "--rate-limit-resource=lane:1"]
    words += ["--trace-config=mode=triton", f"--trace-config=triton,file={trace}", "--trace-config=rate=1"]
    words += ["--trace-config=level=TIMESTAMPS", "--trace-config=triton,log-frequency=1"]
    with triton(repository, [name for name in CONFIGS if name not in UNREADY], *words) as server:
        yield server


def asked_at_once(client: Any, model_name: str, count: int, **options: Any) -> list[tuple[int, Any, Any]]:
    """Answers in the order in which they came: number, result, error."""
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    for i in range(count):
        client.async_infer(
            model_name,
            tensor(rows_of(1, i)),
            lambda result, error, i=i: answers.put((i, result, error)),
            **options,
        )
    return [answers.get(timeout=60) for _ in range(count)]


def right(result: Any, x: np.ndarray, name: str = "y", sign: int = 1) -> None:
    np.testing.assert_allclose(result.as_numpy(name), sign * expected(x), rtol=1e-5, atol=1e-6)


def test_an_ensemble_goes_through_two_models(served: TritonOfTest) -> None:
    x = rows_of(3)
    right(served.client.infer("both", tensor(x, "a"), client_timeout=60), x, "z", -1)


def test_sequences_keep_their_order_and_need_a_start(served: TritonOfTest) -> None:
    from tritonclient.utils import InferenceServerException

    for step in range(4):
        for sequence in (7, 8):
            x = rows_of(1, 10 * sequence + step)
            result = served.client.infer(
                "sequence",
                tensor(x),
                sequence_id=sequence,
                sequence_start=step == 0,
                sequence_end=step == 3,
                client_timeout=60,
            )
            right(result, x)
    with pytest.raises(InferenceServerException, match="START"):
        served.client.infer("sequence", tensor(rows_of(1)), sequence_id=9, client_timeout=60)


def metrics_of(served: TritonOfTest) -> list[str]:
    with urllib.request.urlopen(f"http://{served.metrics}/metrics", timeout=30) as answer:
        return str(answer.read().decode()).splitlines()


def waiting_requests(served: TritonOfTest, name: str) -> int:
    """How many requests for a model wait for a run."""
    start = f'nv_inference_pending_request_count{{model="{name}"'
    (line,) = [line for line in metrics_of(served) if line.startswith(start)]
    return int(float(line.split()[-1]))


def test_a_priority_comes_before_what_waits(served: TritonOfTest) -> None:
    def order() -> list[str] | None:
        """In which order answers come; nothing where the first came before all the others waited, as it may on a
        busy host.
        """
        answers: queue.Queue[str] = queue.Queue()
        kept = True
        for priority, name, count, waiting in ((2, "low", 3, 2), (1, "high", 1, 3)):
            for _ in range(count):
                served.client.async_infer(
                    "ranked",
                    tensor(rows_of(1)),
                    lambda result, error, name=name: answers.put(name if error is None else str(error)),
                    priority=priority,
                )
            while waiting_requests(served, "ranked") != waiting and answers.empty():
                pass
            kept = kept and answers.empty()
        came = [answers.get(timeout=60) for _ in range(4)]
        return came if kept else None

    kept = next((came for came in (order() for _ in range(50)) if came), None)
    assert kept == ["low", "high", "low", "low"]


def test_late_requests_are_given_back(served: TritonOfTest) -> None:
    """The last one may not wait at all, the first as long as it takes."""
    answers: queue.Queue[tuple[int, Any, Any]] = queue.Queue()
    for i, microseconds in enumerate((60_000_000, None, None, 1)):
        served.client.async_infer(
            "hasty",
            tensor(rows_of(1, i)),
            lambda result, error, i=i: answers.put((i, result, error)),
            timeout=microseconds,
        )
    came = sorted((answers.get(timeout=60) for _ in range(4)), key=lambda answer: answer[0])
    errors = [str(error) for _, _, error in came if error is not None]
    assert came[0][2] is None
    assert came[3][2] is not None
    assert all("timeout" in error.lower() for error in errors)
    for i, result, error in came:
        if error is None:
            right(result, rows_of(1, i))


def test_a_limit_holds_over_instances(served: TritonOfTest) -> None:
    begin = time.monotonic()
    answers = asked_at_once(served.client, "limited", 4)
    assert all(error is None for *_, error in answers)
    assert time.monotonic() - begin >= 4 * SLOW_S * 0.95  # Two instances, one lane.


@pytest.mark.parametrize(("name", "runs"), [("shared", 1), ("apart", 4)])
def test_synchronous_execution_runs_each_request_alone(served: TritonOfTest, name: str, runs: int) -> None:
    def emulated() -> float:
        lines = [line for line in metrics_of(served) if f'_compute_seconds_total{{model="{name}"' in line]
        return float(lines[0].split()[-1]) if lines else 0.0

    one = emulated()
    served.client.infer(name, tensor(rows_of(4)), client_timeout=60)
    one = emulated() - one
    before = emulated()
    answers = asked_at_once(served.client, name, 4)
    for i, result, error in answers:
        assert error is None
        right(result, rows_of(1, i))
    assert (emulated() - before) / one == pytest.approx(runs, rel=0.01)


def test_what_cannot_be_served_is_the_reason_of_an_unready_model(served: TritonOfTest) -> None:
    index = {entry.name: entry for entry in served.client.get_model_repository_index().models}
    for name, reason in UNREADY.items():
        assert index[name].state == "UNAVAILABLE"
        assert reason in index[name].reason


def test_statistics_and_traces_tell_of_requests(served: TritonOfTest) -> None:
    served.client.infer("net", tensor(rows_of(2)), request_id="traced", client_timeout=60)
    (statistics,) = served.client.get_inference_statistics("net").model_stats
    assert statistics.inference_stats.success.count >= 1
    assert statistics.inference_stats.compute_infer.ns > 0
    assert statistics.inference_count >= 2
    assert served.client.get_trace_settings().settings["trace_level"].value == ["TIMESTAMPS"]
    traces: list[Any] = []
    for _ in range(1200):
        files = list(served.log.parent.glob("trace.json*"))
        with_text = [file.read_text() for file in files]
        traces = [entry for text in with_text if text for entry in _entries(text)]
        if any(entry.get("request_id") == "traced" for entry in traces):
            break
        time.sleep(0.05)
    (mine,) = [entry for entry in traces if entry.get("request_id") == "traced"]
    names = {
        stamp["name"]
        for entry in traces
        if entry["id"] == mine["id"]
        for stamp in entry.get("timestamps", ())
    }
    assert {"COMPUTE_START", "COMPUTE_END"} <= names


def _entries(text: str) -> list[Any]:
    """The traces of a file that may still be written to."""
    try:
        return list(json.loads(text))
    except ValueError:
        return list(json.loads(text.rstrip().rstrip(",") + "]"))
