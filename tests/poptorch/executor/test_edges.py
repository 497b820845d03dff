"""Edges: clipping with a pipeline, comparisons of no numbers, slices at run time, copies and files of weights."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402

F = torch.nn.functional
X = torch.arange(12.0).reshape(3, 4)
NAN = torch.tensor([float("nan"), 1.0])


class Staged(torch.nn.Module):
    """Two layers, each on an IPU of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

    def forward(self, x: Any, y: Any) -> Any:
        with poptorch.Block("0", ipu_id=0):
            x = torch.tanh(self.first(x))
        with poptorch.Block("1", ipu_id=1):
            return F.cross_entropy(self.second(x), y)


class Calls(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_gradients_are_clipped_in_a_pipeline(kind: str) -> None:
    torch.manual_seed(1)
    model = Staged()
    reference = copy.deepcopy(model)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    plain = getattr(torch.optim, kind)(reference.parameters(), lr=0.1)
    for _ in range(4):
        plain.zero_grad()
        reference(x, y).backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.2)
        plain.step()
    options = poptorch.Options()
    options.Training.gradientAccumulation(4)
    optimizer = getattr(poptorch.optim, kind)(model.parameters(), lr=0.1, max_grad_norm=0.2)
    training = poptorch.trainingModel(model, options, optimizer)
    for _ in range(4):
        training(x, y)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=2e-3, atol=5e-5)
    training.destroy()


def test_another_optimizer_with_halves_may_be_set_until_the_model_is_compiled() -> None:
    model = Staged()
    training = poptorch.trainingModel(
        model,
        poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution()),
        poptorch.optim.SGD(model.parameters(), lr=0.1),
    )
    halves = poptorch.optim.SGD(model.parameters(), lr=0.1, accum_type=torch.half, use_combined_accum=False)
    training.setOptimizer(halves)
    strategy = training.options.Training.meanAccumulationAndReplicationReductionStrategy
    assert strategy == poptorch.MeanReductionStrategy.Running
    with pytest.raises(AttributeError, match="frozen"):
        training.options.deviceIterations(2)
    training(torch.zeros(2, 4), torch.tensor([0, 1]))
    training.destroy()


def stopping(function: Callable[..., Any], *args: Any, stops: bool = True) -> Any:
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(stops)
    return poptorch.inferenceModel(Calls(function), options)(*args)


COMPARISONS: dict[str, Callable[..., Any]] = {
    "eq": lambda x: x == 1,
    "ne": lambda x: x != x + 1,
    "lt": lambda x: x < 0,
    "le": lambda x: x <= x,
    "gt": lambda x: x > 2,
    "ge": lambda x: x >= torch.zeros(2),
    "mask": lambda x: torch.where(x > 0, torch.ones(2), torch.zeros(2)),
    "in a loop": lambda x: poptorch.for_loop(2, lambda y: (torch.where(y < 3, y + 1, y),), [x])[0],
    "in a loop's second round": lambda x: poptorch.for_loop(
        2, lambda y, z: (z + 0, torch.where(y > 0, z, z)), [torch.zeros(2), x]
    )[1],
    "in a branch": lambda x: poptorch.cond(
        torch.ones(()) > 0, lambda y: torch.where(y > 0, y, -y), [x], lambda y: y * 2, [x]
    )[0],
    "in a loop in a branch": lambda x: poptorch.cond(
        torch.zeros(()) > 0,
        lambda y: y * 2,
        [x],
        lambda y: poptorch.for_loop(2, lambda z: (torch.where(z > 0, z, -z),), [y]),
        [x],
    )[0],
    "made within": lambda x: torch.sqrt(-1 - torch.nan_to_num(x)) > 0,
}


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_of_no_number_is_an_exception(name: str) -> None:
    function = COMPARISONS[name]
    with pytest.raises(
        poptorch.Error, match=r"TEXCPT_FP_INV[\s\S]*call the model again: this loads the program\.$"
    ):
        stopping(function, NAN)
    torch.testing.assert_close(
        stopping(function, NAN, stops=False), function(NAN), equal_nan=True, rtol=0, atol=0
    )
    if name != "made within":
        assert stopping(function, torch.ones(2)).tolist() == function(torch.ones(2)).tolist()


def test_an_exception_names_the_operator_and_its_line() -> None:
    with pytest.raises(
        poptorch.Error, match=r"made by log:\d+ \(\S*test_edges\.py:\d+\), has values that are no"
    ):
        stopping(torch.log, -torch.ones(2))


