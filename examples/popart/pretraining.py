"""Pre-training as large models are: a transformer layer in halves, LAMB with a schedule, gradient accumulation, loss
scaling, a checkpoint to go on from, and validation with the weights of training.
"""

import os
import tempfile

import numpy as np
import popart

VOCABULARY, LENGTH, HIDDEN, HEADS, BATCH, ACCUMULATION = 16, 8, 32, 4, 8, 2
random = np.random.default_rng(0)


def sentences(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that count on from a random one, a quarter of them masked by 0; and what stood there."""
    whole = (random.integers(0, VOCABULARY - 1, (count, 1)) + np.arange(LENGTH)) % (VOCABULARY - 1) + 1
    masked = random.random(whole.shape) < 0.25
    return np.where(masked, 0, whole).astype(np.uint32), np.where(masked, whole, 0).astype(np.int32)


builder = popart.Builder()
onnx, graphcore = builder.aiOnnx, builder.aiGraphcore


def weight(shape: list[int], name: str, scale: float = 0.1) -> str:
    return builder.addInitializedInputTensor((random.standard_normal(shape) * scale).astype(np.float16), name)


def norm(x: str) -> str:
    ones, zeros = np.ones(HIDDEN, np.float16), np.zeros(HIDDEN, np.float16)
    gamma, beta = (
        builder.addInitializedInputTensor(ones, "Gamma"),
        builder.addInitializedInputTensor(zeros, "Beta"),
    )
    return graphcore.groupnormalization([x, gamma, beta], 1, 1e-3)[0]


def heads(x: str, order: list[int]) -> str:
    return onnx.transpose(
        [builder.reshape_const(onnx, [x], [BATCH, LENGTH, HEADS, HIDDEN // HEADS])], perm=order
    )


tokens = builder.addInputTensor("UINT32", [BATCH, LENGTH], "tokens")
labels = builder.addInputTensor("INT32", [BATCH, LENGTH], "labels")
with builder.nameScope("Embedding"):
    x = onnx.gather([weight([VOCABULARY, HIDDEN], "Tokens", 1.0), tokens])
    x = onnx.add([x, weight([LENGTH, HIDDEN], "Positions", 1.0)])
    x = norm(builder.reshape_const(onnx, [x], [BATCH * LENGTH, HIDDEN]))
with builder.nameScope("Attention"):
    qkv = onnx.matmul([x, weight([HIDDEN, 3 * HIDDEN], "QKV")])
    builder.setAvailableMemoryProportion(qkv, 0.3)
    query, key, value = onnx.split([qkv], 3, axis=1)
    scores = onnx.matmul([heads(query, [0, 2, 1, 3]), heads(key, [0, 2, 3, 1])])
    scores = onnx.softmax([graphcore.scale([scores], (HIDDEN // HEADS) ** -0.5)], axis=3)
    mixed = onnx.transpose([onnx.matmul([scores, heads(value, [0, 2, 1, 3])])], perm=[0, 2, 1, 3])
    mixed = onnx.matmul([builder.reshape_const(onnx, [mixed], [-1, HIDDEN]), weight([HIDDEN, HIDDEN], "Out")])
    x = norm(onnx.add([x, mixed]))
with builder.nameScope("FeedForward"):
    inner = graphcore.gelu([onnx.matmul([x, weight([HIDDEN, 2 * HIDDEN], "Up")])])
    x = norm(onnx.add([x, onnx.matmul([inner, weight([2 * HIDDEN, HIDDEN], "Down")])]))
logits = builder.reshape_const(
    onnx, [onnx.matmul([x, weight([HIDDEN, VOCABULARY], "Head")])], [BATCH, LENGTH, -1]
)
loss = graphcore.nllloss([onnx.softmax([logits], axis=2), labels], ignoreIndex=0, debugContext="MaskedTokens")
guesses = onnx.argmax([logits], axis=2, keepdims=0)


def lamb(step: int) -> popart.Adam:
    """LAMB with a warm-up; norms do not decay."""
    rate = np.float32(0.02) * min(1, (step + 1) / 5)
    values = {
        "defaultLearningRate": (rate, False),
        "defaultWeightDecay": (0.01, True),
        "lossScaling": (64.0, False),
    }
    optimizer = popart.Adam(values, mode=popart.AdamMode.LambNoBias, accum_type=popart.DataType.FLOAT)
    for name in builder.getTrainableTensorIds():
        if "Gamma" in name or "Beta" in name:
            optimizer.insertSpecific(name, {"weightDecay": (0.0, True)})
    return optimizer


options = popart.SessionOptions()
options.enableGradientAccumulation, options.accumulationFactor = True, ACCUMULATION
options.accumulationAndReplicationReductionType = popart.ReductionType.Mean
device = popart.DeviceManager().acquireAvailableDevice(1)
checkpoint = os.path.join(tempfile.mkdtemp(), "checkpoint.onnx")


def train(model: bytes | str, steps: range) -> None:
    """Some steps of four batches from a model's weights and optimizer state, which go into the checkpoint."""
    flow = popart.DataFlow(4, {loss: popart.AnchorReturnType("Sum")})
    session = popart.TrainingSession(model, flow, loss, lamb(steps[0]), device, userOptions=options)
    session.prepareDevice()
    session.weightsFromHost()
    anchors = session.initAnchorArrays()
    for step in steps:
        session.updateOptimizerFromHost(lamb(step))
        given, wanted = sentences(4 * ACCUMULATION * BATCH)
        session.run(popart.PyStepIO({tokens: given, labels: wanted}, anchors))
        if step % 5 == 4:
            print(f"step {step + 1}: loss {float(anchors[loss]) / (4 * ACCUMULATION):.3f}")
    session.modelToHost(checkpoint)


train(builder.getModelProto(), range(10))
train(checkpoint, range(10, 20))

validation = popart.InferenceSession(checkpoint, popart.DataFlow(4, [guesses]), device)
validation.prepareDevice()
found = validation.initAnchorArrays()
given, wanted = sentences(4 * BATCH)
validation.run(popart.PyStepIO({tokens: given}, found))
asked = wanted > 0
right = found[guesses].reshape(wanted.shape)[asked] == wanted[asked]
print(f"masked tokens guessed: {right.mean():.0%} of {asked.sum()}")
device.detach()
os.remove(checkpoint)
os.rmdir(os.path.dirname(checkpoint))
