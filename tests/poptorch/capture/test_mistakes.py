"""Mistakes inside forward: one short error with the module, the user's line, shapes and types; no frames of torch."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.core.errors import UsageError  # noqa: E402
from podrun.poptorch.compile.estimating import module_source  # noqa: E402

F = torch.nn.functional
X, LABELS = torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64)


class Inner(torch.nn.Module):
    """Makes one mistake."""

    def __init__(self, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.wrong, self.layer, self.norm = wrong, torch.nn.Linear(5, 2), torch.nn.BatchNorm2d(3)

    def forward(self, x: Any, labels: Any) -> Any:
        return self.wrong(self, x, labels)


class Outer(torch.nn.Module):
    """Has the module that makes the mistake."""

    def __init__(self, wrong: Callable[..., Any]) -> None:
        super().__init__()
        self.inner = Inner(wrong)

    def forward(self, x: Any, labels: Any) -> Any:
        return self.inner(x, labels)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "linear": (lambda m, x, y: m.layer(x), r"float32 \[4, 3\]"),
    "matmul": (lambda m, x, y: x @ x, r"float32 \[4, 3\], float32 \[4, 3\]"),
    "add": (lambda m, x, y: x + torch.zeros(5), r"\[4, 3\]"),
    "cat": (lambda m, x, y: torch.cat([x, y], 1), r"\[4, 3\]"),
    "stack": (lambda m, x, y: torch.stack([x, x[:2]]), r"\[4, 3\]"),
    "view": (lambda m, x, y: x.view(5, 5), r"float32 \[4, 3\]"),
    "reshape": (lambda m, x, y: x.reshape(-1, 7), r"\[4, 3\]"),
    "float labels": (lambda m, x, y: F.cross_entropy(x, x[:, 0]), r"float32 \[4\]"),
    "labels too many": (lambda m, x, y: F.cross_entropy(x, y[:2]), r"\[2\]"),
    "float index": (lambda m, x, y: F.embedding(x, x), r"float32 \[4, 3\]"),
    "norm": (lambda m, x, y: m.norm(x), "4D"),
    "dimension": (lambda m, x, y: x.sum(7), "[Dd]im"),
    "squeeze": (lambda m, x, y: x.transpose(0, 3), "[Dd]im"),
    "index": (lambda m, x, y: x[9], "index 9"),
    "indices": (lambda m, x, y: x[0, 0, 0], "too many indices"),
    "text": (lambda m, x, y: torch.matmul(x, "a"), r"float32 \[4, 3\]"),
    "keyword": (lambda m, x, y: torch.softmax(x, axes=1), r"\[4, 3\]"),
    "attribute": (lambda m, x, y: m.missing(x), "no attribute 'missing'"),
    "method": (lambda m, x, y: x.missing(), "no attribute 'missing'"),
    "type": (lambda m, x, y: torch.bmm(x[None], y[None]), r"int64 \[1, 4\]"),
    "convolution": (lambda m, x, y: F.conv2d(x, x), r"\[4, 3\]"),
    "key": (lambda m, x, y: {"a": x}["b"], "KeyError"),
    "expand": (lambda m, x, y: x.expand(4, 5), r"\[4, 3\]"),
    "loss": (lambda m, x, y: F.nll_loss(x, y, weight=x), r"\[4, 3\]"),
    "unpack": (lambda m, x, y: torch.zeros(2) + (*x.shape, 1)[3], "IndexError"),
}


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.parametrize("training", [False, True])
def test_a_mistake_is_one_short_error(
    name: str, training: bool, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong, words = MISTAKES[name]
    model = Outer(wrong)
    wrapped = poptorch.trainingModel(model) if training else poptorch.inferenceModel(model)
    caplog.set_level(logging.ERROR)
    with pytest.raises(poptorch.Error, match=words) as raised:
        wrapped(X, LABELS)
    text = str(raised.value)
    assert len(text) < 1000
    assert len(text.splitlines()) < 6
    line = re.escape(f"{__file__}:{wrong.__code__.co_firstlineno}")
    assert re.search(rf"module 'inner(\.layer|\.norm)?', {line}", text)
    assert "_dynamo" not in text
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert not caplog.records
    assert "Traceback" not in capfd.readouterr().err
    if training:
        wrapped.destroy()


def test_an_error_that_forward_raises_itself_stays() -> None:
    def wrong(module: Any, x: Any, labels: Any) -> Any:
        raise ValueError("this net takes images")

    with pytest.raises(ValueError, match="this net takes images"):
        poptorch.inferenceModel(Outer(wrong))(X, LABELS)


def test_a_model_without_a_loss_is_told_in_the_sdks_words() -> None:
    model = poptorch.trainingModel(Outer(lambda m, x, y: x * m.layer.bias.sum()))
    with pytest.raises(poptorch.Error, match="Couldn't find a loss in graph"):
        model(X, LABELS)
    model.destroy()


NET = """
import torch
from torch.nn import Linear

class Network(torch.nn.Module):
    def forward(self, x):
        return x @ x

class Sized(torch.nn.Module):
    def __init__(self, size):
        super().__init__()

def broken():
    return torch.nn.Linear("a", 2)
"""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Netwrk", "Did you mean Network\\? Modules in it: Network, Sized"),
        ("Sized", "missing 1 required positional argument: 'size'"),
        ("broken", r"broken\(\) of .*TypeError.*net.py:14\)"),
        ("torch", "is a module, not a torch.nn.Module"),
    ],
)
def test_estimates_of_a_wrong_name_say_what_there_is(tmp_path: Path, name: str, words: str) -> None:
    path = tmp_path / "net.py"
    path.write_text(NET)
    with pytest.raises(UsageError) as raised:
        module_source(path, name, ["4x3"])
    text = f"{raised.value} {raised.value.hint}"
    assert re.search(words, text), text


def test_an_estimate_of_a_wrong_shape_is_one_error(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(NET)
    source = module_source(path, "Network", ["4x3"])
    with pytest.raises(poptorch.Error, match=r"float32 \[4, 3\]") as raised:
        source.at(4)
    assert f"{path}:7" in str(raised.value)
