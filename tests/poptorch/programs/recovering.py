"""Trains, saves its weights, meets an error of the system, and goes on from what it has saved."""

import copy
from itertools import pairwise

import poptorch
import torch

STEPS = 6


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layer(x), y)


def wrapped(model):
    return poptorch.trainingModel(model, optimizer=poptorch.optim.SGD(model.parameters(), lr=0.1))


def main():
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    model = Regression()
    training = wrapped(model)
    saved, losses = copy.deepcopy(model.state_dict()), []
    while len(losses) < STEPS:
        try:
            losses.append(float(training(x, y)))
            saved = copy.deepcopy(model.state_dict())
        except poptorch.Error as error:
            print(type(error).__name__, error.type, getattr(error, "recovery_action", None), flush=True)
            if not isinstance(error, poptorch.RecoverableError):
                return
            model = Regression()
            model.load_state_dict(saved)
            training = wrapped(model)
    print("trained after recovery:", all(b < a for a, b in pairwise(losses)), flush=True)


if __name__ == "__main__":
    main()
