"""Trains, and after a recoverable error with IPU_RESET goes on with the same session: it sends the weights of the last
good batch again, and the session loads its program by itself. ``reload.py popart`` or ``reload.py poptorch``.
"""

import sys

import numpy as np

BATCHES = 6


def with_popart():
    import popart
    import popdist.popart

    builder = popart.Builder()
    x = builder.addInputTensor(popart.TensorInfo("FLOAT", [2, 8]), "x")
    w = builder.addInitializedInputTensor(np.full([8, 4], 0.1, np.float32), "w")
    loss = builder.aiGraphcore.l1loss([builder.aiOnnx.matmul([x, w])], 0.1)
    options = popart.SessionOptions()
    popdist.popart.configureSessionOptions(options)
    with popdist.popart.getDevice() as device:
        session = popart.TrainingSession(
            fnModel=builder.getModelProto(),
            dataFlow=popart.DataFlow(1, {loss: popart.AnchorReturnType("All")}),
            loss=loss,
            optimizer=popart.ConstSGD(0.01),
            deviceInfo=device,
            userOptions=options,
        )
        session.prepareDevice()
        anchors, losses = session.initAnchorArrays(), []
        data = popart.PyStepIO({x: np.ones((*anchors[loss].shape[:1], 2, 8), np.float32)}, anchors)
        while len(losses) < BATCHES:
            try:
                session.weightsFromHost()
                session.run(data)
                session.weightsToHost()
                losses.append(float(np.sum(anchors[loss])))
            except popart.poplar_recoverable_runtime_error as error:
                print(error.recoveryAction.name, flush=True)
    return losses


def with_poptorch():
    import poptorch
    import torch

    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 1)

    class Regression(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def forward(self, x, y):
            return torch.nn.functional.mse_loss(self.layer(x), y)

    model = Regression()
    training = poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    while len(losses) < BATCHES:
        try:
            losses.append(float(training(x, y)))
            training.copyWeightsToHost()
        except poptorch.RecoverableError as error:
            print(error.recovery_action, flush=True)
            training.copyWeightsToDevice()
    return losses


print("losses", *(with_popart() if sys.argv[1] == "popart" else with_poptorch()))
