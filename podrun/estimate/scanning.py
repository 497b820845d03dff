"""Trying layouts: which micro-batch, accumulation, pipeline and recomputation is best on a system."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from podrun.device.target import System
from podrun.errors import UsageError
from podrun.estimate.layout import Layout
from podrun.estimate.model import Estimate, estimate
from podrun.estimate.tracing import FixedBatchError, Traced, trace

if TYPE_CHECKING:
    import onnx

MOST_STAGES = 16
"""Longest pipeline that a scan tries."""


@dataclass(frozen=True, slots=True)
class Choices:
    """What a scan tries: all combinations. ``global_batch``: accumulation follows from it, and layouts that do not
    divide it are left out; ``pipelines``: IPUs of a replica, None: powers of two up to `MOST_STAGES`.
    """

    micro_batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    accumulations: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    global_batch: int | None = None
    pipelines: Sequence[int] | None = None
    recomputing: Sequence[bool] = (False, True)


def scan(
    model: onnx.ModelProto, system: System, base: Layout, choices: Choices, *, train: bool
) -> list[Estimate]:
    """Estimates of many layouts, those that fit first and the fastest of them first.

    What is not among the ``choices`` is as in ``base``. Pipelines are split as even as memory allows; inference is
    tried without accumulation and recomputation.

    Raises:
        UsageError: no layout gives that global batch.
    """
    if not train:
        choices = replace(choices, accumulations=(1,), recomputing=(False,))
    found: list[Estimate] = []
    fixed: FixedBatchError | None = None
    for micro_batch in choices.micro_batches:
        traced: Traced | None = None
        for layout in _layouts(system, replace(base, micro_batch=micro_batch), choices):
            if traced is None:
                try:
                    traced = trace(model, system.chip, layout, train=train)
                except FixedBatchError as error:
                    fixed = error
                    break
            if layout.ipus_per_replica <= len(traced.layers):
                found.append(estimate(traced, system, layout, train=train))
    if not found and fixed is not None:
        raise fixed
    if not found:
        raise UsageError(
            f"no layout of {system.name} makes a global batch of {choices.global_batch}",
            hint=f"Give a multiple of the number of replicas, as in --global-batch {system.ipus * 16}.",
        )
    return sorted(found, key=_rank)


def _rank(one: Estimate) -> tuple[bool, int, bool, int, float]:
    """What fits first, the fastest of it to a thousandth; of equals what recomputes nothing, and needs less."""
    speed = round(1000 * math.log(one.samples_per_second))
    return (not one.fits, -speed, one.layout.recompute, one.max_tile_bytes, -one.samples_per_second)


def _layouts(system: System, base: Layout, choices: Choices) -> Iterator[Layout]:
    for per in choices.pipelines or _powers_of_two(min(MOST_STAGES, system.ipus)):
        factors = choices.accumulations
        if choices.global_batch is not None:
            factor, rest = divmod(choices.global_batch, base.micro_batch * (system.ipus // per))
            factors = (factor,) if factor and not rest else ()
        for factor in factors:
            for recompute in choices.recomputing:
                yield replace(base, ipus_per_replica=per, accumulation=factor, recompute=recompute)


def _powers_of_two(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2
