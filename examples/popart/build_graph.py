"""Build a graph operator by operator, call a subgraph twice, run it."""

import numpy as np
import popart

builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]), "x")

# A subgraph is written once and called as often as needed.
double = builder.createSubgraphBuilder()
inner = double.addInputTensor(popart.TensorInfo("FLOAT", [2, 3]))
double.addOutputTensor(double.aiOnnx.add([inner, inner]))

with builder.nameScope("body"):
    (once,) = builder.aiGraphcore.call([x], 1, double)
    (twice,) = builder.aiGraphcore.call([once], 1, double)
    shifted = builder.aiOnnx.add([twice, builder.aiOnnx.constant(np.ones(3, np.float32))])
    y = builder.aiOnnx.relu([shifted])
builder.addOutputTensor(y)
print(f"{y!r} has shape {builder.getTensorShape(y)} and type {builder.getTensorDtypeString(y)}")

with popart.DeviceManager().acquireAvailableDevice(1) as device:
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(1, [y]), device)
    session.prepareDevice()
    anchors = session.initAnchorArrays()
    session.run(popart.PyStepIO({x: np.array([[-1, 0, 1], [2, 3, 4]], np.float32)}, anchors))
    print(anchors[y])
