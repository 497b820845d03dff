"""A captured module and what is asked for: the request to compile, and the division over IPUs that blocks name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field
from typing import Any

import torch

from podrun.core.quick_dataclass import dataclass
from podrun.poptorch.api.annotations import CaptureAnnotations, following
from podrun.poptorch.api.enums import CommGroupType, VariableRetrievalMode
from podrun.poptorch.api.optim import ProgramOptimizer
from podrun.poptorch.api.options import Options
from podrun.poptorch.api.strategies import PIPELINED, PipelinedExecution
from podrun.poptorch.capture.capture import Capture, capture
from podrun.poptorch.capture.graph import BlockPlacement, GraphNode
from podrun.poptorch.compile.aten_table import supported
from podrun.poptorch.compile.batches import BatchDimensions
from podrun.poptorch.errors import Error
from podrun.private_apis.torch import unvalidated_distributions


@dataclass(frozen=True, slots=True)
class ReplicaGroups:
    """How replicas share a parameter: ``shards`` replicas in each group. The host's parameter has a leading dimension
    with a row for each group."""

    kind: CommGroupType
    shards: int
    retrieval: VariableRetrievalMode

    def groups(self, replicas: int) -> int:
        """How many groups there are. Error if the groups do not divide the replicas."""
        if self.kind == CommGroupType.All:
            return 1
        size = 1 if self.kind == CommGroupType.NoGrouping else self.shards
        if size < 1 or replicas % size:
            raise Error(f"replicaGrouping: groups of {size} do not divide {replicas} replicas")
        return replicas // size


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """The module to compile, and how. ``executable``: an earlier compiled program to use instead of compiling."""

    module: torch.nn.Module
    options: Options
    batches: BatchDimensions
    optimizer: ProgramOptimizer | None = None
    groups: Mapping[str, ReplicaGroups] = field(default_factory=dict)
    executable: bytes | None = None

    @property
    def training(self) -> bool:
        """Whether weights are trained."""
        return self.optimizer is not None


def capture_module(
    module: torch.nn.Module, args: Sequence[Any], kwargs: dict[str, Any], options: Options
) -> Capture:
    """Capture a module with its annotations. Error for operators that IPUs do not have."""
    strategy = options._execution_strategy
    if isinstance(strategy, PipelinedExecution):
        strategy.restart()
    annotations = CaptureAnnotations(strategy)
    with following(annotations), unvalidated_distributions():
        captured = capture(
            module,
            args,
            kwargs,
            supported=supported,
            placement=annotations.placement,
            scope=annotations.scope,
        )
    if captured.missing:
        node = next(n for n in captured.graph.nodes if not supported(n.operator))
        raise Error(
            f"operator {node.operator} is not supported on the IPU",
            location=f"module '{node.origin.module}', {node.origin.line}",
            hint="podrun help reference/poptorch lists the operators; poptorch.custom_op takes one of your own.",
        )
    return captured


@dataclass(frozen=True, slots=True)
class Division:
    """How a model is divided over IPUs. ``stages``: forward stages of a pipeline; ``phases``: of phased execution."""

    ipus: int
    stages: int
    phases: int


def division_of(nodes: Sequence[GraphNode]) -> Division:
    """The division over the IPUs that blocks name. A forward stage begins wherever the IPU changes, from IPU 0 on."""
    used, current, changes, phases = set(), 0, 0, 0
    for node in nodes:
        place = node.origin.placement or BlockPlacement()
        used.add(place.ipu)
        changes += place.ipu != current
        current, phases = place.ipu, max(phases, place.phase)
    return Division(max([1, len(used), *(ipu + 1 for ipu in used)]), changes + 1, phases + 1)


_MORE_STAGES = (
    " Please note that a model with {} pipeline stages in PopTorch will have an additional {} stages when "
    "training."
)


def check_micro_batches(division: Division, options: Options, training: bool) -> None:
    """Error for a pipeline that too few micro-batches flow through."""
    if division.ipus == 1 or options._execution_strategy.execution_mode != PIPELINED:
        return
    if training:
        needed, name = 2 * division.stages - 1, "Training.gradientAccumulation"
        batches = options.Training.gradient_accumulation
    else:
        needed, name, batches = division.stages, "deviceIterations", options.device_iterations
    if batches < needed:
        more = _MORE_STAGES.format(division.stages, division.stages - 1) if training else ""
        raise Error(
            f"poptorch.Options().{name} must be greater than or equal to the number of pipeline stages ({needed}) when "
            f"using poptorch.PipelinedExecution.{more}",
            hint=f"It is {batches}. Use {needed} or more, or poptorch.ShardedExecution().",
        )


Taker = Callable[[Capture, CompileRequest, tuple[Any, Any]], None]
"""A function that gets the request to compile, and the call from which the module was captured, with one
micro-batch.
"""


_takers: list[Taker] = []


@contextmanager
def instead_of_compiling(take: Taker) -> Iterator[None]:
    """Let a function see every request first; it may raise."""
    _takers.append(take)
    try:
        yield
    finally:
        _takers.pop()


def offer(captured: Capture, request: CompileRequest, call: tuple[Any, Any]) -> None:
    """Show the request to the functions of `instead_of_compiling`."""
    for take in _takers:
        take(captured, request, call)
