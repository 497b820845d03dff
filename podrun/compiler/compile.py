"""compile_program: checks the program, then runs the stages of compilation in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax.numpy as jnp

from podrun.compiler import extra_state
from podrun.compiler.anchors import Anchor, classify
from podrun.compiler.arenas import Memory, plan_memory
from podrun.compiler.cache import CompileOptions, cached, executable_digest, known_digest
from podrun.compiler.chain import (
    ChainUnit,
    clearing_homes,
    counted_pieces,
    homes_of,
    taking_pieces,
    turns_at,
    turns_of,
    units,
)
from podrun.compiler.checks import check_program, check_program_pipeline
from podrun.compiler.chunk import ChunkBuilder, forward_piece, streams, updated_anchors
from podrun.compiler.collective_cuts import CutPiece, gathered_arenas
from podrun.compiler.collective_cuts import cut_at_exchanges as cut_at_collectives
from podrun.compiler.cost import tile_report
from podrun.compiler.export import PieceFunction, export_piece, export_traced, trace_piece
from podrun.compiler.extra_state import (
    ADVANCE,
    COUNTS,
    STATISTICS,
    advance_piece,
    in_turn,
    scaling_piece,
    turns_piece,
)
from podrun.compiler.extra_state import UPDATE as SCALING
from podrun.compiler.fold import micro_batch_chunks
from podrun.compiler.forward_trace import Trace, fixed_numerics, trace_forward
from podrun.compiler.model_collectives import exchanges
from podrun.compiler.program import RNG, PipelineOrder, Program, joint, layout_of
from podrun.compiler.schedule import Timetable, schedule
from podrun.compiler.segments import Placement, placement_of
from podrun.compiler.update import JOINT_UPDATE, SimilarUpdates, joint_piece, renamed, update_piece
from podrun.core.executable import (
    Arena,
    Computation,
    Executable,
    Instruction,
    TensorSpec,
    Variable,
    VariableRole,
    numpy_dtype,
)
from podrun.core.names import WHOLE, library_errors_named
from podrun.core.terminal import report_step, reported_steps
from podrun.device.xla.clients import instruction_set
from podrun.private_apis.jax import one_context


def compile_program(
    program: Program, *, target: str = "gc200", options: CompileOptions | None = None
) -> Executable:
    """Compile ``program`` for machines with ``target`` chips, or load it from the executable cache.

    The same Program, target and options give an Executable that is equal to the byte, on any host of the same
    instruction set: its metadata names that, since constants worked out on the way have its bits. The machine code of
    pieces is no part of it; each machine compiles for its own processor. Raises UsageError for a program that cannot be
    right, UnimplementedError for what is not there yet, and what `podrun.compiler.cache.cached` raises.
    """
    options = options or CompileOptions()
    compilation = _Compilation(program, target, options)

    def compile_now() -> Executable:
        if options.on_compile is not None:
            options.on_compile()
        with library_errors_named(f"Compiling {program.name!r}"), one_context():
            return compilation.executable()

    if options.cache is None:
        return compile_now()
    return cached(options.cache, compilation.digest(), compile_now, options.cache_wait)


def model_program(program: Program, *, target: str = "gc200") -> dict[str, Any]:
    """The tile report of ``program`` without compiling it: modelled time and memory of a batch.

    Raises UsageError for a program that cannot be right.
    """
    compilation = _Compilation(program, target, CompileOptions())
    check_program_pipeline(program, compilation.placement)
    with fixed_numerics():
        return compilation.report()


class _Compilation:
    """The stages of one program, each run when first asked for."""

    def __init__(self, program: Program, target: str, options: CompileOptions) -> None:
        check_program(program)
        self.program, self.target, self.options = program, target, options
        self.layout = layout_of(program)

    @cached_property
    def traced(self) -> Trace:
        """The trace of the forward pass with the values that are to come back."""
        with fixed_numerics():
            return trace_forward(self.program, self.anchors)

    @cached_property
    def anchors(self) -> tuple[Anchor, ...]:
        """The kind and subject of each anchor."""
        return classify(self.program, plan_memory(self.program, self.layout, {}).variables)

    @cached_property
    def placement(self) -> Placement:
        """The place of each operator."""
        program = self.program
        return placement_of(
            self.traced,
            program.ipus_per_replica,
            pipelined=program.pipelined,
            schedule=program.pipeline_schedule if program.pipelined else PipelineOrder.GROUPED,
            phased=program.phases is not None,
        )

    @cached_property
    def chain(self) -> tuple[ChainUnit, ...]:
        """The segments of a micro-batch if the program lies on several IPUs; else empty."""
        if not self.placement.split:
            return ()
        with fixed_numerics():
            return units(self._builder({}), self.placement, pipelined=self.program.pipelined)

    @cached_property
    def builder(self) -> ChunkBuilder:
        """The trace, on the plan of memory."""
        plain = self._builder({})
        return self._builder(homes_of(plain, self.chain), turns_of(plain, self.chain))

    def _builder(self, homes: Mapping[str, int], turns: Mapping[str, int] | None = None) -> ChunkBuilder:
        memory = plan_memory(self.program, self.layout, homes, turns)
        if self.traced.uses_random:
            spec = TensorSpec(extra_state.SEED_VARIABLE, "uint32", (2,))
            variables = memory.variables | {spec.name: Variable(spec, VariableRole.RANDOM_SEED, 0.0)}
            memory = replace(memory, variables=variables)
        return ChunkBuilder(self.program, self.traced, self.anchors, self.layout, memory)

    @cached_property
    def updates(self) -> dict[str, Computation]:
        """The exported update of each group of weights."""
        rule, memory = self.program.update, self.builder.memory
        computations: dict[str, Computation] = {}
        together = joint(rule)
        if together is not None and memory.groups:
            norms = [anchor.subject for anchor in self.builder.norms]
            with fixed_numerics():
                computations[JOINT_UPDATE] = export_piece(
                    joint_piece(memory, together, norms, self.layout.replicas_per_machine)
                )
        exported_updates = SimilarUpdates(memory, rule)
        with fixed_numerics():
            for index, group in enumerate(() if computations else memory.groups):
                piece = update_piece(index, group, memory, self.program.update_rule, self.layout)
                if self.program.updates_each_micro_batch:
                    piece = in_turn(piece, index)
                first = exported_updates.similar(group, piece)
                computations[piece.name] = (
                    export_piece(piece) if first is None else renamed(computations[first.name], first, piece)
                )
            if self.program.automatic_scaling is not None:
                computations[SCALING] = export_piece(scaling_piece(self.program))
            if RNG in memory.variables:
                early = self.program.updates_each_micro_batch
                computations[ADVANCE] = export_piece(
                    advance_piece(self.program.accumulation_factor if early else 1)
                )
        return computations

    def digest(self) -> str:
        """The name of this program's entry in the cache."""
        known = known_digest(self.program, self.target, self.options)
        if known is not None:
            return known
        with fixed_numerics():
            forward = export_piece(forward_piece(self.builder))
        parts = [part.stablehlo for part in (forward, *self.updates.values())]
        parts += [repr(sorted(e.params.items())).encode() for e in exchanges(self.traced.jaxpr)]
        return executable_digest(self.program, self.target, self.options, parts)

    def report(self) -> dict[str, Any]:
        """The modelled time and memory."""
        return tile_report(self.program, self.traced, self.placement, self.builder.memory, self.target)

    def executable(self) -> Executable:
        """The Executable: runs all stages."""
        program = self.program
        check_program_pipeline(program, self.placement)
        builder = self.builder
        gathered: Mapping[str, Arena] = {}
        moved: Mapping[str, Variable] = {}
        with fixed_numerics():
            if self.placement.split:
                computations, instructions = _sharded(builder, self.chain)
                gathered = gathered_arenas(((unit.piece, unit.ipu) for unit in self.chain), self.layout)
            else:
                computations, instructions, gathered, moved = _folded(builder, self.options.chunk_bytes)
            computations |= self.updates
            for name, anchors in builder.updated.items():
                computations[name] = export_piece(updated_anchors(builder, name, anchors))
            report_step("costing")
            report = self.options.report() if self.options.report is not None else self.report()
        return Executable(
            name=program.name,
            layout=self.layout,
            accumulation_factor=program.accumulation_factor,
            training=program.training,
            streams=streams(builder),
            variables={**builder.memory.variables, **moved},
            arenas={**builder.memory.arenas, **gathered},
            computations=computations,
            instructions=instructions,
            target=self.target,
            tile_report=report,
            metadata={**program.metadata, "instruction_set": instruction_set()},
        )