def test_tests_for_nan_do_not_stop_as_comparisons_do() -> None:
    assert stopping(lambda x: (torch.isnan(x), x.long() > 3), torch.ones(2))[0].tolist() == [False, False]
    assert stopping(torch.isnan, NAN).tolist() == [True, False]


def update(x: Any, part: Any, start: Any, dim: int, size: int) -> Any:
    return poptorch.dynamic_update(x, part, dim, start, size)


def test_updates_begin_where_data_say() -> None:
    model = poptorch.inferenceModel(Calls(update))
    part = torch.full((1, 4), -1.0)
    for start in range(3):
        expected = X.clone()
        expected[start] = -1
        assert torch.equal(model(X, part, torch.tensor([start]), 0, 1), expected)
    expected[2] = -1
    assert torch.equal(model(X, part, torch.tensor([7]), 0, 1), expected)  # The last place where it fits.
    columns = poptorch.inferenceModel(Calls(update))(
        X, torch.zeros(3, 2), torch.tensor(1, dtype=torch.int32), -1, 2
    )
    assert torch.equal(columns, X * torch.tensor([1.0, 0, 0, 1]))


@pytest.mark.parametrize("running", [True, False], ids=["ipu", "host"])
@pytest.mark.parametrize(
    ("part", "start", "dim", "size", "words"),
    [
        ((1, 3), [0], 0, 1, r"src has the shape \[1, 3\], \[1, 4\] was expected"),
        ((1, 4), [0], 0, 2, r"\[2, 4\] was expected"),
        ((1, 4), [0], 2, 1, "has no dimension 2"),
        ((1, 4), [0, 1], 0, 1, r"one integer, not int64 \[2\]"),
        ((1, 4), [0.0], 0, 1, "one integer, not float32"),
        ((4, 4), [0], 0, 4, "at most 3"),
        ((1, 4), [0], 0, 0, "above 0"),
    ],
)
def test_updates_that_do_not_fit_are_refused(
    part: Any, start: Any, dim: int, size: int, words: str, running: bool
) -> None:
    called = poptorch.inferenceModel(Calls(update)) if running else update
    with pytest.raises(poptorch.Error, match=words):
        called(X, torch.zeros(part), torch.tensor(start), dim, size)


def test_slices_that_do_not_fit_are_refused() -> None:
    for dim, start, size, step, words in (
        (3, [0], 1, 1, "dimension 3"),
        (0, [0.5], 1, 1, "one integer"),
        (0, [0], 4, 1, "at most 3"),
        (0, [0], 2, 0, "step must be above 0"),
    ):
        with pytest.raises(poptorch.Error, match=words):
            poptorch.dynamic_slice(X, dim, torch.tensor(start), size, step)


@pytest.mark.slow
def test_copies_and_files_of_a_wrapped_model_are_plain_and_read_with_torchs_defaults() -> None:
    model = Staged()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1)
    options = poptorch.Options().setExecutionStrategy(poptorch.ShardedExecution())
    training = poptorch.trainingModel(model, options, optimizer)
    before = model.first.weight.detach().clone()
    training(torch.randn(2, 4), torch.tensor([0, 2]))
    saved = io.BytesIO()
    torch.save(
        {
            "model": model.state_dict(),
            "wrapper": training.state_dict(),
            "optimizer": optimizer.state_dict(),
            "weight": model.first.weight,
            "all": list(model.parameters()),
        },
        saved,
    )
    copied = copy.deepcopy(model)
    training.destroy()
    saved.seek(0)
    read = torch.load(saved)
    assert not torch.equal(model.first.weight, before)
    for state in (read["model"], read["wrapper"], copied.state_dict()):
        assert {type(value) for value in state.values()} == {torch.Tensor}
        for name, value in model.state_dict().items():
            assert torch.equal(state[name], value)
    assert [type(each) for each in (read["weight"], *read["all"])] == [torch.nn.Parameter] * 5
    assert type(copied) is Staged
    plain = poptorch.optim.AdamW(copied.parameters(), lr=0.5)
    plain.load_state_dict(read["optimizer"])
    assert plain.param_groups[0]["lr"] == 0.1
    again = poptorch.trainingModel(copied, options, plain)
    again(torch.randn(2, 4), torch.tensor([0, 2]))
    again.destroy()


def test_a_capture_looks_for_young_garbage_only() -> None:
    before, during = gc.get_threshold(), []

    def forward(x: Any) -> Any:
        during.append(gc.get_threshold())
        return x + 1

    assert torch.equal(poptorch.inferenceModel(Calls(forward))(X), X + 1)
    assert during[0][:2] == before[:2]
    assert during[0][2] > before[2]
    assert gc.get_threshold() == before
