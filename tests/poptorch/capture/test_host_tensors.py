"""Tensors of the host in forward: the device that programs see, what becomes a constant, what is refused by name."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402

F = torch.nn.functional
X = torch.arange(6.0).reshape(2, 3)
GLOBAL = torch.tensor([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])


class Net(torch.nn.Module):
    """Calls a function with itself and the argument."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call, self.layer = call, torch.nn.Linear(3, 3)
        self.register_buffer("held", torch.zeros(2, 3))
        self.plain, self.many = torch.ones(2, 3), {"a": [torch.full((3,), 2.0)]}

    def forward(self, x: Any, **rest: Any) -> Any:
        return self.call(self, x, **rest)


def run(call: Callable[..., Any], x: Any = X, **rest: Any) -> Any:
    return poptorch.inferenceModel(Net(call))(x, **rest)


def seen(x: Any) -> dict[str, Any]:
    return {
        "device": str(x.device),
        "type": x.device.type,
        "is_cpu": x.is_cpu,
        "is_cuda": x.is_cuda,
        "is_ipu": x.is_ipu,
        "index": x.get_device(),
    }


def test_tensors_in_forward_are_on_the_ipu() -> None:
    answers = {}

    def call(module: Any, x: Any) -> Any:
        made = torch.zeros(2, 3)
        for name, each in {
            "argument": x,
            "parameter": module.layer.weight,
            "buffer": module.held,
            "result": x + 1,
            "made": made,
            "given": torch.zeros(3, device=x.device),
            "moved": GLOBAL.to(x.device),
            "listed": torch.tensor([1.0, 2.0]),
        }.items():
            answers[name] = seen(each)
        answers["host"] = str(GLOBAL.device)
        return x + made

    run(call)
    ipu = {"device": "ipu:0", "type": "ipu", "is_cpu": False, "is_cuda": False, "is_ipu": True, "index": 0}
    assert answers.pop("host") == "cpu"
    assert answers == dict.fromkeys(answers, ipu)
    assert str(X.device) == "cpu"


def _row_written(module: Any, x: Any) -> Any:
    made = x.clone()
    made[0] = GLOBAL[1]
    return made


CLOSED = torch.tensor([1.0, 0.0, 2.0])
MOVES: dict[str, tuple[Callable[..., Any], Any]] = {
    "to device": (lambda m, x: x + GLOBAL.to(x.device), X + GLOBAL),
    "to keyword": (lambda m, x: x + GLOBAL.to(device=x.device), X + GLOBAL),
    "to text": (lambda m, x: x + GLOBAL.to("ipu"), X + GLOBAL),
    "to index": (lambda m, x: x + GLOBAL.to("ipu:0"), X + GLOBAL),
    "to type": (lambda m, x: x + GLOBAL.to(x.device, torch.int32), X + GLOBAL),
    "to other": (lambda m, x: x + GLOBAL.double().to(x), X + GLOBAL),
    "ipu": (lambda m, x: x + GLOBAL.ipu(), X + GLOBAL),
    "type_as": (lambda m, x: x + GLOBAL.double().type_as(x), X + GLOBAL),
    "as_tensor": (lambda m, x: x + torch.as_tensor(GLOBAL, device=x.device), X + GLOBAL),
    "numpy": (lambda m, x: x + torch.from_numpy(GLOBAL.numpy()).to(x.device), X + GLOBAL),
    "view": (lambda m, x: x + GLOBAL[0].to(x.device), X + GLOBAL[0]),
    "computed": (lambda m, x: x + (GLOBAL * 2 + CLOSED).to(x.device), X + GLOBAL * 2 + CLOSED),
    "explicit": (lambda m, x: x + torch.arange(3, device="cpu").to(x.device), X + torch.arange(3)),
    "number": (lambda m, x: x + GLOBAL[0, 0], X + 3),
    "item": (lambda m, x: x + GLOBAL.max().item(), X + 5),
    "condition": (lambda m, x: x + 1 if GLOBAL.sum() > 3 else x, X + 1),
    "copied": (lambda m, x: x.clone().copy_(GLOBAL) + x, X + GLOBAL),
    "written": (_row_written, None),
    "row": (lambda m, x: torch.zeros_like(x).index_copy(0, torch.tensor([1]), x[:1]), None),
    "plain": (lambda m, x: x + m.plain, X + 1),
    "plain moved": (lambda m, x: x + m.plain.to(x.device), X + 1),
    "nested plain": (lambda m, x: x + m.many["a"][0], X + 2),
    "own": (lambda m, x: x.to(x.device) + x.to("ipu:0", torch.float16).float(), X + X),
    "context": (lambda m, x: x + _made_under(x.device), X + 1),
    "module": (lambda m, x: m.to(x.device).call and x + 1, X + 1),
    "numbers of one tensor": (lambda m, x: x + sum(each * x for each in GLOBAL[0]), X * 7),
    "numbers as floats": (lambda m, x: x * sum(float(each) for each in GLOBAL[0]), X * 6),
    "number, then all": (lambda m, x: x * GLOBAL[0, 0] + GLOBAL.to(x.device), X * 3 + GLOBAL),
    "new tensor": (lambda m, x: x + torch.tensor(GLOBAL), X + GLOBAL),
    "zeros like": (lambda m, x: x + torch.zeros_like(GLOBAL), X),
    "ones like": (lambda m, x: x + torch.ones_like(GLOBAL, device=x.device), X + 1),
    "copy": (lambda m, x: x + copy.deepcopy(GLOBAL).to(x.device), X + GLOBAL),
    "array": (lambda m, x: x + torch.as_tensor(GLOBAL.numpy()[0]) + x.new_tensor([1, 2, 3]), None),
    "generic": (lambda m, x: x + torch.ones(3, device="ipu") + torch.full((3,), 1, device=x.device), X + 2),
    "like": (lambda m, x: x + torch.ones_like(x, device=x.device) + x.new_ones(3, device=x.device), X + 2),
}


