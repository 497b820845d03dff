"""What a program must be to be compiled, as far as it can be told before and after it is placed."""

from __future__ import annotations

from podrun.compiler.anchors import unknown_tensor
from podrun.compiler.program import Program, joint
from podrun.compiler.state.grouped import check_groups
from podrun.compiler.tracing.placement import Placement
from podrun.errors import UnsupportedError, UsageError

_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def check_program(program: Program) -> None:
    """Raises UsageError for fields that contradict each other, UnsupportedError for types that no IPU has."""
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
    check_groups(program)
    if (
        program.loss is not None
        and program.update is None
        and any(parameter.trainable for parameter in program.parameters.values())
    ):
        raise UsageError(
            "a program with a loss and weights to train needs an optimizer",
            hint="Give it one, or leave out the loss.",
        )


def check_pipeline(program: Program, placement: Placement) -> None:
    """Raises UsageError for a pipeline of one IPU or updates in flight without one, UnsupportedError for an
    optimizer that no pipeline can have."""
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
