"""Compute activations again in the backward pass instead of keeping them: less memory, more cycles, the same numbers.

Standard keeps some activations as checkpoints and computes the others again from the nearest. RecomputeAll keeps none:
on one IPU all of them are there again when the backward pass begins, so it pays in pipelines, whose stages keep many
micro-batches.
"""

import numpy as np
import popart
from network import images, network, read

BATCH = 256
net = network(BATCH, layers=12)


def train(kind: popart.RecomputationType) -> dict[str, np.ndarray]:
    """Weights after a step."""
    options = popart.SessionOptions()
    options.autoRecomputation = kind
    options.instrumentWithHardwareCycleCounter = True
    with popart.DeviceManager().acquireAvailableDevice(1) as device:
        session = popart.TrainingSession(
            net.model,
            popart.DataFlow(1, [net.loss]),
            net.loss,
            popart.ConstSGD(0.1),
            device,
            userOptions=options,
        )
        session.prepareDevice()
        session.weightsFromHost()
        pixels, labels = images(BATCH)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({net.x: pixels, net.labels: labels}, anchors))
        alive = session.getReport().compilation.livenessProgramSteps
        peak = max(step.notAlwaysLiveMemory.bytes for step in alive)
        print(
            f"{kind.name:>12}: loss {anchors[net.loss].item():.4f}, {session.getCycleCount():7,} modelled cycles, "
            f"{peak / 2**20:5.2f} MiB not always live at the peak"
        )
        return read(session, net.weights)


kept = train(popart.RecomputationType.NoRecompute)
for kind in (popart.RecomputationType.Standard, popart.RecomputationType.RecomputeAll):
    again = train(kind)
    assert all(np.array_equal(kept[name], again[name]) for name in kept)
