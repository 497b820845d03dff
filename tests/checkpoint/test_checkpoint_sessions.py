"""Training that resumes from a checkpoint gives the same bits as training that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podrun.popart as popart
from podrun.checkpoint import CheckpointError, Checkpoints, random_state, set_random_state
from tests.quick_programs import (
    programs_of_default_tests_compile_quickly as programs_of_default_tests_compile_quickly,
)

BATCHES, CUT, REPLICAS = 6, 3, 2


def model() -> tuple[bytes, str, str]:
    """Dropout, batch normalization and a matrix product in halves: random numbers, statistics, weights."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT16", [4, 8, 2]))
    w = builder.addInitializedInputTensor(np.linspace(-1, 1, 64).reshape(8, 8).astype(np.float16), "w")
    ones, zeros = np.ones(8, np.float16), np.zeros(8, np.float16)
    names = ["scale", "bias", "mean", "var"]
    scale, bias, mean, var = (
        builder.addInitializedInputTensor(v.copy(), n)
        for n, v in zip(names, (ones, zeros, zeros, ones), strict=True)
    )
    (dropped,) = builder.aiOnnx.dropout([builder.aiOnnx.matmul([w, x])], 1, 0.25)
    y = builder.aiOnnx.batchnormalization([dropped, scale, bias, mean, var], 5)[0]
    loss = builder.aiGraphcore.l1loss([y], 0.1)
    return builder.getModelProto(), x, loss


def product() -> tuple[bytes, str, str]:
    """A matrix product alone."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 2]))
    w = builder.addInitializedInputTensor(np.ones((2, 2), np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([w, x])], 0.1)
    return builder.getModelProto(), x, loss


OPTIMIZERS = {
    "momentum": lambda: popart.SGD({"defaultLearningRate": (0.01, False), "defaultMomentum": (0.9, True)}),
    "adam": lambda: popart.Adam({"defaultLearningRate": (0.01, False)}),
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where executables stay: sessions of all tests compile a program once."""
    return Path(tmp_path_factory.mktemp("compiled"))


@contextmanager
def training(
    optimizer: str, compiled: Path, made: Callable[[], tuple[bytes, str, str]] = model
) -> Iterator[Training]:
    proto, x, loss = made()
    options = popart.SessionOptions()
    options.enableReplicatedGraphs, options.replicatedGraphCount = True, REPLICAS
    options.enableStochasticRounding = True
    options.enableEngineCaching, options.cachePath = True, str(compiled)
    device = popart.DeviceManager().acquireAvailableDevice(REPLICAS)
    try:
        session = popart.TrainingSession(
            proto,
            popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
            loss,
            OPTIMIZERS[optimizer](),
            device,
            userOptions=options,
        )
        session.prepareDevice()
        session.weightsFromHost()
        session.setRandomSeed(7)
        yield Training(session, x, loss)
    finally:
        device.detach()


class Training:
    def __init__(self, session: popart.TrainingSession, x: str, loss: str) -> None:
        self.session, self._x, self._loss = session, x, loss
        self._anchors = session.initAnchorArrays()
        self.generator = np.random.default_rng(3)
        self.losses: list[float] = []

    def batch(self) -> None:
        data = self.generator.standard_normal((1, REPLICAS, 4, 8, 2)) + random.random() + np.random.rand()
        self.session.run(popart.PyStepIO({self._x: data.astype(np.float16)}, self._anchors))
        self.losses += self._anchors[self._loss].ravel().tolist()

    def weights(self) -> dict[str, bytes]:
        self.session.weightsToHost()
        return {name: value.tobytes() for name, value in self.session.parts.weights.get_all().items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.sample(2)
def test_resumed_training_gives_the_same_bits(optimizer: str, compiled: Path, tmp_path: Path) -> None:
    random.seed(1)
    np.random.seed(1)
    start = random_state()
    with training(optimizer, compiled) as whole:
        for _ in range(BATCHES):
            whole.batch()
        wanted = whole.weights()
        wanted_random = random_state(whole.generator)
    set_random_state(start)
    with training(optimizer, compiled) as first, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        for _ in range(CUT):
            first.batch()
        checkpoints.save(
            first.session, CUT, {"losses": first.losses, "random": random_state(first.generator)}
        )
        first.batch()  # Lost; the save goes on beside it and must not see it.
    random.seed(99)
    np.random.seed(99)
    with training(optimizer, compiled) as second, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        resumed = checkpoints.resume(second.session)
        assert resumed is not None
        assert resumed.batch == CUT
        set_random_state(resumed.state["random"], second.generator)
        second.losses = resumed.state["losses"]
        for _ in range(resumed.batch, BATCHES):
            second.batch()
        assert second.losses == whole.losses
        assert second.weights() == wanted
        assert repr(random_state(second.generator)) == repr(wanted_random)
        # In the same session, too: what a recovery from an error does.
        resumed = checkpoints.resume(second.session)
        assert resumed is not None
        set_random_state(resumed.state["random"], second.generator)
        for _ in range(resumed.batch, BATCHES):
            second.batch()
        assert second.weights() == wanted


def test_a_checkpoint_of_another_program_is_refused(compiled: Path, tmp_path: Path) -> None:
    with training("adam", compiled, product) as first, Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(first.session, 0)
    other = pytest.raises(popart.popart_exception, match="checkpoint is of another program: 'Accl")
    with (
        training("momentum", compiled, product) as second,
        Checkpoints(tmp_path / "checkpoints") as checkpoints,
        other,
    ):
        checkpoints.resume(second.session)


def test_random_states_that_do_not_fit_are_refused() -> None:
    with pytest.raises(CheckpointError, match="1 NumPy generators, not of 0"):
        set_random_state(random_state(np.random.default_rng()))
    wrong: list[Any] = [{}, {"numpy": {}, "generators": []}, {**random_state(), "python": (1, 2, 3)}]
    for state in wrong:
        with pytest.raises(CheckpointError, match="no state of random numbers"):
            set_random_state(state)
