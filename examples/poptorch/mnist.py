"""Digits with replicas: a training and an inference wrapper share one module; data come from poptorch.DataLoader.

As many replicas as it is launched with (podrun --num-replicas 4); two without a launch.
"""

import popdist
import popdist.poptorch
import poptorch
import torch
from sklearn.datasets import load_digits


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()
        )
        self.head = torch.nn.Linear(8 * 16, 10)
        self.loss = torch.nn.CrossEntropyLoss()

    def forward(self, x, labels=None):
        logits = self.head(self.features(x))
        return logits if labels is None else (logits, self.loss(logits, labels))


def main():
    images, labels = load_digits(return_X_y=True)
    data = torch.utils.data.TensorDataset(
        torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16, torch.tensor(labels)
    )
    train, test = data, torch.utils.data.Subset(data, range(1400, 1796))
    train = torch.utils.data.Subset(data, range(1400))
    launched = popdist.isPopdistEnvSet()
    options = popdist.poptorch.Options() if launched else poptorch.Options().replicationFactor(2)
    replicas = popdist.getNumTotalReplicas() if launched else 2
    options.deviceIterations(max(1, 10 // replicas)).randomSeed(1)
    options.Training.gradientAccumulation(2)
    evaluation = poptorch.Options().deviceIterations(6)
    training_data = poptorch.DataLoader(options, train, batch_size=7, shuffle=True)
    test_data = poptorch.DataLoader(evaluation, test, batch_size=11, drop_last=True)

    model = Network()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.02)
    training = poptorch.trainingModel(model, options, optimizer)
    inference = poptorch.inferenceModel(model, evaluation)
    for epoch in range(4):
        losses = [float(training(x, y)[1].mean()) for x, y in training_data]
        training.detachFromDevice()  # Inference takes its IPUs; the next call of training takes them back.
        right = [(inference(x).argmax(1) == y).float().mean() for x, y in test_data]
        inference.detachFromDevice()
        print(f"epoch {epoch}: loss {losses[-1]:.3f}, accuracy {float(torch.stack(right).mean()):.3f}")
    assert float(torch.stack(right).mean()) > 0.85
    x, _ = next(iter(test_data))
    torch.testing.assert_close(inference(x), model(x), rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    main()
