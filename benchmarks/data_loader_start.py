"""From making an asynchronous `poptorch.DataLoader` to its first batch, against torch's own loader, in one run.

    python benchmarks/data_loader_start.py [--json FILE] [--rounds N] [--short]

The same data set, batch size and workers on both sides, in turn, in a program that has run a model (so threads of XLA
exist). ``start_ratio_N``: the median over rounds of ours over torch's, with N workers; ``start_s_N`` and
``torch_s_N``: medians in seconds. Each side ends its processes before the other starts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from short_mode import add_short

from podrun import poptorch

TARGET = 2.0
BATCH = 4


class Numbers(torch.utils.data.Dataset[Any]):
    """Small elements, so that starting is all there is to measure."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(index)), torch.tensor(index)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--workers", default="1,8,32", metavar="LIST")
    add_short(parser, workers="1,4", rounds=2)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    poptorch.inferenceModel(torch.nn.Linear(2, 2))(torch.ones(1, 2))
    figures: dict[str, float] = {}
    for workers in arguments.workers.split(","):
        figures |= measure(int(workers), arguments.rounds)
    for name, value in figures.items():
        target = f"   (at most {TARGET:g})" if name.startswith("start_ratio") else ""
        print(f"{name:16} {value:.3g}{target}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure(workers: int, rounds: int) -> dict[str, float]:
    """Both sides, in turn."""
    pairs = [(ours(workers), of_torch(workers)) for _ in range(rounds + 1)][1:]
    return {
        f"start_ratio_{workers}": statistics.median(mine / other for mine, other in pairs),
        f"start_s_{workers}": statistics.median(mine for mine, _ in pairs),
        f"torch_s_{workers}": statistics.median(other for _, other in pairs),
    }


def ours(workers: int) -> float:
    """Seconds to the first batch of an asynchronous loader."""
    begin = time.perf_counter()
    loader = poptorch.DataLoader(
        poptorch.Options(), Numbers(), BATCH, num_workers=workers, mode=poptorch.DataLoaderMode.Async
    )
    check(next(iter(loader)))
    taken = time.perf_counter() - begin
    loader.terminate()
    return taken


def of_torch(workers: int) -> float:
    """The same of torch's loader."""
    begin = time.perf_counter()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"os\.fork\(\)")
        rows = iter(torch.utils.data.DataLoader(Numbers(), BATCH, num_workers=workers))
    check(next(rows))
    return time.perf_counter() - begin


def check(batch: Any) -> None:
    """End if it is not the first batch."""
    if batch[1].tolist() != list(range(BATCH)):
        raise SystemExit(f"the first batch is {batch[1].tolist()}")


if __name__ == "__main__":
    main()
