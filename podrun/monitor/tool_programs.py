"""Programs that the test tools load: Executables written by hand whose results are known to the bit.

Every number in them is an integer or a small binary fraction, so neither the order of sums nor the precision changes
the result. Here are matrix products, and IPU-Link traffic: in `LinkCheck` the two ends of a link send each other known
words, and every word is compared. `podrun.monitor.transfer_programs` has transfers with hosts and between IPU-Link
domains.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.core import executable_file
from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.executable import (
    Arena,
    Array,
    Computation,
    Compute,
    Executable,
    Instruction,
    LoadStream,
    Receive,
    Retrieval,
    Send,
    StoreStream,
    Stream,
    StreamDirection,
    Sync,
    SyncScope,
    TensorSpec,
    Variable,
    VariableRole,
)
from podrun.core.layout import Layout
from podrun.core.quick_dataclass import dataclass
from podrun.monitor.tool_partition import streamed_product_cycles

if TYPE_CHECKING:
    import jax

    from podrun.core.layout import IpuRange
    from podrun.costmodel.target import Chip
    from podrun.device.connection import Connection
    from podrun.monitor.tool_partition import ToolPartition


def computation(
    name: str,
    function: Callable[..., Any],
    inputs: Mapping[str, tuple[tuple[int, ...], Any]],
    outputs: tuple[str, ...],
) -> Computation:
    """``function(*inputs) -> tuple of outputs`` as a Computation; ``inputs``: shape and dtype by buffer."""
    import jax
    from jax import export

    shapes = [jax.ShapeDtypeStruct(*of_one) for of_one in inputs.values()]  # type: ignore[no-untyped-call]
    exported = export.export(jax.jit(function))(*shapes)
    data = bytes(exported.serialize())
    executable_file.note_exported_piece(data)
    return Computation(name, data, tuple(inputs), outputs)


def one_ipu_replicas(ipus: int) -> Layout:
    """A replica on every IPU."""
    return Layout.of(ipus, 1)


@dataclass(frozen=True, slots=True)
class ToolWork:
    """The work of a batch: an instruction list for each IPU of a replica, and the objects that these name."""

    instructions: tuple[tuple[Instruction, ...], ...]
    pieces: Sequence[Computation] = ()
    streams: dict[str, Stream] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    arenas: dict[str, Arena] = field(default_factory=dict)


def tool_program(name: str, chip: Chip, layout: Layout, work: ToolWork, seconds: float) -> Executable:
    """A program with one micro-batch a batch, whose modelled time is ``seconds``."""
    return Executable(
        name=name,
        layout=layout,
        accumulation_factor=1,
        training=False,
        streams=work.streams,
        variables=work.variables,
        arenas=work.arenas,
        computations={piece.name: piece for piece in work.pieces},
        instructions=work.instructions,
        target=chip.name,
        tile_report={"step": {"cycles": round(seconds * chip.clock_hz), "seconds": seconds}},
    )


BLOCK = 16
"""Channels in and out of the product: a weight block of the matrix unit (two of them for float32)."""
ROWS = 16
"""Rows of values on each tile."""
PASSES = 2049
"""Products in one launch. An odd number, so that the result is not what the values were. Assumed: with it the tile
model gives 99.9 % of the peak for FP32; the published sample is 99.96."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """One launch on all IPUs: floating point operations of each IPU, modelled seconds, seconds of this host's clock,
    and wrong values by IPU."""

    flops: float
    modelled_s: float
    emulation_s: float
    wrong: tuple[int, ...]


class ProductsRun:
    """Products on the IPUs that ``connection`` holds, ``ipus`` of them; ``dtype``: "float16" or "float32"."""

    def __init__(self, connection: Connection, chip: Chip, ipus: int, dtype: str, passes: int) -> None:
        from podrun.costmodel import product_vertices
        from podrun.costmodel.exchange import sync_cycles

        self._connection = connection
        self.flops = 2.0 * chip.tiles * ROWS * BLOCK * BLOCK * passes
        blocks = BLOCK // product_vertices.in_group(dtype)
        cycles = blocks * streamed_product_cycles(chip, dtype, ROWS * passes) + sync_cycles(chip)
        matrix = mixing_matrix()
        shape = (1, 1, ipus, chip.tiles * ROWS, BLOCK)
        values = np.random.default_rng(1).integers(-4, 5, shape).astype(dtype)
        self._inputs = {"x": values, "w": matrix.astype(dtype)[None, None]}
        # Sums of 16 products of small integers and quarters: exact in every type, in any order.
        exact = values.astype(np.float32) @ matrix.astype(np.float32) if passes % 2 else values
        self._expected: Array = exact.astype(dtype)[0, 0]
        seconds = cycles / chip.clock_hz
        connection.load(products(chip, ipus, dtype, chip.tiles, ROWS, passes, seconds))

    def run(self) -> LaunchResult:
        """Run one launch and compare its results."""
        result = self._connection.run(1, self._inputs)
        differ = result.anchors["y"] != self._expected
        return LaunchResult(
            self.flops,
            result.modelled_seconds,
            result.emulation_seconds,
            tuple(int(np.count_nonzero(of_one)) for of_one in differ),
        )


def mixing_matrix(seed: int = 0) -> Array:
    """A symmetric orthogonal matrix of quarters, ``w @ w = 1``: Hadamard's of order 16 with signs."""
    h = np.ones((1, 1))
    while len(h) < BLOCK:
        h = np.block([[h, h], [h, -h]])
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], BLOCK)
    return np.asarray(signs[:, None] * h * signs[None, :] / 4.0)


def products(
    chip: Chip, ipus: int, dtype: str, tiles: int, rows: int, passes: int, seconds: float
) -> Executable:
    """On every tile of every IPU: ``passes`` products of ``rows`` x 16 values with a 16 x 16 matrix, each with the
    result of the one before. Stream ``x``: the values; ``w``: the matrix, the same for all; anchor ``y``: the result.
    """
    import jax

    layout, shape = one_ipu_replicas(ipus), (tiles * rows, BLOCK)
    replicas = layout.replicas_per_machine

    def launch(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        flat = x.reshape(-1, BLOCK)
        return (jax.lax.fori_loop(0, passes, lambda _, y: y @ w[0], flat).reshape(x.shape),)

    piece = computation(
        "products",
        launch,
        {"in:x": ((1, replicas, *shape), dtype), "in:w": ((1, BLOCK, BLOCK), dtype)},
        ("out:y",),
    )
    steps = (
        Sync(SyncScope.HOST),
        LoadStream("x", "in:x", 0, 1),
        LoadStream("w", "in:w", 0, 1),
        Compute(piece.name),
        StoreStream("y", "out:y", 0, 1),
    )
    streams = {
        "x": Stream(TensorSpec("x", dtype, shape), StreamDirection.TO_DEVICE),
        "w": Stream(TensorSpec("w", dtype, (BLOCK, BLOCK)), StreamDirection.TO_DEVICE, broadcast=True),
        "y": Stream(TensorSpec("y", dtype, shape), StreamDirection.TO_HOST, retrieval=Retrieval.FINAL),
    }
    return tool_program("flops", chip, layout, ToolWork((steps,), [piece], streams), seconds)


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
        connection.load(traffic_program(partition.chip, ipus.count, inside, words, seconds))
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
        received = self._connection.read_variables(names)
        return [
            sum(
                int(
                    np.count_nonzero(
                        received[payload(link, end)] != self._first[link][(end + done) % 2] + np.uint32(done)
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


def traffic_program(
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
