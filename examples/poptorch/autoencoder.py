"""A variational autoencoder: random numbers of the IPU, a loss of several parts, results of every iteration."""

import poptorch
import torch


class Autoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(12, 2 * 3), torch.nn.Linear(3, 12)

    def forward(self, x):
        mean, spread = self.encoder(x).chunk(2, -1)
        code = mean + torch.exp(0.5 * spread) * torch.randn(mean.shape)
        rebuilt = self.decoder(code)
        error = ((rebuilt - x) ** 2).sum(-1).mean()
        divergence = -0.5 * (1 + spread - mean**2 - spread.exp()).sum(-1).mean()
        return rebuilt, poptorch.identity_loss(error + 0.01 * divergence, reduction="none")


def main():
    torch.manual_seed(0)
    data = torch.randn(64, 3) @ torch.randn(3, 12)
    options = poptorch.Options().deviceIterations(8).outputMode(poptorch.OutputMode.EveryN, 4).randomSeed(5)
    options.anchorTensor("gradient", "Gradient___decoder.weight")
    model = Autoencoder()
    training = poptorch.trainingModel(model, options, torch.optim.RMSprop(model.parameters(), lr=0.01))
    for step in range(30):
        rebuilt, losses = training(data)
        if step % 10 == 0:
            print(
                f"losses {losses.tolist()}, gradient {float(training.getAnchoredTensor('gradient').norm()):.3f}"
            )
    assert rebuilt.shape == (16, 12)
    assert losses.shape == (2,)
    assert float(losses[-1]) < 15


if __name__ == "__main__":
    main()
