"""Recovers from an error of an IPU: the losses are those of a run without errors, to the bit.

    podrun --num-replicas 4 --fault ipu:2@batch=7:tile-parity examples/poptorch/recover.py

Calling the model after an error whose action is IPU_RESET loads the program again, and this resets the IPUs. What was
trained since the last checkpoint is trained again.
"""

import copy

import popdist.poptorch
import poptorch
import torch

STEPS, BETWEEN_CHECKPOINTS = 12, 3


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layers(x), y)


def main():
    torch.manual_seed(0)
    options = popdist.poptorch.Options()
    batches = torch.randn(STEPS, 4 * options.replication_factor, 8)
    model = Regression()
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    training = poptorch.trainingModel(model, options, optimizer)

    losses, saved = [], None
    while len(losses) < STEPS:
        try:
            if len(losses) % BETWEEN_CHECKPOINTS == 0:
                state = optimizer.state_dict() if training.isCompiled() else None
                saved = copy.deepcopy((losses, model.state_dict(), state))
            x = batches[len(losses)]
            losses.append(float(training(x, x.sum(1, keepdim=True)).mean()))
        except poptorch.RecoverableError as error:
            print(f"after {len(losses)} steps: {error.recovery_action}", flush=True)
            if error.recovery_action != "IPU_RESET":
                raise  # podrun --max-restarts does the stronger actions, then starts the program again.
            losses, weights, state = copy.deepcopy(saved)
            training.load_state_dict(weights)
            if state is not None:
                optimizer.load_state_dict(state)
    print("losses", *losses)


if __name__ == "__main__":
    main()
