"""What both programs share: replicas under podrun or alone, and the loop that trains."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import popdist
import popdist.popart
from network import Sizes, Transformer, popart
from text import corpus, samples


@dataclass(frozen=True)
class Replicas:
    """Replicas over all instances, which of them this instance has, and IPUs of each."""

    total: int
    local: int
    first: int
    ipus: int

    @property
    def own(self) -> slice:
        """This instance's replicas."""
        return slice(self.first, self.first + self.local)


def replicas(
    alone: int, ipus: int | None, usual_ipus: int
) -> tuple[Replicas, popart.SessionOptions, popart.DeviceInfo]:
    """Replicas, options for them and their IPUs: as podrun says, else ``alone`` of them with ``ipus`` each."""
    options = popart.SessionOptions()
    options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
    options.instrumentWithHardwareCycleCounter = True
    if popdist.isPopdistEnvSet():
        popdist.popart.configureSessionOptions(options)
        found = Replicas(
            popdist.getNumTotalReplicas(),
            popdist.getNumLocalReplicas(),
            popdist.getReplicaIndexOffset(),
            popdist.getNumIpusPerReplica(),
        )
        return found, options, popdist.popart.getDevice(ipus)
    ipus = ipus or usual_ipus
    if alone > 1:
        options.enableReplicatedGraphs, options.replicatedGraphCount = True, alone
    device = popart.DeviceManager().acquireAvailableDevice(alone * ipus)
    return Replicas(alone, alone, 0, ipus), options, device


def train(
    net: Transformer,
    sizes: Sizes,
    own: Replicas,
    options: popart.SessionOptions,
    device: popart.DeviceInfo,
    steps: int,
    learning_rate: float,
) -> None:
    """Train for some steps of one batch; print the loss as it falls, modelled speed, and a digest of the weights."""
    accumulation = options.accumulationFactor
    with device:
        session = popart.TrainingSession(
            net.model,
            popart.DataFlow(1, {net.loss: popart.AnchorReturnType("All")}),
            net.loss,
            popart.Adam({"defaultLearningRate": (learning_rate, True)}),
            device,
            userOptions=options,
        )
        session.prepareDevice()
        session.weightsFromHost()
        anchors = session.initAnchorArrays()
        text, random = corpus(20_000), np.random.default_rng(1)
        losses = []
        for step in range(steps):
            # All instances draw the same batch and feed their own replicas' share of it.
            count = accumulation * own.total * sizes.samples
            letters, following = samples(text, count, sizes.letters, random)
            cut = (accumulation, own.total, sizes.samples, sizes.letters)
            data = {
                net.letters: np.ascontiguousarray(letters.reshape(cut)[:, own.own]),
                net.following: np.ascontiguousarray(following.reshape(cut)[:, own.own]),
            }
            session.run(popart.PyStepIO(data, anchors))
            losses.append(float(anchors[net.loss].mean()))
            if popdist.getInstanceIndex() == 0 and (step % 5 == 0 or step == steps - 1):
                print(f"step {step:3d}  loss {losses[-1]:.3f}", flush=True)
        weights = read(session, net.weights)
        cycles = session.getCycleCount()
    if popdist.getInstanceIndex() == 0:
        trained = accumulation * own.total * sizes.samples * sizes.letters
        print(f"{trained:,} letters in {cycles:,} modelled cycles a step")
        digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in net.weights))
        print(f"weights {digest.hexdigest()[:16]}")
        print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


def read(session: popart.TrainingSession, names: list[str]) -> dict[str, np.ndarray]:
    """Weights as they are now."""
    session.weightsToHost()
    arrays = {}
    for name in names:
        info = session.getInfo(name)
        arrays[name] = np.empty(info.shape(), info.data_type_lcase())
    session.readWeights(popart.PyWeightsIO(arrays))
    return arrays
