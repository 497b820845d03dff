"""Four stages on four IPUs: while one works on a micro-batch, the others work on its neighbours."""

import numpy as np
import popart
from network import images, network

BATCH, ACCUMULATION, IPUS = 8, 16, 4


def cycles(pipelined: bool) -> tuple[int, np.ndarray]:
    """Modelled cycles of a step, and its losses."""
    net = network(BATCH, ipus=IPUS, stages=True)
    options = popart.SessionOptions()
    options.virtualGraphMode = popart.VirtualGraphMode.Manual
    options.enablePipelining = pipelined
    options.enableGradientAccumulation = True
    options.accumulationFactor = ACCUMULATION
    options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
    options.instrumentWithHardwareCycleCounter = True
    with popart.DeviceManager().acquireAvailableDevice(IPUS) as device:
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
        pixels, labels = images(BATCH * ACCUMULATION)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({net.x: pixels, net.labels: labels}, anchors))
        return session.getCycleCount(), anchors[net.loss]


sharded, losses = cycles(pipelined=False)
pipelined, same = cycles(pipelined=True)
print(f"sharded:   {sharded:9,d} modelled cycles for {ACCUMULATION} micro-batches")
print(f"pipelined: {pipelined:9,d}")
assert np.array_equal(losses, same), "pipelining changes no number"
