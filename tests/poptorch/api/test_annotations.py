"""Blocks, stages, phases and strategies: where operators go, what is refused, the same numbers everywhere."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from podrun.runtime.words import SessionCall  # noqa: E402

X, LABELS = torch.linspace(-1, 1, 60).reshape(10, 6), torch.arange(10) % 3


class Deep(torch.nn.Module):
    """Four layers, each in a block of its own."""

    def __init__(self, ids: Any = ("a", "b", "c", "d")) -> None:
        super().__init__()
        self.ids = ids
        self.layers = torch.nn.ModuleList([torch.nn.Linear(6, 6) for _ in range(3)] + [torch.nn.Linear(6, 3)])

    def forward(self, x: Any, labels: Any = None) -> Any:
        for name, layer in zip(self.ids, self.layers, strict=True):
            poptorch.Block.start(name)
            x = torch.tanh(layer(x))
        return x if labels is None else (x, torch.nn.functional.cross_entropy(x, labels))


STRATEGIES = {
    "pipelined": lambda: poptorch.PipelinedExecution(
        poptorch.Stage("a").ipu(0), poptorch.Stage("b", "c").ipu(1), poptorch.Stage("d").ipu(0)
    ),
    "pipelined by ids": lambda: poptorch.PipelinedExecution("a", "b", "c", "d"),
    "sharded": lambda: poptorch.ShardedExecution(poptorch.Stage("a", "b"), poptorch.Stage("c", "d")),
    "serial": lambda: poptorch.SerialPhasedExecution(
        poptorch.Phase(poptorch.Stage("a"), poptorch.Stage("b")).ipus(0, 1), poptorch.Phase("c", "d")
    ).setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd),
    "parallel": lambda: poptorch.ParallelPhasedExecution(
        poptorch.Phase("a"), poptorch.Phase("b"), poptorch.Phase("c"), poptorch.Phase("d")
    ).sendTensorsOffChipAfterFwd(),
}


@pytest.mark.parametrize(
    "strategy", [pytest.param(s, marks=pytest.mark.slow) if " " in s else s for s in STRATEGIES]
)
@pytest.mark.sample(7)
def test_strategies_train_to_the_same_weights(strategy: str) -> None:
    torch.manual_seed(0)
    model = Deep()
    reference = copy.deepcopy(model)
    options = poptorch.Options().setExecutionStrategy(STRATEGIES[strategy]()).autoRoundNumIPUs(True)
    options.Training.gradientAccumulation(10)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(2):
        training(X, LABELS)
        optimizer.zero_grad()
        reference(X, LABELS)[1].backward()
        optimizer.step()
    for name, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-4, atol=1e-6)
    training.destroy()


@pytest.mark.parametrize(
    ("accumulation", "enough"), [(4, False), (6, False), pytest.param(7, True, marks=pytest.mark.slow)]
)
def test_pipelines_need_micro_batches(accumulation: int, enough: bool) -> None:
    options = poptorch.Options().setExecutionStrategy(poptorch.PipelinedExecution("a", "b", "c", "d"))
    options.Training.gradientAccumulation(accumulation)
    training = poptorch.trainingModel(Deep(), options)
    data = X[:1].repeat(accumulation, 1), LABELS[:1].repeat(accumulation)
    if enough:
        training(*data)
    else:
        with pytest.raises(poptorch.Error, match=r"pipeline stages \(7\)"):
            training(*data)
    training.destroy()
    inference = poptorch.inferenceModel(
        Deep(), poptorch.Options().deviceIterations(3).setExecutionStrategy(STRATEGIES["pipelined by ids"]())
    )
    with pytest.raises(poptorch.Error, match="deviceIterations"):
        inference(X[:3])


def test_blocks_get_stages_as_the_automatic_strategy_says() -> None:
    automatic = poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement)
    assert [automatic.placement(name, None)[:2] for name in "xyx"] == [(1, 1), (2, 2), (1, 1)]
    assert automatic.placement("z", 7)[:2] == (7, 3)
    same = poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)
    assert same.placement("x", 2)[:2] == (2, 2)
    with pytest.raises(AssertionError, match="ipu_id"):
        same.placement("x", None)
    with pytest.raises(AssertionError, match="two stages"):
        poptorch.PipelinedExecution("a", poptorch.Stage("a"))
    with pytest.raises(AssertionError, match="Unknown block"):
        STRATEGIES["sharded"]().placement("absent", None)
    with pytest.raises(AssertionError, match="phases"):
        poptorch.SerialPhasedExecution()
    with pytest.raises(AssertionError, match="as many IPUs"):
        poptorch.Phase("a", "b").ipus(0, 1)
    with pytest.raises(AssertionError, match="text"):
        poptorch.Stage(1)
    odd = poptorch.ParallelPhasedExecution(poptorch.Phase(poptorch.Stage("a").ipu(1)))
    with pytest.raises(poptorch.Error, match="cannot run on IPU 1"):
        odd.placement("a", None)


def test_stages_without_operators_are_left_out() -> None:
    """Stage 0 is that of operators before the first block: there are none."""

    class All(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = poptorch.BeginBlock(torch.nn.Linear(6, 6), "a", ipu_id=0)
            self.last = poptorch.BeginBlock(torch.nn.Linear(6, 3), "b", ipu_id=1)

        def forward(self, x: Any, labels: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.last(self.first(x)), labels)

    options = poptorch.Options().useOfflineIpuTarget()
    options.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.AutoIncrement))
    options.Training.gradientAccumulation(10)
    training = poptorch.trainingModel(All(), options)
    training.compile(X, LABELS)
    assert training.isCompiled()
    training.destroy()


def test_operators_after_the_end_of_a_block() -> None:
    class Ended(torch.nn.Module):
        def __init__(self, follows: bool) -> None:
            super().__init__()
            self.follows = follows

        def forward(self, x: Any) -> Any:
            poptorch.Block.useAutoId()
            with poptorch.Block(ipu_id=0):
                x = x + 1
            return x + 1 if self.follows else x

    assert poptorch.inferenceModel(Ended(False))(X)[0, 0] == 0
    with pytest.raises(poptorch.Error, match="No active Block"):
        poptorch.inferenceModel(Ended(True))(X)


def test_modules_that_begin_blocks_keep_their_keys_and_lose_them_again() -> None:
    model = Deep()
    keys = list(model.state_dict())
    poptorch.BeginBlock(model.layers[1], "one", ipu_id=0)
    assert list(model.state_dict()) == keys
    with pytest.raises(poptorch.Error, match="already"):
        poptorch.BeginBlock(model.layers[1])
    assert "BeginBlock(user_id=one, ipu_id=0)" in poptorch.module_repr(copy.deepcopy(model))
    poptorch.removeBlocks(model)
    assert "BeginBlock" not in poptorch.module_repr(model)
    with pytest.raises(poptorch.Error):
        poptorch.BeginBlock(3)
    called = poptorch.BeginBlock(lambda x: x + 1, ipu_id=0)
    assert type(called).__name__ == "LegacyBeginBlockFn"
    assert called(torch.ones(1)).item() == 2
    with pytest.raises(AssertionError):
        poptorch.NameScope(1)


def test_scopes_groups_and_the_side_a_model_runs_on() -> None:
    class Both(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = torch.nn.Conv1d(1, 1, 1), torch.nn.Conv1d(1, 1, 1)

        @poptorch.BlockFunction(user_id="inner", ipu_id=0)
        def inner(self, x: Any) -> Any:
            group = poptorch.MultiConv().planType(poptorch.MultiConvPlanType.Serial).partialsTypes(torch.half)
            with group.availableMemoryProportions((0.2, 0.3)).cycleBackOff(0.1), poptorch.NameScope("convs"):
                return self.a(x) + self.b(x) + (1 if poptorch.isRunningOnIpu() else 0)

        def forward(self, x: Any) -> Any:
            return self.inner(x)

    model, x = Both(), torch.ones(1, 1, 4)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), model(x) + 1)
    for wrong in (
        lambda m: m.availableMemoryProportions(()),
        lambda m: m.planType(1),
        lambda m: m.perConvReservedTiles(1.5),
        lambda m: m.cycleBackOff("x"),
    ):
        with pytest.raises(AssertionError):
            wrong(poptorch.MultiConv())
    for wrong in (lambda m: m.partialsTypes(torch.int8), lambda m: m.enableConvDithering(1)):
        with pytest.raises(ValueError, match=r"torch|True"):
            wrong(poptorch.MultiConv())


class Overlapped(torch.nn.Module):
    """Marks its input and its result."""

    def __init__(self, twice: bool = False) -> None:
        super().__init__()
        self.twice = twice

    def forward(self, x: Any) -> Any:
        mode = poptorch.OverlapMode.OverlapAccumulationLoop
        y = poptorch.set_overlap_for_input(x, mode) * 2
        if self.twice:
            y = y + x
        return poptorch.set_overlap_for_output(y, mode)


class Convolutions(torch.nn.Module):
    """A convolution on each of two IPUs. ``mark``: what is done to the first one's result."""

    def __init__(self, mark: Any = None) -> None:
        super().__init__()
        self.mark = mark
        self.first = torch.nn.Conv2d(3, 32, 5, padding=2)
        self.second = poptorch.BeginBlock(torch.nn.Conv2d(32, 64, 3, padding=1), ipu_id=1)

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        hidden = hidden if self.mark is None else self.mark(hidden)
        made = self.second(torch.relu(hidden))
        return poptorch.identity_loss(made, "mean")


