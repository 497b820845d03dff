"""A training loop that recovers: a checkpoint every few steps, and for each class of error what docs/faults.md says.

    vipu create partition mine --size 16
    podrun --vipu-partition mine --num-replicas 16 --fault link:2-3@step=17:down examples/recovery/train.py

prints what is done about errors, and in the end the losses of all steps: those of a run without errors, to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import popart
import popdist
import popdist.popart

STEPS, BETWEEN_CHECKPOINTS = 30, 5


def main() -> None:
    """Train, whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIRECTORY", help="default: one that does not last"
    )
    arguments = parser.parse_args()
    partition = os.environ["IPUOF_VIPU_API_PARTITION_ID"]
    with tempfile.TemporaryDirectory() as passing:
        training = Training((arguments.checkpoints or Path(passing)) / "checkpoint.onnx", partition)
        print("losses", *(loss.hex() for loss in train(training)))


def train(training: Training) -> list[float]:
    """The losses of all steps."""
    shape = [STEPS, popdist.getNumLocalReplicas(), 4, 8]
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    losses: list[float] = []
    saved = 0
    training.save()
    while len(losses) < STEPS:
        try:
            losses.append(training.step(data[len(losses)]))
        except popart.poplar_runtime_error as error:
            training.recover(error)
            del losses[saved:]
            continue
        if len(losses) % BETWEEN_CHECKPOINTS == 0:
            training.save()
            saved = len(losses)
    return losses


class Training:
    """A session on a device of ``partition``, and its last checkpoint."""

    def __init__(self, checkpoint: Path, partition: str) -> None:
        self._checkpoint, self._partition = str(checkpoint), partition
        builder = popart.Builder()
        self._x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
        w = builder.addInitializedInputTensor(np.full([8, 2], 0.1, np.float32), "w")
        self._loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([self._x, w])], 0.1)
        self._start(builder.getModelProto())

    def _start(self, model: bytes | str) -> None:
        options = popart.SessionOptions()
        popdist.popart.configureSessionOptions(options)
        self._device = popdist.popart.getDevice()
        self._session = popart.TrainingSession(
            fnModel=model,
            dataFlow=popart.DataFlow(1, {self._loss: popart.AnchorReturnType("All")}),
            loss=self._loss,
            optimizer=popart.ConstSGD(0.05),
            deviceInfo=self._device,
            userOptions=options,
        )
        self._anchors = self._session.initAnchorArrays()
        self._load()

    def _load(self) -> None:
        self._session.prepareDevice()
        self._session.weightsFromHost()

    def save(self) -> None:
        """Write a checkpoint; whenever this ends, there is a whole one."""
        draft = Path(f"{self._checkpoint}.new")
        self._session.modelToHost(str(draft))
        draft.replace(self._checkpoint)

    def step(self, data: np.ndarray) -> float:
        """Train on one batch of all replicas."""
        self._session.run(popart.PyStepIO({self._x: data}, self._anchors))
        return float(np.sum(self._anchors[self._loss]))

    def recover(self, error: popart.poplar_runtime_error) -> None:
        """Make IPUs usable again, and go back to the checkpoint."""
        action = getattr(error, "recoveryAction", None)
        print(type(error).__name__.removeprefix("poplar_"), action.name if action else "-", flush=True)
        program_failed = isinstance(error, popart.poplar_application_runtime_error)
        if program_failed or action == popart.RecoveryAction.IPU_RESET:
            self._session.resetHostWeights(self._checkpoint)
            self._load()
            return
        self._device.detach()
        if isinstance(error, popart.poplar_unrecoverable_runtime_error):
            replace_machines()
        elif action != popart.RecoveryAction.PARTITION_RESET:
            power_cycle(self._partition)
        command("vipu", "reset", "partition", self._partition)
        self._start(self._checkpoint)


def replace_machines() -> None:
    """Those that no recovery action helps: lost, or with an error that persists."""
    for card in json.loads(command("gc-monitor", "--json"))["cards"]:
        if any(ipu["error_state"] != "no errors" and ipu["recovery_action"] is None for ipu in card["ipus"]):
            command("vipu-admin", "restart", "agent", card["agent"])


def power_cycle(partition: str) -> None:
    """All machines of the partition."""
    found = json.loads(command("vipu", "--format=json", "get", "partition", partition))
    for agent in found["partition"]["agents"]:
        command("vipu-admin", "power-cycle", "agent", agent)


def command(*words: str) -> str:
    """Say what is typed, type it, and return what it prints."""
    print("$", *words, flush=True)
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
