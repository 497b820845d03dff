"""The step of `step_time` as an ordinary torch program: one process for each replica, gradients averaged by gloo.

Run by torchrun. Needs torch only.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SIZES, BATCH, WARM_UP, STEPS = (784, 512, 512, 10), 32, 5, 30


def main() -> None:
    """Train; rank 0 prints the median step."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for i in range(len(SIZES) - 1):
        layers += [torch.nn.Linear(SIZES[i], SIZES[i + 1]), torch.nn.ReLU()]
    model = DistributedDataParallel(torch.nn.Sequential(*layers[:-1]))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = torch.nn.CrossEntropyLoss()
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (BATCH,))
    taken = []
    for _ in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()
        taken.append(time.perf_counter() - begin)
    if dist.get_rank() == 0:
        print(f"step_ms {statistics.median(taken[WARM_UP:]) * 1e3:.3f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
