"""A training loop that recovers: a checkpoint every few batches, and for each class of error what docs/faults.md says.

    vipu create partition mine --size 16
    podrun --vipu-partition mine --num-replicas 16 --fault link:2-3@batch=17:down examples/recovery/train.py

prints what is done about errors, and in the end the losses of all batches: those of a run without errors, to the bit.
With --checkpoints DIRECTORY a later launch goes on where this one ended.

Each instance recovers by itself. All name the generation of the partition that failed, so that of several commands that
say the same one has an effect. All go back to the same checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import popart
import popdist
import popdist.popart

from podrun.checkpoint import CheckpointPolicy, Checkpoints, Spacing, WriteMode

POLICY = CheckpointPolicy(Spacing.BATCHES, 5, WriteMode.BACKGROUND)


def main() -> None:
    """Train, whatever happens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--checkpoints", type=Path, metavar="DIRECTORY", help="default: one that does not last"
    )
    parser.add_argument("--batches", type=int, default=30)
    arguments = parser.parse_args()
    training = Training(os.environ["IPUOF_VIPU_API_PARTITION_ID"])
    lasting = arguments.checkpoints
    folder = lasting or Path(tempfile.gettempdir(), f"checkpoints-{os.environ['PODRUN_LAUNCH_ID']}")
    with Checkpoints(folder, policy=POLICY) as checkpoints:
        losses = train(training, checkpoints, arguments.batches)
    print("losses", *(f"{loss:.6g}" for loss in losses))
    if lasting is None:
        popdist.init()
        popdist.barrier()  # No instance needs the folder any more.
        shutil.rmtree(folder, ignore_errors=True)


def train(training: Training, checkpoints: Checkpoints, batches: int) -> list[float]:
    """The losses of all batches."""
    shape = [batches, popdist.getNumLocalReplicas(), 4, 8]
    data = np.random.default_rng(popdist.getInstanceIndex()).standard_normal(shape).astype(np.float32)
    resumed = checkpoints.resume(training.session)
    losses: list[float] = resumed.state["losses"] if resumed else []
    checkpoints.save(training.session, len(losses), {"losses": losses})
    while len(losses) < batches:
        try:
            losses.append(training.batch(data[len(losses)]))
            checkpoints.save_if_due(training.session, len(losses), {"losses": losses})
        except popart.poplar_runtime_error as error:
            training.recover(error)
            resumed = checkpoints.resume(training.session)
            assert resumed is not None
            losses = resumed.state["losses"]
    return losses


class Training:
    """A session on a device of ``partition``."""

    def __init__(self, partition: str) -> None:
        self._partition = partition
        builder = popart.Builder()
        self._x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
        w = builder.addInitializedInputTensor(np.full([8, 2], 0.1, np.float32), "w")
        self._loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([self._x, w])], 0.1)
        self._model = builder.getModelProto()
        self._start()

    def _start(self) -> None:
        options = popart.SessionOptions()
        popdist.popart.configureSessionOptions(options)
        self._device = popdist.popart.getDevice()
        self.session = popart.TrainingSession(
            fnModel=self._model,
            dataFlow=popart.DataFlow(1, {self._loss: popart.AnchorReturnType("All")}),
            loss=self._loss,
            optimizer=popart.ConstSGD(0.05),
            deviceInfo=self._device,
            userOptions=options,
        )
        self._anchors = self.session.initAnchorArrays()
        self.session.prepareDevice()
        self.session.weightsFromHost()
        self._generation = f"--generation={partition(self._partition)['generation']}"

    def batch(self, data: np.ndarray) -> float:
        """Train on one batch of all replicas."""
        self.session.run(popart.PyStepIO({self._x: data}, self._anchors))
        return float(np.sum(self._anchors[self._loss]))

    def recover(self, error: popart.poplar_runtime_error) -> None:
        """Make IPUs usable again."""
        action = getattr(error, "recoveryAction", None)
        print(type(error).__name__.removeprefix("poplar_"), action.name if action else "-", flush=True)
        program_failed = isinstance(error, popart.poplar_application_runtime_error)
        if program_failed or action == popart.RecoveryAction.IPU_RESET:
            return  # Resuming loads the program again, and so resets its IPUs.
        self._device.detach()
        if isinstance(error, popart.poplar_unrecoverable_runtime_error):
            replace_machines(self._generation)
        elif action != popart.RecoveryAction.PARTITION_RESET:
            for agent in partition(self._partition)["agents"]:
                command("vipu-admin", "power-cycle", "agent", agent, self._generation)
        command("vipu", "reset", "partition", self._partition, self._generation)
        self._start()


def replace_machines(generation: str) -> None:
    """Those that no recovery action helps: lost, or with an error that persists."""
    for card in json.loads(command("gc-monitor", "--json"))["cards"]:
        if any(ipu["error_state"] != "no errors" and ipu["recovery_action"] is None for ipu in card["ipus"]):
            command("vipu-admin", "restart", "agent", card["agent"], generation)


def partition(name: str) -> dict[str, Any]:
    """What the server knows of the partition."""
    found: dict[str, Any] = json.loads(output("vipu", "--format=json", "get", "partition", name))["partition"]
    return found


def command(*words: str) -> str:
    """Say what is typed, type it, and return what it prints."""
    print("$", *words, flush=True)
    return output(*words)


def output(*words: str) -> str:
    """What a command prints."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
