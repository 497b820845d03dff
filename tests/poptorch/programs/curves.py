"""Trains models of `tests.poptorch.models` over all instances of a launch and prints their losses on every instance."""

import json
import sys
from pathlib import Path

import popdist
import popdist.poptorch
import poptorch
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.poptorch.models import MODELS

BATCH, STEPS, RATE = 4, 4, 0.05


def main():
    popdist.init()
    rank, instances = popdist.getInstanceIndex(), popdist.getNumInstances()
    found = {}
    for name in sys.argv[1:]:
        options = popdist.poptorch.Options(ipus_per_replica=1)
        options.broadcastBuffers(False)
        torch.manual_seed(0)
        model = MODELS[name].make().train()
        samples = [
            each.chunk(instances)[rank]
            for each in MODELS[name].samples(BATCH * popdist.getNumTotalReplicas())
        ]
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
        training = poptorch.trainingModel(model, options, optimizer)
        losses = [float(training(*samples).reshape(-1)[-1]) for _ in range(STEPS)]
        total = sum(float(p.detach().double().sum()) for p in model.parameters())
        found[name] = {"losses": losses, "total": total}
        training.destroy()
    print(json.dumps({"rank": rank, "models": found}), flush=True)


main()