def _folded(
    builder: ChunkBuilder, budget: int
) -> tuple[
    dict[str, Computation], tuple[tuple[Instruction, ...], ...], dict[str, Arena], Mapping[str, Variable]
]:
    """Chunks of micro-batches of whole replicas, their schedule, the arenas that collectives of theirs fill, and the
    variables that lie in these.
    """
    cut = micro_batch_chunks(builder.program, builder.traced, builder.layout.replicas_per_machine, budget)
    computations: dict[str, Computation] = {}
    work: dict[str, CutPiece] = {}
    names = []
    shared = {n: builder.memory.variables[n] for n in builder.program.shared_state} if len(cut) == 1 else {}
    accumulate = len(cut) > 1 and bool(builder.weights)
    if accumulate:
        computations["clear"] = export_piece(_clear(builder.memory, "clear"))
    for chunk in reported_steps("exporting chunk", cut):
        name = f"micro_batches.{chunk.count}"
        names.append(name)
        if name not in work:
            piece = trace_piece(builder.piece(name, chunk.count, accumulate=accumulate))
            work[name] = cut_at_collectives(piece, builder.layout, shared)
            computations |= {part.name: export_traced(part) for part in work[name].pieces}
    last = work[names[-1]]
    instructions = schedule(
        builder, cut, [work[name].instructions for name in names], last.closing, clear=accumulate
    )
    arenas = {n: a for item in work.values() for n, a in item.arenas.items()}
    return computations, instructions, arenas, last.variables


