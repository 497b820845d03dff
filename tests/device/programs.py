"""Executables written by hand, without the compiler: a linear model and its sliced update, and small
oddities.

The model of one replica: ``p = x @ w + b`` for ``x[batch, 4]``, loss ``mean((p - y)**2)`` over the batch; the
gradient is summed over micro-batches and replicas; plain SGD with a streamed rate. `reference` is the same in
NumPy.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export

from podrun.core import executable_file
from podrun.core.executable import (
    AllGather,
    AllReduce,
    Arena,
    ArenaMember,
    Computation,
    Compute,
    Executable,
    Instruction,
    LoadStream,
    Receive,
    ReduceScatter,
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

BATCH, FEATURES = 4, 4
SIZE = 1024
"""Elements of the arenas: a multiple of 64 for each of up to 16 machines."""
W, B = ArenaMember("w", 0, (FEATURES, 1)), ArenaMember("b", 64, (1,))


def computation(
    name: str, function: Any, inputs: Mapping[str, Any], outputs: tuple[str, ...], **more: Any
) -> Computation:
    """``function(*inputs) -> tuple of outputs`` as a Computation; ``inputs``: (shape, dtype) by buffer."""
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs.values()]
    exported = export.export(jax.jit(function))(*shapes)
    data = bytes(exported.serialize())
    executable_file.remember(data)
    return Computation(name, data, tuple(inputs), outputs, **more)


def _linear_pieces(lead: tuple[int, ...], part: int, weights: str, gradients: str) -> list[Computation]:
    """Step and update of `linear`. ``lead``: leading axes of inputs. ``part``: elements that a machine updates."""

    def step(w: Any, b: Any, x: Any, y: Any) -> Any:
        def loss(w: Any, b: Any) -> Any:
            per_replica = jnp.mean((x @ w + b - y) ** 2, axis=(2, 3))
            return jnp.sum(per_replica), per_replica

        (gw, gb), losses = jax.grad(loss, argnums=(0, 1), has_aux=True)(w, b)
        return gw, gb, losses

    def update(w: Any, g: Any, rate: Any) -> Any:
        return (w - rate * g,)

    f32 = np.float32
    return [
        computation(
            "step",
            step,
            {
                "w": (W.shape, f32),
                "b": (B.shape, f32),
                "in:x": ((*lead, FEATURES), f32),
                "in:y": ((*lead, 1), f32),
            },
            ("gradient:w", "gradient:b", "out:loss"),
        ),
        computation(
            "update",
            update,
            {weights: ((part,), f32), gradients: ((part,), f32), "rate": ((), f32)},
            (weights,),
        ),
    ]


def _linear_instructions(accumulation: int, *, sliced: bool) -> tuple[Instruction, ...]:
    first: list[Instruction] = [
        Sync(SyncScope.HOST),
        LoadStream("x", "in:x", 0, accumulation),
        LoadStream("y", "in:y", 0, accumulation),
        Compute("step"),
        StoreStream("loss", "out:loss", 0, accumulation),
    ]
    last: list[Instruction] = (
        [ReduceScatter("gradients"), Compute("update"), AllGather("weights")]
        if sliced
        else [AllReduce("gradients"), Compute("update")]
    )
    return (*first, *last)


@functools.cache
def linear(
    replicas: int = 16,
    *,
    accumulation: int = 1,
    sliced: bool = True,
    retrieval: Retrieval = Retrieval.ALL,
    period: int = 1,
    step_seconds: float = 1e-3,
) -> Executable:
    """The linear model on ``replicas`` IPUs. ``sliced``: machines update their own slice of one copy of the
    weights; otherwise each machine updates a copy of its own.
    """
    per_machine = min(replicas, 4)
    machines = replicas // per_machine
    part = SIZE // machines if sliced else SIZE
    weights, gradients = (
        ("arena_slice:weights", "arena_slice:gradients") if sliced else ("arena:weights", "arena:gradients")
    )
    pieces = _linear_pieces((accumulation, per_machine, BATCH), part, weights, gradients)
    return Executable(
        name="linear",
        layout=Layout(replicas, 1, machines, per_machine),
        accumulation_factor=accumulation,
        training=True,
        streams={
            "x": Stream(TensorSpec("x", "float32", (BATCH, FEATURES)), StreamDirection.TO_DEVICE),
            "y": Stream(TensorSpec("y", "float32", (BATCH, 1)), StreamDirection.TO_DEVICE),
            "loss": Stream(
                TensorSpec("loss", "float32", ()), StreamDirection.TO_HOST, retrieval=retrieval, period=period
            ),
        },
        variables={
            "w": Variable(TensorSpec("w", "float32", W.shape), VariableRole.WEIGHT, arena="weights"),
            "b": Variable(
                TensorSpec("b", "float32", B.shape), VariableRole.WEIGHT, initial=0.5, arena="weights"
            ),
            "rate": Variable(TensorSpec("rate", "float32", ()), VariableRole.SCALAR, initial=0.01),
        },
        arenas={
            "weights": Arena("weights", "float32", SIZE, (W, B)),
            "gradients": Arena(
                "gradients",
                "float32",
                SIZE,
                (ArenaMember("gradient:w", 0, W.shape), ArenaMember("gradient:b", 64, B.shape)),
                shared=False,
            ),
        },
        computations={piece.name: piece for piece in pieces},
        instructions=(_linear_instructions(accumulation, sliced=sliced),),
        target="gc200",
        tile_report={"step": {"cycles": int(step_seconds * 1.33e9), "seconds": step_seconds}},
        metadata={"made by": "hand"},
    )


def inference(replicas: int = 4) -> Executable:
    """``out = x * factor`` with ``factor`` broadcast to all replicas."""
    per_machine = min(replicas, 4)
    scale = computation(
        "scale",
        lambda x, factor: (x * factor[:, None, :],),
        {"in:x": ((1, per_machine, 3), np.float32), "in:factor": ((1, 3), np.float32)},
        ("out:y",),
    )
    return Executable(
        name="inference",
        layout=Layout(replicas, 1, replicas // per_machine, per_machine),
        accumulation_factor=1,
        training=False,
        streams={
            "x": Stream(TensorSpec("x", "float32", (3,)), StreamDirection.TO_DEVICE),
            "factor": Stream(
                TensorSpec("factor", "float32", (3,)), StreamDirection.TO_DEVICE, broadcast=True
            ),
            "y": Stream(TensorSpec("y", "float32", (3,)), StreamDirection.TO_HOST),
        },
        variables={},
        arenas={},
        computations={"scale": scale},
        instructions=(
            (
                Sync(SyncScope.HOST),
                LoadStream("x", "in:x", 0, 1),
                LoadStream("factor", "in:factor", 0, 1),
                Compute("scale"),
                StoreStream("y", "out:y", 0, 1),
            ),
        ),
        target="gc200",
    )


def two_ipus() -> Executable:
    """Two replicas of two IPUs: the first doubles, sends, and the second adds its replica's index and one."""
    double = computation("double", lambda x: (x * 2,), {"in:x": ((1, 2, 3), np.float32)}, ("half",))
    add = computation(
        "add",
        lambda x, offset: (
            x + 1 + (offset + jnp.arange(2, dtype=jnp.int32)).astype(jnp.float32)[None, :, None],
        ),
        {"received": ((1, 2, 3), np.float32), "machine:replica_offset": ((), np.int32)},
        ("out:y",),
    )
    return Executable(
        name="two-ipus",
        layout=Layout(2, 2, 1, 2),
        accumulation_factor=1,
        training=False,
        streams={
            "x": Stream(TensorSpec("x", "float32", (3,)), StreamDirection.TO_DEVICE),
            "y": Stream(TensorSpec("y", "float32", (3,)), StreamDirection.TO_HOST),
        },
        variables={},
        arenas={},
        computations={"double": double, "add": add},
        instructions=(
            (
                Sync(SyncScope.HOST),
                LoadStream("x", "in:x", 0, 1),
                Compute("double"),
                Send("half", 1, 7),
                Sync(SyncScope.MACHINE),
            ),
            (
                Sync(SyncScope.HOST),
                Receive("received", 0, 7),
                Compute("add"),
                Sync(SyncScope.MACHINE),
                StoreStream("y", "out:y", 0, 1),
            ),
        ),
        target="gc200",
    )


