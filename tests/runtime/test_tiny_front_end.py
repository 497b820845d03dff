"""A front end of five operators is trained, pipelined, replicated, profiled and saved by the runtime alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from podrun.compiler.program import PipelineOrder
from podrun.core.errors import UnimplementedError, UsageError
from podrun.core.executable import Retrieval
from podrun.runtime.device_program import fingerprint
from podrun.runtime.settings import Recomputation, Returned, RunSettings
from tests.kept_programs import kept as kept
from tests.runtime.tiny import (
    FUNCTIONS,
    MOMENTUM,
    OPERATORS,
    SETTINGS,
    WIDTH,
    Descent,
    Network,
    TinySession,
    data,
    forward,
    gradients,
)

RATE, BATCHES, SAMPLES = 0.05, 2, 24
ROOT = Path(__file__).resolve().parents[2]
SHOWN = ("tiny", "tiny_steps")
"""The files of which the page about the runtime shows parts."""


def trained(
    network: Network, settings: RunSettings = SETTINGS, optimizer: Descent | None = None
) -> dict[str, np.ndarray]:
    """Losses of all micro-batches and the weights after `BATCHES` batches of `SAMPLES` samples."""
    micro = SAMPLES // (settings.replicas * settings.micro_batches)
    network = replace(network, rows=micro)
    with TinySession(
        network.model(),
        ["loss"],
        network.settings(settings),
        batches=BATCHES,
        loss="loss",
        optimizer=optimizer or Descent(RATE),
        ipus=network.stages,
    ) as session:
        results = session.run(**data(BATCHES * SAMPLES))
        weights = {name: session.read(name) for name in network.start()}
    return {"loss": results["loss"].reshape(BATCHES, -1), **weights}


def reference(network: Network, momentum: float = 0.0) -> dict[str, np.ndarray]:
    """Weights and the loss of each batch, in NumPy's float64."""
    values = {name: value.astype(np.float64) for name, value in network.start().items()}
    velocity = {name: np.zeros_like(value) for name, value in values.items()}
    inputs, losses = data(BATCHES * SAMPLES), []
    for batch in range(BATCHES):
        part = slice(batch * SAMPLES, (batch + 1) * SAMPLES)
        x, target = (inputs[name][part].astype(np.float64) for name in ("x", "target"))
        loss, grads = gradients(network, values, x, target)
        losses.append(loss)
        for name, gradient in grads.items():
            velocity[name] = momentum * velocity[name] + gradient
            values[name] = values[name] - RATE * velocity[name]
    return {"loss": np.array(losses), **values}


