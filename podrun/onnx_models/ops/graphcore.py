"""Operators of ai.graphcore that have no family elsewhere, and its collectives between replicas.

Meanings follow PopART 3.4 and poplibs.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from podrun.compiler import model_collectives
from podrun.core.errors import InputMismatch, UnimplementedError, UsageError
from podrun.core.layout import GroupKind, replica_groups
from podrun.numerics.ctc import alignment_losses, best_label_sequences, without_infinity
from podrun.numerics.loss_functions import reduced
from podrun.numerics.precision import rounds_once, widen
from podrun.onnx_models.annotations import COLLECTIVE_OPERATOR, COMM_GROUP
from podrun.onnx_models.ops.common import Array, ints, onnx_dtype, same_dtype
from podrun.onnx_models.ops.registry import GRAPHCORE, operator
from podrun.onnx_models.ops.training import reduction_of
from podrun.runtime.graph import Node
from podrun.runtime.operators import Context


@operator(GRAPHCORE, "Init")
def graphcore_init(ctx: Context, node: Node) -> Array:
    """A tensor of ``shape`` and ``data_type`` of zeros; what NoInit leaves undefined is 0 here too."""
    return jnp.zeros(ints(node["shape"]), onnx_dtype(node["data_type"], ctx))


@operator(GRAPHCORE, "Detach")
def graphcore_detach(ctx: Context, node: Node, x: Array) -> Array:
    """x, through which no gradient flows (PopART Detach)."""
    return lax.stop_gradient(x)


@operator(GRAPHCORE, "Nop")
@operator(GRAPHCORE, "TensorRemap")
@operator(GRAPHCORE, "PrintTileMapping")
def graphcore_nop(ctx: Context, node: Node, x: Array) -> Array:
    """x: these operators only change how a tensor lies on tiles, or tell it (PopART Nop, TensorRemap; PopRT
    PrintTileMapping, which `podrun.serving.compiler` prints).
    """
    return x


@operator(GRAPHCORE, "PrintTensor")
def graphcore_print_tensor(ctx: Context, node: Node, x: Array) -> Array:
    """x. Sessions print what those of the main graph see (`popart.program.observers`); those of subgraphs do not."""
    return x


@operator(GRAPHCORE, "CopyVarUpdate")
def copy_var_update(ctx: Context, node: Node, variable: Array, value: Array) -> Array:
    """value, which also replaces the variable after the micro-batch (PopART CopyVarUpdate)."""
    same_dtype(variable, value)
    if variable.shape != value.shape:
        raise InputMismatch(f"the variable has shape {variable.shape}, the value {value.shape}")
    ctx.state_update(0, 0)
    return value


@operator(GRAPHCORE, "IncrementMod")
def increment_mod(ctx: Context, node: Node, x: Array) -> Array:
    """The remainder of (x + ``increment``) by ``modulus``, with the sign of the sum (PopART IncrementMod)."""
    return jnp.fmod(
        x + np.asarray(node["increment"]).astype(x.dtype), np.asarray(node["modulus"]).astype(x.dtype)
    )


@operator(GRAPHCORE, "NormalizeImage")
@rounds_once
def normalize_image(ctx: Context, node: Node, x: Array, offsets: Array, scales: Array) -> Array:
    """(x * ``scale`` - offsets) * scales over the 3 channels of the last axis, padded to 4 with 0 (popops)."""
    if x.shape[-1] != 3:
        raise InputMismatch(f"the last axis holds {x.shape[-1]} channels, not 3")
    kind = offsets.dtype
    y = (x.astype(kind) * np.asarray(node.get("scale", 1.0), kind) - offsets) * scales
    return lax.pad(y, np.zeros((), kind), [(0, 0, 0)] * (x.ndim - 1) + [(0, 1, 0)])


@operator(GRAPHCORE, "Abort")
def abort(ctx: Context, node: Node, *inputs: Array) -> Any:
    """Refused in a subgraph; sessions carry out those of the main graph (`podrun.runtime.observers`)."""
    raise UnimplementedError(f"{node.describe()}: a program cannot stop itself inside a subgraph yet")


@operator(GRAPHCORE, "PackedDataBlock")
def packed_data_block(ctx: Context, node: Node, *inputs: Array) -> Array:
    """Sequences packed one behind the other, each run through ``callback`` and packed again (PopART PackedDataBlock).

    Inputs: for each data tensor ``[rows, ...]`` offsets and lengths of its sequences, then offsets and lengths of the
    results. The callback takes ``callbackBatchSize`` sequences at a time, ``[batch, maxSequenceLengths[i], ...]``,
    filled up with 0; what it gives goes to ``[resultSize, ...]``, where rows that nothing goes to are 0.
    """
    longest, size = ints(node["maxSequenceLengths"]), int(node["resultSize"])
    batch, callback = int(node["callbackBatchSize"]), node["callback"]
    if len(inputs) != 3 * len(longest) + 2:
        raise InputMismatch(
            f"{len(longest)} data inputs take {3 * len(longest) + 2} tensors, not {len(inputs)}"
        )
    *packed, offsets, lengths = inputs
    count = offsets.shape[0]
    if batch < 1 or count % batch:
        raise InputMismatch(f"{count} sequences do not make batches of {batch}")
    parts = [_unpacked(steps, *packed[3 * k : 3 * k + 3]) for k, steps in enumerate(longest)]
    batches = tuple(part.reshape(count // batch, batch, *part.shape[1:]) for part in parts)

    def run(index: Array, batch: Any) -> tuple[Array, Any]:
        (result,) = ctx.run(callback, batch, iteration=index)
        return index + 1, result

    _, rows = lax.scan(run, jnp.zeros((), jnp.int32), batches)
    rows = rows.reshape(count, *rows.shape[2:])
    step = jnp.arange(rows.shape[1], dtype=jnp.int32)[None]
    places = jnp.where(step < _column(lengths), _column(offsets) + step, size)
    return jnp.zeros((size, *rows.shape[2:]), rows.dtype).at[places].set(rows, mode="drop")


def _column(values: Array) -> Array:
    return values.reshape(-1, 1).astype(jnp.int32)


def _unpacked(steps: int, data: Array, offsets: Array, lengths: Array) -> Array:
    """``[sequences, steps, ...]`` from rows; 0 behind the end of each."""
    step = jnp.arange(steps, dtype=jnp.int32)[None]
    rows = jnp.take(data, jnp.clip(_column(offsets) + step, 0, data.shape[0] - 1), axis=0)
    inside = (step < _column(lengths)).reshape(*rows.shape[:2], *(1,) * (data.ndim - 1))
    return jnp.where(inside, rows, jnp.zeros((), data.dtype))


@operator(GRAPHCORE, "CtcBeamSearchDecoder")
def graphcore_ctc_beam_search_decoder(
    ctx: Context, node: Node, log_p: Array, lengths: Array
) -> tuple[Array, Array, Array]:
    """The ``top_paths`` best label sequences by prefix beam search: scores, lengths, labels (PopART).

    ``log_p [time, batch, classes]``, ``lengths [batch]``; gives ``[batch, paths]`` twice and ``[batch,
    paths, time]``, labels beyond a length being ``blank``.
    """
    blank, width, paths = node.get("blank", 0), node.get("beam_width", 100), node.get("top_paths", 1)
    scores, counts, labels = best_label_sequences(
        widen(log_p), lengths.astype(jnp.int32), blank, width, paths
    )
    return scores.astype(log_p.dtype), counts.astype(jnp.uint32), labels.astype(jnp.uint32)


@operator(GRAPHCORE, "Ctc")
def graphcore_ctc_loss(
    ctx: Context, node: Node, log_p: Array, targets: Array, lengths: Array, target_lengths: Array
) -> Array:
    """Connectionist temporal classification: ``log_p [time, batch, classes]``, ``targets [batch, most]`` (as torch).

    ``reduction`` Mean divides each loss by its target's length (at least 1) and averages over the batch.
    ``zeroInfinity`` turns losses without any alignment (and their gradients) into 0.
    """
    counts = target_lengths.astype(jnp.int32)
    losses = alignment_losses(
        *(widen(log_p), targets.astype(jnp.int32), lengths.astype(jnp.int32), counts),
        int(node.get("blank", 0)),
        pairwise=True,
    )
    losses = without_infinity(losses) if node.get("zeroInfinity", 0) else losses
    how = reduction_of(node)
    if how == "mean":
        losses = losses / jnp.maximum(target_lengths, 1).astype(losses.dtype)
    losses = reduced(losses, how)
    kind = node.get("outDataType", "UNDEFINED")
    out = {"FLOAT": np.float32, "FLOAT16": np.float16}.get(str(kind), log_p.dtype)
    return losses.astype(out)


# --- splines (torch-spline-conv) -------------------------------------------------------------------------------


def _spline(degree: int, v: Array, k: Array) -> Array:
    """Basis function k of a B-spline of a degree at the fraction v."""
    match degree:
        case 1:
            pieces: tuple[Array, ...] = (1 - v, v)
        case 2:
            pieces = (0.5 * v * v - v + 0.5, -v * v + v + 0.5, 0.5 * v * v)
        case 3:
            pieces = (
                (1 - v) ** 3 / 6,
                (3 * v**3 - 6 * v * v + 4) / 6,
                (-3 * v**3 + 3 * v * v + 3 * v + 1) / 6,
                v**3 / 6,
            )
        case _:
            raise InputMismatch(f"degree {degree} is none of 1, 2, 3")
    return jnp.select([k == i for i in range(len(pieces))], pieces)


@operator(GRAPHCORE, "SplineBasis")
@rounds_once
def spline_basis(
    ctx: Context, node: Node, pseudo: Array, kernel: Array, is_open: Array
) -> tuple[Array, Array]:
    """Products of B-spline bases at ``pseudo [edges, dims]`` and the weights they go with, ``[edges,
    (degree+1)^dims]``.
    """
    degree = int(node["degree"])
    edges, dims = pseudo.shape
    count = (degree + 1) ** dims
    digits = np.stack([np.arange(count) // (degree + 1) ** d % (degree + 1) for d in range(dims)], axis=1)
    basis: Any = jnp.ones((edges, count), pseudo.dtype)
    index: Any = jnp.zeros((edges, count), jnp.int32)
    stride: Any = jnp.ones((), jnp.int32)
    for d in range(dims):
        size = kernel.reshape(-1)[d].astype(jnp.int32)
        span = (size - degree * is_open.reshape(-1)[d].astype(jnp.int32)).astype(pseudo.dtype)
        v = pseudo[:, d, None] * span
        floor = jnp.floor(v)
        k = jnp.asarray(digits[None, :, d])
        index = index + ((floor.astype(jnp.int32) + k) % size) * stride
        stride = stride * size
        basis = basis * _spline(degree, v - floor, k)
    return basis, index


@operator(GRAPHCORE, "SplineWeighting")
@rounds_once
def spline_weighting(ctx: Context, node: Node, x: Array, weight: Array, basis: Array, index: Array) -> Array:
    """Sum over bases of basis * (x @ weight[index]): ``[edges, out]`` from ``[edges, in]`` and ``[kernels,
    in, out]``.
    """
    return jnp.einsum("es,ei,esio->eo", basis, x, weight[index])


KINDS = {0: GroupKind.ALL, 1: GroupKind.CONSECUTIVE, 2: GroupKind.ORTHOGONAL, 3: GroupKind.NONE}
"""CommGroupType by its number."""


@operator(GRAPHCORE, "ReplicatedAllReduce")
@operator(GRAPHCORE, "ReplicatedAllReduceInplace")
def replicated_all_reduce(ctx: Context, node: Node, x: Array, *linked: Array) -> Array:
    """x combined over the replicas of its group. Further inputs only link shards in PopART."""
    return model_collectives.all_reduce(x, _operator(node), _groups(ctx, node))


@operator(GRAPHCORE, "ReplicatedReduceScatter")
def replicated_reduce_scatter(ctx: Context, node: Node, x: Array, *linked: Array) -> Array:
    """This replica's part of x combined over its group."""
    return model_collectives.reduce_scatter(x, _operator(node), _groups(ctx, node))


