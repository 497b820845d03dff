"""Programs of the test tools that move data between host, buffer and tiles, and between IPU-Link domains.

Like those of `podrun.monitor.tool_programs` they are Executables written by hand whose results are known to the bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from podrun.core.executable import (
    REPLICA_OFFSET,
    AllGather,
    Arena,
    Array,
    Computation,
    Compute,
    Executable,
    Instruction,
    LoadStream,
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
from podrun.monitor.tool_programs import ToolWork, computation, tool_program

if TYPE_CHECKING:
    import jax

    from podrun.costmodel.target import Chip


@dataclass(frozen=True, slots=True)
class _TransferSide:
    """One side's work on the buffer: a piece, its instructions and its streams."""

    piece: Computation
    steps: tuple[Instruction, ...]
    streams: dict[str, Stream]


def host_traffic(
    chip: Chip, host: str, tile: str, host_words: int, tile_words: int, seconds: float
) -> Executable:
    """One IPU whose buffer the host and the tiles use at once.

    Host "to": stream ``down`` of ``host_words`` words comes in, and its `checksum` goes back as ``sum:down``; "from":
    the words ``first .. first + host_words`` go out as ``up``. Tiles "to": the `checksum` of variable ``buffer`` goes
    out as ``sum:buffer``; "from": tiles add one to each word of it.
    """
    outside = _host_sends(host_words) if host == "to" else _host_receives(host_words)
    inside = _tiles_read(tile_words) if tile == "to" else _tiles_write(tile_words)
    buffer = Variable(TensorSpec("buffer", "uint32", (tile_words,)), VariableRole.WEIGHT)
    work = ToolWork(
        ((Sync(SyncScope.HOST), *outside.steps, *inside.steps),),
        [outside.piece, inside.piece],
        outside.streams | inside.streams,
        {"buffer": buffer},
    )
    return tool_program("host-traffic", chip, Layout(1, 1, 1, 1), work, seconds)


def _host_sends(words: int) -> _TransferSide:
    """The host sends ``down`` and receives its checksum."""
    piece = computation("take", _device_checksum, {"in:down": ((1, 1, words), "uint32")}, ("out:sum:down",))
    return _TransferSide(
        piece,
        (
            LoadStream("down", "in:down", 0, 1),
            Compute("take"),
            StoreStream("sum:down", "out:sum:down", 0, 1),
        ),
        {"down": _to_device("down", words), "sum:down": _to_host("sum:down", 1)},
    )


def _host_receives(words: int) -> _TransferSide:
    """The host receives ``up``, which begins with the word that it sends."""
    import jax.numpy as jnp

    def count(first: jax.Array) -> tuple[jax.Array]:
        return (first + jnp.arange(words, dtype=jnp.uint32),)

    piece = computation("give", count, {"in:first": ((1, 1, 1), "uint32")}, ("out:up",))
    return _TransferSide(
        piece,
        (LoadStream("first", "in:first", 0, 1), Compute("give"), StoreStream("up", "out:up", 0, 1)),
        {"first": _to_device("first", 1), "up": _to_host("up", words)},
    )


def _tiles_read(words: int) -> _TransferSide:
    """Tiles read the buffer and send its checksum."""
    piece = computation("read", _device_checksum, {"buffer": ((words,), "uint32")}, ("out:sum:buffer",))
    steps = (Compute("read"), StoreStream("sum:buffer", "out:sum:buffer", 0, 1))
    return _TransferSide(piece, steps, {"sum:buffer": _to_host("sum:buffer", 1)})


def _tiles_write(words: int) -> _TransferSide:
    """Tiles add one to each word of the buffer."""
    import jax.numpy as jnp

    def add(x: jax.Array) -> tuple[jax.Array]:
        return (x + jnp.uint32(1),)

    piece = computation("write", add, {"buffer": ((words,), "uint32")}, ("buffer",))
    return _TransferSide(piece, (Compute("write"),), {})


def _device_checksum(x: jax.Array) -> tuple[jax.Array]:
    """`checksum` on the device."""
    import jax.numpy as jnp

    weights = jnp.arange(1, x.size + 1, dtype=jnp.uint32)
    return (jnp.sum(x.reshape(-1) * weights, dtype=jnp.uint32).reshape(1, 1, 1),)


def _to_device(name: str, words: int) -> Stream:
    return Stream(TensorSpec(name, "uint32", (words,)), StreamDirection.TO_DEVICE)


def _to_host(name: str, words: int) -> Stream:
    return Stream(TensorSpec(name, "uint32", (words,)), StreamDirection.TO_HOST)


def host_syncs(chip: Chip, seconds: float) -> Executable:
    """One IPU that only waits for the host, once a batch."""
    return tool_program("host-syncs", chip, Layout(1, 1, 1, 1), ToolWork(((Sync(SyncScope.HOST),),)), seconds)


# --- between IPU-Link domains ---------------------------------------------------------------------------------


def pattern(machine: int, batch: int, words: int) -> Array:
    """The words that a machine writes in a batch."""
    return np.arange(words, dtype=np.uint32) * np.uint32(2 * machine + 1) + np.uint32(batch)


def checksum(values: Array) -> int:
    """A sum that depends on the order of words."""
    weights = np.arange(1, values.size + 1, dtype=np.uint32)
    return int(np.sum(values.reshape(-1) * weights, dtype=np.uint32))


def gather_over_gateways(chip: Chip, ipus: int, machines: int, words: int, seconds: float) -> Executable:
    """Every machine writes its `pattern` into its slice of an arena, an all-gather joins the slices, and every IPU
    returns the `checksum` of each slice as anchor ``sums``.

    Stream ``batch``: the number of the batch.
    """
    ipus_each = ipus // machines
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
    work = ToolWork((steps,), _gathering(ipus_each, machines, words), streams, arenas=arenas)
    return tool_program("gateway-links", chip, Layout(ipus, 1, machines, ipus_each), work, seconds)


def _gathering(ipus_each: int, machines: int, words: int) -> list[Computation]:
    """The pieces before and after the all-gather, on a machine with ``ipus_each`` IPUs."""
    import jax.numpy as jnp

    def write(offset: jax.Array, batch: jax.Array) -> tuple[jax.Array]:
        odd = (2 * (offset // ipus_each) + 1).astype(jnp.uint32)
        return (jnp.arange(words, dtype=jnp.uint32) * odd + batch.reshape(()),)

    def sums(whole: jax.Array) -> tuple[jax.Array]:
        weights = jnp.arange(1, words + 1, dtype=jnp.uint32)
        by_machine = jnp.sum(whole.reshape(machines, words) * weights, axis=1, dtype=jnp.uint32)
        return (jnp.broadcast_to(by_machine, (1, ipus_each, machines)),)

    return [
        computation(
            "write",
            write,
            {REPLICA_OFFSET: ((), "int32"), "in:batch": ((1,), "uint32")},
            ("arena_slice:all",),
        ),
        computation("sums", sums, {"arena:all": ((machines * words,), "uint32")}, ("out:sums",)),
    ]