def compiled_convolutions(model: Any, proportions: dict[str, float]) -> tuple[dict[str, float], Any]:
    """Memory proportions by label as the tile model gets them, and its report."""
    options = poptorch.Options().useOfflineIpuTarget().setAvailableMemoryProportion(proportions)
    options.Training.gradientAccumulation(3)
    training = poptorch.trainingModel(model, options)
    training.compile(torch.ones(3, 3, 64, 64))
    parts = training._compiled.session.parts
    report = parts.program.prepared(SessionCall.REPORT).tile_report
    found = dict(parts.model.built.program.plans.proportions), report
    training.destroy()
    return found


@pytest.mark.slow
def test_memory_proportions_are_those_of_an_ipu_and_of_marked_operators() -> None:
    mark = functools.partial(poptorch.set_available_memory, available_memory_proportion=0.3)
    found, _ = compiled_convolutions(Convolutions(mark), {"IPU0": 0.2, "IPU1": 0.02})
    assert {share for label, share in found.items() if label.startswith("first/")} == {0.3}
    assert {share for label, share in found.items() if label.startswith("second/")} == {0.02}
    assert min(found.values()) == 0.02


@pytest.mark.slow
def test_a_small_memory_proportion_takes_cycles_on_its_ipu_alone() -> None:
    def cycles(report: Any, ipu: int) -> int:
        return sum(s["report"]["step"]["cycles"] for s in report["segments"] if s["ipu"] == ipu)

    _, plain = compiled_convolutions(Convolutions(), {})
    _, little = compiled_convolutions(Convolutions(), {"IPU1": 0.005})
    assert cycles(little, 0) == cycles(plain, 0)
    assert cycles(little, 1) > cycles(plain, 1)


