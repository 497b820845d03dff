"""Automatic loss scaling: which gradients are watched, and the checks.

What is counted and how the factor moves is `podrun.compiler.extra_state`. Tracked are float16 gradients
only, as in PopART: of all tensors between the weights and the loss but those that only view-changing operators read, or
of what convolutions and matrix products read, or of tensors that the program names. Where several operators read a
tensor, their gradients are counted as the sum they become.

Names to anchor: ``lossScaleUpdateFactor`` (the factor a micro-batch was run with) and ``finalLossScale`` (the
optimizer's loss scaling times that factor).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from podrun.compiler.program import AutomaticScaling
from podrun.core.errors import UnimplementedError, UsageError
from podrun.runtime.settings import AdaptiveLossScale, TrackedGradients
from podrun.runtime.tensor_names import PREFIXES
from podrun.runtime.words import Words

if TYPE_CHECKING:
    from podrun.runtime.graph import Node
    from podrun.runtime.lowering import Lowered

TRANSFORM = "[AutomaticLossScale transform]"
"""Begins messages about automatic loss scaling, as PopART's do."""

FINAL = "finalLossScale"
"""Anchor: the loss scaling that a micro-batch was run with."""
LARGEST_HALF = 65504.0
LARGEST_SCALE = 2.0**15
"""The greatest power of two that a half holds: with halves the loss scale goes no higher."""

VIEWS = frozenset(
    (
        *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Concat"),
        *("Expand", "Detach", "DynamicSlice", "DynamicUpdate", "Reverse"),
    )
)
"""Operators whose gradients only move or repeat elements."""
PRODUCTS = frozenset(
    ("Conv", "ConvTranspose", "MultiConv", "MatMul", "Gemm", "LSTM", "GRU", "RNN", "Attention")
)


def automatic_scaling(
    lowered: Lowered,
    differentiable: Collection[str],
    trainable: Collection[str],
    loss: str,
    settings: AdaptiveLossScale,
) -> AutomaticScaling:
    """The compiler's settings. UsageError for tensors that cannot be tracked."""
    able = set(differentiable) - {loss} - set(lowered.inputs) - made_wide(lowered)
    able -= set(lowered.parameters) - set(trainable)
    chosen = _chosen(settings, lowered, able)
    halves = tuple(sorted(name for name in chosen if lowered.tensors[name].dtype == "float16"))
    if not halves:
        raise UsageError(
            f"{TRANSFORM} No tracked gradient tensors of type fp16 were found.",
            hint="Of the gradients that gradientTensorTrackingMethod "
            f"{settings.tracked.value} chooses none is FLOAT16.",
        )
    involved = {scaling_type(lowered, loss), *(lowered.parameters[name].dtype for name in trainable)}
    return AutomaticScaling(
        tracked=halves,
        edge=float(np.float32(LARGEST_HALF) * np.float32(settings.edge)),
        threshold=settings.threshold,
        period=settings.period,
        most=LARGEST_SCALE if "float16" in involved else None,
    )


def widening(lowered: Lowered, loss: str, anchors: Iterable[str], words: Words) -> Lowered:
    """The lowered model, whose half loss is differentiated in float32. ``words``: the front end's.

    UsageError where that is impossible, UnimplementedError for an anchored gradient that becomes float32.
    """
    from podrun.runtime.widening import wide_nodes

    try:
        lowered = replace(lowered, wide=wide_nodes(lowered.graph.nodes, lowered.tensors, loss))
    except ValueError as error:
        raise UsageError(
            str(error), hint=f"Leave out {words.wide_loss_scale}, or cast the loss to FLOAT."
        ) from None
    for anchor in anchors:
        subject = anchor.removeprefix(PREFIXES["Gradient"])
        if subject != anchor and subject in made_wide(lowered):
            raise UnimplementedError(
                f"Anchor {anchor!r}: with {words.wide_loss_scale} the gradient of {subject!r} is on the way of the "
                "loss scaling, and not there to be anchored.",
                hint="Leave out that anchor.",
            )
    return lowered


def made_wide(lowered: Lowered) -> set[str]:
    """The half tensors whose gradients are float32."""
    return {name for node in lowered.wide for name in node.outputs if name}


def scaling_type(lowered: Lowered, loss: str) -> str:
    """The type in which the loss scaling enters the backward pass: the loss's type, unless that is widened."""
    return "float32" if lowered.wide else lowered.tensors[loss].dtype


def returning(lowered: Lowered, scaling: AutomaticScaling | None) -> Lowered:
    """The lowered model, which also returns the tensors whose gradients are counted."""
    if scaling is None:
        return lowered
    more = {n: lowered.tensors[n] for n in scaling.tracked if n not in lowered.parameters}
    returns = tuple(dict.fromkeys((*lowered.returns, *more)))
    return replace(lowered, returns=returns, outputs={**lowered.outputs, **more})


def _chosen(settings: AdaptiveLossScale, lowered: Lowered, able: set[str]) -> Iterable[str]:
    method, names = settings.tracked, settings.names
    by_name = method is TrackedGradients.NAMED
    if names is not None and not by_name:
        raise UsageError(
            "toTrackTensors goes with gradientTensorTrackingMethod GradientsOfUserSpecifiedTensors, not "
            f"{method.value}."
        )
    if by_name:
        if not names:
            raise UsageError("GradientsOfUserSpecifiedTensors needs toTrackTensors.")
        for name in names:
            _check_named(name, lowered, able)
        return names
    readers: dict[str, set[str]] = {}
    for node in lowered.graph.nodes:
        for name in node.inputs:
            readers.setdefault(name, set()).add(_kind(node, lowered))
    if method is TrackedGradients.PRODUCTS:
        return [name for name in able if readers.get(name, set()) & PRODUCTS]
    return [name for name in able if not readers.get(name, set()) <= VIEWS]


def _kind(node: Node, lowered: Lowered) -> str:
    """An operator's type; a Cast to its input's own type is an Identity."""
    ends = [lowered.tensors.get(name) for name in (*node.inputs, *node.outputs)]
    if node.op_type == "Cast" and len({end.dtype for end in ends if end is not None}) == 1:
        return "Identity"
    return node.op_type


def _check_named(name: str, lowered: Lowered, able: set[str]) -> None:
    if name in able:
        return
    if name in lowered.tensors:
        raise UsageError(f"toTrackTensors: no gradient of tensor {name!r} is computed.")
    near = difflib.get_close_matches(name, sorted(lowered.tensors), n=1)
    guess = f" Did you mean {near[0]!r}?" if near else ""
    raise UsageError(f"toTrackTensors: the model has no tensor {name!r}.{guess}")
