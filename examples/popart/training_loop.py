"""Train with validation between epochs: a training and an inference session take turns on one device."""

import tempfile
from pathlib import Path

import numpy as np
import popart
from network import images, network

BATCH, STEPS, EPOCHS = 32, 8, 4

train_images, train_labels = images(BATCH * STEPS, seed=1)
test_images, test_labels = images(BATCH * 4, seed=2)
net = network(BATCH)

with popart.DeviceManager().acquireAvailableDevice(1) as device, tempfile.TemporaryDirectory() as folder:
    checkpoint = str(Path(folder) / "checkpoint.onnx")
    trainer = popart.TrainingSession(
        net.model,
        popart.DataFlow(STEPS, {net.loss: popart.AnchorReturnType("All")}),
        net.loss,
        popart.SGD({"defaultLearningRate": (0.1, False), "defaultMomentum": (0.9, True)}),
        device,
    )
    options = popart.SessionOptions()
    options.constantWeights = False  # So that new weights can be sent to the same program.
    tester = popart.InferenceSession(
        net.model, popart.DataFlow(4, [net.probabilities]), device, userOptions=options
    )
    trainer.prepareDevice()
    tester.prepareDevice(loadEngine=False)
    for epoch in range(EPOCHS):
        # The other session's program was on the IPU in between, so weights (and momenta) are sent again.
        trainer.weightsFromHost()
        anchors = trainer.initAnchorArrays()
        trainer.run(popart.PyStepIO({net.x: train_images, net.labels: train_labels}, anchors))
        trainer.modelToHost(checkpoint)
        loss = anchors[net.loss].mean()

        tester.resetHostWeights(checkpoint, ignoreWeightsInModelWithoutCorrespondingHostWeight=True)
        tester.weightsFromHost()
        results = tester.initAnchorArrays()
        tester.run(popart.PyStepIO({net.x: test_images}, results))
        guesses = results[net.probabilities].reshape(-1, 10).argmax(axis=1)
        print(f"epoch {epoch}: loss {loss:.3f}, accuracy {np.mean(guesses == test_labels):.1%}")
