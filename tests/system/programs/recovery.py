"""A training loop that recovers: a checkpoint every few steps, and for each class of error what docs/faults.md says.

``recovery.py DIRECTORY`` prints what it does about errors, and in the end the losses of all steps.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import popart
import popdist
import popdist.popart

STEPS, EVERY = 30, 5
CHECKPOINT = str(Path(sys.argv[1]) / "checkpoint.onnx")
PARTITION = sys.argv[2]
RESET = popart.RecoveryAction.PARTITION_RESET


def command(*words):
    print("$", *words, flush=True)
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def replace_machines():
    """Those that no recovery action helps: lost, or with an error that persists."""
    for card in json.loads(command("gc-monitor", "--json"))["cards"]:
        if any(ipu["error_state"] != "no errors" and ipu["recovery_action"] is None for ipu in card["ipus"]):
            command("vipu-admin", "restart", "agent", card["agent"])


def power_cycle():
    for agent in json.loads(command("vipu", "--format=json", "get", "partition", PARTITION))["partition"][
        "agents"
    ]:
        command("vipu-admin", "power-cycle", "agent", agent)


class Training:
    def __init__(self, model, x, loss):
        self.x, self.loss = x, loss
        self.start(model)

    def start(self, model):
        options = popart.SessionOptions()
        popdist.popart.configureSessionOptions(options)
        self.device = popdist.popart.getDevice()
        self.session = popart.TrainingSession(
            fnModel=model,
            dataFlow=popart.DataFlow(1, {self.loss: popart.AnchorReturnType("All")}),
            loss=self.loss,
            optimizer=popart.ConstSGD(0.05),
            deviceInfo=self.device,
            userOptions=options,
        )
        self.session.prepareDevice()
        self.session.weightsFromHost()
        self.anchors = self.session.initAnchorArrays()

    def save(self):
        self.session.modelToHost(CHECKPOINT + ".new")
        Path(CHECKPOINT + ".new").replace(CHECKPOINT)

    def step(self, data):
        self.session.run(popart.PyStepIO({self.x: data}, self.anchors))
        return float(np.sum(self.anchors[self.loss]))

    def recover(self, error):
        """Make IPUs usable again, and go back to the checkpoint."""
        kind, action = type(error).__name__.removeprefix("poplar_"), getattr(error, "recoveryAction", None)
        print(kind, action.name if action else "-", flush=True)
        if (
            isinstance(error, popart.poplar_application_runtime_error)
            or action == popart.RecoveryAction.IPU_RESET
        ):
            self.session.resetHostWeights(CHECKPOINT)
            self.session.prepareDevice()
            self.session.weightsFromHost()
            return
        self.device.detach()
        if isinstance(error, popart.poplar_unrecoverable_runtime_error):
            replace_machines()
        elif action != RESET:
            power_cycle()
        command("vipu", "reset", "partition", PARTITION)
        self.start(CHECKPOINT)


def main():
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]))
    w = builder.addInitializedInputTensor(np.full([8, 2], 0.1, np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    shape = [STEPS, popdist.getNumLocalReplicas(), 4, 8]
    data = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    training, losses, saved = Training(builder.getModelProto(), x, loss), {}, 0
    training.save()
    while len(losses) < STEPS:
        step = len(losses)
        try:
            losses[step] = training.step(data[step])
        except popart.poplar_runtime_error as error:
            training.recover(error)
            losses = {at: value for at, value in losses.items() if at < saved}
            continue
        if len(losses) % EVERY == 0:
            training.save()
            saved = len(losses)
    print("losses", *(losses[at].hex() for at in range(STEPS)))


if __name__ == "__main__":
    main()
