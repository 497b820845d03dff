"""A residual network in half precision: float inputs of the loss, loss scaling, running statistics, partials."""

import poptorch
import torch


class Block(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(channels),
            torch.nn.ReLU(),
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class ResNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = torch.nn.Sequential(Block(8), Block(8))
        self.head = torch.nn.Linear(8, 4)

    def forward(self, x, labels=None):
        logits = self.head(self.blocks(self.stem(x)).mean((2, 3)))
        if labels is None:
            return logits
        return logits, torch.nn.functional.cross_entropy(logits.float(), labels)


def main():
    torch.manual_seed(0)
    x, labels = torch.randn(16, 3, 8, 8), torch.arange(16) % 4
    x[:, 0] += labels.reshape(-1, 1, 1)
    model = ResNet().half()
    options = poptorch.Options()
    options.Precision.setPartialsType(torch.float).enableStochasticRounding(True)
    optimizer = poptorch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, loss_scaling=128.0, use_combined_accum=False
    )
    training = poptorch.trainingModel(model, options, optimizer)
    losses = [float(training(x.half(), labels)[1]) for _ in range(25)]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]
    assert model.head.weight.dtype == torch.float16
    assert float(model.blocks[0].body[1].running_mean.abs().sum()) > 0
    inference = poptorch.inferenceModel(model.eval())
    given, expected = inference(x.half()).float(), model(x.half()).float()
    print(f"greatest difference from the CPU {float((given - expected).abs().max()):.4f}")
    assert float((given - expected).abs().max()) < 0.1


if __name__ == "__main__":
    main()