def state_per_replica(replicas: int = 8, rows: tuple[int, ...] = ()) -> Executable:
    """Every replica counts what it has seen in variables of its own: ``seen += x``, its halves, and how often.

    ``rows``: of `podrun.core.executable.Variable`, but for the number, of which the host sees replica 0's.
    """
    per_machine = min(replicas, 4)

    def own(name: str, dtype: str, shape: tuple[int, ...], rows: tuple[int, ...] = ()) -> Variable:
        spec = TensorSpec(name, dtype, shape)
        return Variable(spec, VariableRole.WEIGHT, initial=1.0, per_replica=True, rows=rows)

    variables = [
        own("seen", "float32", (2,), rows),
        own("half", "float16", (3, 1), rows),
        own("times", "int32", ()),
        own("nothing", "int32", (0, 2), rows),
    ]
    count = computation(
        "count",
        lambda seen, half, times, x: (
            seen + x[0],
            half + x[0, :, :1, None].astype(half.dtype) / 2,
            times + 1,
        ),
        {v.spec.name: ((per_machine, *v.spec.shape), np.dtype(v.spec.dtype)) for v in variables[:3]}
        | {"in:x": ((1, per_machine, 2), np.float32)},
        ("seen", "half", "times"),
    )
    return Executable(
        name="state",
        layout=Layout(replicas, 1, replicas // per_machine, per_machine),
        accumulation_factor=1,
        training=True,
        streams={"x": Stream(TensorSpec("x", "float32", (2,)), StreamDirection.TO_DEVICE)},
        variables={v.spec.name: v for v in variables},
        arenas={},
        computations={"count": count},
        instructions=((Sync(SyncScope.HOST), LoadStream("x", "in:x", 0, 1), Compute("count")),),
        target="gc200",
    )


def data(executable: Executable, batches: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Inputs for all replicas of `linear`."""
    generator = np.random.default_rng(seed)
    lead = (batches, executable.accumulation_factor, executable.layout.replicas, BATCH)
    return {
        "x": generator.normal(size=(*lead, FEATURES)).astype(np.float32),
        "y": generator.normal(size=(*lead, 1)).astype(np.float32),
    }


def first_weights(seed: int = 1) -> dict[str, np.ndarray]:
    """Start values of `linear`'s weights."""
    return {"w": np.random.default_rng(seed).normal(size=W.shape).astype(np.float32)}


def reference(
    executable: Executable, inputs: Mapping[str, np.ndarray], rate: float = 0.01
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What `linear` computes, in float64: losses ``[batches, accumulation, replicas]``, and w and b at the
    end.
    """
    w, b = first_weights()["w"].astype(np.float64), np.full((1,), 0.5)
    losses = []
    for x, y in zip(inputs["x"].astype(np.float64), inputs["y"].astype(np.float64), strict=True):
        error = x @ w + b - y
        losses.append(np.mean(error**2, axis=(2, 3)))
        w = w - rate * np.einsum("arif,ario->fo", x, 2 * error / BATCH)
        b = b - rate * np.sum(2 * error / BATCH)
    return np.array(losses), w, b
