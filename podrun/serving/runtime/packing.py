"""Where samples of different lengths lie in the rows of a batch. Pure.

A *row* has ``row_length`` places. Samples keep their order; ``next_fit`` looks at the last row that was begun only,
``first_fit`` at all. Between two samples of a row ``delimiters`` places stay empty. End to end, samples lie one behind
the other and may cross the ends of rows.
"""

from __future__ import annotations

from dataclasses import field
from enum import Enum

import numpy as np

from podrun.core.quick_dataclass import dataclass


class PackAlgorithm(Enum):
    """How a row is chosen for a sample. Values are the SDK's."""

    next_fit = 0
    first_fit = 1


@dataclass(frozen=True, slots=True)
class PackedSample:
    """Where a sample lies: in the places ``begin`` to ``begin + length`` of all rows one behind the other. ``number``:
    of the samples of its row, from 1.
    """

    begin: int
    length: int
    number: int


@dataclass(frozen=True, slots=True)
class PackingShape:
    """What a batch has room for. ``most``: samples, 0 for as many as fit."""

    rows: int
    row_length: int
    most: int = 0
    delimiters: int = 0
    end_to_end: bool = False
    algorithm: PackAlgorithm = PackAlgorithm.next_fit


@dataclass(slots=True)
class OpenPack:
    """A batch that samples are put into, one after the other."""

    shape: PackingShape
    samples: list[PackedSample] = field(default_factory=list)
    _used: list[int] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        """True iff no sample is taken any more, however short."""
        return bool(self.shape.most) and len(self.samples) >= self.shape.most

    def add(self, length: int) -> PackedSample | None:
        """Put a sample of that length in; None if there is no room."""
        if self.is_full or length < 1:
            return None
        sample = self._end_to_end(length) if self.shape.end_to_end else self._in_a_row(length)
        if sample is not None:
            self.samples.append(sample)
        return sample

    def _end_to_end(self, length: int) -> PackedSample | None:
        begin = self.samples[-1].begin + self.samples[-1].length if self.samples else 0
        if begin + length > self.shape.rows * self.shape.row_length:
            return None
        return PackedSample(begin, length, len(self.samples) + 1)

    def _in_a_row(self, length: int) -> PackedSample | None:
        first = 0 if self.shape.algorithm is PackAlgorithm.first_fit else max(0, len(self._used) - 1)
        for row in range(first, self.shape.rows):
            if row == len(self._used):
                self._used.append(0)
                self._counts.append(0)
            begin = self._used[row] + (self.shape.delimiters if self._used[row] else 0)
            if begin + length <= self.shape.row_length:
                self._used[row] = begin + length
                self._counts[row] += 1
                return PackedSample(row * self.shape.row_length + begin, length, self._counts[row])
        return None

    def numbers(self) -> np.ndarray:
        """int32 ``[rows, row_length]``: for each place the number of its sample in the row, 0 for empty places."""
        places = np.zeros(self.shape.rows * self.shape.row_length, np.int32)
        for sample in self.samples:
            places[sample.begin : sample.begin + sample.length] = sample.number
        return places.reshape(self.shape.rows, self.shape.row_length)
