"""A training program that goes on until it is ended: data parallel, with a checkpoint every few batches."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import click
import numpy as np
import popart
import popdist
import popdist.popart

from podrun.checkpoint import CheckpointPolicy, Checkpoints, Spacing, WriteMode
from podrun.core.environment import PODRUN_PROGRAM_FAULTS, environment, pass_on

POLICY = CheckpointPolicy(Spacing.BATCHES, 50, WriteMode.BLOCKING)
BATCHES_PER_STEP = 5
HOLD_S = 86_400.0


@click.command(help=__doc__)
@click.option("--checkpoints", type=click.Path(path_type=Path), required=True, help="Folder of checkpoints.")
@click.option("--pause", default=0.05, help="Seconds between two runs [0.05].")
@click.option("--hold", is_flag=True, help="Keep the IPUs after the first run, without using them.")
def main(checkpoints: Path, pause: float, hold: bool) -> None:
    """Train, and say every few batches how it goes."""
    if "DRILL_FAULTS" in environment():  # Faults of this process, which the drill writes there later.
        pass_on(PODRUN_PROGRAM_FAULTS, environment()["DRILL_FAULTS"])
        logging.getLogger("podrun.faults").setLevel(logging.ERROR)  # It would say that a fault strikes.
    session, x, loss = training_session()
    anchors = session.initAnchorArrays()
    dice = np.random.default_rng(popdist.getInstanceIndex())
    shape = [BATCHES_PER_STEP, popdist.getNumLocalReplicas(), 4, 8]
    with Checkpoints(checkpoints, policy=POLICY) as kept:
        resumed = kept.resume(session)
        batch = int(resumed.state["batch"]) if resumed else 0
        print(f"training from batch {batch}", flush=True)
        while True:
            data = dice.standard_normal(shape).astype(np.float32)
            session.run(popart.PyStepIO({x: data}, anchors))
            batch += BATCHES_PER_STEP
            if batch % 50 == 0:
                print(f"batch {batch}, loss {float(np.mean(anchors[loss])):.4f}", flush=True)
            kept.save_if_due(session, batch, {"batch": batch})
            time.sleep(HOLD_S if hold else pause)


def training_session() -> tuple[popart.TrainingSession, str, str]:
    """A session with its weights on the device, its input and its loss."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]), "x")
    w = builder.addInitializedInputTensor(np.full([8, 2], 0.1, np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    options = popart.SessionOptions()
    popdist.popart.configureSessionOptions(options)
    session = popart.TrainingSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(BATCHES_PER_STEP, {loss: popart.AnchorReturnType("All")}),
        loss=loss,
        optimizer=popart.ConstSGD(0.05),
        deviceInfo=popdist.popart.getDevice(),
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    return session, x, loss


if __name__ == "__main__":
    main()
