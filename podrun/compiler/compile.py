"""compile_program: the stages in order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from podrun.compiler import seeds
from podrun.compiler.anchors import AnchorKind, classify
from podrun.compiler.arenas import Memory, plan_memory
from podrun.compiler.chunk import ChunkBuilder, anchor_buffer
from podrun.compiler.cost import tile_report
from podrun.compiler.fold import Chunk, chunks
from podrun.compiler.layout import layout_of
from podrun.compiler.pieces import Piece, export_piece
from podrun.compiler.program import Program
from podrun.compiler.schedule import schedule
from podrun.compiler.trace import abstract, fixed_numerics, trace
from podrun.compiler.update import update_piece
from podrun.errors import UnimplementedError, UsageError
from podrun.executable import (
    Computation,
    Executable,
    Stream,
    StreamDirection,
    TensorSpec,
    Variable,
    VariableRole,
    numpy_dtype,
)


@dataclass(frozen=True, slots=True)
class CompileOptions:
    """What may be chosen apart from the Program.

    ``chunk_bytes``: budget for the intermediates of the micro-batches that run as one on a machine (bytes).
    It decides the order of sums, so it is part of what makes results repeatable.
    """

    chunk_bytes: int = 128 << 20


def compile_program(
    program: Program, *, target: str = "gc200", options: CompileOptions | None = None
) -> Executable:
    """Compile ``program`` for machines with ``target`` chips.

    The same Program, target and options give an Executable that is equal to the byte, on any host.
    Raises UsageError for a program that cannot be right, UnimplementedError for what is not there yet.
    """
    options = options or CompileOptions()
    layout = layout_of(program)
    _check(program)
    with fixed_numerics():
        memory = plan_memory(program, layout)
        anchors = classify(program, memory.variables)
        traced = trace(program, anchors)
        if traced.uses_random:
            spec = TensorSpec(seeds.SEED_VARIABLE, "uint32", (2,))
            memory.variables[spec.name] = Variable(spec, VariableRole.RANDOM_SEED, 0.0)
        builder = ChunkBuilder(program, traced, anchors, layout, memory)
        cut = chunks(program, traced, layout.replicas_per_machine, options.chunk_bytes)
        computations, names = _computations(builder, cut)
        return Executable(
            name=program.name,
            layout=layout,
            accumulation_factor=program.accumulation_factor,
            training=program.training,
            streams=_streams(builder),
            variables=memory.variables,
            arenas=memory.arenas,
            computations=computations,
            instructions=schedule(builder, cut, names, clear="clear" in computations),
            target=target,
            tile_report=tile_report(program, traced, target),
            metadata=program.metadata,
        )


def _check(program: Program) -> None:
    if program.accumulation_factor < 1:
        raise UsageError(f"The accumulation factor must be at least 1, not {program.accumulation_factor}.")
    if (
        program.loss is not None
        and program.update is None
        and any(parameter.trainable for parameter in program.parameters.values())
    ):
        raise UsageError("A program with a loss and weights to train needs an optimizer.")


def _computations(
    builder: ChunkBuilder, cut: tuple[Chunk, ...]
) -> tuple[dict[str, Computation], tuple[str, ...]]:
    """Every piece exported, and the name of the one that runs each chunk."""
    pieces: dict[str, Piece] = {}
    names = []
    accumulate = len(cut) > 1 and bool(builder.weights)
    if accumulate:
        pieces["clear"] = _clear(builder.memory)
    for chunk in cut:
        name = f"micro_batches.{chunk.count}"
        names.append(name)
        if name not in pieces:
            pieces[name] = builder.piece(name, chunk.count, accumulate=accumulate)
    rule = builder.program.update
    for index, group in enumerate(builder.memory.groups):
        assert rule is not None
        piece = update_piece(index, group, builder.memory, rule, builder.layout)
        pieces[piece.name] = piece
    if any(anchor.kind is AnchorKind.UPDATED for anchor in builder.anchors):
        pieces["anchors.updated"] = _updated_anchors(builder)
    return {name: export_piece(piece) for name, piece in pieces.items()}, tuple(names)


def _clear(memory: Memory) -> Piece:
    """Zeros for all gradient accumulators, so that every chunk can add to them."""
    arenas = {f"arena:{g.gradient_arena}": (g.size, numpy_dtype(g.gradient_dtype)) for g in memory.groups}

    def run(_: Mapping[str, Any]) -> dict[str, Any]:
        return {name: jnp.zeros(size, dtype) for name, (size, dtype) in arenas.items()}

    return Piece("clear", run, {}, tuple(arenas))


def _updated_anchors(builder: ChunkBuilder) -> Piece:
    """The weights after the update, once for each replica of the machine."""
    anchors = [anchor for anchor in builder.anchors if anchor.kind is AnchorKind.UPDATED]
    replicas = builder.layout.replicas_per_machine

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        found = {anchor.name: values[anchor.subject] for anchor in anchors}
        return {anchor_buffer(n): jnp.broadcast_to(v, (1, replicas, *v.shape)) for n, v in found.items()}

    inputs = {a.subject: abstract(builder.program.parameters[a.subject].spec) for a in anchors}
    return Piece("anchors.updated", run, inputs, tuple(anchor_buffer(anchor.name) for anchor in anchors))


def _streams(builder: ChunkBuilder) -> dict[str, Stream]:
    program = builder.program
    streams = {
        name: Stream(item.spec, StreamDirection.TO_DEVICE, broadcast=item.broadcast)
        for name, item in sorted(program.inputs.items())
    }
    for anchor, item in zip(builder.anchors, program.anchors, strict=True):
        spec = _subject_spec(builder, anchor.kind, anchor.subject)
        named = TensorSpec(anchor.name, spec.dtype, spec.shape)
        streams[anchor.name] = Stream(
            named, StreamDirection.TO_HOST, retrieval=item.retrieval, period=item.period
        )
    return streams


def _subject_spec(builder: ChunkBuilder, kind: AnchorKind, subject: str) -> TensorSpec:
    """dtype and shape of what an anchor speaks of, as one replica sees it in one micro-batch."""
    if subject in builder.memory.variables:
        return builder.memory.variables[subject].spec
    if subject in builder.program.inputs:
        if kind is AnchorKind.VALUE:
            raise UnimplementedError(
                f"The input {subject!r} cannot be anchored by its own name yet.",
                hint="Anchor the output of an Identity operator that reads it.",
            )
        return builder.program.inputs[subject].spec
    return builder.traced.spec(subject)
