"""Traffic over IPU-Links: both ends of a link send each other known words, and every word is compared."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.executable import (
    Computation,
    Compute,
    Executable,
    Instruction,
    Receive,
    Send,
    Sync,
    SyncScope,
    TensorSpec,
    Variable,
    VariableRole,
)
from podrun.core.layout import Layout
from podrun.monitor.tool_programs import ToolWork, computation, tool_program

if TYPE_CHECKING:
    from podrun.core.layout import IpuRange
    from podrun.costmodel.target import Chip
    from podrun.device.connection import Connection
    from podrun.monitor.tool_partition import ToolPartition

CHUNK = 100
"""Iterations of one run; Ctrl-C and faults take effect between runs."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Iterations so far, their modelled seconds, and seconds of this host's clock."""

    iterations: int = 0
    modelled_s: float = 0.0
    emulation_s: float = 0.0


class LinkCheck:
    """A check of all ``pairs`` of IPUs at once, on the ``ipus`` that ``connection`` holds.

    ``words``: 32-bit words each way and iteration; ``seconds``: modelled time of an iteration.
    """

    def __init__(
        self,
        partition: ToolPartition,
        connection: Connection,
        ipus: IpuRange,
        pairs: Sequence[tuple[int, int]],
        words: int,
        seconds: float,
    ) -> None:
        self._connection, self._pairs, self._words = connection, pairs, words
        self._first = [
            [np.random.default_rng((link, end)).integers(0, 2**32, words, np.uint32) for end in (0, 1)]
            for link in range(len(pairs))
        ]
        inside = [(a - ipus.first, b - ipus.first) for a, b in pairs]
        connection.load(traffic(partition.chip, ipus.count, inside, words, seconds))
        connection.write_variables(
            {payload(link, end): self._first[link][end] for link in range(len(pairs)) for end in (0, 1)}
        )
        self.done = Progress()

    def run(self, iterations: int | None) -> Iterator[Progress]:
        """Run ``iterations`` (None: without end), `CHUNK` at a time."""
        left = iterations
        while left is None or left > 0:
            count = CHUNK if left is None else min(CHUNK, left)
            result = self._connection.run(count, {})
            done = self.done
            self.done = Progress(
                done.iterations + count,
                done.modelled_s + result.modelled_seconds,
                done.emulation_s + result.emulation_seconds,
            )
            left = None if left is None else left - count
            yield self.done

    def errors(self) -> list[int]:
        """Number of wrong words after the iterations so far, by pair."""
        done = self.done.iterations
        names = [payload(link, end) for link in range(len(self._pairs)) for end in (0, 1)]
        found = self._connection.read_variables(names)
        return [
            sum(
                int(
                    np.count_nonzero(
                        found[payload(link, end)] != self._first[link][(end + done) % 2] + np.uint32(done)
                    )
                )
                for end in (0, 1)
            )
            for link in range(len(self._pairs))
        ]


def payload(link: int, end: int) -> str:
    """Name of the variable with the words that end 0 or 1 of a link received last."""
    return f"payload:{link}:{end}"


@functools.lru_cache(4)
def _plus_one(words: int) -> Computation:
    import jax.numpy as jnp

    return computation("add", lambda x: (x + jnp.uint32(1),), {"x": ((words,), "uint32")}, ("y",))


@functools.lru_cache(4)
def _unchanged(words: int) -> Computation:
    import jax.numpy as jnp

    return computation("keep", lambda x: (x + jnp.uint32(0),), {"x": ((words,), "uint32")}, ("y",))


def traffic(
    chip: Chip, ipus: int, pairs: Sequence[tuple[int, int]], words: int, seconds: float
) -> Executable:
    """One replica of ``ipus`` IPUs; both ends of every pair send each other ``words`` 32-bit words at once.

    Each end sends the words it received last, plus one: after *n* batches end *e* holds the first words of end
    ``(e + n) % 2``, plus *n*.
    """
    machines = max(ipus // IPUS_PER_MACHINE, 1)
    sends: list[list[Instruction]] = [[] for _ in range(ipus)]
    receives: list[list[Instruction]] = [[] for _ in range(ipus)]
    pieces: list[Computation] = []
    variables: dict[str, Variable] = {}
    add, keep = _plus_one(words), _unchanged(words)
    for link, ends in enumerate(pairs):
        for end, ipu in enumerate(ends):
            name, tag = payload(link, end), 2 * link
            variables[name] = Variable(
                TensorSpec(name, "uint32", (words,)),
                VariableRole.WEIGHT,
                position=ipu // IPUS_PER_MACHINE if machines > 1 else None,
            )
            for piece, first, last in ((add, name, f"out:{link}"), (keep, f"in:{link}", name)):
                named = f"{piece.name}:{link}:{end}"
                pieces.append(Computation(named, piece.stablehlo, (first,), (last,)))
            sends[ipu] += [Compute(f"add:{link}:{end}"), Send(f"out:{link}", ends[1 - end], tag + end)]
            receives[ipu] += [
                Receive(f"in:{link}", ends[1 - end], tag + 1 - end),
                Compute(f"keep:{link}:{end}"),
            ]
    lists = tuple(
        (Sync(SyncScope.HOST), *sent, *received) for sent, received in zip(sends, receives, strict=True)
    )
    layout = Layout(1, ipus, machines, 1, machines)
    return tool_program("traffic", chip, layout, ToolWork(lists, pieces, variables=variables), seconds)
