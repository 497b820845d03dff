"""An operator of the program's own. For the SDK it would be a C++ library; here it is what the library computes.

A program that loads such a library stays as it is: put `register_op` in a file, and name it in PODRUN_CUSTOM_OPS.
"""

import jax.numpy as jnp
import numpy as np
import popart

from podrun.popart import register_op


def soft_threshold(x, *, width):
    """Zero within ``width`` of zero, nearer to zero by ``width`` elsewhere. JAX gives the gradient."""
    return jnp.sign(x) * jnp.maximum(jnp.abs(x) - width, 0)


register_op("example.ops", "SoftThreshold", 1, soft_threshold)

STEPS = 40
target = np.array([0.8, -0.6, 0.0, 0.3], np.float32)

builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4]), "x")
signal = builder.addInitializedInputTensor(np.array([0.5, -0.5, 0.05, 0.5], np.float32), "signal")
(shrunk,) = builder.customOp("SoftThreshold", 1, "example.ops", [signal], {"width": 0.1})
error = builder.aiOnnx.sub([shrunk, x])
loss = builder.aiGraphcore.identityloss([builder.aiOnnx.mul([error, error])], popart.ReductionType.Sum)

session = popart.TrainingSession(
    fnModel=builder.getModelProto(),
    dataFlow=popart.DataFlow(STEPS, {loss: popart.AnchorReturnType("All")}),
    loss=loss,
    optimizer=popart.ConstSGD(0.1),
    deviceInfo=popart.DeviceManager().acquireAvailableDevice(1),
)
session.prepareDevice()
session.weightsFromHost()
anchors = session.initAnchorArrays()
session.run(popart.PyStepIO({x: np.tile(target, (STEPS, 1))}, anchors))
session.weightsToHost()
learnt = {signal: np.empty(4, np.float32)}
session.readWeights(popart.PyWeightsIO(learnt))
print(f"loss {anchors[loss][0]:.3f}, after {STEPS} steps {anchors[loss][-1]:.6f}")
print("signal", learnt[signal].round(3), "which the operator takes nearer to zero by 0.1")
assert anchors[loss][-1] < 1e-4
