"""A whole PopART program: a two-layer network on random data, replicated and accumulated as the launch asks."""

import numpy as np
import popart
import popdist
import popdist.popart

SAMPLES, FEATURES, CLASSES, RATE = 16, 32, 4, 0.5  # Samples of a micro-batch; features and classes of each.
STEPS, ACCUMULATION = 5, 2  # Weight updates of one session.run; micro-batches summed for an update.

random = np.random.default_rng(0)
builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [SAMPLES, FEATURES]))
labels = builder.addInputTensor(popart.TensorInfo("INT32", [SAMPLES]))
h = x
for rows, columns in ((FEATURES, 64), (64, CLASSES)):
    w = builder.addInitializedInputTensor(random.normal(0, 0.2, (rows, columns)).astype(np.float32))
    h = builder.aiOnnx.matmul([h if h == x else builder.aiOnnx.relu([h]), w])
loss = builder.aiGraphcore.nllloss([builder.aiOnnx.softmax([h]), labels], popart.ReductionType.Mean)

options = popart.SessionOptions()
options.enableGradientAccumulation, options.accumulationFactor = True, ACCUMULATION
options.accumulationAndReplicationReductionType = popart.ReductionType.Mean  # The loss is a mean.
popdist.popart.configureSessionOptions(options)  # Replicas, as `podrun --num-replicas` gives them.
session = popart.TrainingSession(
    builder.getModelProto(),
    popart.DataFlow(STEPS, {loss: popart.AnchorReturnType("All")}),
    loss,
    popart.ConstSGD(RATE),
    popdist.popart.getDevice(),
    userOptions=options,
)
session.prepareDevice()
session.weightsFromHost()
anchors = session.initAnchorArrays()

random = np.random.default_rng(popdist.getInstanceIndex())  # Each instance has samples of its own.
replicas = popdist.getNumLocalReplicas()  # Replicas of this instance.
# Step data: steps, accumulation, replicas, then the micro-batch.
shape = (STEPS, ACCUMULATION, replicas, SAMPLES)
for run in range(4):
    images = random.normal(size=(*shape, FEATURES)).astype(np.float32)
    session.run(
        popart.PyStepIO({x: images, labels: images[..., :CLASSES].argmax(-1).astype(np.int32)}, anchors)
    )
    print(f"run {run}: loss {anchors[loss].mean():.4f}")