def _sharded(
    builder: ChunkBuilder, chain: Sequence[ChainUnit]
) -> tuple[dict[str, Computation], tuple[tuple[Instruction, ...], ...]]:
    """Segments of replicas on their IPUs, and the schedule of these."""
    accumulate = builder.program.accumulates and bool(builder.weights)
    pieces = []
    if accumulate:
        homes = clearing_homes(builder)
        firsts = {builder.layout.position_of(home): home for home in reversed(homes)}
        pieces = [
            _clear(builder.memory, f"clear.{home}", home, counts=home in firsts.values()) for home in homes
        ]
    pieces += counted_pieces(builder, chain)
    pieces += [turns_piece(home, indices) for home, indices in turns_at(builder).items()]
    if joint(builder.program.update):
        pieces += taking_pieces(builder.memory, builder.layout)
    computations = {piece.name: export_piece(piece) for piece in reported_steps("exporting piece", pieces)}
    computations |= {
        unit.piece.name: export_traced(unit.piece) for unit in reported_steps("exporting segment", chain)
    }
    timetable = Timetable(builder, chain, pipelined=builder.program.pipelined)
    return computations, timetable.instructions(clear=accumulate)


def _clear(memory: Memory, name: str, home: int | None = None, *, counts: bool = True) -> PieceFunction:
    """Zeros for the gradient accumulators of an IPU (None: of all), so that every chunk can add to them.

    ``counts``: also for the counts of its machine.
    """
    groups = [group for group in memory.groups if home is None or group.home == home]
    arenas = {WHOLE + g.gradient_arena: (g.size, numpy_dtype(g.gradient_dtype)) for g in groups}
    if counts:
        extra = [memory.arenas[name] for name in (STATISTICS, COUNTS) if name in memory.arenas]
        arenas |= {WHOLE + a.name: (a.size, numpy_dtype(a.dtype)) for a in extra}

    def run(_: Mapping[str, Any]) -> dict[str, Any]:
        return {name: jnp.zeros(size, dtype) for name, (size, dtype) in arenas.items()}

    return PieceFunction(name, run, {}, tuple(arenas))