def agree(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    """Equal but for float32's rounding; losses of micro-batches add up to the batch's."""
    for name, value in expected.items():
        seen = found[name].sum(1) if name == "loss" else found[name]
        np.testing.assert_allclose(seen, value, rtol=2e-5, atol=2e-6, err_msg=name)


def same(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> None:
    """Equal to the bit."""
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_it_trains_as_numpy_does() -> None:
    agree(trained(Network()), reference(Network()))


def test_momentum_is_a_rule_of_the_runtime() -> None:
    agree(trained(Network(), optimizer=Descent(RATE, 0.5)), reference(Network(), 0.5))


@pytest.mark.sample(2)
@pytest.mark.parametrize("stages", [2, 4])
def test_a_pipeline_has_the_bits_of_the_model_on_as_many_ipus(stages: int) -> None:
    network = Network(layers=stages, stages=stages)
    accumulated = RunSettings(accumulates=True, accumulation=8)
    split = trained(network, accumulated)
    agree(split, reference(network))
    same(split, trained(network, replace(accumulated, pipelined=True)))


@pytest.mark.slow
def test_all_orders_of_a_pipeline_have_the_same_bits() -> None:
    network = Network(layers=4, stages=4)
    settings = RunSettings(accumulates=True, accumulation=8, pipelined=True)
    first, *others = (trained(network, replace(settings, order=order)) for order in (*PipelineOrder, None))
    for other in others:
        same(first, other)


@pytest.mark.parametrize(
    ("replicas", "accumulation"),
    [(4, 2), *(pytest.param(*way, marks=pytest.mark.slow) for way in [(2, 1), (8, 1), (1, 4)])],
)
def test_replicas_and_micro_batches_share_a_batch(replicas: int, accumulation: int) -> None:
    settings = RunSettings(
        replicas=replicas, local_replicas=replicas, accumulates=accumulation > 1, accumulation=accumulation
    )
    agree(trained(Network(), settings), reference(Network()))


@pytest.mark.slow
def test_replicated_pipelines_that_recompute_agree_to_the_bit() -> None:
    network = Network(stages=2)
    settings = RunSettings(replicas=2, local_replicas=2, accumulates=True, accumulation=4)
    split = trained(network, settings)
    agree(split, reference(network))
    same(split, trained(network, replace(settings, pipelined=True, recomputation=Recomputation.PIPELINE)))


@pytest.mark.slow
def test_running_means_move_with_every_micro_batch_in_a_pipeline_too() -> None:
    network = Network(means=True, stages=2)
    settings = RunSettings(accumulates=True, accumulation=4)
    split = trained(network, settings)
    same(split, trained(network, replace(settings, pipelined=True)))
    mean = np.zeros(WIDTH)
    for micro_batch in data(BATCHES * SAMPLES)["x"].astype(np.float64).reshape(2 * 4, -1, WIDTH):
        mean = MOMENTUM * mean + (1 - MOMENTUM) * micro_batch.mean(0)
    np.testing.assert_allclose(split["mean"], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sessions", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_noise_is_each_replicas_and_repeats(sessions: int) -> None:
    network, settings = Network(layers=1, noise=0.5), RunSettings(replicas=2, local_replicas=2)
    alike = np.tile(data(4)["x"], (2, 1))

    def noisy(*seeds: int) -> list[np.ndarray]:
        found = []
        with TinySession(
            network.model(), ["normal_noise"], settings, loss="loss", optimizer=Descent(RATE)
        ) as session:
            for seed in seeds:
                session.parts.random.set_seed(seed)
                found.append(session.run(x=alike, target=alike)["normal_noise"].reshape(2, 4, WIDTH))
        return found

    first, again, other = noisy(3, 3, 4) if sessions == 1 else (noisy(seed)[0] for seed in (3, 3, 4))
    assert not np.array_equal(first[0], first[1])
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_inference_has_neither_noise_nor_gradients() -> None:
    network = Network(noise=0.5, rows=4)
    inputs = data(8)
    with TinySession(network.model(), ["tanh:1"], batches=2) as session:
        found = session.run(x=inputs["x"])["tanh:1"]
    values = {name: value.astype(np.float64) for name, value in network.start().items()}
    np.testing.assert_allclose(
        found.reshape(8, WIDTH),
        forward(network, values, inputs["x"].astype(np.float64))[-1],
        rtol=1e-5,
        atol=1e-7,  # Sums of numbers about 1 may be next to 0.
    )


def test_weights_and_rate_change_between_runs() -> None:
    network = Network(rows=4)
    inputs = data(4)
    with TinySession(network.model(), ["loss"], loss="loss", optimizer=Descent(RATE)) as session:
        session.run(**inputs)
        session.parts.scalars.replace(Descent(0.0))
        before = session.read("w0")
        session.run(**inputs)
        np.testing.assert_array_equal(session.read("w0"), before)
        session.parts.transfer.write(network.start())
        session.parts.transfer.from_host()
        np.testing.assert_array_equal(session.read("w0"), network.start()["w0"])
        values = {name: value.astype(np.float64) for name, value in network.start().items()}
        loss, _ = gradients(network, values, *(inputs[n].astype(np.float64) for n in ("x", "target")))
        np.testing.assert_allclose(session.run(**inputs)["loss"].item(), loss, rtol=1e-5)


@pytest.mark.usefixtures("kept")
def test_a_checkpoint_continues_to_the_bit() -> None:
    network = Network(rows=4, noise=0.1, means=True)
    inputs = [data(4, seed) for seed in range(3)]

    def session() -> TinySession:
        return TinySession(network.model(), ["loss"], loss="loss", optimizer=Descent(RATE, 0.5))

    with session() as first:
        first.run(**inputs[0])
        tensors, values = first.parts.transfer.checkpoint()
        losses = [first.run(**batch)["loss"] for batch in inputs[1:]]
    with session() as second:
        second.parts.transfer.restore(tensors, values)
        again = [second.run(**batch)["loss"] for batch in inputs[1:]]
    np.testing.assert_array_equal(losses, again)


def test_an_executable_in_a_file_runs_in_place_of_a_compilation(tmp_path: Path) -> None:
    network, inputs = Network(rows=4), data(4)
    path = str(tmp_path / "tiny.popef")
    with TinySession(network.model(), ["loss"], loss="loss", optimizer=Descent(RATE)) as first:
        first.parts.files.save(path)
        loss = first.run(**inputs)["loss"]
    second = TinySession(network.model(), ["loss"], loss="loss", optimizer=Descent(RATE))
    second.parts.files.load(path)
    with second:
        assert not second.parts.loader.compiler.compiled_here
        np.testing.assert_array_equal(second.run(**inputs)["loss"], loss)
    other = TinySession(replace(network, rows=2).model(), ["loss"], loss="loss", optimizer=Descent(RATE))
    with pytest.raises(UsageError, match=r"is not the program of this session: its inputs are"):
        other.parts.files.load(path)


def test_equal_models_have_equal_digests() -> None:
    def digest(network: Network) -> str | None:
        session = TinySession(
            network.model(), ["loss"], network.settings(), loss="loss", optimizer=Descent(RATE), ipus=2
        )
        return fingerprint(session.parts.model.built)

    first = digest(Network())
    assert first is not None
    assert first == digest(Network())
    assert len({first, *map(digest, (Network(rows=2), Network(noise=0.1), Network(stages=2)))}) == 4


def test_a_report_names_the_operators() -> None:
    network = Network(stages=2, rows=4)
    settings = network.settings(RunSettings(accumulates=True, accumulation=4, pipelined=True))
    with TinySession(
        network.model(), ["loss"], settings, loss="loss", optimizer=Descent(RATE), ipus=2
    ) as session:
        profile, text = session.parts.reports.profile(), session.parts.reports.summary()
    assert profile.compilation.target.numIPUs == 2
    assert "Gemm" in text


def test_the_last_value_alone_comes_back() -> None:
    network, inputs = Network(rows=4), data(12)
    with TinySession(network.model(), ["tanh:0"], batches=3) as session:
        every = session.run(x=inputs["x"])["tanh:0"]
    final = Returned(Retrieval.FINAL)
    with TinySession(network.model(), ["tanh:0"], batches=3, returned=final) as session:
        np.testing.assert_array_equal(session.run(x=inputs["x"])["tanh:0"][0], every[-1, 0, 0])


def test_an_operator_outside_the_table_is_refused_by_name() -> None:
    network = Network()
    model = network.model()
    nodes = tuple(replace(n, op_type="sine") if n.op_type == "tanh" else n for n in model.graph.nodes)
    with pytest.raises(UnimplementedError, match=r"tiny\.sine 'tanh:0'.*has no operator 'sine'"):
        TinySession(model.with_graph(model.graph.with_nodes(nodes)), ["tanh:0"])


def test_shapes_that_do_not_fit_name_the_operator() -> None:
    model = Network().model()
    values = {"w0": np.zeros((3, WIDTH), np.float32)}
    with pytest.raises(UsageError, match=r"tiny\.dense 'dense:0'.*rows of 3 weights do not fit 4 columns"):
        TinySession(model.with_values(values), ["tanh:0"])


def test_the_table_holds_functions_alone() -> None:
    assert OPERATORS.functions is FUNCTIONS


def test_the_page_about_the_runtime_shows_this_front_end() -> None:
    page = (ROOT / "docs/runtime.md").read_text(encoding="utf-8")
    code = "".join((ROOT / f"tests/runtime/{name}.py").read_text(encoding="utf-8") for name in SHOWN)
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) > 6
    assert [block for block in blocks if block not in code] == []


OTHERS = ("podrun.popart", "podrun.poptorch", "podrun.onnx_models", "onnx", "torch")


@pytest.mark.slow
@pytest.mark.system
def test_training_imports_no_other_front_end() -> None:
    """A process that trains a pipeline, checkpoints, reports and saves a file has none of the others' modules.

    `tests/test_rooms.py` follows the import statements by default.
    """
    run = subprocess.run(
        [sys.executable, "-m", "tests.runtime.train_alone"],
        cwd=ROOT,
        env={**os.environ, "PODRUN_CHECK_REPLICAS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    modules = run.stdout.split()
    assert "podrun.runtime.runner" in modules
    assert [name for name in modules if f"{name}.".startswith(tuple(f"{other}." for other in OTHERS))] == []
