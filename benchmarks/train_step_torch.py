"""The steps of `train_step` in torch. Reads lines of a number of steps; answers each with losses and seconds as JSON.

PYTHON train_step_torch.py NETWORK FOLDER    # the folder holds weights.npz, x.npy and labels.npy
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from train_networks import NETWORKS, RATE


class TorchLayers:
    """The layers in torch's functions, on weights by name."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        self.weights = weights

    def conv(self, x: Any, name: str, shape: tuple[int, ...], stride: int, pad: int, groups: int) -> Any:
        return F.conv2d(x, self.weights[name], None, stride, pad, 1, groups)

    def norm(self, x: Any, name: str, channels: int) -> Any:
        return F.batch_norm(
            x, None, None, self.weights[f"{name}.scale"], self.weights[f"{name}.bias"], training=True
        )

    def relu(self, x: Any) -> Any:
        return F.relu(x)

    def add(self, a: Any, b: Any) -> Any:
        return a + b

    def max_pool(self, x: Any) -> Any:
        return F.max_pool2d(x, 3, 2, 1)

    def dense(self, x: Any, name: str, shape: tuple[int, int]) -> Any:
        return x.mean((2, 3)) @ self.weights[name]


def main() -> None:
    """Serve."""
    if len(sys.argv) != 3 or sys.argv[1] not in NETWORKS:
        sys.exit(f"PYTHON train_step_torch.py NETWORK FOLDER; networks: {', '.join(NETWORKS)}")
    folder = Path(sys.argv[2])
    with np.load(folder / "weights.npz") as file:
        weights = {name: torch.tensor(file[name], requires_grad=True) for name in file.files}
    x = torch.tensor(np.load(folder / "x.npy"))
    labels = torch.tensor(np.load(folder / "labels.npy")).long()
    network, layers = NETWORKS[sys.argv[1]], TorchLayers(weights)
    optimizer = torch.optim.SGD(weights.values(), lr=RATE)
    for line in sys.stdin:
        losses, seconds = [], []
        for _ in range(int(line)):
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(network(layers, x), labels)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
        answer = {"losses": losses, "seconds": seconds, "threads": torch.get_num_threads()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
