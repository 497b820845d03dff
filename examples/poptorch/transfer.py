"""Transfer learning: a frozen body, two parameter groups, a head that is trained, then the CPU uses the result."""

import copy

import poptorch
import torch


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(10, 20), torch.nn.ReLU())
        self.neck, self.head = torch.nn.Linear(20, 20), torch.nn.Linear(20, 3)

    def forward(self, x, labels=None):
        logits = self.head(torch.relu(self.neck(self.body(x))))
        return logits if labels is None else (logits, torch.nn.functional.cross_entropy(logits, labels))


def main():
    torch.manual_seed(0)
    x = torch.randn(32, 10)
    labels = x[:, :3].argmax(1)
    model = Classifier()
    model.body.requires_grad_(False)
    start = copy.deepcopy(model.state_dict())
    groups = [
        {"params": model.neck.parameters(), "lr": 0.01},
        {"params": model.head.parameters(), "lr": 0.1, "weight_decay": 0.0},
    ]
    optimizer = poptorch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.001)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    losses = [float(training(x, labels)[1]) for _ in range(60)]
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    assert losses[-1] < 0.5 * losses[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, start[name]) == name.startswith("body")
    accuracy = (model(x).argmax(1) == labels).float().mean()
    print(f"accuracy on the CPU {float(accuracy):.3f}")
    training.destroy()
    assert float(accuracy) > 0.8


if __name__ == "__main__":
    main()
