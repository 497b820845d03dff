"""Optimizers: momentum, Adam and LAMB; a learning rate that changes while training; clipping by the norm."""

import popart
from network import images, network

BATCH, STEPS = 32, 6
net = network(BATCH)
pixels, labels = images(BATCH * STEPS)


def run(name: str, make, rates: tuple[float, float]) -> None:
    """Two runs of a session, the second with another learning rate."""
    with popart.DeviceManager().acquireAvailableDevice(1) as device:
        session = popart.TrainingSession(
            net.model, popart.DataFlow(STEPS, [net.loss]), net.loss, make(rates[0]), device
        )
        session.prepareDevice()
        session.weightsFromHost()
        losses = []
        for rate in rates:
            session.updateOptimizerFromHost(make(rate))
            anchors = session.initAnchorArrays()
            session.run(popart.PyStepIO({net.x: pixels, net.labels: labels}, anchors))
            losses.append(anchors[net.loss].mean())
        print(f"{name:>20}: mean loss {losses[0]:.3f}, then {losses[1]:.3f}")


clip = [popart.ClipNormSettings.clipAllWeights(1.0)]
run(
    "SGD with momentum",
    lambda rate: popart.SGD({"defaultLearningRate": (rate, False), "defaultMomentum": (0.9, True)}),
    (0.05, 0.01),
)
run("SGD, clipped", lambda rate: popart.SGD({"defaultLearningRate": (rate, False)}, clip), (0.2, 0.05))
run("Adam", lambda rate: popart.Adam({"defaultLearningRate": (rate, False)}), (0.003, 0.001))
run(
    "LAMB",
    lambda rate: popart.Adam({"defaultLearningRate": (rate, False)}, mode=popart.AdamMode.Lamb),
    (0.02, 0.005),
)
