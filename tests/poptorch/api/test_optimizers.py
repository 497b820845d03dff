"""Optimizers give torch's weights over 40 steps: groups, schedulers, attributes, scaling, clipping, accumulation."""

from __future__ import annotations

import copy
import importlib
import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402

STEPS = 40
Make = Callable[[Any], Any]


class Regression(torch.nn.Module):
    """Two layers and a mean squared error."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 2)

    def forward(self, x: Any, y: Any) -> Any:
        z = self.second(torch.tanh(self.first(x)))
        return z, torch.nn.functional.mse_loss(z, y)


def grouped(model: Any, **second: Any) -> list[dict[str, Any]]:
    return [{"params": model.first.parameters()}, {"params": model.second.parameters(), **second}]


def batches(count: int) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(4 * count, 6, generator=generator), torch.randn(4 * count, 2, generator=generator))
        for _ in range(STEPS)
    ]


def by_torch(model: Any, optimizer: Any, parts: int, schedule: Any, norm: float | None) -> list[float]:
    losses = []
    for x, y in batches(parts):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            loss = model(a, b)[1]
            (loss / parts).backward()
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        losses.append(float(loss.detach()))
        if schedule is not None:
            schedule.step()
    return losses


def compare(
    ours: Make,
    theirs: Make,
    *,
    parts: int = 1,
    schedule: Callable[[Any], Any] | None = None,
    norm: float | None = None,
) -> Any:
    """Trains twice and compares losses and weights; gives the wrapper that was trained."""
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    plain = theirs(reference)
    expected = by_torch(reference, plain, parts, schedule(plain) if schedule else None, norm)
    optimizer = ours(model)
    planned = schedule(optimizer) if schedule else None
    options = poptorch.Options()
    options.Training.gradientAccumulation(parts)
    training = poptorch.trainingModel(model, options, optimizer)
    found = []
    for x, y in batches(parts):
        found.append(float(training(x, y)[1]))
        if planned is not None:
            planned.step()
            training.setOptimizer(optimizer)
    assert found == pytest.approx(expected, rel=2e-4, abs=2e-5)
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=2e-3, atol=5e-5)
    return training


CASES: dict[str, tuple[Make, Make]] = {
    "sgd": (
        lambda m: poptorch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    ),
    "sgd-nesterov-groups": (
        lambda m: poptorch.optim.SGD(
            grouped(m, lr=0.05, momentum=0.5, weight_decay=0.0), 0.1, 0.9, 0.0, 0.01, nesterov=True
        ),
        lambda m: torch.optim.SGD(
            grouped(m, lr=0.05, momentum=0.5, weight_decay=0.0), 0.1, 0.9, 0.0, 0.01, nesterov=True
        ),
    ),
    "sgd-combined-scaled": (
        lambda m: poptorch.optim.SGD(
            m.parameters(),
            0.1,
            0.9,
            0.0,
            0.01,
            use_combined_accum=True,
            loss_scaling=8.0,
            velocity_scaling=2.0,
        ),
        lambda m: torch.optim.SGD(m.parameters(), 0.1, 0.9, 0.0, 0.01),
    ),
    "adam-scaled": (
        lambda m: poptorch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1, loss_scaling=128.0),
        lambda m: torch.optim.Adam(m.parameters(), lr=0.01, weight_decay=0.1),
    ),
    "adamw-groups": (
        lambda m: poptorch.optim.AdamW(grouped(m, lr=0.02, weight_decay=0.0), lr=0.01, weight_decay=0.1),
        lambda m: torch.optim.AdamW(grouped(m, lr=0.02, weight_decay=0.0), lr=0.01, weight_decay=0.1),
    ),
    "rmsprop-centered": (
        lambda m: poptorch.optim.RMSprop(m.parameters(), lr=0.01, alpha=0.9, momentum=0.9, centered=True),
        lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, alpha=0.9, momentum=0.9, centered=True),
    ),
    "lamb": (
        lambda m: poptorch.optim.LAMB(m.parameters(), lr=0.01, weight_decay=0.05, loss_scaling=4.0),
        lambda m: poptorch.optim.LAMB(m.parameters(), lr=0.01, weight_decay=0.05),
    ),
    "adamax": (
        lambda m: torch.optim.Adamax(m.parameters(), lr=0.02),
        lambda m: torch.optim.Adamax(m.parameters(), lr=0.02),
    ),
}


QUICK = ("sgd-nesterov-groups", "adamw-groups", "rmsprop-centered")


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
@pytest.mark.sample(2)
def test_weights_after_training_are_torchs(case: str) -> None:
    compare(*CASES[case]).destroy()


def _half(schedule_of: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(schedule_of, step_size=10, gamma=0.5)


def _linear(schedule_of: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(schedule_of, lambda step: (step + 1) / STEPS)


def _cosine(schedule_of: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(schedule_of, STEPS)


def _cycle(schedule_of: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(schedule_of, 0.1, total_steps=STEPS + 1, cycle_momentum=False)


def _warm(schedule_of: Any) -> Any:
    """Linear warm-up, then a cosine, as fine-tuning scripts have them."""
    up = torch.optim.lr_scheduler.LinearLR(schedule_of, 0.1, total_iters=5)
    down = torch.optim.lr_scheduler.CosineAnnealingLR(schedule_of, STEPS - 5)
    return torch.optim.lr_scheduler.SequentialLR(schedule_of, [up, down], [5])


def _restarts(schedule_of: Any) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(schedule_of, 7, 2)


def _milestones(schedule_of: Any) -> Any:
    return torch.optim.lr_scheduler.MultiStepLR(schedule_of, [5, 20], 0.3)


def _momentum_too(schedule_of: Any) -> Any:
    """Moves momentum, or the first of two betas, against the rate."""
    return torch.optim.lr_scheduler.OneCycleLR(schedule_of, 0.1, total_steps=STEPS + 1)


@pytest.mark.parametrize(("case", "schedule"), [("sgd-nesterov-groups", _half)])
def test_schedulers_change_rates(case: str, schedule: Any) -> None:
    compare(*CASES[case], schedule=schedule).destroy()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "schedule", "parts"),
    list(itertools.product(CASES, (None, _linear, _cycle, _half, _cosine), (1, 4))),
)
def test_every_optimizer_with_every_schedule_and_accumulation(case: str, schedule: Any, parts: int) -> None:
    compare(*CASES[case], schedule=schedule, parts=parts).destroy()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["sgd-combined-scaled", "adamw-groups", "rmsprop-centered"])
@pytest.mark.parametrize("schedule", [_warm, _restarts, _milestones])
def test_weights_under_schedules_of_fine_tuning_are_torchs(case: str, schedule: Any) -> None:
    compare(*CASES[case], schedule=schedule).destroy()


@pytest.mark.slow
def test_a_cycle_moves_momentum_and_betas_that_are_variable() -> None:
    compare(
        lambda m: poptorch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
        schedule=_momentum_too,
    ).destroy()
    compare(
        lambda m: poptorch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.9, 0.99)),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, betas=(0.9, 0.99)),
        schedule=_momentum_too,
    ).destroy()


@pytest.mark.parametrize(
    ("kind", "ours_alone", "both"),
    [
        pytest.param("SGD", {"loss_scaling": 8.0}, {}, marks=pytest.mark.slow),
        ("SGD", {"loss_scaling": 8.0, "use_combined_accum": True}, {"momentum": 0.9, "weight_decay": 0.01}),
        pytest.param("SGD", {}, {"momentum": 0.9, "nesterov": True}, marks=pytest.mark.slow),
        pytest.param("Adam", {"loss_scaling": 8.0}, {"weight_decay": 0.01}, marks=pytest.mark.slow),
        ("AdamW", {"loss_scaling": 8.0}, {}),
    ],
)
def test_clipping_is_that_of_torch(kind: str, ours_alone: dict[str, Any], both: dict[str, Any]) -> None:
    ours, theirs = getattr(poptorch.optim, kind), getattr(torch.optim, kind)
    compare(
        lambda m: ours(m.parameters(), lr=0.05, max_grad_norm=0.3, **ours_alone, **both),
        lambda m: theirs(m.parameters(), lr=0.05, **both),
        norm=0.3,
        parts=2,
    ).destroy()


def test_attributes_given_are_variable_and_others_constant() -> None:
    model = Regression()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    marks = optimizer.variable_attrs
    assert not marks.isConstant("lr")
    assert not marks.isConstant("momentum")
    assert marks.isConstant("weight_decay")
    assert marks.isConstant("loss_scaling")
    with pytest.raises(AssertionError, match="speed"):
        marks.isConstant("speed")
    marks.markAsConstant("momentum")
    marks.markAsVariable("weight_decay")
    training = poptorch.trainingModel(model, optimizer=optimizer)
    training(*batches(1)[0])
    optimizer.param_groups[0]["weight_decay"] = 0.5
    training.setOptimizer(optimizer)
    optimizer.param_groups[0]["momentum"] = 0.5
    with pytest.raises(poptorch.Error, match="momentum"):
        training.setOptimizer(optimizer)
    training.destroy()


def test_attributes_that_come_late_are_named_once(caplog: Any) -> None:
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["early"] = 1
    training = poptorch.trainingModel(model, optimizer=optimizer)
    training(*batches(1)[0])
    optimizer.param_groups[0]["late"] = 1
    with caplog.at_level(logging.DEBUG, "poptorch::python"):
        training.setOptimizer(optimizer)
        training.setOptimizer(optimizer)
    named = [record for record in caplog.records if "Ignoring unexpected" in record.message]
    assert [("late" in r.message, r.levelname) for r in named] == [(True, "WARNING")]
    training.destroy()


@pytest.mark.parametrize(
    "kind", ["SGD", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Adam", "AdamW", "RMSprop", "LAMB"))]
)
def test_optimizer_state_is_the_same_after_saving_and_loading(kind: str) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "loss_scaling": 2.0} | (
        {"momentum": 0.9} if kind == "SGD" else {}
    )

    def made() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = Regression()
        return model, getattr(poptorch.optim, kind)(model.parameters(), **settings)

    model, optimizer = made()
    assert (optimizer.state_dict()["ipu_state"], optimizer.state_dict()["ipu_param"]) == (None, None)
    assert not optimizer.has_state()
    training = poptorch.trainingModel(model, optimizer=optimizer)
    data = batches(1)
    for x, y in data[:5]:
        training(x, y)
    state = copy.deepcopy(optimizer.state_dict())
    assert optimizer.has_state()
    assert all(name.split("___")[1] in dict(model.named_parameters()) for name in state["ipu_state"])
    assert any("lossScaling_FLOAT" in name for name in state["ipu_param"])
    weights = copy.deepcopy(model.state_dict())
    expected = [float(training(x, y)[1]) for x, y in data[5:10]]
    training.destroy()
    again, other = made()
    again.load_state_dict(weights)
    other.load_state_dict(state)
    resumed = poptorch.trainingModel(again, optimizer=other)
    assert [float(resumed(x, y)[1]) for x, y in data[5:10]] == expected
    again.load_state_dict(weights)
    resumed.copyWeightsToDevice()
    other.load_state_dict(state)
    assert [float(resumed(x, y)[1]) for x, y in data[5:10]] == expected
    resumed.destroy()
    for wrong in ({}, torch.optim.SGD(again.parameters(), lr=0.1).state_dict()):
        with pytest.raises(RuntimeError):
            other.load_state_dict(wrong)


def test_offline_programs_have_no_state() -> None:
    model = Regression()
    optimizer = poptorch.optim.Adam(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, poptorch.Options().useOfflineIpuTarget(), optimizer)
    training.compile(*batches(1)[0])
    assert optimizer.state_dict()["ipu_state"] is None
    training.destroy()


def test_half_accumulation_averages_as_it_goes() -> None:
    model = Regression()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.1, accum_type=torch.float16)
    options = poptorch.Options()
    training = poptorch.trainingModel(model, options, optimizer)
    strategy = training.options.Training.meanAccumulationAndReplicationReductionStrategy
    assert strategy == poptorch.MeanReductionStrategy.Running
    assert (
        options.Training.meanAccumulationAndReplicationReductionStrategy
        == poptorch.MeanReductionStrategy.Post
    )
    training.destroy()
    plain = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.1))
    plain(*batches(1)[0])
    with pytest.raises(ValueError, match="half precision"):
        plain.setOptimizer(optimizer)
    plain.destroy()


@pytest.mark.parametrize("name", ["Optimizer", "SGD", "Adam", "AdamW", "RMSprop", "LAMB"])
def test_optimizers_show_the_names_that_programs_use(name: str) -> None:
    kind = getattr(poptorch.optim, name)
    assert (kind.__name__, kind.__qualname__) == (name, name)
    assert getattr(importlib.import_module(kind.__module__), name) is kind


def test_optimizers_refuse_what_ipus_do_not_have() -> None:
    parameters = list(Regression().parameters())
    for kind in (poptorch.optim.Adam, poptorch.optim.AdamW):
        with pytest.raises(ValueError, match="amsgrad"):
            kind(parameters, amsgrad=True)
        with pytest.raises(TypeError, match="momentum"):
            kind(parameters, momentum=0.9)
    with pytest.raises(ValueError, match="amsgrad"):
        poptorch.trainingModel(Regression(), optimizer=torch.optim.Adam(parameters, amsgrad=True))
    with pytest.raises(TypeError):
        poptorch.optim.SGD(parameters)
    with pytest.warns(UserWarning, match="velocity_scaling"):
        poptorch.optim.SGD(parameters, lr=0.1, velocity_scaling=2.0)

    class Own(torch.optim.SGD):
        """Its Python code does not run."""

    with pytest.warns(UserWarning, match="Own is run as SGD"):
        poptorch.trainingModel(Regression(), optimizer=Own(parameters, lr=0.1)).destroy()


def test_dampening_begins_with_the_first_step() -> None:
    """PopART's velocity starts at 0; torch's starts with the first gradient, which it does not dampen."""
    torch.manual_seed(0)
    model = Regression()
    reference = copy.deepcopy(model)
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    velocity = {name: torch.zeros_like(value) for name, value in reference.named_parameters()}
    for x, y in batches(1)[:3]:
        training(x, y)
        reference.zero_grad()
        reference(x, y)[1].backward()
        for name, value in reference.named_parameters():
            velocity[name] = 0.9 * velocity[name] + 0.5 * value.grad
            value.data -= 0.1 * velocity[name]
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    training.destroy()
