"""Replicas of 8 IPUs, each a pipeline of 8 stages over two machines; or of 16, over four.

Alone, one replica: ``python -m podrun.compat examples/popart/large_replicas.py``; or
``podrun --num-replicas 2 --ipus-per-replica 8 examples/popart/large_replicas.py``.
"""

import hashlib

import numpy as np
import popart
import popdist
import popdist.popart
from network import images, network, read

BATCH, ACCUMULATION, STEPS = 8, 32, 5

IPUS = popdist.getNumIpusPerReplica() if popdist.isPopdistEnvSet() else 8
replicas = popdist.getNumTotalReplicas() if popdist.isPopdistEnvSet() else 1
mine = popdist.getNumLocalReplicas() if popdist.isPopdistEnvSet() else 1
first = popdist.getReplicaIndexOffset() if popdist.isPopdistEnvSet() else 0

net = network(BATCH, layers=IPUS, ipus=IPUS, stages=True)
options = popart.SessionOptions()
if popdist.isPopdistEnvSet():
    popdist.popart.configureSessionOptions(options)
options.virtualGraphMode = popart.VirtualGraphMode.Manual
options.enablePipelining = True
options.enableGradientAccumulation = True
options.accumulationFactor = ACCUMULATION
options.accumulationAndReplicationReductionType = popart.ReductionType.Mean

with popdist.popart.getDevice(IPUS) as device:
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
    # [micro-batches, replicas, samples]: this process feeds its own replicas.
    pixels, labels = images(BATCH * ACCUMULATION * replicas)
    cut = (ACCUMULATION, replicas, BATCH)
    share = slice(first, first + mine)
    data = {
        net.x: np.ascontiguousarray(pixels.reshape(*cut, -1)[:, share]),
        net.labels: np.ascontiguousarray(labels.reshape(cut)[:, share]),
    }
    anchors = session.initAnchorArrays()
    losses = []
    for _ in range(STEPS):
        session.run(popart.PyStepIO(data, anchors))
        losses.append(float(anchors[net.loss].mean()))
    weights = read(session, net.weights)

print(f"{IPUS} stages, {replicas} replica(s): loss {losses[0]:.3f} -> {losses[-1]:.3f}")
digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in net.weights))
print(f"weights {digest.hexdigest()[:16]}")
assert losses[-1] < losses[0]
