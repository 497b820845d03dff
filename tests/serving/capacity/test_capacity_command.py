"""``podrun capacity`` as people type it: models of files, quantities, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from podrun.core.errors import PodrunError
from podrun.serving.capacity.arrivals import read_arrivals
from podrun.serving.capacity.quantities import duration_seconds, read_objectives, requests_per_second
from podrun.serving.commands.capacity import capacity_verb


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "dense.onnx"
    weights = numpy_helper.from_array(np.ones((64, 32), np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "dense",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 64])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 32])],
        [weights],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)]), path)
    return path


def asked(*words: str) -> Result:
    return CliRunner().invoke(capacity_verb, list(words), standalone_mode=False)


def test_a_model_of_a_file_is_answered_as_text_json_and_page(model: Path, tmp_path: Path) -> None:
    figures, page = tmp_path / "figures.json", tmp_path / "page.html"
    result = asked(
        *(str(model), "--rate", "20k/s", "--slo", "p99=5ms", "--batch", "1,8", "--requests", "2000"),
        *("--json", str(figures), "--html", str(page)),
    )
    assert result.return_value == 0, result.output
    assert "pod16 holds the service" in result.output
    assert json.loads(figures.read_text())["services"][0]["best"]["holds"]
    assert "<svg" in page.read_text()


@pytest.mark.parametrize("option", ["--json", "--html"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(option: str, tmp_path: Path) -> None:
    """The model does not even exist: its absence would be told if anything was planned."""
    for place in (tmp_path, tmp_path / "none" / "figures"):
        result = asked(str(tmp_path / "no.onnx"), "--rate", "1/s", option, str(place))
        assert f"{place} cannot be written" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_the_servers_own_work_for_a_run_is_part_of_it(model: Path, tmp_path: Path) -> None:
    runs = []
    for more in ([], ["--host-time", "2ms"]):
        figures = tmp_path / "figures.json"
        asked(
            str(model), "--rate", "100/s", "--batch", "4", "--requests", "200", "--json", str(figures), *more
        )
        (service,) = json.loads(figures.read_text())["services"]
        runs.append((service["runs"][0], service["best"]["latency_s"]["p50"]))
    assert runs[1][0]["seconds"] - runs[0][0]["seconds"] == pytest.approx(2e-3)
    assert runs[1][0]["host_s"] - runs[0][0]["host_s"] == pytest.approx(2e-3)
    assert runs[1][1] - runs[0][1] == pytest.approx(2e-3, rel=0.1)
    assert "--host-time: '2' is no duration" in str(
        asked(str(model), "--rate", "1/s", "--host-time", "2").exception
    )


def test_a_name_with_batch_stands_for_a_file_of_each_batch(model: Path, tmp_path: Path) -> None:
    for rows in (1, 4):
        fixed = onnx.load(model)
        for value in (*fixed.graph.input, *fixed.graph.output):
            value.type.tensor_type.shape.dim[0].dim_value = rows
        onnx.save(fixed, tmp_path / f"net-b{rows}.onnx")
    named = str(tmp_path / "net-b{batch}.onnx")
    result = asked(named, "--rate", "9k/s", "--batch", "1,4", "--requests", "500")
    assert result.return_value == 0, result.exception
    assert " 4 " in result.output
    assert "which batches" in str(asked(named, "--rate", "9k/s").exception)
    assert "net-b8.onnx" in str(asked(named, "--rate", "9k/s", "--batch", "8").exception)


def test_a_preferred_size_runs_at_once_and_others_wait_for_the_delay(model: Path, tmp_path: Path) -> None:
    waits = {}
    for preferred in ("", "2"):
        figures = tmp_path / "figures.json"
        words = [
            "--rate",
            "2k/s",
            "--batch",
            "8",
            "--delay",
            "2ms",
            "--requests",
            "2000",
            "--json",
            str(figures),
        ]
        assert asked(str(model), *words, "--preferred-batch", preferred).return_value == 0
        best = json.loads(figures.read_text())["services"][0]["best"]
        assert (best["delay_s"], best["preferred_batches"]) == (0.002, [2] if preferred else [])
        waits[preferred] = best["mean_wait_s"]
        if preferred:
            assert best["mean_rows"] == pytest.approx(2, abs=0.1)
    assert waits["2"] < 0.5 * waits[""]


def test_exit_code_1_says_that_the_target_does_not_hold(model: Path) -> None:
    result = asked(str(model), "--rate", "90M/s", "--slo", "p99=5ms", "--batch", "8", "--requests", "500")
    assert result.return_value == 1
    assert "does not hold" in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--target", "pod17", "--rate", "1/s"), "pod17"),
        ((), "how many requests"),
        (("--rate", "many"), "no rate"),
        (("--rate", "1/s", "--slo", "p99=20"), "no duration"),
        (("--rate", "1/s", "--slo", "p50=20ms,p99=10ms"), "p50 may be later than p99"),
        (("--rate", "1/s", "--arrivals", "closed:clients=4"), "have no --rate"),
        (("--rate", "1/s", "--arrivals", "sometimes"), "says nothing that is known"),
        (("--rate", "1/s", "--arrivals", "trace:no_such.csv"), "no_such.csv"),
        (("--rate", "1/s", "--rate", "2/s"), "given 2 times for 1 models"),
        (("--rate", "1/s", "--batch", "0"), "no batch sizes"),
        (("--rate", "1/s", "--preferred-batch", "4,x"), "--preferred-batch: '4,x' are no batch sizes"),
        (("--rate", "1/s", "--delay", "5"), "--delay: '5' is no duration"),
        (("--rate", "1/s", "--price", "pod16"), "no price"),
        (("--rate", "1/s", "--rows", "128", "--batch", "8"), "do not fit a batch"),
    ],
)
def test_what_cannot_be_is_refused_by_name(model: Path, words: tuple[str, ...], said: str) -> None:
    result = asked(str(model), *words)
    assert isinstance(result.exception, PodrunError)
    assert said in str(result.exception)
    assert result.exception.hint


def test_a_trace_says_file_and_line_of_a_clock_that_runs_backwards(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s\n1\n2\n1.5\n3\n")
    with pytest.raises(PodrunError, match=r"trace\.csv:4: the clock runs backwards by 0\.5 s"):
        read_arrivals(f"trace:{trace}")
    trace.write_text("when\n1\n2\n")
    with pytest.raises(PodrunError, match=r"trace\.csv:1: there is no column of times"):
        read_arrivals(f"trace:{trace}")


def test_quantities_have_their_units() -> None:
    assert requests_per_second("300/min") == 5
    assert requests_per_second("2.5k") == 2500
    assert duration_seconds("250us", "--slo") == 250e-6
    assert [(one.name, one.seconds) for one in read_objectives("p99.9=1s,p50=5ms")] == [
        ("p50", 0.005),
        ("p99.9", 1.0),
    ]
