"""An operator's runs in a trace, forward and backward, and the pen that writes them anew (see
`operators`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from podrun.costmodel.flat_graph import Equation, FlatTensor
from podrun.costmodel.narrow import OperatorScope


@dataclass(slots=True)
class OperatorRun:
    """Equations of one operator and direction: what they read of others, what others (or the outside) read
    of them.
    """

    first: int
    end: int
    reads: list[int]
    written: list[int]
    scope: str
    made: list[Equation] = field(default_factory=list)


class Unexpected(Exception):
    """A run does not have the shape that its operator's template knows."""


class RunWriter:
    """Writes the equations of a run anew, with fresh value numbers."""

    def __init__(self, tensors: dict[int, FlatTensor], scope: str, into: list[Equation]) -> None:
        self.tensors, self.scope, self.into = tensors, scope, into

    def new(self, shape: Sequence[int], dtype: str) -> int:
        """A value of its own."""
        number = len(self.tensors)
        while number in self.tensors:
            number += 1
        self.tensors[number] = FlatTensor(tuple(shape), dtype)
        return number

    def emit(
        self,
        primitive: str,
        inputs: Sequence[int],
        output: int | None = None,
        *,
        shape: Sequence[int] = (),
        params: Mapping[str, Any] | None = None,
        seen_as: Sequence[int] = (),
    ) -> int:
        """Add an equation with one result: ``output``, or a new value of ``shape``. ``seen_as``: the shape
        in which the planner sees the first operand.
        """
        dtype = self.tensors[inputs[0]].dtype
        number = self.new(shape, dtype) if output is None else output
        operands = [self.tensors[n] for n in inputs]
        if seen_as:
            operands[0] = FlatTensor(tuple(seen_as), dtype)
        result = self.tensors[number]
        self.into.append(
            Equation(
                primitive, params or {}, tuple(inputs), (number,), tuple(operands), (result,), self.scope
            )
        )
        return number


@dataclass(slots=True)
class TracedOperator:
    """An operator of the trace with its runs; templates read and write through it."""

    place: OperatorScope
    tensors: dict[int, FlatTensor]
    forward: OperatorRun
    backward: OperatorRun | None
    equations: Sequence[Equation]

    def size(self, number: int) -> int:
        """Elements of a value."""
        return self.tensors[number].size

    def shape(self, number: int) -> tuple[int, ...]:
        """Shape of a value."""
        return self.tensors[number].shape

    def main_input(self) -> int:
        """The largest value that the forward run reads of others.

        Raises:
            Unexpected: it reads none.
        """
        if not self.forward.reads:
            raise Unexpected
        return max(self.forward.reads, key=self.size)

    def main_output(self) -> int:
        """The one large result of the forward run; smaller ones are statistics.

        Raises:
            Unexpected: none, or two of its size.
        """
        written = sorted(self.forward.written, key=self.size)
        if not written or (len(written) > 1 and self.size(written[-2]) * 2 > self.size(written[-1]) > 64):
            raise Unexpected
        return written[-1]

    def gradient(self, y: int) -> int:
        """The gradient of ``y`` that the backward run reads.

        Raises:
            Unexpected: nothing of that size is read.
        """
        found = [n for n in self.arriving() if self.size(n) == self.size(y)]
        if not found:
            raise Unexpected
        return found[0]

    def arriving(self) -> list[int]:
        """What the backward run reads that the forward run neither read nor made: gradients of other
        operators.
        """
        assert self.backward is not None
        forward = self.equations[self.forward.first : self.forward.end]
        known = {*self.forward.reads, *(n for e in forward for n in e.outputs)}
        return [n for n in self.backward.reads if n not in known]

    def wanted(self, source: int) -> int | None:
        """The result of the backward run that is the gradient of ``source``, if anything reads it."""
        assert self.backward is not None
        for number in self.backward.written:
            if self.shape(number) == self.shape(source):
                return number
        return None

    def writer(self, run: OperatorRun) -> RunWriter:
        """Writes ``run`` anew."""
        return RunWriter(self.tensors, run.scope, run.made)

    def finish(self, run: OperatorRun, done: set[int], source: int, main: int | None = None) -> None:
        """Values of ``run`` that others read and no template made: small ones are copied, of ``source``.

        Raises:
            Unexpected: one of them is as large as ``main`` (``source`` if left out).
        """
        limit = self.size(source if main is None else main)
        write = self.writer(run)
        for number in run.written:
            if number in done:
                continue
            if self.size(number) * 2 > limit > 64:
                raise Unexpected
            write.emit("copy", [source], number, seen_as=self.shape(number))


Template = Callable[[TracedOperator], None]
"""Writes the runs of one operator anew. Raises Unexpected, before anything is replaced, for runs it does
not know.
"""
