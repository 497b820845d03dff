"""Data parallel training. ``podrun --num-replicas 4 [--num-instances 2] replication.py``, or alone on four
replicas.
"""

import numpy as np
import popart
import popdist
import popdist.popart
from network import images, network

GLOBAL_BATCH, STEPS = 32, 8

options = popart.SessionOptions()
if popdist.isPopdistEnvSet():
    total, local = popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas()
    popdist.popart.configureSessionOptions(options)
    device = popdist.popart.getDevice()
else:
    total = local = 4
    options.enableReplicatedGraphs, options.replicatedGraphCount = True, local
    device = popart.DeviceManager().acquireAvailableDevice(local)
# The model is written for one replica's share; the mean over replicas makes it the mean over the global
# batch.
options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
net = network(GLOBAL_BATCH // total)

with device:
    session = popart.TrainingSession(
        net.model,
        popart.DataFlow(STEPS, [net.loss]),
        net.loss,
        popart.ConstSGD(0.2),
        device,
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    first = popdist.getReplicaIndexOffset()
    pixels, labels = images(GLOBAL_BATCH * STEPS)
    own = (slice(None), slice(first, first + local))  # [step, replica, image, ...]
    inputs = {
        net.x: np.ascontiguousarray(pixels.reshape(STEPS, total, -1, pixels.shape[-1])[own]),
        net.labels: np.ascontiguousarray(labels.reshape(STEPS, total, -1)[own]),
    }
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO(inputs, anchors))
    if popdist.getInstanceIndex() == 0:
        print(f"{total} replicas, {local} of them here; losses of replica {first} in each step:")
        print(np.round(anchors[net.loss].reshape(STEPS, local)[:, 0], 3))
