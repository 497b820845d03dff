"""Training steps that a graph brings itself: it computes gradients and new values of its variables, and no rule of the
runtime is applied (`podrun.runtime.graph.Model.stepped`).

Every micro-batch is a batch. Each replica writes its own copy of a variable. They stay equal where the graph reduces
its gradients over the replicas, with a collective operator of its own (`podrun.compiler.model_collectives`); whenever
the host reads the variables, and before a checkpoint is saved, they are compared.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from podrun.core.errors import ApplicationRuntimeError, UnsupportedError, UsageError
from podrun.runtime.graph import Model, Node, reads
from podrun.runtime.settings import RunSettings


def check_own_step(model: Model, settings: RunSettings, loss: str | None) -> None:
    """UsageError for a model that brings its own step and is to be trained by the runtime too, or accumulates."""
    if not model.stepped:
        return
    first = min(model.stepped)
    if loss is not None:
        raise UsageError(
            f"The model brings its own training step, which writes {first!r} and others: the loss {loss!r} cannot be "
            "differentiated as well.",
            hint="Leave out the loss and the optimizer, or the step.",
        )
    if settings.micro_batches > 1:
        raise UsageError(
            f"The model's own training step writes {first!r} after each micro-batch: {settings.micro_batches} "
            "micro-batches cannot share one update.",
            hint="Add gradients up in the graph, or give it larger micro-batches.",
        )
    grouped = sorted(model.stepped & model.groups.keys())
    if grouped:
        raise UsageError(
            f"The model's own training step writes {grouped[0]!r}, which groups of replicas keep for themselves: all "
            "replicas must agree on what a step writes."
        )


def check_stages(model: Model, settings: RunSettings) -> None:
    """UnsupportedError for a variable of a placed model that two stages of a pipeline use: other micro-batches would be
    between reading it and writing it.
    """
    if not settings.overlaps:
        return
    users: dict[str, Node] = {}
    for node in model.graph.nodes:
        for name in sorted(reads(node) & model.stepped):
            first = users.setdefault(name, node)
            if first.stage != node.stage:
                raise UnsupportedError(
                    f"The model's own training step writes {name!r}, which {first.describe()} reads in stage "
                    f"{first.stage} of a pipeline and {node.describe()} in stage {node.stage}: other micro-batches "
                    "would be between them.",
                    hint="Put what reads and what writes it in one stage, or do not pipeline.",
                )


def check_written(stepped: Collection[str], written: Collection[str]) -> None:
    """UsageError for a variable that the step does not write."""
    missing = sorted(set(stepped) - set(written))
    if missing:
        raise UsageError(
            f"No operator writes the variable {missing[0]!r}, which the model's own training step is said to change.",
            hint="Let an operator call Context.state_update for it, and name the new value among the model's updates.",
        )


def check_alike(stepped: Collection[str], values: Mapping[str, np.ndarray]) -> None:
    """ApplicationRuntimeError unless all replicas hold the same bits; ``values``: ``[replicas, *shape]``."""
    for name in sorted(stepped & values.keys()):
        rows = values[name]
        first = rows[0].tobytes()
        for replica, row in enumerate(rows[1:], 1):
            if row.tobytes() != first:
                raise ApplicationRuntimeError(
                    f"The replicas 0 and {replica} hold different values of {name!r}, which the model's own training "
                    "step writes.",
                    hint="Reduce gradients over the replicas before the step uses them.",
                )
