"""What goes between the host and a program: its streams, and the piece that makes ready what is anchored after an
update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from podrun.compiler.abstract import abstract
from podrun.compiler.anchors import Anchor, AnchorKind
from podrun.compiler.export.pieces import PieceFunction
from podrun.compiler.numbers.chunk import ChunkBuilder
from podrun.compiler.state.arenas import WeightGroup
from podrun.compiler.state.grouped import rows
from podrun.core.buffer_names import anchor_buffer, gradient_buffer
from podrun.core.errors import UnimplementedError
from podrun.core.executable import REPLICA_OFFSET, Stream, StreamDirection, TensorSpec


def updated_anchors(builder: ChunkBuilder, name: str, anchors: Sequence[Anchor]) -> PieceFunction:
    """Weights after their update, and the gradients it saw, for each replica of the machine."""
    kinds = {weight: group.gradient_dtype for group in builder.memory.groups for weight in _names(group)}

    def source(anchor: Anchor) -> str:
        return gradient_buffer(anchor.subject) if anchor.kind is AnchorKind.REDUCED else anchor.subject

    def stored(anchor: Anchor) -> TensorSpec:
        spec = builder.memory.variables[anchor.subject].spec
        reduced = anchor.kind is AnchorKind.REDUCED
        return TensorSpec(source(anchor), kinds[anchor.subject], spec.shape) if reduced else spec

    replicas = builder.layout.replicas_per_machine

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for anchor in anchors:
            value, group_of = values[source(anchor)], builder.memory.group_of.get(anchor.subject)
            if group_of is None:
                found[anchor_buffer(anchor.name)] = jnp.broadcast_to(value, (1, replicas, *value.shape))
            else:
                found[anchor_buffer(anchor.name)] = rows(
                    value, group_of, values[REPLICA_OFFSET], 1, replicas
                )[None]
        return found

    inputs = {source(a): abstract(stored(a)) for a in anchors}
    if any(a.subject in builder.memory.group_of for a in anchors):
        inputs[REPLICA_OFFSET] = abstract(TensorSpec(REPLICA_OFFSET, "int32", ()))
    outputs = tuple(anchor_buffer(anchor.name) for anchor in anchors)
    return PieceFunction(name, run, inputs, outputs)


def _names(group: WeightGroup) -> tuple[str, ...]:
    return tuple(weight.name for weight in group.weights)


def streams(builder: ChunkBuilder) -> dict[str, Stream]:
    """The program's inputs and anchors as streams, by name. Raises UnimplementedError for an anchored input."""
    program = builder.program
    found = {
        name: Stream(item.spec, StreamDirection.TO_DEVICE, broadcast=item.broadcast)
        for name, item in sorted(program.inputs.items())
    }
    for anchor, item in zip(builder.anchors, program.anchors, strict=True):
        spec = _subject_spec(builder, anchor.kind, anchor.subject)
        named = TensorSpec(anchor.name, spec.dtype, spec.shape)
        found[anchor.name] = Stream(
            named, StreamDirection.TO_HOST, retrieval=item.retrieval, period=item.period
        )
    return found


def _subject_spec(builder: ChunkBuilder, kind: AnchorKind, subject: str) -> TensorSpec:
    """dtype and shape of what an anchor speaks of, as one replica sees it in one micro-batch."""
    if kind is AnchorKind.NORM:
        return TensorSpec(subject, "float32", ())
    if subject in builder.memory.variables:
        found = builder.memory.variables[subject].spec
        if kind is AnchorKind.REDUCED:
            group = next(group for group in builder.memory.groups if subject in _names(group))
            found = TensorSpec(subject, group.gradient_dtype, found.shape)
        grouped = subject in builder.memory.group_of
        return TensorSpec(found.name, found.dtype, found.shape[1:]) if grouped else found
    if subject in builder.program.inputs:
        if kind is AnchorKind.VALUE:
            raise UnimplementedError(
                f"the input {subject!r} cannot be anchored by its own name yet",
                hint="Anchor the output of an Identity operator that reads it.",
            )
        return builder.program.inputs[subject].spec
    return builder.traced.spec(subject)
