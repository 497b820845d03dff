"""Wrappers around a model: weights between host and IPU, attaching, arguments, results, hooks, questions."""

from __future__ import annotations

import collections
import copy
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from podrun import poptorch  # noqa: E402
from tests.runtime.handovers import way_to_the_machine  # noqa: E402

Pair = collections.namedtuple("Pair", ["first", "second"])


class Affine(torch.nn.Module):
    """``x * scale + shift``, with a loss when it is given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 2)

    def forward(self, x: Any, labels: Any = None) -> Any:
        y = self.layer(x)
        return y if labels is None else (y, torch.nn.functional.mse_loss(y, labels))


@pytest.fixture
def data() -> tuple[Any, Any]:
    torch.manual_seed(1)
    return torch.randn(4, 3), torch.randn(4, 2)


@pytest.fixture
def training(data: Any) -> Iterator[Any]:
    made = poptorch.trainingModel(Affine())
    yield made
    made.destroy()


def counted(executor: Any) -> list[int]:
    """Counts copies to the host by replacing the executor's method, as the SDK's own tests do."""
    copies, plain = [0], executor.copyWeightsToHost

    def copy_weights() -> None:
        copies[0] += 1
        plain()

    executor.copyWeightsToHost = copy_weights
    return copies


def reads(model: Any) -> dict[str, Any]:
    """Ways to read weights on the host."""
    return {
        "state_dict": lambda: model.state_dict(),
        "parameters": lambda: next(model.parameters()).data,
        "named": lambda: dict(model.named_parameters())["layer.weight"].sum(),
        "attribute": lambda: model.layer.bias.detach(),
        "forward": lambda: model(torch.ones(1, 3)),
        "equal": lambda: torch.equal(model.layer.bias, torch.ones(2)),
        "save": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "copy": lambda: copy.deepcopy(model),
    }


@pytest.mark.sample(3)
@pytest.mark.parametrize("way", list(reads(Affine())))
def test_reading_weights_copies_them_once(training: Any, data: Any, way: str) -> None:
    copies = counted(training)
    training(*data)
    assert copies == [0]
    reads(training.model)[way]()
    reads(training.model)[way]()
    assert copies == [1]
    training(*data)
    assert training.model.copyWeightsToHostIfNeeded() is True
    assert training.copyWeightsToHostIfNeeded() is False
    assert copies == [2]


def test_a_wrapped_module_says_so_and_its_copies_do_not(training: Any, data: Any) -> None:
    model = training.model
    assert (type(model).__name__, isinstance(model, Affine)) == ("PoptorchAffine", True)
    training(*data)
    again = copy.deepcopy(model)
    assert type(again) is Affine
    assert type(again.layer.weight) is torch.nn.Parameter
    torch.testing.assert_close(again.layer.weight, model.layer.weight)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    torch.testing.assert_close(loaded["layer.weight"], model.layer.weight.data)
    with pytest.raises(RuntimeError, match="wrapped already"):
        poptorch.trainingModel(model)
    training.destroy()
    assert type(model) is Affine
    assert type(model.layer.weight) is torch.nn.Parameter
    other = poptorch.trainingModel(model)
    other(*data)
    model.destroy()
    assert not other.isCompiled()


def test_weights_on_the_host_reach_the_ipu_when_they_are_sent(data: Any) -> None:
    model = Affine()
    inference = poptorch.inferenceModel(model)
    before = inference(data[0])
    with torch.no_grad():
        model.layer.bias += 1
    torch.testing.assert_close(inference(data[0]), before)
    inference.copyWeightsToDevice()
    torch.testing.assert_close(inference(data[0]), before + 1)
    assert not inference.load_state_dict(Affine().state_dict()).missing_keys
    torch.testing.assert_close(inference(data[0]), model(data[0]))


def test_sending_weights_overwrites_what_was_trained(training: Any, data: Any) -> None:
    start = copy.deepcopy(training.model.state_dict())
    training(*data)
    training.copyWeightsToDevice()
    for name, value in training.model.state_dict().items():
        torch.testing.assert_close(value, start[name])


def test_inference_follows_training_through_the_end_of_the_trainer(data: Any) -> None:
    model = Affine()
    training, inference = poptorch.trainingModel(model), poptorch.inferenceModel(model)
    inference(data[0])
    training(*data)
    training.destroy()
    torch.testing.assert_close(inference(data[0]), model(data[0]))


def test_frozen_weights_stay_and_the_rest_is_trained(data: Any) -> None:
    model = Affine()
    model.layer.weight.requires_grad_(False)
    start = copy.deepcopy(model.state_dict())
    training = poptorch.trainingModel(model)
    training(*data)
    assert torch.equal(model.layer.weight, start["layer.weight"])
    assert not torch.equal(model.layer.bias, start["layer.bias"])
    training.destroy()


def test_detached_and_attached_training_goes_on(data: Any) -> None:
    losses = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = Affine()
        training = poptorch.trainingModel(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1))
        found = []
        for turn in range(4):
            if interrupted and turn == 2:
                assert training.isAttachedToDevice()
                training.detachFromDevice()
                assert not training.isAttachedToDevice()
                with pytest.raises(poptorch.Error, match="not attached"):
                    training.detachFromDevice()
                model.state_dict()
                training.attachToDevice()
                with pytest.raises(poptorch.Error, match="already"):
                    training.attachToDevice()
            if interrupted and turn == 3:
                training.detachFromDevice()
            found.append(float(training(*data)[1]))
        losses.append(found)
        training.destroy()
    assert losses[0] == losses[1]


def called(executor: Any, call: str) -> Any:
    """The result of a method or a property of an executor."""
    found = getattr(executor, call)
    return found() if callable(found) else found


@pytest.mark.parametrize(
    "call", ["detachFromDevice", "attachToDevice", "copyWeightsToHost", "copyWeightsToDevice", "rng_state"]
)
def test_calls_that_need_a_compiled_model_refuse_without_one(call: str) -> None:
    inference = poptorch.inferenceModel(Affine())
    assert not inference.isCompiled()
    assert not inference.isAttachedToDevice()
    with pytest.raises(
        poptorch.Error, match=rf"Model has not been compiled or has been destroyed.\n  in {call}"
    ):
        called(inference, call)
    with pytest.raises(AssertionError, match="compiled"):
        inference.getTensorNames()


def test_devices_are_taken_when_the_options_say(data: Any) -> None:
    later = poptorch.inferenceModel(
        Affine(), poptorch.Options().connectionType(poptorch.ConnectionType.OnDemand)
    )
    later.compile(data[0])
    assert later.isAttachedToDevice()
    never = poptorch.inferenceModel(Affine(), poptorch.Options().useOfflineIpuTarget())
    never.compile(data[0])
    assert never.isCompiled()
    assert not never.isAttachedToDevice()
    with pytest.raises(AssertionError, match="offline device"):
        never(data[0])
    with pytest.raises(AssertionError, match="offline device"):
        never.attachToDevice()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: (x[:2],), "shape"),
        (lambda x: (x.half(),), "float16"),
        (lambda x: ([x],), "structure"),
        (lambda x: (x, None), "structure"),
    ],
)
def test_calls_unlike_the_first_one_are_refused_until_destroy(data: Any, change: Any, message: str) -> None:
    inference = poptorch.inferenceModel(Affine())
    inference(data[0])
    with pytest.raises(poptorch.Error, match=message) as caught:
        inference(*change(data[0]))
    assert "destroy" in str(caught.value)
    inference.destroy()
    assert not inference.isCompiled()
    assert inference(data[0][:2]).shape == (2, 2)


class Several(torch.nn.Module):
    """Many kinds of arguments and results."""

    def forward(self, a: Any, *rest: Any, factor: Any = 2, **more: Any) -> Any:
        total = a["x"] * factor + sum(rest)
        return {"b": [total, (total + 1, "text", None)], "a": Pair(total * 2, more["z"])}


def test_arguments_and_results_keep_their_structure() -> None:
    inference = poptorch.inferenceModel(Several())
    x, y, z = torch.ones(2), torch.full((2,), 2.0), torch.full((2,), 3.0)
    found = inference({"x": x}, y, z, factor=4, z=z)
    expected = Several()({"x": x}, y, z, factor=4, z=z)
    assert list(found) == ["b", "a"]
    assert type(found["a"]) is Pair
    assert found["b"][1][1:] == ("text", None)
    torch.testing.assert_close(found["a"], expected["a"])
    torch.testing.assert_close(found["b"][0], expected["b"][0])
    with pytest.raises(poptorch.Error, match="4"):
        inference({"x": x}, y, z, factor=5, z=z)


def test_arguments_that_do_not_fit_forward_are_refused(data: Any) -> None:
    inference = poptorch.inferenceModel(Affine())
    with pytest.raises(poptorch.Error, match="missing"):
        inference()
    for args, kwargs in ((data * 2, {}), (data, {"other": 1}), ((data[0],), {"x": data[0]})):
        with pytest.raises(AssertionError):
            inference(*args, **kwargs)
    with pytest.raises(poptorch.Error, match="no elements"):
        inference(torch.zeros(0, 3))
    with pytest.raises(AssertionError, match="Invalid batch dimension"):
        poptorch.inferenceModel(Affine(), poptorch.Options().deviceIterations(3))(data[0])


class InPlace(torch.nn.Module):
    """Writes into its argument."""

    def forward(self, x: Any) -> Any:
        x += 1
        return x.sum()


def test_what_forward_writes_into_its_arguments_comes_back() -> None:
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    inference = poptorch.inferenceModel(InPlace(), options.outputMode(poptorch.OutputMode.Final))
    x = torch.arange(12.0).reshape(4, 3)
    sums = inference(x)
    torch.testing.assert_close(x, torch.arange(1.0, 13.0).reshape(4, 3))
    torch.testing.assert_close(sums, x[2:].sum(1))


class Counting(torch.nn.Module):
    """A buffer that forward writes, and one that the host changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("given", torch.zeros(1))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x + self.given, self.calls.clone()


