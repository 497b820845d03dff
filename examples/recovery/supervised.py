"""A training loop without a line about errors: it keeps checkpoints, and podrun starts it again.

    podrun --num-replicas 16 --num-instances 2 --max-restarts 3 --fault link:2-3@batch=17:down \
        examples/recovery/supervised.py --checkpoints supervised-checkpoints

All instances start from the last checkpoint. At the end the losses of all batches are those of a run without errors, to
the bit.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import numpy as np
import popart
import popdist
import popdist.popart

from podrun.checkpoint import CheckpointPolicy, Checkpoints, Spacing, WriteMode

BATCHES = 30
POLICY = CheckpointPolicy(Spacing.BATCHES, 5, WriteMode.BACKGROUND)


def main() -> None:
    """Train from the last checkpoint to the last batch."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=Path, metavar="DIRECTORY", required=True)
    session, x, loss = start()
    with Checkpoints(parser.parse_args().checkpoints, policy=POLICY) as checkpoints:
        resumed = checkpoints.resume(session)
        losses: list[float] = resumed.state["losses"] if resumed else []
        print(f"start {os.environ['PODRUN_RESTART_COUNT']} from batch {len(losses)}", flush=True)
        anchors = session.initAnchorArrays()
        shape = [BATCHES, popdist.getNumLocalReplicas(), 4, 8]
        data = np.random.default_rng(popdist.getInstanceIndex()).standard_normal(shape).astype(np.float32)
        while len(losses) < BATCHES:
            session.run(popart.PyStepIO({x: data[len(losses)]}, anchors))
            losses.append(float(np.sum(anchors[loss])))
            checkpoints.save_if_due(session, len(losses), {"losses": losses})
    print("losses", *(f"{loss:.6g}" for loss in losses))


def start() -> tuple[popart.TrainingSession, str, str]:
    """A session with its weights on the device, its input and its loss."""
    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4, 8]), "x")
    w = builder.addInitializedInputTensor(np.full([8, 2], 0.1, np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    options = popart.SessionOptions()
    popdist.popart.configureSessionOptions(options)
    session = popart.TrainingSession(
        fnModel=builder.getModelProto(),
        dataFlow=popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
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
