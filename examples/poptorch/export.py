"""Compile where there are no IPUs, run where they are: an offline target, a file, a wrapper made from it."""

import tempfile
from pathlib import Path

import poptorch
import torch


class Scorer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))

    def forward(self, x):
        return {"scores": self.layers(x).softmax(-1)}


def main():
    torch.manual_seed(0)
    x = torch.randn(6, 5)
    model = Scorer().eval()
    file = str(Path(tempfile.mkdtemp()) / "scorer.poptorch")
    options = poptorch.Options().deviceIterations(3).useOfflineIpuTarget()
    poptorch.inferenceModel(model, options).compileAndExport(file, x)

    served = poptorch.load(file, edit_opts_fn=lambda opts: opts.modelName("scorer"))
    print("compiled:", served.isCompiled(), "attached:", served.isAttachedToDevice())
    torch.testing.assert_close(served(x)["scores"], model(x)["scores"])
    served.detachFromDevice()
    torch.testing.assert_close(served(x)["scores"], model(x)["scores"])
    print("seconds from input to result:", served.getLatency()[2])
    Path(file).unlink()


if __name__ == "__main__":
    main()
