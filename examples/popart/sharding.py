"""Put layers on two IPUs by hand, or let PopART split the graph: the numbers stay the same."""

import numpy as np
import popart
from network import images, network, read

BATCH, STEPS = 16, 4


def train(ipus: int, mode: popart.VirtualGraphMode) -> dict[str, np.ndarray]:
    """Weights after some steps."""
    net = network(BATCH, ipus=ipus if mode is popart.VirtualGraphMode.Manual else 1)
    options = popart.SessionOptions()
    options.virtualGraphMode = mode
    with popart.DeviceManager().acquireAvailableDevice(ipus) as device:
        session = popart.TrainingSession(
            net.model,
            popart.DataFlow(STEPS, [net.loss]),
            net.loss,
            popart.ConstSGD(0.1),
            device,
            userOptions=options,
        )
        session.prepareDevice()
        session.weightsFromHost()
        pixels, labels = images(BATCH * STEPS)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({net.x: pixels, net.labels: labels}, anchors))
        print(f"{ipus} IPU(s), {mode.name}: losses {np.round(anchors[net.loss], 4)}")
        return read(session, net.weights)


whole = train(1, popart.VirtualGraphMode.Off)
for ipus, mode in ((2, popart.VirtualGraphMode.Manual), (4, popart.VirtualGraphMode.Auto)):
    split = train(ipus, mode)
    worst = max(np.abs(split[name] - whole[name]).max() for name in whole)
    print(f"    largest difference of a weight from one IPU: {worst:.1e}")
    assert worst < 1e-6
