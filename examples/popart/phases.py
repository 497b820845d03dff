"""A network in execution phases on two IPUs that take turns: weights and activations wait in streaming memory."""

import numpy as np
import popart
from network import HIDDEN, images

BATCH, PHASES, STEPS = 16, 6, 4


def chain(phased: bool) -> tuple[bytes, str, str]:
    """Layers of tanh, one for each phase: model, input, loss."""
    random = np.random.default_rng(0)
    builder = popart.Builder()
    x = h = builder.addInputTensor(popart.TensorInfo("FLOAT", [BATCH, 784]), "images")
    for phase in range(PHASES):
        inputs = 784 if phase == 0 else HIDDEN
        start = random.standard_normal((inputs, HIDDEN)).astype(np.float32) / np.sqrt(np.float32(inputs))
        w = builder.addInitializedInputTensor(start, f"w{phase}")
        product = builder.aiOnnx.matmul([h, w])
        h = builder.aiOnnx.tanh([product])
        if phased:
            builder.executionPhase(product, phase)
            builder.executionPhase(h, phase)
    loss = builder.aiGraphcore.l1loss([h], 0.1)
    return builder.getModelProto(), x, loss


def train(
    phased: bool,
    weights: popart.ExecutionPhaseIOSchedule = popart.ExecutionPhaseIOSchedule.Preload,
    updates: popart.ExecutionPhaseSchedule = popart.ExecutionPhaseSchedule.Interleaving,
) -> tuple[np.ndarray, float]:
    """Losses, and modelled milliseconds of a step."""
    model, x, loss = chain(phased)
    options = popart.SessionOptions()
    if phased:
        options.virtualGraphMode = popart.VirtualGraphMode.ExecutionPhases
        options.executionPhaseSettings.phases = PHASES
        options.executionPhaseSettings.weightIOSchedule = weights
        options.executionPhaseSettings.schedule = updates
        off_chip = popart.TensorLocationSettings(popart.TensorLocation(popart.TensorStorage.OffChip))
        options.weightTensorLocationSettings = off_chip
        options.activationTensorLocationSettings = off_chip
    options.instrumentWithHardwareCycleCounter = True
    with popart.DeviceManager().acquireAvailableDevice(2 if phased else 1) as device:
        session = popart.TrainingSession(
            model, popart.DataFlow(STEPS, [loss]), loss, popart.ConstSGD(0.01), device, userOptions=options
        )
        session.prepareDevice()
        session.weightsFromHost()
        pixels, _ = images(BATCH * STEPS)
        anchors = session.initAnchorArrays()
        session.run(popart.PyStepIO({x: pixels}, anchors))
        return anchors[loss], session.getCycleCount() / 1.33e9 * 1e3


preload, on_demand = popart.ExecutionPhaseIOSchedule.Preload, popart.ExecutionPhaseIOSchedule.OnDemand
interleaving, batch = popart.ExecutionPhaseSchedule.Interleaving, popart.ExecutionPhaseSchedule.Batch
losses, whole = train(False)
print(f"one IPU, everything on chip:                     {whole:.3f} ms modelled")
for weights, updates in ((on_demand, interleaving), (preload, interleaving), (preload, batch)):
    phased, milliseconds = train(True, weights, updates)
    how = f"weights {weights.name}, updates {updates.name}"
    print(f"{PHASES} phases, {how:<38} {milliseconds:.3f} ms modelled")
    assert np.allclose(phased, losses, rtol=1e-5), "phases change no number"
