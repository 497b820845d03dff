"""Compute activations again in the backward pass instead of keeping them: less memory, the same numbers."""

import numpy as np
import popart
from network import images, network, read

BATCH = 16
net = network(BATCH, layers=6)


def train(kind: popart.RecomputationType) -> dict[str, np.ndarray]:
    """Weights after a step."""
    options = popart.SessionOptions()
    options.autoRecomputation = kind
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
        print(f"{kind.name}: loss {anchors[net.loss].item():.4f}")
        return read(session, net.weights)


kept = train(popart.RecomputationType.NoRecompute)
for kind in (popart.RecomputationType.Standard, popart.RecomputationType.RecomputeAll):
    again = train(kind)
    assert all(np.array_equal(kept[name], again[name]) for name in kept)
