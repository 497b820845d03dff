"""The programs that the test tools load: Executables written by hand, whose results can be foretold to the bit.

Every number in them is an integer or a small binary fraction, so that no order of sums and no precision can change what
has to come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from podrun.executable import (
    REPLICA_OFFSET,
    AllGather,
    Arena,
    Computation,
    Compute,
    Executable,
    Instruction,
    Layout,
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

if TYPE_CHECKING:
    from podrun.device.target import Chip

IPUS_PER_MACHINE = 4
Array = np.ndarray[Any, np.dtype[Any]]


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
    return Computation(name, bytes(exported.serialize()), tuple(inputs), outputs)


def one_ipu_replicas(ipus: int) -> Layout:
    """A replica on every IPU."""
    per_machine = min(ipus, IPUS_PER_MACHINE)
    return Layout(ipus, 1, ipus // per_machine, per_machine)


@dataclass(frozen=True, slots=True)
class _Work:
    """What a batch does: an instruction list for each IPU of a replica, and what these name."""

    instructions: tuple[tuple[Instruction, ...], ...]
    pieces: Sequence[Computation] = ()
    streams: dict[str, Stream] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)
    arenas: dict[str, Arena] = field(default_factory=dict)


def _program(name: str, chip: Chip, layout: Layout, work: _Work, seconds: float) -> Executable:
    """A program of one micro-batch to a batch, which is said to take ``seconds``."""
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


# --- products -------------------------------------------------------------------------------------------------

BLOCK = 16
"""Channels in and out of the product: a weight block of the matrix unit (two of them for float32)."""


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
    """On every tile of every IPU: ``passes`` products of ``rows`` x 16 values with a 16 x 16 matrix, each of the last
    one's result. Stream ``x``: the values; ``w``: the matrix, the same for all; anchor ``y``: the result.
    """
    import jax

    layout, shape = one_ipu_replicas(ipus), (tiles * rows, BLOCK)
    replicas = layout.replicas_per_machine

    def launch(x: Any, w: Any) -> Any:
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
    return _program("flops", chip, layout, _Work((steps,), [piece], streams), seconds)


# --- IPU to IPU -----------------------------------------------------------------------------------------------


def payload(link: int, end: int) -> str:
    """The variable that holds what end 0 or 1 of a link received last."""
    return f"payload:{link}:{end}"


@functools.lru_cache(4)
def _one_more(words: int) -> Computation:
    import jax.numpy as jnp

    return computation("add", lambda x: (x + jnp.uint32(1),), {"x": ((words,), "uint32")}, ("y",))


@functools.lru_cache(4)
def _as_it_is(words: int) -> Computation:
    import jax.numpy as jnp

    return computation("keep", lambda x: (x + jnp.uint32(0),), {"x": ((words,), "uint32")}, ("y",))


def traffic(
    chip: Chip, ipus: int, pairs: Sequence[tuple[int, int]], words: int, seconds: float
) -> Executable:
    """One replica of ``ipus`` IPUs; both ends of every pair send each other ``words`` 32-bit words at once.

    What is sent is what was received last, each word one more: after *n* batches end *e* holds what end ``(e + n) % 2``
    began with, plus *n*.
    """
    machines = max(ipus // IPUS_PER_MACHINE, 1)
    sends: list[list[Instruction]] = [[] for _ in range(ipus)]
    receives: list[list[Instruction]] = [[] for _ in range(ipus)]
    pieces: list[Computation] = []
    variables: dict[str, Variable] = {}
    add, keep = _one_more(words), _as_it_is(words)
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
    return _program("traffic", chip, layout, _Work(lists, pieces, variables=variables), seconds)


# --- host and IPU ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Side:
    """What one side does with the buffer: a piece, its instructions and its streams."""

    piece: Computation
    steps: tuple[Instruction, ...]
    streams: dict[str, Stream]


def host_traffic(
    chip: Chip, host: str, tile: str, host_words: int, tile_words: int, seconds: float
) -> Executable:
    """One IPU whose buffer the host and the tiles use at once, each "to" or "from" it seen from the host.

    Host "to": stream ``down`` of ``host_words`` words comes in, and its `checksum` goes back as ``sum:down``; "from":
    the words ``first .. first + host_words`` go out as ``up``. Tiles "to": the `checksum` of variable ``buffer`` goes
    out as ``sum:buffer``; "from": tiles add one to each word of it.
    """
    outside = _taken(host_words) if host == "to" else _given(host_words)
    inside = _read(tile_words) if tile == "to" else _written(tile_words)
    buffer = Variable(TensorSpec("buffer", "uint32", (tile_words,)), VariableRole.WEIGHT)
    work = _Work(
        ((Sync(SyncScope.HOST), *outside.steps, *inside.steps),),
        [outside.piece, inside.piece],
        outside.streams | inside.streams,
        {"buffer": buffer},
    )
    return _program("host-traffic", chip, Layout(1, 1, 1, 1), work, seconds)


def _taken(words: int) -> _Side:
    """The host sends ``down``, and gets its checksum."""
    piece = computation("take", _summed, {"in:down": ((1, 1, words), "uint32")}, ("out:sum:down",))
    return _Side(
        piece,
        (
            LoadStream("down", "in:down", 0, 1),
            Compute("take"),
            StoreStream("sum:down", "out:sum:down", 0, 1),
        ),
        {"down": _to_device("down", words), "sum:down": _to_host("sum:down", 1)},
    )


def _given(words: int) -> _Side:
    """The host gets ``up``, which begins with the word that it sends."""
    import jax.numpy as jnp

    def count(first: Any) -> Any:
        return (first + jnp.arange(words, dtype=jnp.uint32),)

    piece = computation("give", count, {"in:first": ((1, 1, 1), "uint32")}, ("out:up",))
    return _Side(
        piece,
        (LoadStream("first", "in:first", 0, 1), Compute("give"), StoreStream("up", "out:up", 0, 1)),
        {"first": _to_device("first", 1), "up": _to_host("up", words)},
    )


def _read(words: int) -> _Side:
    """Tiles read the buffer, and say its checksum."""
    piece = computation("read", _summed, {"buffer": ((words,), "uint32")}, ("out:sum:buffer",))
    steps = (Compute("read"), StoreStream("sum:buffer", "out:sum:buffer", 0, 1))
    return _Side(piece, steps, {"sum:buffer": _to_host("sum:buffer", 1)})


def _written(words: int) -> _Side:
    """Tiles add one to each word of the buffer."""
    import jax.numpy as jnp

    def add(x: Any) -> Any:
        return (x + jnp.uint32(1),)

    piece = computation("write", add, {"buffer": ((words,), "uint32")}, ("buffer",))
    return _Side(piece, (Compute("write"),), {})


def _summed(x: Any) -> Any:
    """`checksum` on the device."""
    import jax.numpy as jnp

    weights = jnp.arange(1, x.size + 1, dtype=jnp.uint32)
    return (jnp.sum(x.reshape(-1) * weights, dtype=jnp.uint32).reshape(1, 1, 1),)


def _to_device(name: str, words: int) -> Stream:
    return Stream(TensorSpec(name, "uint32", (words,)), StreamDirection.TO_DEVICE)


def _to_host(name: str, words: int) -> Stream:
    return Stream(TensorSpec(name, "uint32", (words,)), StreamDirection.TO_HOST)


def host_syncs(chip: Chip, seconds: float) -> Executable:
    """One IPU that does nothing but wait for the host, once a batch."""
    return _program("host-syncs", chip, Layout(1, 1, 1, 1), _Work(((Sync(SyncScope.HOST),),)), seconds)


# --- between IPU-Link domains ---------------------------------------------------------------------------------


def pattern(machine: int, batch: int, words: int) -> Array:
    """What a machine writes in a batch."""
    return np.arange(words, dtype=np.uint32) * np.uint32(2 * machine + 1) + np.uint32(batch)


def checksum(values: Array) -> int:
    """A sum that sees the order of words."""
    weights = np.arange(1, values.size + 1, dtype=np.uint32)
    return int(np.sum(values.reshape(-1) * weights, dtype=np.uint32))


def gather_over_gateways(chip: Chip, ipus: int, machines: int, words: int, seconds: float) -> Executable:
    """Every machine writes its `pattern` into its slice of an arena, all gather the slices, and every IPU gives back
    the `checksum` of each slice as anchor ``sums``.

    Stream ``batch``: the number of the batch.
    """
    each = ipus // machines
    steps = (
        Sync(SyncScope.HOST),
        LoadStream("batch", "in:batch", 0, 1),
        Compute("write"),
        AllGather("all"),
        Compute("sums"),
        StoreStream("sums", "out:sums", 0, 1),
    )
    streams = {
        "batch": Stream(TensorSpec("batch", "uint32", ()), StreamDirection.TO_DEVICE, broadcast=True),
        "sums": _to_host("sums", machines),
    }
    arenas = {"all": Arena("all", "uint32", machines * words, (), shared=False)}
    work = _Work((steps,), _gathering(each, machines, words), streams, arenas=arenas)
    return _program("gateway-links", chip, Layout(ipus, 1, machines, each), work, seconds)


def _gathering(each: int, machines: int, words: int) -> list[Computation]:
    """Before the gathering and after it, on a machine with ``each`` IPUs."""
    import jax.numpy as jnp

    def write(offset: Any, batch: Any) -> Any:
        odd = (2 * (offset // each) + 1).astype(jnp.uint32)
        return (jnp.arange(words, dtype=jnp.uint32) * odd + batch.reshape(()),)

    def sums(whole: Any) -> Any:
        weights = jnp.arange(1, words + 1, dtype=jnp.uint32)
        found = jnp.sum(whole.reshape(machines, words) * weights, axis=1, dtype=jnp.uint32)
        return (jnp.broadcast_to(found, (1, each, machines)),)

    return [
        computation(
            "write",
            write,
            {REPLICA_OFFSET: ((), "int32"), "in:batch": ((1,), "uint32")},
            ("arena_slice:all",),
        ),
        computation("sums", sums, {"arena:all": ((machines * words,), "uint32")}, ("out:sums",)),
    ]