@operator(GRAPHCORE, "ReplicatedAllGather")
def replicated_all_gather(ctx: Context, node: Node, x: Array, *linked: Array) -> Array:
    """The group's values end to end."""
    return model_collectives.all_gather(x, _groups(ctx, node))


def _operator(node: Node) -> model_collectives.Combination:
    number = node.get(COLLECTIVE_OPERATOR, node.get("collectiveOperator", node.get("op", 0)))
    try:
        return model_collectives.Combination(number)
    except ValueError:
        known = ", ".join(f"{item.value} {item.name}" for item in model_collectives.Combination)
        raise UsageError(
            f"{node.describe()}: there is no collective operator {number!r}",
            hint=f"The operators are: {known}",
        ) from None


def _groups(ctx: Context, node: Node) -> model_collectives.CollectiveGroups:
    setting = node.get(COMM_GROUP, node.get("commGroup", (0, 0)))
    numbers = [int(value) for value in setting] + [0]
    kind, size = numbers[0], numbers[1]
    if len(setting) > 2 or kind not in KINDS:
        raise UsageError(
            f"{node.describe()}: {list(setting)} is no group of replicas",
            hint="commGroup is a CommGroupType's number (0 to 3) and a group size.",
        )
    try:
        return replica_groups(ctx.replicas, KINDS[kind], size)
    except UsageError as error:
        raise UsageError(f"{node.describe()}: {error.message}", hint=error.hint) from None