def test_buffers_persist_and_are_sent_by_name() -> None:
    model = Counting()
    options = poptorch.Options().deviceIterations(2)
    options.updatableNamedBuffers(["given"])
    inference = poptorch.inferenceModel(model, options)
    x = torch.zeros(2, 1)
    assert inference(x)[1].tolist() == [1, 2]
    with torch.no_grad():
        model.given += 5
    inference.copyNamedBuffersToDevice()
    y, calls = inference(x)
    assert (y.tolist(), calls.tolist()) == ([[5], [5]], [3, 4])
    assert model.calls.tolist() == [0]
    inference.copyWeightsToHost()
    assert model.calls.tolist() == [4]
    wrong = poptorch.Options()
    wrong.updatableNamedBuffers(["absent"])
    with pytest.raises(poptorch.Error, match="absent"):
        poptorch.inferenceModel(Counting(), wrong)(x)
    plain = poptorch.inferenceModel(Counting())
    plain(x)
    with pytest.raises(poptorch.Error, match="updatableNamedBuffers"):
        plain.copyNamedBuffersToDevice()


def test_replicas_have_written_buffers_of_their_own_or_none() -> None:
    x = torch.zeros(2, 1)
    with pytest.raises(poptorch.Error, match="broadcastBuffers"):
        poptorch.inferenceModel(Counting(), poptorch.Options().replicationFactor(2))(x)
    model = Counting()
    own = poptorch.inferenceModel(model, poptorch.Options().replicationFactor(2).broadcastBuffers(False))
    own(x)
    assert own(x)[1].tolist() == [2, 2]
    own.copyWeightsToHost()
    assert model.calls.tolist() == [2]


