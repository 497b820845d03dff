"""The kernel of convolutions whose windows have four rows, on one tile: its cycles, loops and stalls.

No plan of podrun chooses it; published traces of it are held against these formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fidelity_kinds.benchmark_only import benchmark_only
from podrun.costmodel.vertices import WORKERS


@benchmark_only
def four_row_cycles(
    rows: float, row_length: float, in_channels: int, out_channels: int, kernel_h: int, kernel_w: int
) -> tuple[float, float]:
    """AMP vertex whose weight block holds four kernel rows of four channels, FP16, on one tile: (all,
    supervisor).

    One call for each block of four input channels, four kernel rows, one kernel column and eight output
    channels; ``rows`` output rows of ``row_length`` pixels are shared by the workers. Source: poplin's
    estimator of the Nx1 vertex and the loops of its code.
    """
    loops = _FourRowLoops.of(in_channels, out_channels, kernel_h, kernel_w)
    partitions = math.ceil(rows / WORKERS)
    body = 34.0 + 4.0 * max(0.0, row_length - 3.0) - 9.0
    worker = 18.0 + partitions * (3.0 + body)
    clear = loops.out_groups * rows * row_length * 2.0
    supervisor = loops.cycles + loops.calls * FOUR_ROW_CALL
    return supervisor + loops.calls * WORKERS * worker + clear, supervisor


@dataclass(frozen=True, slots=True)
class _FourRowLoops:
    """How often each loop of the Nx1 vertex's supervisor turns: groups of input and output channels, groups of kernel
    rows, kernel columns.
    """

    in_groups: int
    out_groups: int
    row_groups: int
    columns: int

    @classmethod
    def of(cls, in_channels: int, out_channels: int, kernel_h: int, kernel_w: int) -> _FourRowLoops:
        """The loops of a convolution."""
        return cls(math.ceil(in_channels / 4), math.ceil(out_channels / 8), math.ceil(kernel_h / 4), kernel_w)

    @property
    def turns(self) -> tuple[int, int, int, int]:
        """Turns of the loops over input groups, output groups, kernel rows and kernel columns."""
        outputs = self.in_groups * self.out_groups
        return self.in_groups, outputs, outputs * self.row_groups, self.calls

    @property
    def calls(self) -> int:
        """Launches of the workers on a weight block."""
        return self.in_groups * self.out_groups * self.row_groups * self.columns

    @property
    def cycles(self) -> float:
        """Cycles of the supervisor beside its calls: start, clearing of each output group, and loops."""
        clearing = self.out_groups * 17.0 + (self.out_groups - 1) * BRANCH_STALL + 2.0
        turning = sum(
            turns * loop_cycles for turns, loop_cycles in zip(self.turns, FOUR_ROW_LOOPS, strict=True)
        )
        return 109.0 + WORKERS * 18.0 + 16.0 + clearing + turning

    @property
    def stalls(self) -> float:
        """Those of its cycles in which the supervisor issues nothing, calls included."""
        waited = zip(self.turns, FOUR_ROW_LOOPS, FOUR_ROW_INSTRUCTIONS, strict=True)
        return sum(turns * (all_of - issued) for turns, all_of, issued in waited) + self.calls * CALL_STALL


@benchmark_only
def four_row_parts(
    rows: float, row_length: float, in_channels: int, out_channels: int, kernel_h: int, kernel_w: int
) -> dict[str, float]:
    """Cycles of the parts of a `four_row_cycles` trace: of one call, of the supervisor's instructions, stalls and
    syncs, of one worker.
    """
    loops = _FourRowLoops.of(in_channels, out_channels, kernel_h, kernel_w)
    inner = 34.0 + 4.0 * max(0.0, row_length - 3.0) - 9.0
    most, least = math.ceil(rows / WORKERS), math.floor(rows / WORKERS)
    clear = 17.0 + rows * row_length * 2.0 / WORKERS
    # One round of the six threads for each call, each clearing and the end.
    syncs = WORKERS * (loops.calls + loops.out_groups + 1.0)
    return {
        "amp_call": FOUR_ROW_CALL,
        "instructions": loops.cycles + loops.calls * FOUR_ROW_CALL - loops.stalls - syncs,
        "stalls": loops.stalls,
        "syncs": syncs,
        "amp_inner": inner,
        "partition_loop": most * (3.0 + inner),
        "zero_loop": clear,
        "busiest_worker": loops.calls * (18.0 + most * (3.0 + inner)) + loops.out_groups * clear,
        "other_workers": loops.calls * (18.0 + least * (3.0 + inner)) + loops.out_groups * clear,
    }


FOUR_ROW_CALL = 64.0 + 60.0 + WORKERS * 9.0
"""Supervisor cycles of one call: weights loaded 64 bits at a time, set-up, and the workers' launch."""


FOUR_ROW_LOOPS = (14.0, 14.0, 14.0, 17.0)
"""Cycles of one turn of the supervisor's loops over input groups, output groups, kernel rows and kernel columns, beside
what is inside. Source: the note on performance in the vertex's code
(graphcore/poplibs, lib/poplin/codelets/asm/conv_partial_nx1_supervisor.S)."""


FOUR_ROW_INSTRUCTIONS = (11.0, 11.0, 13.0, 6.0)
"""Instructions among them. Published: the breakdown of a trace (graphcore/poplibs, df1d490d); the others are stalls."""


BRANCH_STALL = 5.0
"""Cycles that the supervisor waits after a branch that is taken, a write to a register of the matrix unit, or a launch:
one instruction is in its six pipeline stages at a time."""


CALL_STALL = (3.0 + 4.0 + 1.0) * BRANCH_STALL
"""Stalls of a call: three branches (to the code for four rows, to the fragment, back), four addresses of weight rows,
one launch."""
