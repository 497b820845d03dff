"""A small BERT-like encoder in a pipeline of two IPUs: blocks by annotation, accumulation, a warm-up schedule."""

import copy

import poptorch
import torch

WORDS, WIDTH, LENGTH, ACCUMULATION = 40, 16, 6, 4


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, labels):
        x = self.words(tokens) + self.places
        for layer in self.layers:
            x = layer(x)
        loss = torch.nn.functional.cross_entropy(
            self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-1
        )
        return poptorch.identity_loss(loss, reduction="none")


def schedule_of(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))


def batch():
    tokens = torch.randint(0, WORDS, (2 * ACCUMULATION, LENGTH))
    labels = torch.where(torch.rand(tokens.shape) < 0.5, tokens, -1)
    labels[:, 0] = tokens[:, 0]
    return tokens, labels


def main():
    torch.manual_seed(0)
    model = Encoder()
    reference = copy.deepcopy(model)
    poptorch.BeginBlock(model.words, "embedding", ipu_id=0)
    poptorch.BeginBlock(model.layers[1], "second layer", ipu_id=1)
    print(poptorch.module_repr(model))
    options = poptorch.Options().setExecutionStrategy(
        poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)
    )
    options.Training.gradientAccumulation(ACCUMULATION)
    options.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0, loss_scaling=64.0)
    training = poptorch.trainingModel(model, options, optimizer)
    schedule = schedule_of(optimizer)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.01, weight_decay=0.0)
    plain_schedule = schedule_of(plain)
    for _ in range(6):
        tokens, labels = batch()
        loss = float(training(tokens, labels))
        schedule.step()
        training.setOptimizer(optimizer)
        plain.zero_grad()
        for part in zip(tokens.chunk(ACCUMULATION), labels.chunk(ACCUMULATION), strict=True):
            expected = reference(*part)
            (expected / ACCUMULATION).backward()
        plain.step()
        plain_schedule.step()
        expected = expected.item()
        print(f"loss {loss:.4f}, on the CPU {expected:.4f}")
        assert abs(loss - expected) < 2e-3


if __name__ == "__main__":
    main()