@pytest.mark.slow
def test_what_a_checkpoint_keeps_is_not_computed_again() -> None:
    kept, remade = (
        compiled_convolutions(Convolutions(mark), {})[1] for mark in (poptorch.recomputationCheckpoint, None)
    )
    assert kept["step"]["seconds_by_cause"]["compute"] < remade["step"]["seconds_by_cause"]["compute"]
    held = [
        sum(entry["memory"]["by_content"]["stash"] for entry in report["ipus"]) for report in (kept, remade)
    ]
    assert held[0] > held[1]


def test_overlapped_transfers_and_what_they_need() -> None:
    def options(mode: str = "All", tiles: int = 32, sharded: bool = True) -> Any:
        made = poptorch.Options().outputMode(poptorch.OutputMode[mode])
        if tiles:
            made.TensorLocations.numIOTiles(tiles)
        return made.setExecutionStrategy(poptorch.ShardedExecution()) if sharded else made

    torch.testing.assert_close(poptorch.inferenceModel(Overlapped(), options())(X), 2 * X)
    for wrong, message in (
        (options(mode="Final"), "outputMode"),
        (options(tiles=0), "No IO tiles allocated"),
        (options(sharded=False), "please switch to poptorch.ShardedExecution"),
    ):
        with pytest.raises(poptorch.Error, match=message):
            poptorch.inferenceModel(Overlapped(), wrong)(X)
    with pytest.raises(
        poptorch.Error, match=r"must be the only op applied to an input\. This is not the case for input x to"
    ):
        poptorch.inferenceModel(Overlapped(twice=True), options())(X)


class Marked(torch.nn.Module):
    """A convolution whose input, labels and loss cross as a mode says."""

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self.mode = mode
        self.first = torch.nn.Conv2d(3, 16, 5)
        self.last = torch.nn.Linear(16, 4)

    def forward(self, x: Any, labels: Any) -> Any:
        x, labels = (poptorch.set_overlap_for_input(each, self.mode) for each in (x, labels))
        z = self.last(torch.relu(self.first(x)).mean((2, 3)))
        return poptorch.set_overlap_for_output(torch.nn.functional.cross_entropy(z, labels), self.mode)


