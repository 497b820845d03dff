"""The chunk piece: forward and backward of some micro-batches on all replicas of a machine, over named buffers.

Reads weights, streamed inputs and (beyond the first chunk) gradient accumulators; writes accumulators, anchors, the
advanced seed and replaced parameters (running statistics). Here too: the program's host streams, which enter and leave
a chunk, and the piece that prepares anchors of what an update wrote.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from podrun.compiler import extra_state
from podrun.compiler.anchors import Anchor, AnchorKind
from podrun.compiler.arenas import Memory, WeightGroup
from podrun.compiler.export import PieceFunction
from podrun.compiler.extra_state import averaged, averages, counts, counts_micro_batches
from podrun.compiler.fold import Folded, FoldedOperands, gradients, weight_gradients_each
from podrun.compiler.forward_trace import Trace, evaluate_forward
from podrun.compiler.jaxprs import BufferValues, abstract, buffer
from podrun.compiler.model_collectives import alone
from podrun.compiler.program import FACTOR, Program
from podrun.compiler.replica_groups import grouped_names, replicas_reduced, rows
from podrun.core.errors import UnimplementedError, present
from podrun.core.executable import REPLICA_OFFSET, Stream, StreamDirection, TensorSpec, numpy_dtype
from podrun.core.layout import Layout
from podrun.core.names import (
    KEYS,
    anchor_buffer,
    count_buffer,
    gradient_buffer,
    input_buffer,
    statistics_buffer,
)
from podrun.core.quick_dataclass import dataclass


def updated_piece(number: int) -> str:
    """The piece that gives the anchors of updated weights of an IPU, or of a group of weights."""
    return f"anchors.updated.{number}"


@dataclass(frozen=True, slots=True)
class ChunkBuilder:
    """The ingredients of a chunk piece; `piece` makes one for a number of micro-batches."""

    program: Program
    traced: Trace
    anchors: tuple[Anchor, ...]
    layout: Layout
    memory: Memory

    @property
    def weights(self) -> tuple[str, ...]:
        """The weights that are updated, in the order of their groups."""
        return tuple(weight.name for group in self.memory.groups for weight in group.weights)

    @property
    def tracked(self) -> tuple[str, ...]:
        """The values and weights whose gradients automatic loss scaling counts."""
        scaling = self.program.automatic_scaling
        return () if scaling is None else scaling.tracked

    @property
    def stored(self) -> tuple[Anchor, ...]:
        """The anchors whose value chunks compute (the others get theirs after the update)."""
        return tuple(anchor for anchor in self.anchors if not anchor.kind.once_a_batch)

    @property
    def norms(self) -> tuple[Anchor, ...]:
        """The anchored norms that a joint update clips by."""
        return tuple(anchor for anchor in self.anchors if anchor.kind is AnchorKind.NORM)

    @property
    def updated(self) -> dict[str, tuple[Anchor, ...]]:
        """The anchors of weights after their update and of the gradients that the update saw, by the piece that gives
        them: one piece for all weights of an IPU, or one for each group of weights that changes while micro-batches are
        in flight.
        """
        early = self.program.updates_each_micro_batch
        weights_of: dict[str, set[str]] = {}
        for index, group in enumerate(self.memory.groups):
            name = updated_piece(index if early else group.home)
            weights_of.setdefault(name, set()).update(weight.name for weight in group.weights)
        kinds = (AnchorKind.UPDATED, AnchorKind.REDUCED)
        anchors = {
            name: tuple(a for a in self.anchors if a.kind in kinds and a.subject in here)
            for name, here in weights_of.items()
        }
        return {name: those for name, those in anchors.items() if those}

    @property
    def loaded(self) -> tuple[str, ...]:
        """The inputs that chunks read."""
        wanted = {anchor.subject for anchor in self.anchors if anchor.kind is AnchorKind.VALUE}
        return tuple(name for name in self.traced.inputs if name in self.traced.used or name in wanted)

    def piece(self, name: str, micro_batches: int, *, accumulate: bool, split: bool = False) -> PieceFunction:
        """A piece for ``micro_batches``; with ``accumulate`` it adds to the gradients that are there.

        ``split``: it takes its keys from `keys_piece` and leaves the seed alone.
        """
        folded = Folded(
            self.traced,
            micro_batches,
            self.layout.replicas_per_machine,
            batched=self.program.replica_state,
            shared=frozenset(self.program.state_updates[name] for name in self.program.shared_state),
            broadcast=frozenset(n for n, spec in self.program.inputs.items() if spec.broadcast),
            group_of=grouped_names(self.program),
        )
        outputs = [gradient_buffer(weight) for weight in self.weights]
        outputs += [statistics_buffer(name) for name in self.tracked]
        if accumulate and counts_micro_batches(self.program):
            outputs += [count_buffer(weight) for weight in self.weights]
        outputs += [anchor_buffer(anchor.name) for anchor in self.stored]
        outputs += sorted(self.program.state_updates)
        if self.traced.uses_random and not split:
            outputs.append(extra_state.SEED_VARIABLE)

        def run(values: BufferValues) -> dict[str, Any]:
            return self._run(folded, values, accumulate)

        return PieceFunction(name, run, self._inputs(micro_batches, accumulate, split), tuple(outputs))

    def keys_piece(self) -> PieceFunction:
        """The keys of one micro-batch; moves the seed on by one."""
        replicas = self.layout.replicas_per_machine

        def run(values: BufferValues) -> dict[str, Any]:
            seed = values[extra_state.SEED_VARIABLE]
            keys = extra_state.folded_keys(seed, values[REPLICA_OFFSET], 1, replicas)
            return {KEYS: keys, extra_state.SEED_VARIABLE: extra_state.advance(seed, 1)}

        inputs = {extra_state.SEED_VARIABLE: buffer((2,), "uint32"), REPLICA_OFFSET: buffer((), "int32")}
        return PieceFunction("keys", run, inputs, (KEYS, extra_state.SEED_VARIABLE))

    def _inputs(self, micro_batches: int, accumulate: bool, split: bool) -> dict[str, jax.ShapeDtypeStruct]:
        replicas = self.layout.replicas_per_machine
        specs: dict[str, jax.ShapeDtypeStruct] = {}
        for name, variable in self.memory.variables.items():
            specs[name] = abstract(variable.spec, *([replicas] if variable.per_replica else []))
        for name in self.loaded:
            item = self.program.inputs[name]
            axes = (micro_batches,) if item.broadcast else (micro_batches, replicas)
            specs[input_buffer(name)] = abstract(item.spec, *axes)
        if accumulate:
            for group in self.memory.groups:
                dtype = group.gradient_dtype
                for weight in group.weights:
                    specs[gradient_buffer(weight.name)] = buffer(weight.shape, dtype)
            specs |= {statistics_buffer(name): buffer((2,), "float32") for name in self.tracked}
            if counts_micro_batches(self.program):
                specs |= {count_buffer(weight): buffer((1,), "float32") for weight in self.weights}
        if split:
            specs[KEYS] = buffer((replicas, 2), "uint32")
        elif self.traced.uses_random:
            specs[extra_state.SEED_VARIABLE] = buffer((2,), "uint32")
            specs[REPLICA_OFFSET] = buffer((), "int32")
        if self.memory.group_of:
            specs[REPLICA_OFFSET] = buffer((), "int32")
        return specs

    def _run(self, folded: Folded, buffers: BufferValues, accumulate: bool) -> dict[str, Any]:
        parameters = {name: buffers[name] for name in self.traced.parameters}
        if self.memory.group_of:
            parameters[REPLICA_OFFSET] = buffers[REPLICA_OFFSET]
        inputs = folded.fold_inputs({name: buffers[input_buffer(name)] for name in self.loaded})
        results: dict[str, Any] = {}
        keys = buffers.get(KEYS)
        if self.traced.uses_random and keys is None:
            seed = buffers[extra_state.SEED_VARIABLE]
            keys = folded.keys(seed, buffers[REPLICA_OFFSET])
            results[extra_state.SEED_VARIABLE] = extra_state.advance(seed, folded.micro_batches)
        subjects: dict[AnchorKind, Mapping[str, Any]] = {AnchorKind.VARIABLE: buffers}
        if self.program.loss is None:
            values = folded.forward(parameters, inputs, keys, {})
        else:
            operands = FoldedOperands(parameters, inputs, keys)
            values = self._differentiated(folded, buffers, operands, accumulate, results, subjects)
        subjects[AnchorKind.VALUE] = values | {
            name: self._each(folded, name, inputs[name]) for name in inputs
        }
        for anchor in self.stored:
            value = subjects[anchor.kind][anchor.subject]
            if anchor.kind is AnchorKind.VARIABLE and anchor.subject in self.memory.group_of:
                group_of, offset = self.memory.group_of[anchor.subject], buffers[REPLICA_OFFSET]
                value = rows(value, group_of, offset, folded.micro_batches, folded.replicas)
            elif anchor.kind is AnchorKind.VARIABLE and anchor.subject not in self.program.replica_state:
                value = jnp.broadcast_to(value, (folded.size, *value.shape))
            results[anchor_buffer(anchor.name)] = folded.unfold(value)
        for parameter, value in self.program.state_updates.items():
            results[parameter] = values[value][0] if parameter in self.program.shared_state else values[value]
        return results

    def _differentiated(
        self,
        folded: Folded,
        buffers: BufferValues,
        operands: FoldedOperands,
        accumulate: bool,
        results: dict[str, Any],
        subjects: dict[AnchorKind, Mapping[str, Any]],
    ) -> dict[str, Any]:
        """Forward values; puts accumulated gradients into ``results``, anchored ones into ``subjects``."""
        loss = present(self.program.loss, "gradients are those of a loss")
        scaling = self.program.loss_scaling
        scale = buffers[scaling] if isinstance(scaling, str) else jnp.float32(scaling)
        if self.tracked:
            scale = scale * buffers[FACTOR]
        computed = gradients(folded, loss, scale, operands, self.weights, self._taps())
        for group in self.memory.groups:
            for weight in group.weights:
                self._accumulate(
                    weight.name, group, computed.summed[weight.name], buffers, accumulate, results
                )
        subjects[AnchorKind.VALUE_GRADIENT] = computed.values_each
        anchored = [a.subject for a in self.anchors if a.kind is AnchorKind.PARAMETER_GRADIENT]
        wanted = sorted({*anchored, *(name for name in self.tracked if name in operands.parameters)})
        if wanted:
            subjects[AnchorKind.PARAMETER_GRADIENT] = weight_gradients_each(
                folded, loss, scale, operands, wanted
            )
        self._count(subjects, buffers, accumulate, results)
        return computed.values

    def _accumulate(
        self,
        weight: str,
        group: WeightGroup,
        gradient: jax.Array,
        buffers: BufferValues,
        accumulate: bool,
        results: dict[str, Any],
    ) -> None:
        """Add a weight's gradient, summed over the chunk, to the batch's accumulator."""
        name, dtype = gradient_buffer(weight), numpy_dtype(group.gradient_dtype)
        if not averages(self.program):
            gradient = gradient.astype(dtype)
            results[name] = buffers[name] + gradient if accumulate else gradient
            return
        old, count = (buffers[name], buffers[count_buffer(weight)]) if accumulate else (None, None)
        replicas = replicas_reduced(self.program, weight)
        results[name] = averaged(old, count, gradient, replicas).astype(dtype)
        if accumulate:
            results[count_buffer(weight)] = buffers[count_buffer(weight)] + 1

    def _count(
        self,
        subjects: Mapping[AnchorKind, Mapping[str, Any]],
        buffers: BufferValues,
        accumulate: bool,
        results: dict[str, Any],
    ) -> None:
        """Add the counts of the chunk's tracked gradients to the batch's."""
        for name in self.tracked:
            scaling = present(self.program.automatic_scaling, "only automatic loss scaling tracks gradients")
            weight = name in self.program.parameters
            kind = AnchorKind.PARAMETER_GRADIENT if weight else AnchorKind.VALUE_GRADIENT
            buffer, more = statistics_buffer(name), counts(subjects[kind][name], scaling)
            results[buffer] = buffers[buffer] + more if accumulate else more

    def _taps(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The spec on one replica of each value whose gradient is anchored."""
        subjects = [a.subject for a in self.anchors if a.kind is AnchorKind.VALUE_GRADIENT]
        subjects += [n for n in self.tracked if n not in self.program.parameters and n not in subjects]
        inputs = self.program.inputs
        return {n: abstract(inputs[n].spec if n in inputs else self.traced.spec(n)) for n in subjects}

    def _each(self, folded: Folded, name: str, value: jax.Array) -> Any:
        """An input on the folded axis; a broadcast input is repeated."""
        if folded.input_axes({name: value})[name] is None:
            return jnp.broadcast_to(value, (folded.size, *value.shape))
        return value


