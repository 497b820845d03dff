"""How a model is divided over IPUs: stages, phases and the strategies that run them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from podrun.poptorch.api.enums import AutoStage, Liveness
from podrun.poptorch.api.signatures import checks_methods
from podrun.poptorch.errors import ArgumentError

PIPELINED, SHARDED, PHASED = 0, 1, 2
"""Execution modes as `ExecutionStrategy.backendOptions` numbers them."""


@checks_methods()
class Stage:
    """Blocks that run together: ``Stage("encoder", "head")``. AssertionError for ids that are not text."""

    def __init__(self, *block_ids: str) -> None:
        if not all(isinstance(block, str) for block in block_ids):
            raise ArgumentError("block ids are text")
        self._blocks = tuple(block_ids)
        self._ipu: int | None = None

    @property
    def blocks(self) -> tuple[str, ...]:
        """The ids of the blocks."""
        return self._blocks

    def ipu(self, ipu: int) -> Stage:
        """Run the stage's blocks on this IPU."""
        self._ipu = int(ipu)
        return self


@checks_methods()
class Phase:
    """Stages that run at the same time: ``Phase(Stage("a"), Stage("b"))``, or block ids, which form one stage."""

    def __init__(self, *arg: object) -> None:
        if len(arg) == 1 and isinstance(arg[0], (list, tuple)):
            arg = tuple(arg[0])
        if not arg:
            raise ArgumentError("a phase needs stages or block ids")
        blocks = [part for part in arg if isinstance(part, str)]
        stages = (Stage(*blocks),) if len(blocks) == len(arg) else arg
        self.stages = tuple(stage for stage in stages if isinstance(stage, Stage))
        if len(self.stages) != len(stages):
            raise ArgumentError("a phase takes stages or block ids")

    def stage(self, idx: int) -> Stage:
        """The stage at a place. AssertionError for a place that the phase does not have."""
        if idx not in range(len(self.stages)):
            raise ArgumentError(f"the phase has {len(self.stages)} stages, from 0; there is no stage {idx}")
        return self.stages[idx]

    def ipus(self, *ipus: int) -> Phase:
        """Set one IPU for each stage. AssertionError for another number of them."""
        if len(ipus) != len(self.stages):
            raise ArgumentError(f"{len(self.stages)} stages need as many IPUs, not {len(ipus)}")
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self


class ExecutionStrategy:
    """The base of all strategies. Use one of the subclasses."""

    execution_mode = PIPELINED

    def backendOptions(self) -> dict[str, Any]:
        """The strategy as numbers, for `Options.toDict`."""
        return {"execution_mode": self.execution_mode}

    def placement(self, block: str, ipu: int | None) -> tuple[int, int, int]:
        """IPU, stage and phase of a block that asks for an IPU or for none."""
        raise NotImplementedError


@checks_methods()
class PipelinedExecution(ExecutionStrategy):
    """Stages one after the other, micro-batches overlapping: ``PipelinedExecution(AutoStage.AutoIncrement)``, or with
    stages: ``PipelinedExecution(Stage("a").ipu(0), Stage("b").ipu(1))``, or block ids, one stage each."""

    def __init__(self, *args: object) -> None:
        if len(args) == 1 and isinstance(args[0], (list, tuple)):
            args = tuple(args[0])
        self._auto = AutoStage.SameAsIpu
        self._stages: list[Stage] = []
        self._by_block: dict[str, int] = {}
        if len(args) == 1 and isinstance(args[0], AutoStage):
            self._auto = args[0]
        else:
            for stage in args:
                self._add(Stage(stage) if isinstance(stage, str) else stage)
        self._seen: dict[str, int] = {}

    def _add(self, stage: object) -> None:
        if not isinstance(stage, Stage):
            raise ArgumentError("PipelinedExecution takes stages, block ids or an AutoStage")
        for block in stage.blocks:
            if block in self._by_block:
                raise ArgumentError(f"block {block!r} is in two stages")
            self._by_block[block] = len(self._stages)
        self._stages.append(stage)

    def stage(self, block_id: str) -> Stage:
        """The stage of a block. AssertionError for a block that is in none."""
        return self._stages[self._stage_of(block_id)]

    def _stage_of(self, block: str) -> int:
        if block not in self._by_block:
            raise ArgumentError(f"Unknown block {block!r}: list of expected blocks {sorted(self._by_block)}")
        return self._by_block[block]

    def restart(self) -> None:
        """Forget the blocks met so far, because a model is about to be captured."""
        self._seen = {}

    def placement(self, block: str, ipu: int | None) -> tuple[int, int, int]:
        """See `ExecutionStrategy.placement`. Blocks before the first one are stage 0 on IPU 0."""
        if self._stages:
            index = self._stage_of(block)
            pinned = self._stages[index]._ipu
            return next(i for i in (pinned, ipu, index) if i is not None), index, 0
        if self._auto == AutoStage.SameAsIpu:
            if ipu is None:
                raise ArgumentError(f"block {block!r} needs an ipu_id: the strategy is AutoStage.SameAsIpu")
            return ipu, ipu, 0
        index = self._seen.setdefault(block, len(self._seen) + 1)
        return (index if ipu is None else ipu), index, 0


