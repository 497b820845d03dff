"""Data prepared ahead in a process of its own, rebatched from workers; the last batch of an epoch is not lost."""

import poptorch
import torch


class Sequence(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, index):
        x = torch.linspace(0, 1, 8) + index / 50
        return {"x": x, "y": x.sum().reshape(1)}


class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, x, y):
        return torch.nn.functional.mse_loss(self.layer(x), y)


def main():
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(2).randomSeed(4)
    loader = poptorch.DataLoader(
        options,
        Sequence(),
        batch_size=4,
        shuffle=True,
        num_workers=2,
        mode=poptorch.DataLoaderMode.AsyncRebatched,
        rebatched_worker_size=5,
        drop_last=False,
        async_options={"early_preload": True, "buffer_size": 4},
    )
    assert len(loader) == 7
    model = Sum()
    training = poptorch.trainingModel(model, options, poptorch.optim.Adam(model.parameters(), lr=0.05))
    for epoch in range(5):
        seen, losses = 0, []
        for batch in loader:
            seen += len(batch["x"])
            if len(batch["x"]) == loader.combinedBatchSize:
                losses.append(float(training(batch["x"], batch["y"])))
        print(f"epoch {epoch}: {seen} samples, loss {losses[-1]:.4f}")
        assert seen == 50
    loader.terminate()
    assert losses[-1] < 0.5


if __name__ == "__main__":
    main()
