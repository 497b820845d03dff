"""Four models at once on eight replicas, two replicas to a model, and what they agree on.

Each group of two replicas has weights of its own. An all-reduce over the replicas that are at the same place of their
groups averages the four models' answers inside of the program.
"""

import numpy as np
import popart
from network import CLASSES, PIXELS, images

REPLICAS, MODELS, BATCH, STEPS = 8, 4, 16, 12
SHARED = REPLICAS // MODELS
own = popart.VariableSettings(popart.CommGroup(popart.CommGroupType.Consecutive, SHARED))
across = popart.CommGroup(popart.CommGroupType.Orthogonal, MODELS)

builder = popart.Builder()
builder.embedReplicationFactor(REPLICAS)
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [BATCH, PIXELS]), "images")
labels = builder.addInputTensor(popart.TensorInfo("INT32", [BATCH]), "labels")
start = np.random.default_rng(0).standard_normal((MODELS, PIXELS, CLASSES)).astype(np.float32) / 28
weight = builder.addInitializedInputTensor(start, own, "w")
probabilities = builder.aiOnnx.softmax([builder.aiOnnx.matmul([x, weight])], axis=1)
loss = builder.aiGraphcore.nllloss([probabilities, labels])
together = builder.aiGraphcore.replicatedallreduce([probabilities], commGroup=across, collectiveOperator=1)

options = popart.SessionOptions()
options.enableReplicatedGraphs, options.replicatedGraphCount = True, REPLICAS
with popart.DeviceManager().acquireAvailableDevice(REPLICAS) as device:
    session = popart.TrainingSession(
        builder.getModelProto(),
        popart.DataFlow(STEPS, [probabilities, together]),
        loss,
        popart.ConstSGD(0.02),
        device,
        userOptions=options,
    )
    session.prepareDevice()
    session.weightsFromHost()
    # Replicas at the same place of their groups see the same images, so that their answers can be averaged.
    pixels, answers = images(STEPS * SHARED * BATCH)
    pixels, answers = (
        pixels.reshape(STEPS, 1, SHARED, BATCH, PIXELS),
        answers.reshape(STEPS, 1, SHARED, BATCH),
    )
    inputs = {
        x: np.ascontiguousarray(np.broadcast_to(pixels, (STEPS, MODELS, *pixels.shape[2:]))),
        labels: np.ascontiguousarray(np.broadcast_to(answers, (STEPS, MODELS, *answers.shape[2:]))),
    }
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO(inputs, anchors))
    session.weightsToHost()
    trained = {weight: np.empty_like(start)}
    session.readWeights(popart.PyWeightsIO(trained))

shape = (STEPS, MODELS, SHARED, BATCH, CLASSES)
right = {n: anchors[n].reshape(shape).argmax(-1) == answers for n in (probabilities, together)}
each = right[probabilities][-10:].mean((0, 2, 3))
print(f"weights of {trained[weight].shape[0]} models: {list(trained[weight].shape)}")
print(f"right in the last 10 steps: {np.round(each, 3)} each, {right[together][-10:].mean():.3f} together")
