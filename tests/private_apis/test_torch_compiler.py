"""Captures and optimizers do without torch's compiler, which works as ever once a program asks for it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

from podrun.private_apis.torch_compiler import default_settings

PREPARE = """
import sys
import threading
import torch
from podrun.private_apis import torch as private
from podrun.private_apis import torch_compiler

def step(optimizer, weight):
    optimizer.zero_grad()
    (weight * weight).sum().backward()

def fakes():
    mode = private.fake_mode()
    base = torch.arange(24.0).reshape(2, 3, 4)
    weight = torch.nn.Parameter(torch.ones(4, 5, dtype=torch.bfloat16))
    tensors = [base, base.mT, base[:, 1:, ::2].detach(), torch.tensor(3), torch.ones(2, dtype=torch.complex64),
               torch.empty(0, 3), weight, torch.eye(3).to_sparse(), weight[1:].T, torch.ones(2).expand(5, 2)]
    made = [mode.from_tensor(each) for each in tensors]
    with mode:
        x = made[0]
        made += [x @ torch.ones(4, 2), torch.nn.functional.gelu(x), torch.where(x > 0, x, torch.tensor(1.0)),
                 torch.nn.functional.conv1d(x, torch.ones(5, 3, 2)), torch.softmax(x, -1), x.view(6, 4).t()]
        made += [torch.nn.functional.layer_norm(x, [4]), torch.cat([x, x], 1), x.std(), torch.randn(3).sort()[0]]
    return [(type(t).__name__, t.shape, t.layout, t.layout == torch.strided and t.stride(), t.dtype, t.device,
             t.requires_grad, t.is_leaf, t._is_view()) for t in made]

weight = torch.nn.Parameter(torch.ones(3))
optimizer = torch.optim.SGD([weight], lr=0.1)
step(optimizer, weight)
spared = fakes()
assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.1
assert "torch._dynamo" not in sys.modules, "torch asks for its compiler"
assert "_dynamo" not in vars(torch)
assert "getattr" in vars(torch._compile)
"""

SAME = """
import torch._dynamo

assert fakes() == spared, (fakes(), spared)
assert type(private.fake_mode()) is private.FakeTensorMode
optimizer.zero_grad()
assert "getattr" not in vars(torch._compile), "torch's code is not as it was"
inner = torch.optim.Optimizer.zero_grad.__wrapped__
assert vars(inner)["__dynamo_disable"]._torchdynamo_disable
print("done")
"""

COMPILED = """
from torch._dynamo.testing import CompileCounter

def run():
    counter = CompileCounter()

    @torch.compile(backend=counter)
    def train(x):
        optimizer.zero_grad()
        return (x * weight).sin() + 1

    x = torch.arange(3.0)
    results.append((torch.equal(train(x), (x * weight).sin() + 1), counter.frame_count, counter.op_count))

results = []
IN_TURN
assert results == [(True, 1, 3)], results
assert "getattr" not in vars(torch._compile)
assert weight.grad is None
print("done")
"""

IN_THIS_THREAD = "run()"
IN_A_THREAD = "thread = threading.Thread(target=run)\nthread.start()\nthread.join(120)"

CONFIGURED = """
assert torch._dynamo.config._custom_ops_profile is None
torch._dynamo.config.fake_tensor_cache_enabled = False
assert not private.fake_mode().cache_enabled
print("done")
"""

MEANWHILE = """
mode = private.fake_mode()
import torch._dynamo
x = mode.from_tensor(torch.ones(2, 3))
with mode:
    assert (x @ torch.ones(3, 4)).shape == (2, 4)
print("done")
"""

TOGETHER = (
    """
started, imported, problems = threading.Event(), threading.Event(), []

def capture():
    try:
        for number in range(100_000):
            assert fakes() == spared
            optimizer.zero_grad()
            started.set()
            if imported.is_set():
                break
    except BaseException as error:
        problems.append(error)
        started.set()

thread = threading.Thread(target=capture)
thread.start()
assert started.wait(100)
import torch._dynamo

assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
imported.set()
thread.join(100)
assert not thread.is_alive() and not problems, problems
"""
    + SAME
)

SETTINGS = """
import os
from podrun.private_apis import torch_compiler
import torch._dynamo.config as config

named = torch_compiler.default_settings(os.environ)
assert {name: getattr(config, name) for name in named} == named, named
print("done", named["fake_tensor_cache_enabled"], named["fake_tensor_cache_crosscheck_enabled"])
"""

TRAIN = """
import sys
import torch
from podrun import poptorch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.GELU(), torch.nn.Flatten(),
            torch.nn.LayerNorm(144), torch.nn.Dropout(0.1), torch.nn.Linear(144, 3))
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, labels):
        return self.loss(self.layers(x), labels)

model = Model()
OPTIMIZER
training = poptorch.trainingModel(model, optimizer=optimizer)
loss = training(torch.ones(2, 1, 8, 8), torch.tensor([0, 1]))
assert loss.shape == () and bool(torch.isfinite(loss))
training.destroy()
assert "torch._dynamo" not in sys.modules, "torch asks for its compiler"
print("done")
"""


def output(program: str, **variables: str) -> str:
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system
@pytest.mark.parametrize(
    "optimizer", [pytest.param("torch.optim.Adam", marks=pytest.mark.slow), "poptorch.optim.SGD"]
)
def test_a_training_program_does_without_the_compiler(optimizer: str) -> None:
    made = f"optimizer = {optimizer}(model.parameters(), lr=0.01)"
    assert output(TRAIN.replace("OPTIMIZER", made)) == "done\n"


@pytest.mark.system
@pytest.mark.parametrize(
    "rest",
    [
        pytest.param(SAME, marks=pytest.mark.slow),
        pytest.param(COMPILED.replace("IN_TURN", IN_THIS_THREAD), marks=pytest.mark.slow),
        pytest.param(COMPILED.replace("IN_TURN", IN_A_THREAD), marks=pytest.mark.slow),
        pytest.param(CONFIGURED, marks=pytest.mark.slow),
        pytest.param(MEANWHILE, marks=pytest.mark.slow),
        TOGETHER,
    ],
    ids=[
        "same tensors",
        "compiled",
        "compiled in a thread",
        "configured",
        "imported meanwhile",
        "imported by another thread",
    ],
)
def test_a_program_may_use_the_compiler_afterwards(rest: str) -> None:
    assert output(PREPARE + rest) == "done\n"


@pytest.mark.slow
@pytest.mark.system
def test_a_program_may_use_the_compiler_before() -> None:
    program = "import torch._dynamo\n" + PREPARE[: PREPARE.index('assert "torch._dynamo" not')]
    assert output(program + COMPILED.replace("IN_TURN", IN_THIS_THREAD)) == "done\n"


@pytest.mark.slow
@pytest.mark.system
def test_the_settings_are_those_of_the_compiler() -> None:
    assert output(SETTINGS) == "done True False\n"
    changed = {"TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0", "TORCH_FAKE_TENSOR_DISPATCH_CACHE_CROSSCHECK": "1"}
    assert output(SETTINGS, **changed) == "done False True\n"
    assert default_settings(changed) == {
        "fake_tensor_cache_enabled": False,
        "fake_tensor_cache_crosscheck_enabled": True,
        "_custom_ops_profile": None,
    }
