"""A recurrent forecast with a one-cycle schedule: the learning rate changes on the IPU without compiling again."""

import copy

import poptorch
import torch

STEPS = 30


class Forecast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = torch.nn.LSTM(1, 12, batch_first=True)
        self.head = torch.nn.Linear(12, 1)

    def forward(self, x, y):
        z = self.head(self.lstm(x)[0][:, -1])
        return z, torch.nn.functional.mse_loss(z, y)


def one_cycle(optimizer):
    return torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.1, total_steps=STEPS + 1, cycle_momentum=False
    )


def main():
    torch.manual_seed(0)
    phase = torch.rand(32, 1) * 6
    waves = torch.sin(phase + 0.5 * torch.arange(10)).unsqueeze(-1)
    x, y = waves[:, :-1], waves[:, -1]
    model = Forecast()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    plain = torch.optim.SGD(reference.parameters(), lr=0.01, momentum=0.9)
    training = poptorch.trainingModel(model, optimizer=optimizer)
    schedules = one_cycle(optimizer), one_cycle(plain)
    training.compile(x, y)
    print("compiled in", training.compilationTime())
    for _ in range(STEPS):
        loss = float(training(x, y)[1])
        plain.zero_grad()
        expected = reference(x, y)[1]
        expected.backward()
        plain.step()
        for schedule in schedules:
            schedule.step()
        training.setOptimizer(optimizer)
    print(f"loss {loss:.4f}, on the CPU {float(expected.detach()):.4f}")
    assert abs(loss - float(expected.detach())) < 1e-3


if __name__ == "__main__":
    main()