@pytest.mark.slow
def test_overlapped_transfers_hide_behind_computing_and_change_no_number() -> None:
    x, labels = torch.linspace(-1, 1, 2 * 4 * 2 * 3 * 32 * 32).reshape(-1, 3, 32, 32), torch.arange(16) % 4
    cycles, losses = [], []
    for mode in poptorch.OverlapMode:
        torch.manual_seed(0)
        options = poptorch.Options().deviceIterations(2).logCycleCount(True)
        options.outputMode(poptorch.OutputMode.All).setExecutionStrategy(poptorch.ShardedExecution())
        options.TensorLocations.numIOTiles(64)
        options.Training.gradientAccumulation(4)
        training = poptorch.trainingModel(Marked(mode), options)
        losses.append(training(x, labels).tolist())
        cycles.append(training.cycleCount())
        training.destroy()
    assert losses[0] == losses[1] == losses[2]
    assert cycles[0] > cycles[1] > cycles[2]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda self, x: x.sum().item(), "item"),
        (lambda self, x: x[0] if x.sum() > 0 else x, "item"),
        (lambda self, x: x + torch.zeros(4).cpu()[:1].repeat(2) if False else x @ OUTSIDE, "CPU"),
    ],
)
def test_what_cannot_be_known_while_a_model_is_compiled(model: Any, message: str) -> None:
    kind = type("Refused", (torch.nn.Module,), {"forward": model})
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(kind())(X)


OUTSIDE = torch.ones(6, 2)


def test_two_losses_are_refused_and_losses_of_losses_are_one() -> None:
    class Losses(torch.nn.Module):
        def __init__(self, joined: bool) -> None:
            super().__init__()
            self.layer, self.joined = torch.nn.Linear(6, 3), joined

        def forward(self, x: Any, labels: Any) -> Any:
            logits = self.layer(x)
            a, b = torch.nn.functional.cross_entropy(logits, labels), logits.abs().mean()
            b = poptorch.identity_loss(b, "none")
            return poptorch.identity_loss(a + b, "none") if self.joined else (a, b)

    training = poptorch.trainingModel(Losses(True))
    assert training(X, LABELS).item() > 0
    training.destroy()
    training = poptorch.trainingModel(Losses(False))
    with pytest.raises(poptorch.Error, match="Multiple independent losses"):
        training(X, LABELS)
    training.destroy()


class Unusual(torch.nn.Module):
    """A layer, a buffer and any function as forward."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.layer = function, torch.nn.Linear(6, 2)
        self.register_buffer("count", torch.zeros(2))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def replacing(model: Any, x: Any) -> Any:
    model.count = model.count + 1
    return x


def deleting(model: Any, x: Any) -> Any:
    y = model.layer(x)
    del model.layer
    return y


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (replacing, r"Buffer count is reassigned within .* self\.count\.copy_\(src\)"),
        (deleting, "layer.weight is removed from the model"),
        (lambda model, x: torch.tensor((x + 1).numpy()), r"numpy\(\)"),
    ],
)
def test_what_forward_may_not_do_with_its_module(function: Any, message: str) -> None:
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(Unusual(function))(X)


def test_models_that_compute_nothing_give_back_their_arguments() -> None:
    same, text = poptorch.inferenceModel(Unusual(lambda model, x: (x, "text")))(X)
    torch.testing.assert_close(same, X)
    assert text == "text"
    assert poptorch.inferenceModel(Unusual(lambda model, x: None))(X) is None


def test_parameters_that_no_group_has_stay() -> None:
    model = Unusual(lambda model, x: poptorch.identity_loss(model.layer(x), "sum"))
    bias, weight = model.layer.bias.detach().clone(), model.layer.weight.detach().clone()
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD([model.layer.weight], lr=0.1))
    training(X)
    assert torch.equal(model.layer.bias.detach(), bias)
    assert not torch.equal(model.layer.weight.detach(), weight)
    training.destroy()


def test_results_that_are_no_numbers_end_a_run_if_that_is_asked_for() -> None:
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    inference = poptorch.inferenceModel(Unusual(lambda model, x: 1 / x), options)
    assert inference(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises(poptorch.Error, match="Tiles in excepted state: IPU 0: TEXCPT_FP_OFLO") as caught:
        inference(torch.zeros(2))
    assert caught.value.type == "poplar_application_runtime_error"
    assert inference(torch.ones(2)).tolist() == [1, 1], "the program was loaded again"