def test_hooks_run_around_every_capture(data: Any) -> None:
    order: list[str] = []
    handles = [
        poptorch.registerPreCompileHook(lambda: order.append("before")),
        poptorch.registerPostCompileHook(lambda: order.append("after")),
        poptorch.registerPreCompileHook(lambda: order.append("second")),
    ]
    try:
        poptorch.inferenceModel(Affine())(data[0])
        assert order == ["before", "second", "after"]
        with pytest.raises(poptorch.Error, match="RuntimeError in forward"):
            poptorch.inferenceModel(Affine())(torch.zeros(2, 5))
        assert order[3:] == ["before", "second", "after"]
        with pytest.raises(RuntimeError, match="callable"):
            poptorch.registerPreCompileHook(5)
    finally:
        for handle in handles:
            handle.remove()
    poptorch.inferenceModel(Affine())(data[0])
    assert len(order) == 6


def test_a_wrapper_answers_for_anchors_cycles_counters_and_names(data: Any) -> None:
    options = poptorch.Options().deviceIterations(2).logCycleCount(True)
    options.anchorTensor("gradient", "Gradient___layer.weight")
    options.outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(Affine(), options)
    assert training.getPerfCounters() == {
        n: [[]] for n in ("input", "input_complete", "output", "output_complete")
    }
    assert training.getLatency() == (0.0, 0.0, 0.0)
    with pytest.raises(poptorch.Error, match="Please run the model at least once"):
        training.cycleCount()
    training(*data)
    assert training.cycleCount() > 0
    assert {"layer.weight", "layer.bias", "Gradient___layer.weight"} <= set(training.getTensorNames())
    assert training.getAnchoredTensor("gradient").shape == (2, 2, 3)
    with pytest.raises(AssertionError, match="other"):
        training.getAnchoredTensor("other")
    counters = training.getPerfCounters()
    assert [len(row) for row in counters["input"]] == [2, 2]
    assert [len(row) for row in counters["output"]] == [2, 2]
    spans = [training.getHostIpuLatency(), training.getComputeLatency(), training.getIpuHostLatency()]
    assert all(0 <= low <= average <= high for low, high, average in spans)
    assert training.getLatency()[1] >= spans[1][1]
    assert training.compilationTime().total_seconds() > 0
    assert '"maingraph"' in training._debugGetPopartIR()
    training.destroy()


