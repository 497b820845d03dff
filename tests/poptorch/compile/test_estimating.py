"""`podrun estimate` of PyTorch programs and modules: it takes the model at compile time, and nothing runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun.estimate.command import main  # noqa: E402

PROGRAM = """
import sys
import torch
import poptorch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU())
        self.head = torch.nn.Linear(32, int(sys.argv[1]) if len(sys.argv) > 1 else 5)

    def forward(self, x, labels=None):
        logits = self.head(self.body(x))
        return logits if labels is None else (logits, torch.nn.functional.cross_entropy(logits, labels))

class Fixed(Net):
    def forward(self, x):
        return self.head(self.body(x)).reshape(6, 5)

if __name__ == "__main__":
    print("starts")
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    model = poptorch.trainingModel(Net(), options)
    model(torch.ones(12, 12), torch.zeros(12, dtype=torch.int64))
    print("trained", file=sys.stderr)
    poptorch.inferenceModel(Net())(torch.ones(2, 12))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "train_net.py"
    path.write_text(PROGRAM)
    return str(path)


def _answer(capsys: Any, *words: str) -> Any:
    assert main(["--format", "json", *words]) == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)["estimates"]


def test_a_program_is_estimated_up_to_its_first_training_model(program: str, capsys: Any) -> None:
    (found,) = _answer(capsys, program, "--train", "--", "7")
    assert (found["micro_batch"], found["accumulation"]) == (4, 3)
    modules = {each["name"]: each["weight_bytes"] for each in found["modules"]}
    assert modules["body/0"] == 4 * 12 * 32 + 4 * 32
    assert modules["head"] == 4 * 32 * 7 + 4 * 7
    assert all(each["cycles"] > 0 for each in found["modules"] if each["weight_bytes"])


def test_a_module_is_estimated_in_layouts_of_other_batches(program: str, capsys: Any) -> None:
    found = _answer(capsys, f"{program}:Net", "--input", "6x12", "--scan")
    assert {6, 32} <= {each["micro_batch"] for each in found}
    assert {1, 2} <= {each["ipus_per_replica"] for each in found}
    fixed = _answer(capsys, f"{program}:Fixed", "--input", "6x12", "--scan")
    assert {each["micro_batch"] for each in fixed} == {6}


def test_the_text_of_an_estimate_names_modules(program: str, capsys: Any) -> None:
    assert main([f"{program}:Net", "--input", "6x12"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.endswith("body/0") for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{}:Absent", "--input", "6x12"], "has no Absent"),
        (["{}:Net"], "inputs of Net are not known"),
        (["{}:Net", "--input", "6xx"], "no shape"),
        (["{}:Fixed", "--input", "6x12", "--micro-batch", "4"], "no micro-batch of 4"),
        (["absent.py", "--train"], "there is no file absent.py"),
        (["{}", "--", "many"], "ends before it compiles"),
    ],
)
@pytest.mark.sample(2)
def test_what_an_estimate_cannot_take_is_told(program: str, capsys: Any, words: list[str], said: str) -> None:
    assert main([word.format(program) for word in words]) == 2
    assert said in capsys.readouterr().err


def test_a_program_without_such_a_model_says_which_there_is(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "empty.py").write_text("import poptorch\n")
    assert main([str(tmp_path / "empty.py"), "--train"]) == 2
    assert "compiles no poptorch.trainingModel" in capsys.readouterr().err


def test_a_mistake_in_forward_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "net.py"
    source.write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def forward(self, x):\n        return x.reshape(2, 7)\n"
    )
    assert main([f"{source}:Net", "--input", "2x8"]) == 2
    assert f"{source}:5" in capsys.readouterr().err
