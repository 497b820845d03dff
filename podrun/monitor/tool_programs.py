"""The programs that the test tools load: Executables written by hand, whose results can be foretold to the bit.

Every number in them is an integer or a small binary fraction, so that no order of sums and no precision can change what
has to come out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def _report(seconds: float, clock_hz: float) -> dict[str, Any]:
    return {"step": {"cycles": round(seconds * clock_hz), "seconds": seconds}}


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
    target: str, ipus: int, dtype: str, tiles: int, rows: int, passes: int, seconds: float, clock_hz: float
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
    return Executable(
        name="flops",
        layout=layout,
        accumulation_factor=1,
        training=False,
        streams={
            "x": Stream(TensorSpec("x", dtype, shape), StreamDirection.TO_DEVICE),
            "w": Stream(TensorSpec("w", dtype, (BLOCK, BLOCK)), StreamDirection.TO_DEVICE, broadcast=True),
            "y": Stream(TensorSpec("y", dtype, shape), StreamDirection.TO_HOST, retrieval=Retrieval.FINAL),
        },
        variables={},
        arenas={},
        computations={piece.name: piece},
        instructions=(
            (
                Sync(SyncScope.HOST),
                LoadStream("x", "in:x", 0, 1),
                LoadStream("w", "in:w", 0, 1),
                Compute(piece.name),
                StoreStream("y", "out:y", 0, 1),
            ),
        ),
        target=target,
        tile_report=_report(seconds, clock_hz),
    )


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
    target: str,
    ipus: int,
    pairs: Sequence[tuple[int, int]],
    words: int,
    seconds: float,
    clock_hz: float,
) -> Executable:
    """One replica of ``ipus`` IPUs; both ends of every pair send each other ``words`` 32-bit words at once.

    What is sent is what was received last, each word one more: after *n* batches end *e* holds what end ``(e + n) % 2``
    began with, plus *n*.
    """
    machines = max(ipus // IPUS_PER_MACHINE, 1)
    sends: list[list[Instruction]] = [[] for _ in range(ipus)]
    receives: list[list[Instruction]] = [[] for _ in range(ipus)]
    pieces: dict[str, Computation] = {}
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
                pieces[named] = Computation(named, piece.stablehlo, (first,), (last,))
            sends[ipu] += [Compute(f"add:{link}:{end}"), Send(f"out:{link}", ends[1 - end], tag + end)]
            receives[ipu] += [
                Receive(f"in:{link}", ends[1 - end], tag + 1 - end),
                Compute(f"keep:{link}:{end}"),
            ]
    return Executable(
        name="traffic",
        layout=Layout(1, ipus, machines, 1, machines),
        accumulation_factor=1,
        training=False,
        streams={},
        variables=variables,
        arenas={},
        computations=pieces,
        instructions=tuple(
            (Sync(SyncScope.HOST), *sent, *received) for sent, received in zip(sends, receives, strict=True)
        ),
        target=target,
        tile_report=_report(seconds, clock_hz),
    )


# --- host and IPU ---------------------------------------------------------------------------------------------


def host_traffic(
    target: str, host: str, tile: str, host_words: int, tile_words: int, seconds: float, clock_hz: float
) -> Executable:
    """One IPU whose buffer the host and the tiles use at once, each "to" or "from" it seen from the host.

    Host "to": stream ``down`` of ``host_words`` words comes in, and its `checksum` goes back as ``sum:down``; "from":
    the words ``first .. first + host_words`` go out as ``up``. Tiles "to": the `checksum` of variable ``buffer`` goes
    out as ``sum:buffer``; "from": tiles add one to each word of it.
    """
    import jax.numpy as jnp

    def summed(x: Any) -> Any:
        weights = jnp.arange(1, x.size + 1, dtype=jnp.uint32)
        return (jnp.sum(x.reshape(-1) * weights, dtype=jnp.uint32).reshape(1, 1, 1),)

    def to_device(name: str, words: int) -> Stream:
        return Stream(TensorSpec(name, "uint32", (words,)), StreamDirection.TO_DEVICE)

    def to_host(name: str, words: int) -> Stream:
        return Stream(TensorSpec(name, "uint32", (words,)), StreamDirection.TO_HOST)

    streams: dict[str, Stream] = {}
    pieces: list[Computation] = []
    work: list[Instruction] = [Sync(SyncScope.HOST)]
    if host == "to":
        streams |= {"down": to_device("down", host_words), "sum:down": to_host("sum:down", 1)}
        pieces.append(
            computation(
                "take",
                summed,
                {"in:down": ((1, 1, host_words), "uint32")},
                ("out:sum:down",),
            )
        )
        work += [LoadStream("down", "in:down", 0, 1), Compute("take")]
        work += [StoreStream("sum:down", "out:sum:down", 0, 1)]
    else:
        streams |= {"first": to_device("first", 1), "up": to_host("up", host_words)}
        pieces.append(
            computation(
                "give",
                lambda first: (first + jnp.arange(host_words, dtype=jnp.uint32),),
                {"in:first": ((1, 1, 1), "uint32")},
                ("out:up",),
            )
        )
        work += [LoadStream("first", "in:first", 0, 1), Compute("give"), StoreStream("up", "out:up", 0, 1)]
    shape = (tile_words,)
    if tile == "to":
        streams["sum:buffer"] = to_host("sum:buffer", 1)
        pieces.append(
            computation(
                "read",
                summed,
                {"buffer": (shape, "uint32")},
                ("out:sum:buffer",),
            )
        )
        work += [Compute("read"), StoreStream("sum:buffer", "out:sum:buffer", 0, 1)]
    else:
        pieces.append(
            computation("write", lambda x: (x + jnp.uint32(1),), {"buffer": (shape, "uint32")}, ("buffer",))
        )
        work.append(Compute("write"))
    return Executable(
        name="host-traffic",
        layout=Layout(1, 1, 1, 1),
        accumulation_factor=1,
        training=False,
        streams=streams,
        variables={"buffer": Variable(TensorSpec("buffer", "uint32", shape), VariableRole.WEIGHT)},
        arenas={},
        computations={piece.name: piece for piece in pieces},
        instructions=(tuple(work),),
        target=target,
        tile_report=_report(seconds, clock_hz),
    )


def host_syncs(target: str, seconds: float, clock_hz: float) -> Executable:
    """One IPU that does nothing but wait for the host, once a batch."""
    return Executable(
        name="host-syncs",
        layout=Layout(1, 1, 1, 1),
        accumulation_factor=1,
        training=False,
        streams={},
        variables={},
        arenas={},
        computations={},
        instructions=((Sync(SyncScope.HOST),),),
        target=target,
        tile_report=_report(seconds, clock_hz),
    )


# --- between IPU-Link domains ---------------------------------------------------------------------------------


def pattern(machine: int, batch: int, words: int) -> Array:
    """What a machine writes in a batch."""
    return np.arange(words, dtype=np.uint32) * np.uint32(2 * machine + 1) + np.uint32(batch)


def checksum(values: Array) -> int:
    """A sum that sees the order of words."""
    weights = np.arange(1, values.size + 1, dtype=np.uint32)
    return int(np.sum(values.reshape(-1) * weights, dtype=np.uint32))


def gather_over_gateways(
    target: str, ipus: int, machines: int, words: int, seconds: float, clock_hz: float
) -> Executable:
    """Every machine writes its `pattern` into its slice of an arena, all gather the slices, and every IPU gives back
    the `checksum` of each slice as anchor ``sums``.

    Stream ``batch``: the number of the batch.
    """
    import jax.numpy as jnp

    each = ipus // machines

    def write(offset: Any, batch: Any) -> Any:
        odd = (2 * (offset // each) + 1).astype(jnp.uint32)
        return (jnp.arange(words, dtype=jnp.uint32) * odd + batch.reshape(()),)

    def sums(whole: Any) -> Any:
        weights = jnp.arange(1, words + 1, dtype=jnp.uint32)
        found = jnp.sum(whole.reshape(machines, words) * weights, axis=1, dtype=jnp.uint32)
        return (jnp.broadcast_to(found, (1, each, machines)),)

    pieces = [
        computation(
            "write",
            write,
            {REPLICA_OFFSET: ((), "int32"), "in:batch": ((1,), "uint32")},
            ("arena_slice:all",),
        ),
        computation("sums", sums, {"arena:all": ((machines * words,), "uint32")}, ("out:sums",)),
    ]
    return Executable(
        name="gateway-links",
        layout=Layout(ipus, 1, machines, each),
        accumulation_factor=1,
        training=False,
        streams={
            "batch": Stream(TensorSpec("batch", "uint32", ()), StreamDirection.TO_DEVICE, broadcast=True),
            "sums": Stream(TensorSpec("sums", "uint32", (machines,)), StreamDirection.TO_HOST),
        },
        variables={},
        arenas={"all": Arena("all", "uint32", machines * words, (), shared=False)},
        computations={piece.name: piece for piece in pieces},
        instructions=(
            (
                Sync(SyncScope.HOST),
                LoadStream("batch", "in:batch", 0, 1),
                Compute("write"),
                AllGather("all"),
                Compute("sums"),
                StoreStream("sums", "out:sums", 0, 1),
            ),
        ),
        target=target,
        tile_report=_report(seconds, clock_hz),
    )
