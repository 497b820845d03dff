"""Fused models: the names of a request say which one computes, and each is batched by itself."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from onnx import ModelProto

from podrun.core.errors import SystemRuntimeError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions, ServedModel
from podrun.serving.convert.model_fusion import MFConverter
from podrun.serving.loaded_model import LoadedModel
from podrun.serving.run_popef_command import exec_command
from podrun.serving.runner import ModelRunner
from podrun.serving.runtime.config import MODEL_FUSION_RUNNER, RuntimeConfig
from podrun.serving.runtime.factory import make_runner
from podrun.serving.runtime.fusion_runner import ModelFusionRunner
from tests.serving.convert.models import FLOAT, Writer

WIDTHS = (8, 64)
ROWS = (1, 4)


def chain(width: int, rows: int, products: int, seed: int) -> tuple[ModelProto, np.ndarray]:
    """A model that multiplies by one matrix again and again, and that matrix to the power."""
    w = Writer(seed)
    matrix = (w.random.standard_normal((width, width)) / width).astype(np.float32)
    held, x = w.constant(matrix), "x"
    for number in range(products):
        x = w("MatMul", x, held, out="y" if number == products - 1 else "")
    model = w.model({"x": (FLOAT, [rows, width])}, {"y": (FLOAT, [rows, width])}, opset=11)
    power: np.ndarray = np.linalg.matrix_power(matrix.astype(np.float64), products)
    return model, power


CHAINS = [chain(WIDTHS[0], ROWS[0], 1, 1), chain(WIDTHS[1], ROWS[1], 4, 2)]
MODELS, POWERS = [model for model, _ in CHAINS], [power for _, power in CHAINS]


@pytest.fixture(scope="module")
def fused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fused") / "executable.popef"
    Compiler.compile_and_export(
        MFConverter().convert(MODELS), None, path, CompilerOptions(partials_type="float")
    )
    return path


def request(graph: int, rows: int, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    x = np.random.default_rng(seed).standard_normal((rows, WIDTHS[graph])).astype(np.float32)
    return {f"graph{graph}/x": x}, {f"graph{graph}/y": np.full_like(x, np.nan)}


def check(graph: int, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray]) -> None:
    wanted = inputs[f"graph{graph}/x"].astype(np.float64) @ POWERS[graph]
    np.testing.assert_allclose(outputs[f"graph{graph}/y"], wanted, rtol=1e-4, atol=1e-5)


def test_names_say_which_model_computes(fused: Path) -> None:
    with make_runner(str(fused), RuntimeConfig(batching_dim=0, timeout_ns=1_000_000)) as runner:
        assert isinstance(runner, ModelFusionRunner)
        assert [d.name for d in runner.get_execute_inputs()] == ["graph0/x", "graph1/x"]
        jobs = [(number % 2, request(number % 2, 1 + number % 5, number)) for number in range(12)]
        futures = [runner.execute_async(*arrays) for _, arrays in jobs]
        for future, (graph, arrays) in zip(futures, jobs, strict=True):
            future.wait(60)
            check(graph, *arrays)
        inputs, outputs = request(1, 3)
        runner.execute(inputs | {"index": np.asarray([1], np.int32)}, outputs)
        check(1, inputs, outputs)


def test_each_model_has_its_own_batch_and_cost(fused: Path) -> None:
    with ModelFusionRunner(str(fused)) as runner:
        costs = []
        for graph in (0, 1):
            inputs, outputs = request(graph, 2 * ROWS[graph])
            future = runner.execute_async(inputs, outputs)
            future.wait(60)
            check(graph, inputs, outputs)
            costs.append(future.modelled)
        small, large = (cost.compute_s for cost in costs if cost is not None)
        assert 2 * small < large
        with pytest.raises(UsageError, match="the model was compiled for 4"):
            runner.execute(*request(1, 3))


def test_requests_of_no_model_or_several_are_refused(fused: Path) -> None:
    with ModelFusionRunner(str(fused)) as runner:
        zero, one = request(0, 1), request(1, 4)
        for inputs, outputs, message in (
            (zero[0] | one[0], {}, "the inputs of one graph"),
            ({}, {}, "the inputs of one graph"),
            (zero[0] | {"index": np.asarray([1], np.int32)}, zero[1], r"with index \[1\]"),
            ({"graph7/x": zero[0]["graph0/x"]}, {}, "has no graph 7"),
            (zero[0], one[1], "there is no output 'graph1/y'"),
        ):
            with pytest.raises(UsageError, match=message):
                runner.execute(inputs, outputs)
        runner.execute(*zero)
        check(0, *zero)
    with pytest.raises(UsageError, match="is a fused model") as told:
        ModelRunner(str(fused))
    assert "ModelFusionRunner" in str(told.value.hint)
    single = Compiler.compile(MODELS[0], None, CompilerOptions())
    with pytest.raises(UsageError, match="is no fused model"):
        make_runner(single, RuntimeConfig(runner_type=MODEL_FUSION_RUNNER))


def test_an_error_of_the_ipus_ends_all_models(fused: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ModelFusionRunner(str(fused)) as runner:

        def lost(*_: object, **__: object) -> None:
            raise SystemRuntimeError("the machine is lost")

        with monkeypatch.context() as patch:
            patch.setattr(LoadedModel, "start", lost)
            with pytest.raises(SystemRuntimeError):
                runner.execute(*request(0, 1))
        with pytest.raises(SystemRuntimeError, match="is lost"):
            runner.execute(*request(1, 4))
        assert runner.failure is not None


def test_models_take_turns_under_many_threads(fused: Path) -> None:
    wrong: list[BaseException] = []
    with ModelFusionRunner(str(fused), RuntimeConfig(batching_dim=0, timeout_ns=100_000)) as runner:

        def work(seed: int) -> None:
            try:
                for turn in range(8):
                    graph = (seed + turn) % 2
                    arrays = request(graph, 1 + seed, 10 * seed + turn)
                    runner.execute(*arrays)
                    check(graph, *arrays)
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert wrong == []


def test_poprt_run_popef_runs_the_graph_that_index_names(fused: Path, tmp_path: Path) -> None:
    words = ["poprt_run_popef", "--popef", str(fused), "--iteration", "6"]
    result = CliRunner().invoke(exec_command, [*words, "--index", "1"], standalone_mode=False)
    assert result.exception is None
    assert "Throughput" in result.output
    for more, message in ((["--index", "5"], "has no graph 5"), ([], "the file holds the graphs 0, 1")):
        result = CliRunner().invoke(exec_command, [*words, *more], standalone_mode=False)
        assert message in str(result.exception)
    plain = tmp_path / "executable.popef"
    Compiler.compile_and_export(MODELS[0], None, plain, CompilerOptions())
    words[2] = str(plain)
    result = CliRunner().invoke(exec_command, [*words, "--index", "0"], standalone_mode=False)
    assert "this is none" in str(result.exception)


def test_poprt_tells_latency_of_each_model(fused: Path) -> None:
    from podrun.serving.poprt_flow import run_lines

    lines = run_lines(ServedModel(fused), 1)
    words = ["Bs", "Latency", "Tput"]
    assert [line.split(":")[0] for line in lines] == ["graph0", *words, "graph1", *words]
    assert [lines[1], lines[5]] == ["Bs: 1", "Bs: 4"]