def forward_piece(builder: ChunkBuilder) -> PieceFunction:
    """The plain forward function of one micro-batch on one replica, from which the program's digest is computed."""
    traced, program = builder.traced, builder.program
    names = (*traced.parameters, *traced.inputs)
    specs = {n: abstract(program.parameters[n].spec) for n in traced.parameters}
    specs |= {n: abstract(program.inputs[n].spec) for n in traced.inputs}

    def run(values: BufferValues) -> dict[str, Any]:
        return evaluate_forward(traced, [values[n] for n in (*names, extra_state.SEED_VARIABLE)], {}, alone)

    return PieceFunction(
        "forward", run, specs | {extra_state.SEED_VARIABLE: buffer((2,), "uint32")}, traced.outputs
    )


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
        buffers = {}
        for anchor in anchors:
            value, group_of = values[source(anchor)], builder.memory.group_of.get(anchor.subject)
            if group_of is None:
                buffers[anchor_buffer(anchor.name)] = jnp.broadcast_to(value, (1, replicas, *value.shape))
            else:
                buffers[anchor_buffer(anchor.name)] = rows(
                    value, group_of, values[REPLICA_OFFSET], 1, replicas
                )[None]
        return buffers

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
    by_name = {
        name: Stream(item.spec, StreamDirection.TO_DEVICE, broadcast=item.broadcast)
        for name, item in sorted(program.inputs.items())
    }
    for anchor, item in zip(builder.anchors, program.anchors, strict=True):
        spec = _subject_spec(builder, anchor.kind, anchor.subject)
        named = TensorSpec(anchor.name, spec.dtype, spec.shape)
        by_name[anchor.name] = Stream(
            named, StreamDirection.TO_HOST, retrieval=item.retrieval, period=item.period
        )
    return by_name


def _subject_spec(builder: ChunkBuilder, kind: AnchorKind, subject: str) -> TensorSpec:
    """The dtype and shape of an anchor's subject, as one replica sees it in one micro-batch."""
    if kind is AnchorKind.NORM:
        return TensorSpec(subject, "float32", ())
    if subject in builder.memory.variables:
        spec = builder.memory.variables[subject].spec
        if kind is AnchorKind.REDUCED:
            group = next(group for group in builder.memory.groups if subject in _names(group))
            spec = TensorSpec(subject, group.gradient_dtype, spec.shape)
        grouped = subject in builder.memory.group_of
        return TensorSpec(spec.name, spec.dtype, spec.shape[1:]) if grouped else spec
    if subject in builder.program.inputs:
        if kind is AnchorKind.VALUE:
            raise UnimplementedError(
                f"the input {subject!r} cannot be anchored by its own name yet",
                hint="Anchor the output of an Identity operator that reads it.",
            )
        return builder.program.inputs[subject].spec
    return builder.traced.spec(subject)
