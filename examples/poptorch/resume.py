"""Training that stops and goes on: checkpoints that plain torch reads, with the optimizer's state of the IPU."""

import tempfile
from pathlib import Path

import poptorch
import torch


class Network(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.GELU(), torch.nn.Linear(12, 1))

    def forward(self, x, y):
        return torch.nn.functional.smooth_l1_loss(self.layers(x), y)


def start():
    torch.manual_seed(3)
    model = Network()
    optimizer = poptorch.optim.LAMB(model.parameters(), lr=0.02)
    return model, optimizer


def main():
    generator = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(8, 6, generator=generator), torch.randn(8, 1, generator=generator)) for _ in range(8)
    ]
    file = Path(tempfile.mkdtemp()) / "checkpoint.pt"

    model, optimizer = start()
    training = poptorch.trainingModel(model, optimizer=optimizer)
    for batch in batches[:4]:
        training(*batch)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    expected = [float(training(*batch)) for batch in batches[4:]]
    training.destroy()

    saved = torch.load(file, weights_only=True)
    model, optimizer = start()
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    training = poptorch.trainingModel(model, optimizer=optimizer)
    found = [float(training(*batch)) for batch in batches[4:]]
    print("the same losses after the checkpoint:", found == expected)
    assert found == expected
    file.unlink()


if __name__ == "__main__":
    main()
