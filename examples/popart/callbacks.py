"""Step data from functions, as programs do that load or make it while they run: one call per micro-batch."""

import numpy as np
import popart

builder = popart.Builder()
x = builder.addInputTensor(popart.TensorInfo("FLOAT", [4]), "x")
y = builder.aiOnnx.exp([x])
STEPS = 3

given, taken = [], []


def give(name: str, is_prefetch: bool) -> np.ndarray:
    """The next micro-batch of input ``name``."""
    given.append(np.full(4, len(given), np.float32))
    return given[-1]


def take(name: str) -> np.ndarray:
    """Where the next value of anchor ``name`` goes."""
    taken.append(np.empty(4, np.float32))
    return taken[-1]


with popart.DeviceManager().acquireAvailableDevice(1) as device:
    session = popart.InferenceSession(builder.getModelProto(), popart.DataFlow(STEPS, [y]), device)
    session.prepareDevice()
    io = popart.PyStepIOCallback(
        give,
        lambda name: print(f"{name}: consumed"),
        take,
        lambda name: print(f"{name}: {taken[-1]}"),
    )
    session.run(io)
