"""The programs that PopRT publishes as scripts: ``poprt_exec auto_sharding.py`` and ``model_debugger.py``."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner

from podrun.core.errors import GraphMemoryAllocationError, PodrunError, UsageError
from podrun.serving.compiler import Compiler, CompilerOptions
from podrun.serving.convert import auto_sharding
from podrun.serving.convert.auto_sharding import auto_sharded, evenly_cut_places
from podrun.serving.convert.model_debugger import METHODS
from podrun.serving.convert.reference_runs import run_onnxruntime
from podrun.serving.loaded_model import LoadedModel
from podrun.serving.run_popef_command import exec_command
from tests.serving.convert.models import FLOAT, Writer
from tests.serving.test_runner import WEIGHT, model, rows_of


def run(*words: str) -> str:
    """The output of a program."""
    return CliRunner().invoke(exec_command, list(words), standalone_mode=False, catch_exceptions=False).output


# --- Sharding -----------------------------------------------------------------------------------------------------


def best_cut(costs: list[int], parts: int) -> int:
    """The cost of the dearest part at best, by trying all cuts."""
    cuts = itertools.combinations(range(1, len(costs)), parts - 1)
    return min(max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cut, len(costs)))) for cut in cuts)


@pytest.mark.parametrize("parts", [2, 3, 4])
def test_cuts_are_as_even_as_can_be(parts: int) -> None:
    source = np.random.default_rng(parts)
    for size in (parts, 5, 9):
        for costs in (source.integers(0, 10, size).tolist(), [0] * size, [9, *[0] * (size - 1)]):
            places = evenly_cut_places(costs, parts)
            assert sorted(set(places)) == list(range(parts))
            assert list(places) == sorted(places)
            dearest = max(
                sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(parts)
            )
            assert dearest == best_cut(costs, parts)


def layers(count: int = 4) -> onnx.ModelProto:
    """Products one after the other, without names of nodes."""
    w, x = Writer(3), "x"
    for number in range(count):
        x = w("MatMul", x, w.weight(8, 8), out="y" if number == count - 1 else "")
    proto = w.model({"x": (FLOAT, [4, 8])}, {"y": (FLOAT, [4, 8])}, opset=11)
    for node in proto.graph.node:
        node.name = ""
    return proto


def test_a_model_is_put_on_ipus_and_runs_there(tmp_path: Path) -> None:
    onnx.save(layers(), tmp_path / "net.onnx")
    text = run(
        "auto_sharding.py", "--input_model", str(tmp_path / "net.onnx"), "--num_ipus", "2", "--optimal_perf"
    )
    assert "IPU 0: 2 nodes" in text
    assert "IPU 1: 2 nodes" in text
    placed = onnx.load(tmp_path / "net.onnx.auto_sharded.onnx")
    places = [a.i for node in placed.graph.node for a in node.attribute if a.name == "__ipu_number"]
    assert places == [0, 0, 1, 1]
    options = CompilerOptions(num_ipus=2, virtual_graph_mode="manual", partials_type="float")
    with LoadedModel(Compiler.compile(placed, None, options)) as loaded:
        x = rows_of(4)
        results, _ = loaded.run({"x": x}, 1)
    np.testing.assert_allclose(results["y"], run_onnxruntime(layers(), {"x": x})["y"], rtol=1e-4, atol=1e-5)


def test_what_cannot_be_sharded_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="4 nodes, less than the 8 IPUs"):
        auto_sharded(layers(), 8)
    with pytest.raises(PodrunError, match="there is no file"):
        run("auto_sharding", "--input_model", str(tmp_path / "no.onnx"), "--num_ipus", "2")
    tried: list[float] = []

    def too_large(*arguments: object) -> None:
        tried.append(float(str(arguments[3])))
        raise GraphMemoryAllocationError("Out of memory on tile 7: 700000 bytes used")

    monkeypatch.setattr(auto_sharding, "_compiled", too_large)
    with pytest.raises(
        GraphMemoryAllocationError, match="does not fit 2 IPUs: Out of memory on tile 7"
    ) as told:
        auto_sharded(layers(), 2)
    assert told.value.hint == "Take more IPUs: --num_ipus 4"
    assert tried == [0.6, 0.3, 0.1]


# --- Debugging ----------------------------------------------------------------------------------------------------


def test_methods_are_those_of_their_names() -> None:
    a, b = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0])
    right = {"mse": 5 / 3, "rmse": (5 / 3) ** 0.5, "mae": 1.0, "mape": 100 / 3, "r2": 1 - 5 / (14 / 3)}
    assert {name: method(a, b) for name, method in METHODS.items()} == pytest.approx(right)


def test_two_engines_are_compared(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "net.onnx")
    np.save(tmp_path / "x.npy", rows_of(4))
    words = ["--src_model", str(tmp_path / "net.onnx"), "--compare_method", "mae,mse"]
    words += ["--input_data", f"x={tmp_path / 'x.npy'}", "--mark_outputs", "all"]
    text = run("model_debugger.py", "compare", *words, "--dump_data", "--dump_dir", str(tmp_path / "dump"))
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "y - shape: (4, 3)"
    assert lines[3] == "h - shape: (4, 3)"
    assert float(lines[1].removeprefix("mae - diff: ")) < 1e-2
    np.testing.assert_allclose(
        np.load(tmp_path / "dump" / "h_src.npy"), rows_of(4) @ WEIGHT, rtol=1e-5, atol=1e-6
    )
    assert {p.name for p in (tmp_path / "dump").iterdir()} == {
        f"{n}_{w}.npy" for n in "hy" for w in ("src", "dst")
    }


def test_a_changed_model_is_compared_under_other_names(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "net.onnx")
    other = model()
    other.graph.output[0].name = other.graph.node[1].output[0] = "z"
    onnx.save(other, tmp_path / "other.onnx")
    source, target = str(tmp_path / "net.onnx"), str(tmp_path / "new.onnx")
    run(
        "model_debugger",
        "modify",
        "--model",
        str(tmp_path / "other.onnx"),
        "--update",
        "w=zeros",
        "--output_model",
        target,
    )
    text = run(
        *(
            "model_debugger",
            "compare",
            "--src_model",
            source,
            "--dst_model",
            target,
            "--dst_backend",
            "onnxruntime",
        ),
        *("--mark_io_mapping", "y=z", "--input_data", "x=ones"),
    )
    right = np.mean(np.square(np.maximum(np.ones((4, 8)) @ WEIGHT.astype(np.float64), 0)))
    assert float(text.splitlines()[1].strip().removeprefix("mse - diff: ")) == pytest.approx(right, rel=1e-5)
    words = ("compare", "--src_model", source, "--dst_backend", "onnxruntime")
    for more, message in (
        (["--dst_model", target], "no outputs in common"),
        (["--compare_method", "l7"], "there is no 'l7'"),
        (["--mark_outputs", "q"], "'q' is not in both models"),
        (["--input_data", "q=ones"], "no input 'q'"),
        (["--input_data", "x=none.npy"], "there is no file"),
        (["--input_data", f"x={source}"], "is no array of NumPy"),
    ):
        with pytest.raises(PodrunError, match=message):
            run("model_debugger", *words, *more)


def test_parts_of_a_model_are_taken_out_sorted_and_printed(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(), path)
    part = str(tmp_path / "part.onnx")
    run(
        "model_debugger",
        "modify",
        "--model",
        str(path),
        "--extract",
        "input_names=h",
        "output_names=y",
        "--output_model",
        part,
    )
    x = np.float32([[-1.0, 2.0, 3.0]] * 4)
    np.testing.assert_array_equal(run_onnxruntime(onnx.load(part), {"h": x})["y"], np.maximum(x, 0))
    unsorted = model()
    nodes = [*unsorted.graph.node][::-1]
    del unsorted.graph.node[:]
    unsorted.graph.node.extend(nodes)
    onnx.save(unsorted, path)
    run("model_debugger", "modify", "--model", str(path), "--sort")
    onnx.save(model(), path)
    assert [n.op_type for n in onnx.load(f"{path}.updated.onnx").graph.node] == ["MatMul", "Relu"]
    text = run("model_debugger", "print", "--model", str(path))
    assert (
        "Model inputs:\n  Name: x\n    Shape: [4, 8]\n    Data type: float32\nModel outputs:\n  Name: y"
        in text
    )
    text = run("model_debugger", "print", "--model", str(path), "--level", "tensor")
    assert "Inputs: ['x', 'w']" in text
    assert "Op type: Relu" in text
    assert "    Value: " in run("model_debugger", "print", "--model", str(path), "--name", "w")
    for words, message in (
        (["print", "--name", "q"], "no node or tensor of the model matches 'q'"),
        (["modify"], "modify does one thing, not none"),
        (["modify", "--sort", "--update", "w=ones"], "not --update and --sort"),
        (["modify", "--update", "q=ones"], "no weight or input 'q'"),
        (["modify", "--extract", "input_names=x"], "takes input_names and output_names"),
        (["modify", "--extract", "input_names=x", "output_names=q"], "no tensor 'q'"),
    ):
        with pytest.raises(PodrunError, match=message):
            run("model_debugger", *words, "--model", str(path))