def test_a_compiled_model_has_a_report(training: Any, data: Any, capsys: Any) -> None:
    with pytest.raises(poptorch.Error, match="compiled"):
        training.getReport()
    training.compile(*data)
    report = training.getReport()
    assert report.fits
    assert any("layer" in name for name in report.layers())
    report.show()
    assert "layer" in capsys.readouterr().out


def test_a_checkpoint_is_in_the_ir_and_stashed() -> None:
    """The names that published tests of recomputation count."""

    class Model(torch.nn.Module):
        def __init__(self, marked: bool) -> None:
            super().__init__()
            self.weight, self.marked = torch.nn.Parameter(torch.rand(3, 3)), marked

        def forward(self, x: Any, target: Any) -> Any:
            with poptorch.Block(ipu_id=0):
                x = torch.matmul(self.weight, x)
                if self.marked:
                    x = poptorch.recomputationCheckpoint(x)
                x = torch.matmul(self.weight, x)
            with poptorch.Block(ipu_id=1):
                x = x * 2
                return x, torch.nn.functional.l1_loss(x, target)

    counted = []
    for marked in (False, True):
        options = poptorch.Options()
        options.Training.gradientAccumulation(3)
        options._Popart.set("autoRecomputation", 3)
        model = poptorch.trainingModel(Model(marked), options)
        model.compile(torch.randn(9, 1), torch.randn(9, 1))
        nodes = json.loads(model._debugGetPopartIR())["maingraph"]
        named = any("Checkpoint" in each["name"] for each in nodes)
        counted.append((named, sum(each["type"] == "Stash" for each in nodes)))
        model.destroy()
    assert counted == [(False, 1), (True, 2)]


@pytest.mark.parametrize(
    ("make", "kinds"),
    [
        (torch.optim.SGD, ["SGD0VarUpdate"]),
        (poptorch.optim.AdamW, ["AdamUpdater", "AdamVarUpdate"]),
    ],
)
def test_the_ir_has_the_update_of_each_parameter(make: Any, kinds: list[str]) -> None:
    """As published tests of optimizers count them."""
    model = Affine()
    training = poptorch.trainingModel(model, optimizer=make(model.parameters(), lr=0.1))
    training.compile(torch.ones(2, 3), torch.ones(2, 2))
    types = [node["type"] for node in json.loads(training._debugGetPopartIR())["maingraph"]]
    assert types[-2 * len(kinds) :] == kinds * 2
    training.destroy()


def test_scopes_are_in_the_names_of_the_ir_as_text() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(3, 3)

        def forward(self, x: Any) -> Any:
            with poptorch.NameScope("head"), poptorch.NameScope("scores"):
                return self.layer(x) + 1

    model = poptorch.inferenceModel(Model())
    model.compile(torch.ones(1, 3))
    assert '"name":"head/scores/add' in model._debugGetPopartIR()
    assert '"name":"layer/head/scores/linear' in model._debugGetPopartIR()


def test_backward_of_a_result_is_refused(training: Any, data: Any) -> None:
    _, loss = training(*data)
    with pytest.raises(poptorch.Error, match="backward"):
        loss.backward()
    own = torch.ones(1, requires_grad=True)
    own.sum().backward()
    assert own.grad is not None


def test_random_numbers_go_on_from_a_state() -> None:
    model = torch.nn.Dropout(0.5)
    inference = poptorch.inferenceModel(model, poptorch.Options().randomSeed(7))
    x = torch.ones(64)
    first = inference(x)
    state = inference.rng_state
    second = inference(x)
    inference.rng_state = state
    assert torch.equal(inference(x), second)
    assert not torch.equal(first, second)
    inference.rng_state = state
    inference.detachFromDevice()
    assert torch.equal(inference(x), second)


