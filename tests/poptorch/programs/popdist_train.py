"""Trains a classifier over all instances of a launch and prints what it has learned, as bytes, on every instance."""

import hashlib
import json

import horovod.torch as hvd
import popdist
import popdist.poptorch
import poptorch
import torch

TOTAL, MICRO, STEPS = 4, 3, 4


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Dropout(0.25), torch.nn.Linear(16, 4)
        )

    def forward(self, x, labels):
        logits = self.layers(x)
        return logits, torch.nn.functional.cross_entropy(logits, labels)


def main():
    popdist.init()
    hvd.init()
    if popdist.isPopdistEnvSet():
        options = popdist.poptorch.Options(ipus_per_replica=1)
        rank, local = popdist.getInstanceIndex(), popdist.getNumLocalReplicas()
        assert (hvd.rank(), hvd.size()) == (rank, popdist.getNumInstances())
    else:
        options, rank, local = poptorch.Options().replicationFactor(TOTAL), 0, TOTAL
    options.randomSeed(11)
    options.Training.gradientAccumulation(2)
    refused = not popdist.isPopdistEnvSet()
    if not refused:
        try:
            options.Distributed.configureProcessId(0, 9)
        except RuntimeError as error:
            refused = "configureProcessId" in str(error)
    torch.manual_seed(5)
    model = Classifier()
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.05)
    training = poptorch.trainingModel(model, options, optimizer)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(2, TOTAL, MICRO, 8, generator=generator)
        labels = torch.randint(0, 4, (2, TOTAL, MICRO), generator=generator)
        mine = slice(rank * local, (rank + 1) * local)
        _, loss = training(x[:, mine].reshape(-1, 8), labels[:, mine].reshape(-1))
        everybody = hvd.allgather(loss.reshape(-1))
        losses.append(everybody.tolist())
    weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    found = {
        "rank": rank,
        "weights": hashlib.sha256(weights).hexdigest(),
        "losses": losses,
        "refused": refused,
        "scalar": hvd.allreduce(torch.tensor(float(rank))).item(),
        "average": hvd.allreduce(torch.tensor([float(rank)])).tolist(),
        "grouped": [
            t.tolist() for t in hvd.grouped_allreduce([torch.ones(2), torch.tensor([rank])], op=hvd.Sum)
        ],
        "ragged": hvd.allgather(torch.full((rank + 1,), rank)).tolist(),
        "note": hvd.broadcast_object({"epoch": rank + 7}, root_rank=0),
        "root": hvd.broadcast(torch.tensor([rank, 3]), hvd.size() - 1).tolist(),
    }
    fresh = Classifier()
    hvd.broadcast_parameters(fresh.state_dict(), root_rank=0)
    first = hvd.allgather(fresh.layers[0].bias.detach()[:1])
    found["equal"] = bool((first == first[0]).all())
    data = [(torch.full((8,), float(n)), torch.tensor(n)) for n in range(48)]
    loader = poptorch.DataLoader(options, data, batch_size=MICRO, shuffle=True)
    found["loaded"] = sorted(label for _, labels in loader for label in labels.tolist())
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
