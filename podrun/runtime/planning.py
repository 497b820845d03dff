"""What settings and hints say of a program: IPUs, order of micro-batches, transfers, how products are planned, and what
the backward pass computes again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import Beside, Transfers
from podrun.compiler.program import PipelineOrder as Order
from podrun.core.executable import Reduction
from podrun.costmodel.settings import PlanOptions, Recompute
from podrun.runtime.graph import Node
from podrun.runtime.placing import phases_of
from podrun.runtime.planner_options import CONVOLUTIONS, PRODUCTS, memory_share
from podrun.runtime.settings import Recomputation, RunPlan, RunSettings
from podrun.runtime.tensor_infos import anchor_alias

if TYPE_CHECKING:
    from podrun.runtime.lowering import Lowered


def filled_ipus(ipus_per_replica: int) -> int:
    """The IPUs that fill machines: a power of two, so that a model of three IPUs becomes one of four with an
    idle one.
    """
    return 1 << (ipus_per_replica - 1).bit_length()


def arrangement_of(settings: RunSettings, plan: RunPlan, stages: int) -> dict[str, Any]:
    """The parts of a Program that settings determine: replicas, micro-batches, their order, locations in memory."""
    return {
        "replicas": settings.replicas,
        # The batches of a run that are in a pipeline together are the micro-batches of one run.
        "accumulation_factor": plan.batches if settings.overlaps_batches else settings.micro_batches,
        # In one stage micro-batches of a batch follow each other, pipelined or not: then it is not, to the last bit.
        "pipelined": settings.overlaps and (stages > 1 or settings.overlaps_batches),
        "pipeline_schedule": settings.order or Order.GROUPED,
        "phases": phases_of(settings),
        "reduction": Reduction.MEAN if settings.mean and settings.running_mean else Reduction.SUM,
        "locations": settings.locations,
        "unsent": frozenset(settings.unsent),
    }


def transfers_of(
    inputs: Mapping[str, Beside], lowered: Lowered, plan: RunPlan, settings: RunSettings
) -> Transfers | None:
    """How transfers are arranged: by inputs, tensors that come back, and tiles for input and output. None if nothing
    says so."""
    beside = dict(inputs)
    for name, kind in plan.returned.items():
        beside[anchor_alias(name, lowered.inputs)] = kind.beside
    beside = {name: what for name, what in beside.items() if what is not Beside.NOTHING}
    return Transfers(settings.io_tiles, beside) if beside or settings.io_tiles else None


NORMS = frozenset({"BatchNormalization", "InstanceNormalization", "GroupNormalization", "LayerNormalization"})
NONLINEARITIES = frozenset(
    {"Relu", "Gelu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Softplus", "Swish"}
)


def plans_of(nodes: Iterable[Node], settings: RunSettings) -> PlanOptions:
    """How products are planned: partials by setting, memory proportions by setting and by the hints of ``nodes``."""
    nodes = tuple(nodes)
    hinted = ((node.label, node.hints.available_memory) for node in nodes)
    own = _shares(nodes, settings) | {
        label: round(float(value), 6) for label, value in hinted if value is not None
    }
    return PlanOptions(
        partials_type=settings.partials,
        convolution_partials=settings.convolution_partials,
        proportions=tuple(sorted(own.items())),
    )


_PLANNED = {"Conv": CONVOLUTIONS, "ConvTranspose": CONVOLUTIONS, "MatMul": PRODUCTS, "Gemm": PRODUCTS}
"""Which planner's options an operator has, by kind."""


def _shares(nodes: Iterable[Node], settings: RunSettings) -> dict[str, float]:
    """The part of tile memory that the options of its planner give an operator, by label."""
    shares = {source: memory_share(options) for source, options in settings.planner_options.items()}
    planned = ((node.label, shares.get(_PLANNED.get(node.kind, ""))) for node in nodes)
    return {label: share for label, share in planned if share is not None}


def recompute_of(nodes: Iterable[Node], settings: RunSettings) -> Recompute:
    """What is computed again in the backward pass: by setting, and by the hints of ``nodes``."""
    listed = list(nodes)
    scopes = {node.label for node in listed if node.hints.recompute}
    kept = {node.label for node in listed if node.hints.recompute is False}
    rule = settings.recomputation
    if rule is Recomputation.NORMS:
        scopes |= _norms(listed) - kept
    name = "none" if rule is Recomputation.NORMS else rule.value
    return Recompute(name, frozenset(scopes), frozenset(kept), outlined=settings.outlining)


def _norms(nodes: list[Node]) -> set[str]:
    """Norms, and non-linearities that read them directly."""
    normed = {output for node in nodes if node.kind in NORMS for output in node.outputs if output}
    return {
        node.label
        for node in nodes
        if node.kind in NORMS or (node.kind in NONLINEARITIES and not normed.isdisjoint(node.inputs))
    }