class ShardedExecution(PipelinedExecution):
    """Stages one after the other, without overlap."""

    execution_mode = SHARDED


@checks_methods()
class _PhasedExecution(ExecutionStrategy):
    """Phases one after the other; values for a later phase wait in streaming memory."""

    execution_mode = PHASED
    serial = True

    def __init__(self, *phases: object) -> None:
        if len(phases) == 1 and isinstance(phases[0], (list, tuple)):
            phases = tuple(phases[0])
        if not phases:
            raise ArgumentError("phases have to be given")
        for phase in phases:
            if not isinstance(phase, (Phase, Stage, str, list, tuple)):
                raise ArgumentError(f"a phase is a poptorch.Phase, stages or block ids, not {phase!r}")
        self._phases = [phase if isinstance(phase, Phase) else Phase(*_together(phase)) for phase in phases]
        self._liveness = Liveness.AlwaysLive
        self._separate_backward = False
        self._places: dict[str, tuple[int, int, int | None]] = {}
        for number, phase in enumerate(self._phases):
            for index, stage in enumerate(phase.stages):
                for block in stage.blocks:
                    if block in self._places:
                        raise ArgumentError(f"block {block!r} is in two stages")
                    self._places[block] = (number, index, stage._ipu)

    def phase(self, phase: int) -> Phase:
        """A phase by its number. AssertionError for one that there is not."""
        if phase not in range(len(self._phases)):
            raise ArgumentError(f"there are {len(self._phases)} phases, from 0; there is no phase {phase}")
        return self._phases[phase]

    def stage(self, block_id: str) -> Stage:
        """The stage of a block."""
        number, index, _ = self._placed(block_id)
        return self._phases[number].stages[index]

    def useSeparateBackwardPhase(self, use: bool = True) -> Any:
        """Give the backward pass phases of its own."""
        self._separate_backward = use
        return self

    def _placed(self, block: str) -> tuple[int, int, int | None]:
        if block not in self._places:
            raise ArgumentError(f"Unknown block {block!r}: list of expected blocks {sorted(self._places)}")
        return self._places[block]

    def backendOptions(self) -> dict[str, Any]:
        """See `ExecutionStrategy.backendOptions`."""
        return {
            "execution_mode": self.execution_mode,
            "serial_phases_execution": self.serial,
            "separate_backward_phase": self._separate_backward,
            "tensors_liveness": self._liveness.value,
        }


def _together(value: object) -> Iterable[object]:
    """The stages or block ids of a phase that is given by one of them, or by several."""
    return value if isinstance(value, (list, tuple)) else (value,)


@checks_methods()
class SerialPhasedExecution(_PhasedExecution):
    """All stages of a phase, then the next phase."""

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Set when tensors leave the tiles."""
        self._liveness = liveness
        return self

    def placement(self, block: str, ipu: int | None) -> tuple[int, int, int]:
        """See `ExecutionStrategy.placement`."""
        number, index, pinned = self._placed(block)
        return (pinned if pinned is not None else index if ipu is None else ipu), index, number


@checks_methods()
class ParallelPhasedExecution(_PhasedExecution):
    """Phases take turns on even and odd IPUs."""

    serial = False

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Move tensors to streaming memory after the forward pass."""
        if not isinstance(off_chip, bool):
            raise ArgumentError("sendTensorsOffChipAfterFwd takes True or False")
        self._liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self

    def placement(self, block: str, ipu: int | None) -> tuple[int, int, int]:
        """See `ExecutionStrategy.placement`. Error for an even phase on an odd IPU and the reverse."""
        from podrun.poptorch.errors import Error

        number, index, pinned = self._placed(block)
        chosen = next(i for i in (pinned, ipu, 2 * index + number % 2) if i is not None)
        if chosen % 2 != number % 2:
            raise Error(
                f"phase {number} of a ParallelPhasedExecution cannot run on IPU {chosen}",
                hint="Even phases run on even IPUs, odd phases on odd ones.",
            )
        return chosen, index, number
