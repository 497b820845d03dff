"""SessionOptions and annotations that decide about memory, as the compiler wants them: recomputation, locations.

None of them changes a number; they change what tiles hold, and the cycles of recomputed work.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from podrun.compiler.program import Locations
from podrun.core.names import gradient_buffer
from podrun.costmodel.recompute import Recompute
from podrun.costmodel.tile_memory import Location
from podrun.session import names
from podrun.session.attributes import RECOMPUTE
from podrun.session.enums import (
    RecomputationType,
    RecomputeType,
    ReplicatedTensorSharding,
    TensorStorage,
)
from podrun.session.options.settings import TensorLocation, TensorLocationSettings

if TYPE_CHECKING:
    from podrun.session.options.session_options import SessionOptions

RULES = {
    RecomputationType.NoRecompute: "none",
    RecomputationType.Standard: "standard",
    RecomputationType.NormOnly: "none",
    RecomputationType.Pipeline: "pipeline",
    RecomputationType.RecomputeAll: "all",
}
NORMS = frozenset({"BatchNormalization", "InstanceNormalization", "GroupNormalization", "LayerNormalization"})
NONLINEARITIES = frozenset(
    {"Relu", "Gelu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "Selu", "Softplus", "Swish"}
)


def recompute_of(nodes: Iterable[Any], options: SessionOptions) -> Recompute:
    """What a session computes again: by option, and by annotation of the lowered graph's ``nodes``.

    NormOnly: norms, and non-linearities that read them directly, as PopART does.
    """
    listed = list(nodes)
    annotated = {node.label: int(node.attributes.get(RECOMPUTE, 0)) for node in listed}
    scopes = {label for label, value in annotated.items() if value == RecomputeType.Recompute.value}
    kept = {label for label, value in annotated.items() if value == RecomputeType.Checkpoint.value}
    if options.autoRecomputation is RecomputationType.NormOnly:
        scopes |= _norms(listed) - kept
    return Recompute(RULES[options.autoRecomputation], frozenset(scopes), frozenset(kept))


def _norms(nodes: list[Any]) -> set[str]:
    made = {output for node in nodes if node.kind in NORMS for output in node.outputs if output}
    return {
        node.label
        for node in nodes
        if node.kind in NORMS or (node.kind in NONLINEARITIES and not made.isdisjoint(node.inputs))
    }


def locations_of(options: SessionOptions) -> Locations:
    """Where a session's variables live. Sharding is over the replicas of the sharding domain (default: all)."""
    replicas = options.getGlobalReplicationFactor()
    if replicas == 1:
        _warn_of_sharding(options)
    return Locations(
        _location(options.weightTensorLocationSettings, replicas),
        _location(options.optimizerStateTensorLocationSettings, replicas),
        _location(options.accumulatorTensorLocationSettings, replicas),
        _location(options.activationTensorLocationSettings, replicas),
        {
            _own_name(name): _place(where, replicas, 0, 0)
            for name, where in sorted(options.tensorLocationSettingsOverride.items())
            if isinstance(where, TensorLocation)
        },
    )


def _warn_of_sharding(options: SessionOptions) -> None:
    """Say once that there is nothing to cut over one replica, as PopART does."""
    settings = {
        name: getattr(options, name).location
        for name in (
            "weightTensorLocationSettings",
            "optimizerStateTensorLocationSettings",
            "accumulatorTensorLocationSettings",
        )
    }
    chosen = [
        n for n, where in settings.items() if where.replicatedTensorSharding is ReplicatedTensorSharding.On
    ]
    if chosen:
        logging.getLogger("podrun.popart").warning(
            "%s ask for replicated tensor sharding, but the session has one replica: tensors stay whole.",
            ", ".join(chosen),
        )


def _own_name(name: str) -> str:
    """The compiler's name of an accumulator that PopART's name stands for; any other name as it is."""
    accumulator = names.PREFIXES["Accum"]
    return gradient_buffer(name.removeprefix(accumulator)) if name.startswith(accumulator) else name


def _location(settings: TensorLocationSettings, replicas: int) -> Location:
    return _place(
        settings.location,
        replicas,
        settings.minElementsForOffChip,
        settings.minElementsForReplicatedTensorSharding,
    )


def _place(where: TensorLocation, replicas: int, off_chip: int, sharded: int) -> Location:
    """popart_exception for a sharding domain that does not divide the replicas."""
    shards = 1
    if where.replicatedTensorSharding is ReplicatedTensorSharding.On:
        shards = where.shardingDomain.toReplicaGrouping(replicas).groupSize
    return Location(where.storage is TensorStorage.OffChip, shards, off_chip, sharded)