def test_wrappers_refuse_what_they_cannot_do() -> None:
    with pytest.raises(poptorch.Error, match="Options"):
        poptorch.inferenceModel(Affine(), {})
    with pytest.raises(poptorch.Error, match=r"torch\.nn\.Module"):
        poptorch.trainingModel(lambda x: x)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match="accumulation must be 1"):
        poptorch.inferenceModel(Affine(), options)
    with pytest.raises(AssertionError, match="Adagrad"):
        poptorch.trainingModel(Affine(), optimizer=torch.optim.Adagrad(Affine().parameters()))


def test_an_executor_stands_for_its_module(data: Any) -> None:
    model = poptorch.BeginBlock(Affine(), user_id="all", ipu_id=0)
    training = poptorch.trainingModel(model)
    inference = poptorch.inferenceModel(training)
    assert inference.model is model
    assert inference.layer is model.layer
    assert "BeginBlock(user_id=all, ipu_id=0)" in repr(inference)
    assert [n for n, _ in inference.named_parameters()] == ["layer.weight", "layer.bias"]
    with pytest.raises(AttributeError):
        _ = inference.absent
    with pytest.raises(AttributeError, match="frozen"):
        inference.options.deviceIterations(2)
    training.destroy()
    again = copy.deepcopy(inference)
    assert not again.isCompiled()


@pytest.mark.parametrize("groups", ["Consecutive", "Orthogonal"])
def test_groups_of_replicas_train_parameters_of_their_own(groups: str) -> None:
    class Weighted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2))

        def forward(self, x: Any) -> Any:
            return poptorch.identity_loss(x @ self.w, "sum")

    kind = poptorch.CommGroupType[groups]
    model = Weighted()
    start = model.w.detach().clone()
    options = poptorch.Options().replicationFactor(4)
    options.Training.accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=1.0))
    training.w.replicaGrouping(kind, 2, poptorch.VariableRetrievalMode.OnePerGroup)
    x = torch.arange(8.0).reshape(4, 2)
    losses = training(x)
    members = [[0, 1], [2, 3]] if groups == "Consecutive" else [[0, 2], [1, 3]]
    row_of = {replica: row for row, each in enumerate(members) for replica in each}
    torch.testing.assert_close(losses, torch.stack([x[r] @ start[row_of[r]] for r in range(4)]))
    expected = torch.stack([start[row] - x[each].sum(0) for row, each in enumerate(members)])
    torch.testing.assert_close(model.w.detach(), expected)
    with pytest.raises(poptorch.Error, match="before the model is compiled"):
        training.w.replicaGrouping(kind, 2, poptorch.VariableRetrievalMode.OnePerGroup)
    training.destroy()


def test_other_inputs_than_the_compiled_ones_are_named() -> None:
    class Net(torch.nn.Module):
        def forward(
            self, image: torch.Tensor, pair: tuple[torch.Tensor, torch.Tensor], scale: float = 1.0
        ) -> torch.Tensor:
            return image * scale + pair[0] + pair[1]

    model = poptorch.inferenceModel(Net())
    one, other = torch.ones(2, 3), torch.ones(2, 4)
    model(one, (one, one))
    for given, words in (
        (
            lambda: model(other, (one, one)),
            r"Input 'image' was torch.float32 of shape \[2, 3\] .* \[2, 4\] now",
        ),
        (
            lambda: model(one, (one, one.int())),
            r"Input 'pair\[1\]' was torch.float32 .* is torch.int32 of",
        ),
        (lambda: model(one, (other, one)), r"Input 'pair\[0\]' was"),
    ):
        with pytest.raises(poptorch.Error, match=words):
            given()
    model.destroy()


def test_the_batch_of_a_nan_loss_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.loss = torch.nn.Linear(2, 2), torch.nn.MSELoss()

        def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.layer(x)
            return y, self.loss(y, wanted)

    net = Net()
    options = poptorch.Options().deviceIterations(2).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(net, options, poptorch.optim.SGD(net.parameters(), lr=0.1))
    x = torch.ones(8, 2)
    training(x, x)
    assert caplog.messages == []
    training(torch.cat([x[:4], x[4:] * float("nan")]), x)
    training(x, x)
    assert [text for text in caplog.messages if "NaN in batch 3 " in text] == caplog.messages
    assert len(caplog.messages) == 1
    training.destroy()


def test_a_call_passes_six_functions_on_its_way_to_the_machine(training: Any, data: Any) -> None:
    training(*data)
    assert way_to_the_machine(lambda: training(*data)) == [
        "PoplarExecutor.__call__",
        "CompiledModel.run",
        "TorchSession.run",
        "BatchRunner.run",
        "StepRunner.run",
        "PortConnection.start",
        "LocalPort.run",
    ]