def _made_under(device: Any) -> Any:
    with device:
        return torch.ones(3)


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", MOVES)
def test_a_moved_tensor_is_a_constant(name: str) -> None:
    call, expected = MOVES[name]
    if expected is None:
        expected = call(None, X)
    torch.testing.assert_close(run(call), expected)


def test_a_constant_is_the_data_of_the_moment_when_it_is_moved() -> None:
    target = torch.zeros(3)

    def call(module: Any, x: Any) -> Any:
        before = target.to(x.device)
        target.add_(1)
        return x + before, x + target.to(x.device)

    made = run(call)
    torch.testing.assert_close(made, (X, X + 1))


def test_a_loss_with_a_target_of_the_host_trains() -> None:
    target = torch.tensor([1, 0])

    def call(module: Any, x: Any) -> Any:
        out = module.layer(x)
        return out, F.cross_entropy(out, target.to(x.device))

    module = Net(call)
    weight = module.layer.weight.detach().clone()
    loss = F.cross_entropy(module.layer(X), target)
    loss.backward()
    expected = weight - 0.1 * module.layer.weight.grad
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    torch.testing.assert_close(training(X)[1], loss.detach())
    torch.testing.assert_close(module.layer.weight.detach(), expected)
    training.destroy()


def test_a_parameter_that_a_closure_holds_is_the_models() -> None:
    def call(module: Any, x: Any) -> Any:
        return (x @ weight).sum(), poptorch.identity_loss((x @ weight).sum(), "sum")

    module = Net(call)
    weight = module.layer.weight
    before = weight.detach().clone()
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    training(X)
    torch.testing.assert_close(module.layer.weight.detach(), before - 0.1 * X.sum(0)[:, None].expand(3, 3))
    training.destroy()


class Holder:
    """Has a tensor."""

    def __init__(self) -> None:
        self.values = torch.ones(3)


HOLDER = Holder()
LISTED = {"mask": [torch.ones(3)]}


def _closed() -> Callable[..., Any]:
    target = torch.ones(2, 3)
    return lambda m, x: x + target


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "global": (lambda m, x: x + GLOBAL, "'GLOBAL'"),
    "closure": (_closed(), "'target'"),
    "attribute": (lambda m, x: x + HOLDER.values, "'HOLDER.values'"),
    "element": (lambda m, x: x + LISTED["mask"][0], r"LISTED\['mask'\]\[0\]"),
    "view": (lambda m, x: x + GLOBAL[0], "'GLOBAL'"),
    "loss": (lambda m, x: F.mse_loss(x, GLOBAL), "'GLOBAL'"),
    "listed": (lambda m, x: torch.cat([x, GLOBAL]), "'GLOBAL'"),
    "index": (lambda m, x: x[GLOBAL > 2], "of the CPU"),
    "explicit": (lambda m, x: x + torch.zeros(3, device="cpu"), "of the CPU"),
    "unnamed": (lambda m, x: x + (GLOBAL + 1), "of the CPU"),
    "loop": (lambda m, x: poptorch.for_loop(2, lambda a: [a + GLOBAL], [x])[0], "'GLOBAL'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_was_not_moved_is_an_error_that_names_it(name: str) -> None:
    call, words = REFUSED[name]
    with pytest.raises(poptorch.Error, match=words) as raised:
        run(call)
    text = str(raised.value)
    assert re.search(rf"module '', {re.escape(__file__)}:{call.__code__.co_firstlineno}", text), text
    assert ".to(x.device)" in text
    assert len(text.splitlines()) < 6


@pytest.mark.parametrize(
    "call", [lambda m, x: x.to("cpu"), lambda m, x: x.cpu(), lambda m, x: x.to(device=torch.device("cpu"))]
)
def test_nothing_is_moved_to_the_cpu(call: Callable[..., Any]) -> None:
    with pytest.raises(poptorch.Error, match="moves a tensor from the IPU to the CPU") as raised:
        run(call)
    assert f"{__file__}:{call.__code__.co_firstlineno}" in str(raised.value)


def test_a_returned_tensor_of_the_host_comes_back_as_it_was_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="returns a tensor of the CPU"):
        made, host = run(lambda m, x: (x + 1, GLOBAL * 2))
    torch.testing.assert_close((made, host), (X + 1, GLOBAL * 2))


def test_an_argument_returned_from_the_host_is_plain_afterwards() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = run(lambda m, x, scale: x * scale.to(x.device), scale=torch.full((2, 3), 2.0))
    torch.testing.assert_close(made, X * 2)
    assert made.device.type == "cpu"


def test_checkpoints_and_autocast_know_the_device() -> None:
    def call(module: Any, x: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return torch.utils.checkpoint.checkpoint(module.layer, x, use_reentrant=False)

    module = Net(call)
    torch.testing.assert_close(poptorch.inferenceModel(module)(X), module.layer(X).detach())
