"""Replicas compare their weights: a flipped bit is found, its IPUs are named, and no spoiled weights are kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import podrun.popart as popart
from podrun.checkpoint import Checkpoints
from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.faults import parse_faults
from podrun.popart.devices.device_manager import DeviceManager
from podrun.runtime.environment import check_replicas
from podrun.runtime.replica_check import IpuDigest, differing, odd_ones

BATCHES, REPLICAS, EVERY = 9, 16, 3
OPTIMIZERS: Mapping[str, Callable[[], popart.Optimizer]] = {
    "lamb": lambda: popart.Adam({"defaultLearningRate": (0.01, False)}, mode=popart.AdamMode.Lamb),
    "sgd": lambda: popart.SGD({"defaultLearningRate": (0.01, False)}),
    "adam": lambda: popart.Adam({"defaultLearningRate": (0.01, False)}),
}


class Training:
    """Sixteen replicas on four machines inside this process."""

    def __init__(self, optimizer: str, every: int) -> None:
        builder = popart.Builder()
        self.x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
        start = np.linspace(-1, 1, 24).reshape(8, 3).astype(np.float32)
        w = builder.addInitializedInputTensor(start, "w")
        self.loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([self.x, w])], 0.1)
        options = popart.SessionOptions()
        options.enableReplicatedGraphs, options.replicatedGraphCount = True, REPLICAS
        environ = {**environment(), "PODRUN_CHECK_REPLICAS": str(every)}
        device = DeviceManager(environ=environ).acquireAvailableDevice(REPLICAS)
        flow = popart.DataFlow(1, {self.loss: popart.AnchorReturnType("All")})
        self.device = device
        self.session = popart.TrainingSession(
            builder.getModelProto(), flow, self.loss, OPTIMIZERS[optimizer](), device, userOptions=options
        )
        self.session.prepareDevice()
        self.session.weightsFromHost()
        self.anchors = self.session.initAnchorArrays()
        shape = (BATCHES, 1, REPLICAS, 4, 8)
        self.data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)

    def batch(self, number: int) -> None:
        self.session.run(popart.PyStepIO({self.x: self.data[number]}, self.anchors))

    def weights(self) -> dict[str, bytes]:
        self.session.weightsToHost()
        return {name: value.tobytes() for name, value in self.session.parts.weights.get_all().items()}

    def flip(self, *ipus: int) -> None:
        """Flip a bit of ``w`` in the memory of IPUs, before the next batch."""
        for ipu in ipus:
            port = self.device.device.connection._ports[ipu // 4]  # type: ignore[attr-defined]
            port._machine.plan_faults(parse_faults(f"ipu:{ipu}@batch=+0:corrupt,tensor=w,bit=10"))


@contextmanager
def training(optimizer: str, every: int = EVERY) -> Iterator[Training]:
    made = Training(optimizer, every)
    try:
        yield made
    finally:
        made.device.detach()


def undisturbed(optimizer: str) -> dict[str, bytes]:
    """The weights after a training without flips, and without comparisons."""
    with training(optimizer, every=0) as plain:
        for number in range(BATCHES):
            plain.batch(number)
        return plain.weights()


@pytest.mark.parametrize("optimizer", ["lamb", "adam", pytest.param("sgd", marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_named_and_left_behind(optimizer: str, tmp_path: Path) -> None:
    expected = undisturbed(optimizer)
    flips = {4: (5,), 6: (8, 11)}
    errors = []
    with training(optimizer) as here, Checkpoints(tmp_path) as checkpoints:
        done = 0
        while done < BATCHES:
            if done in flips:
                here.flip(*flips.pop(done))
            try:
                here.batch(done)
                done += 1
                if done % 3 == 0:
                    checkpoints.save(here.session, done)
            except popart.poplar_recoverable_runtime_error as error:
                errors.append((error.args[0], error.recoveryAction))
                resumed = checkpoints.resume(here.session)
                assert resumed is not None
                done = resumed.batch
        assert here.weights() == expected
    assert [action for _, action in errors] == [popart.RecoveryAction.IPU_RESET] * 2
    said = "Weights differ between replicas after batch"
    assert [text for text, _ in errors] == [
        f"{said} 6: those of IPU 5 are not those of most replicas; they were alike after batch 3",
        f"{said} 6: those of IPU 8, IPU 11 are not those of most replicas; they were alike after batch 3",
    ]


def test_no_checkpoint_is_saved_of_replicas_that_differ(tmp_path: Path) -> None:
    with training("sgd", every=100) as here, Checkpoints(tmp_path) as checkpoints:
        here.batch(0)
        checkpoints.save(here.session, 1)
        here.batch(1)
        here.flip(4)
        here.batch(1)
        with pytest.raises(popart.poplar_recoverable_runtime_error, match="those of IPU 4 are not"):
            checkpoints.save(here.session, 2)
        assert checkpoints.batches() == [1]


@given(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.sampled_from([1, 2]))
def test_the_ones_that_are_not_like_most_are_suspected(digests: list[int], span: int) -> None:
    digests = digests[: len(digests) // span * span]
    found = [IpuDigest(n, digest) for n, digest in enumerate(digests)]
    suspects = odd_ones(found, span)
    for position in range(span):
        alike = digests[position::span]
        here = [m for m in suspects if m.ipu % span == position]
        if len(set(alike)) <= 1:
            assert here == []
        else:
            assert here
            assert len(set(alike) - {m.digest for m in here}) <= 1
            assert all(alike.count(m.digest) <= max(map(alike.count, alike)) for m in here)


def test_two_that_differ_are_both_named() -> None:
    error = differing(odd_ones([IpuDigest(0, 1), IpuDigest(1, 1), IpuDigest(5, 2), IpuDigest(7, 2)]), 20, 10)
    assert error.message == (
        "Weights differ between replicas after batch 20: those of IPUs 0-1, IPU 5, IPU 7 are not alike; "
        "they were alike after batch 10"
    )
    assert error.where == "ipus 0-1, ipu 5, ipu 7"


def test_a_number_of_batches_that_is_none_is_refused() -> None:
    assert check_replicas({}) == 0
    assert check_replicas({"PODRUN_CHECK_REPLICAS": "5"}) == 5
    for text in ("-1", "often", "1.5", "9" * 20):
        with pytest.raises(UsageError, match="must be a number of batches"):
            check_replicas({"PODRUN_CHECK_REPLICAS": text})
