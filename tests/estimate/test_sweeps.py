"""Throughput over sizes: more samples are never cheaper, and neighbouring sizes never lie far apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import onnx
import pytest

from podrun import models
from podrun.costmodel.matmul import plan_product
from podrun.costmodel.products import Product
from podrun.costmodel.target import GC200, system
from podrun.estimate import ProgramLayout, estimate
from podrun.estimate.tracing import trace_model

JUMP = 1.10
"""Most that a sample may cost beside one of the next smaller size."""
DIP = 0.05
"""Share by which a single product of more rows may be cheaper: a planner tries 28 numbers of parts of each dimension,
and those of neighbouring sizes differ. Whole networks have no dips."""


def smooth(sizes: Sequence[int], cost: Callable[[int], float], dip: float = 0.0) -> None:
    """Assert that ``cost`` never falls by more than ``dip``, and rises by less than `JUMP` for each of ``sizes``."""
    for smaller, larger in itertools.pairwise(sizes):
        before, after = cost(smaller), cost(larger)
        assert after >= (1.0 - dip) * before, (smaller, larger)
        assert after / larger <= JUMP * before / smaller, (smaller, larger)


@pytest.mark.parametrize("proportion", [0.15, 0.6])
@pytest.mark.parametrize(("k", "n"), [(768, 768), (768, 3072), (1024, 4096), (4096, 1024)])
def test_products_over_batch_sizes(k: int, n: int, proportion: float) -> None:
    def cost(batch: int) -> float:
        return plan_product(GC200, Product(1, 128 * batch, k, n, proportion=proportion)).cycles(GC200)

    smooth(range(1, 33), cost, DIP)


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", ["resnet18", "bert_tiny"])
def test_networks_over_batch_sizes(name: str, train: bool) -> None:
    def cost(batch: int) -> float:
        built = models.build(name, batch=batch, train=train, weights=models.Random(seed=0), size=64)
        layout = ProgramLayout(micro_batch=batch, accumulation=8)
        made = trace_model(onnx.load_from_string(built.model), GC200, layout, train=train)
        found = estimate(made, system("pod4"), layout, train=train)
        return found.samples / found.samples_per_second

    smooth(range(1, 9), cost)
