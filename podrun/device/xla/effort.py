"""How much of XLA's effort a piece gets: compiling a small one in full takes longer than a program computes it.

XLA passes every fusion through MLIR and LLVM with all optimizations, 0.15 s of a core for a piece of a few operations,
which then runs for 20 us, most of them in starting it. With fewer passes it compiles in a fifth of the time, and a
small piece runs as long as before. Bits depend on the passes, so the effort depends on the piece alone: on what it
computes and on whether it has loops. A loop says nothing of how often it runs, and its body is slower without all
passes.

`docs/benchmarks.md` has the times of both for pieces of many kinds and sizes.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from podrun.device.xla import clients

if TYPE_CHECKING:
    from jax.stages import Lowered

COMPILER_OPTIONS: dict[str, bool | int] = {
    "xla_cpu_multi_thread_eigen": False,
    "xla_allow_excess_precision": False,
    "xla_backend_optimization_level": 3,
    "xla_llvm_disable_expensive_passes": False,
    "xla_cpu_enable_fast_math": False,
}
"""Passed to XLA for every piece. Without excess precision halves are rounded between operators, as tiles do. The last
three are XLA's own values: ``jax_disable_most_optimizations`` or ``XLA_FLAGS`` may say others."""
_WITHOUT_MLIR: Mapping[str, bool | int] = {
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}
LEAST_OPTIONS: Mapping[str, bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    **_WITHOUT_MLIR,
}
LITTLE_WORK = 1 << 22
"""Work of a piece (`_work`) below which its code is as quick without MLIR and with LLVM's first level alone."""
LEAST_WORK = 1 << 15
"""Work below which code without any optimization takes some 20 us longer at most."""
_TRANSCENDENTAL = 10
_BYTES = 4
_LOOP = b"while"
"""In the bytes of every piece with a loop: they hold the names of operations in full."""


class Effort(enum.StrEnum):
    """How a piece is compiled, and by how many threads it is computed."""

    LEAST = "least"
    LITTLE = "little"
    ONE_THREAD = "one thread"
    TWO_THREADS = "two threads"

    @property
    def threads(self) -> int:
        """That compute the piece."""
        return clients.SHARED_BY if self is Effort.TWO_THREADS else 1

    def options(self) -> dict[str, bool | int]:
        """Those of XLA's compiler."""
        return {**COMPILER_OPTIONS, **_OPTIONS.get(self, {})}


_OPTIONS: Mapping[Effort, Mapping[str, bool | int]] = {
    Effort.LEAST: LEAST_OPTIONS,
    Effort.LITTLE: {"xla_backend_optimization_level": 1, **_WITHOUT_MLIR},
}


def effort_of(lowered: Lowered, stablehlo: bytes) -> Effort:
    """The effort for a ``jax.stages.Lowered``, as it is before anything is rewritten, of these exported bytes."""
    from jax import tree

    analysis = lowered.cost_analysis() or {}
    arrays = [*tree.leaves(lowered.in_avals), *tree.leaves(lowered.out_info)]
    size = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    if analysis.get("flops", 0.0) >= clients.WORTH_SHARING or size >= clients.WORTH_READING_TOGETHER:
        return Effort.TWO_THREADS
    work = _work(analysis, size)
    if work >= LITTLE_WORK or _LOOP in stablehlo:
        return Effort.ONE_THREAD
    return Effort.LITTLE if work >= LEAST_WORK else Effort.LEAST


def settings() -> tuple[object, ...]:
    """All that decides, besides a piece itself, with which options it is compiled: part of the key of kept pieces."""
    options = [sorted(effort.options().items()) for effort in Effort]
    return (*options, LITTLE_WORK, LEAST_WORK)


def _work(analysis: Mapping[str, float], size: int) -> float:
    """Operations, and as many for moving data as take about as long: some pieces only copy. ``size``: bytes of operands
    and results, as XLA counts none for transpositions."""
    moved = (analysis.get("bytes accessed", 0.0) + size) / _BYTES
    return analysis.get("flops", 0.0) + _TRANSCENDENTAL * analysis.get("transcendentals", 0.0) + moved
