"""Which elements of a data set a process loads, and how batches of a sampler become batches of a call."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch


class PartitionSampler(torch.utils.data.Sampler[int]):
    """The elements of one process among several, a block of neighbours in the order of the epoch.

    With ``drop_last`` every process has the largest number of whole batches that all have; the blocks of every other
    epoch begin as many elements later as are left over, so that two epochs see them all. Otherwise the blocks differ
    by one element at most. ``seed``: draw a new order for each epoch, the same in all processes; None: keep the order.
    """

    def __init__(
        self, elements: Sized, process: int, processes: int, batch: int, drop_last: bool, seed: int | None
    ) -> None:
        self._total = len(elements)
        self._process, self._processes = process, processes
        self._generator: torch.Generator | None = None
        if seed is not None:
            self._generator = torch.Generator().manual_seed(seed)
        self._epoch = 0
        whole, rest = divmod(self._total, processes)
        if drop_last:
            self._length = batch * (self._total // (batch * processes))
            self._start, self._left_over = process * self._length, self._total - processes * self._length
        else:
            self._length = whole + (process < rest)
            self._start, self._left_over = process * whole + min(process, rest), 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        order: Any = range(self._total)
        if self._generator is not None:
            order = torch.randperm(self._total, generator=self._generator).tolist()
        start = self._start + (self._left_over if self._epoch % 2 else 0)
        self._epoch += 1
        yield from order[start : start + self._length]


class JoinedBatches(torch.utils.data.Sampler[list[int]]):
    """``count`` batches of another sampler as one. ``drop_last``: leave out the last one if it has fewer."""

    def __init__(self, batches: Any, count: int, drop_last: bool) -> None:
        self._batches, self._count, self._drop_last = batches, count, drop_last

    def __len__(self) -> int:
        whole, rest = divmod(len(self._batches), self._count)
        return whole + bool(rest and not self._drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        joined: list[int] = []
        taken = 0
        for batch in self._batches:
            joined += batch
            taken += 1
            if taken == self._count:
                yield joined
                joined, taken = [], 0
        if taken and not self._drop_last:
            yield joined


def element_count(data: Any) -> int | None:
    """How many elements a data set has; None if it does not say."""
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None
