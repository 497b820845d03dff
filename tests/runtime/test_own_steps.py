"""A model that brings its own gradients and updates: trained, replicated, on several IPUs, saved; refusals by name."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from podrun.core.errors import ApplicationRuntimeError, UnsupportedError, UsageError
from podrun.runtime.graph import Model, VariableGroups
from podrun.runtime.settings import RunSettings
from tests.kept_programs import kept as kept
from tests.runtime.tiny import Descent, Network, TinySession, data, gradients
from tests.runtime.tiny_steps import with_own_step

RATE, BATCHES, SAMPLES = 0.05, 3, 16


def session(network: Network, settings: RunSettings, model: Model | None = None) -> TinySession:
    """A session of the network's own step."""
    return TinySession(
        with_own_step(network, RATE) if model is None else model,
        ["loss"],
        network.settings(settings),
        batches=BATCHES,
        ipus=network.stages,
    )


def replicated(replicas: int) -> RunSettings:
    """Settings for replicas, on all of which the samples are spread."""
    return RunSettings(replicas=replicas, local_replicas=replicas)


def reference(network: Network) -> dict[str, np.ndarray]:
    """The losses of all batches, and the weights after them, in float64."""
    values = {name: value.astype(np.float64) for name, value in network.start().items()}
    inputs, losses = data(BATCHES * SAMPLES), []
    for batch in range(BATCHES):
        part = slice(batch * SAMPLES, (batch + 1) * SAMPLES)
        x, target = (inputs[name][part].astype(np.float64) for name in ("x", "target"))
        loss, grads = gradients(network, values, x, target)
        losses.append(loss)
        values = {name: value - RATE * grads[name] for name, value in values.items()}
    return {"loss": np.array(losses), **values}


@pytest.mark.parametrize(
    ("replicas", "stages"),
    [(2, 2), (8, 1), *(pytest.param(*way, marks=pytest.mark.slow) for way in [(1, 1), (2, 1), (1, 4)])],
)
def test_it_trains_as_numpy_does_and_all_replicas_agree(replicas: int, stages: int) -> None:
    network = Network(layers=max(2, stages), rows=SAMPLES // replicas, stages=stages)
    with session(network, replicated(replicas)) as own:
        losses = own.run(**data(BATCHES * SAMPLES))["loss"].reshape(BATCHES, -1).sum(1)
        for name, value in reference(network).items():
            seen = losses if name == "loss" else own.read(name)
            np.testing.assert_allclose(seen, value, rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_noise_drops_in_as_in_training() -> None:
    network = Network(rows=4, noise=1.0)
    model = with_own_step(network, 0.0)
    with TinySession(model, ["normal_noise"]) as own:
        inputs = data(4)
        assert not np.array_equal(own.run(**inputs)["normal_noise"][0, 0, 0], inputs["x"])


def test_weights_go_to_the_host_and_back() -> None:
    network = Network(rows=SAMPLES // 2)
    inputs = data(BATCHES * SAMPLES)
    with session(network, replicated(2)) as own:
        first = own.run(**inputs)["loss"]
        own.parts.transfer.write(network.start())
        own.parts.transfer.from_host()
        np.testing.assert_array_equal(own.read("w0"), network.start()["w0"])
        np.testing.assert_array_equal(own.run(**inputs)["loss"], first)


@pytest.mark.usefixtures("kept")
def test_a_checkpoint_continues_to_the_bit() -> None:
    network = Network(rows=SAMPLES // 2)
    inputs = [data(BATCHES * SAMPLES, seed) for seed in range(2)]
    with session(network, replicated(2)) as first:
        first.run(**inputs[0])
        state = first.parts.transfer.checkpoint()
        losses = first.run(**inputs[1])["loss"]
    with session(network, replicated(2)) as second:
        second.parts.transfer.restore(*state)
        np.testing.assert_array_equal(second.run(**inputs[1])["loss"], losses)


def test_replicas_that_differ_are_found_when_weights_are_read_or_saved() -> None:
    network = Network(rows=SAMPLES // 2)
    model = with_own_step(network, RATE, reduces=False)
    with session(network, replicated(2), model) as own:
        own.run(**data(BATCHES * SAMPLES))
        for ask in (own.parts.transfer.to_host, own.parts.transfer.checkpoint):
            with pytest.raises(
                ApplicationRuntimeError, match=r"replicas 0 and 1 hold different values of 'b0'"
            ):
                ask()


def test_a_pipeline_is_refused_because_stages_read_what_others_write() -> None:
    network = Network(rows=SAMPLES, stages=2)
    settings = RunSettings(pipelined=True)
    with pytest.raises(
        UnsupportedError, match=r"'w\d', which tiny\.dense 'dense:\d'.* in stage \d of a pipeline"
    ):
        session(network, settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": "loss", "optimizer": Descent(RATE)}, r"the loss 'loss' cannot be differentiated as well"),
        (
            {"settings": RunSettings(accumulates=True, accumulation=3)},
            r"3 micro-batches cannot share one update",
        ),
    ],
)
def test_what_contradicts_an_own_step_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        TinySession(with_own_step(Network(), RATE), ["loss"], **changes)  # type: ignore[arg-type]


def test_a_variable_that_nothing_writes_is_named() -> None:
    model = with_own_step(Network(means=True), RATE)
    wrong = replace(model, stepped=model.stepped | {"mean"}, updates=model.updates)
    nodes = tuple(n for n in model.graph.nodes if n.op_type != "descend" or n.inputs[0] != "w1")
    unwritten = replace(
        model, graph=model.graph.with_nodes(nodes), updates=tuple(u for u in model.updates if u != "w1/new")
    )
    TinySession(wrong, ["loss"])
    with pytest.raises(UsageError, match=r"No operator writes the variable 'w1'"):
        TinySession(unwritten, ["loss"])


def test_groups_of_replicas_do_not_go_with_an_own_step() -> None:
    model = with_own_step(Network(), RATE)
    values = {name: value for name, value in model.graph.initializers.items() if name == "w0"}
    grouped = replace(model, groups={name: VariableGroups("Ungrouped", 0, "OnePerGroup") for name in values})
    with pytest.raises(UsageError, match=r"'w0', which groups of replicas keep for themselves"):
        TinySession(grouped, ["loss"], replicated(2))
