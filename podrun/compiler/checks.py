"""What a Program has to be to be compiled: fields that agree, types that an IPU has, several IPUs for a pipeline."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podrun.compiler.anchors import unknown_tensor
from podrun.compiler.program import Program, joint
from podrun.compiler.replica_groups import check_parameter_groups
from podrun.core.errors import UnsupportedError, UsageError

if TYPE_CHECKING:
    from podrun.compiler.segments import Placement

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def check_program(program: Program) -> None:
    """Raise UsageError for fields that contradict each other, UnsupportedError for types that no IPU has."""
    if program.accumulation_factor < 1:
        raise UsageError(f"the accumulation factor must be at least 1, not {program.accumulation_factor}")
    specs = [parameter.spec for parameter in program.parameters.values()]
    specs += [item.spec for item in program.inputs.values()]
    for spec in specs:
        if spec.dtype in _WIDE:
            raise UnsupportedError(
                f"{spec.name!r} is {spec.dtype}; an IPU has no 64-bit types",
                hint="Give it as a 32-bit type.",
            )
    for name in program.state_updates:
        if name not in program.parameters:
            raise unknown_tensor(name, program.parameters)
    if program.shared_state and (program.loss is not None or program.rounds_stochastically):
        raise UsageError(
            f"{min(program.shared_state)!r} is state that replicas share, in a program that is differentiated or "
            "rounds stochastically",
            hint="Let every replica keep its own.",
        )
    check_parameter_groups(program)
    if (
        program.loss is not None
        and program.update is None
        and any(parameter.trainable for parameter in program.parameters.values())
    ):
        raise UsageError(
            "a program with a loss and weights to train needs an optimizer",
            hint="Give it one, or leave out the loss.",
        )


def check_program_pipeline(program: Program, placement: Placement) -> None:
    """Raise UsageError for a pipeline of one IPU or updates in flight without a pipeline, UnsupportedError for an
    optimizer that no pipeline can have.
    """
    if program.updates_each_micro_batch and not program.pipelined:
        raise UsageError(
            "only a pipelined program updates weights while micro-batches are in flight",
            hint="Pipeline it, or update once a batch.",
        )
    if not program.pipelined:
        return
    if not placement.split or not placement.stages:
        raise UsageError(
            "pipelining requires operators on more than one IPU",
            hint="Place operators with virtualGraph and pipelineStage, or switch pipelining off.",
        )
    if program.updates_each_micro_batch and joint(program.update):
        raise UnsupportedError(
            "an optimizer that looks at all weights at once (gradient clipping) needs gradient accumulation in a "
            "pipeline: stages update their weights at different times",
            hint="Use gradient accumulation.",
        )
