"""Names of tensors with a meaning: prefixes of gradients, optimizer state and anchors, and names of streamed scalars;
what a buffer of a machine is to those who wrote the program.

They are PopART's, which programs, checkpoints and reports know (graphcore/popart,
willow/include/popart/tensornames.hpp); the runtime uses them for all front ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from podrun.core.names import (
    ANCHOR,
    CROSSING,
    GRADIENT_ANCHOR,
    GRADIENT_COUNT,
    GRADIENT_SUM,
    NORM_ANCHOR,
    REDUCED_ANCHOR,
    UPDATED_ANCHOR,
)
from podrun.runtime.graph import Node

PREFIXES: dict[str, str] = {
    "Gradient": GRADIENT_ANCHOR,
    "UpdatedVar": UPDATED_ANCHOR,
    "Accum": "Accum___",
    "Accl": "Accl___",
    "Accl1": "Accl1___",
    "Accl2": "Accl2___",
    "Accl3": "Accl3___",
    "Step": "Step___",
    "AcclToReduce": "AcclIntoReduce___",
    "AcclToUpdate": "AcclIntoUpdate___",
    "AcclFinalOut": "AcclOutOfAcclUpdate___",
    "FinalReducedGrad": REDUCED_ANCHOR,
    "AdamUpdater": "AdamUpdater___",
    "AdaptiveUpdater": "AdaptiveUpdater___",
    "LambR1Sq": "LambR1Sq___",
    "LambR2Sq": "LambR2Sq___",
    "Stashed": "Stashed___",
    "Restored": "Restored___",
    "LossScaling": "lossScaling_",
    "RandomSeed": "randomSeed___",
    "SeedModifier": "randomSeedModifier___",
    "RemoteArg": "RemoteArg___",
    "AutomaticLossScale": "AutomaticLossScaleProxy___",
}
"""Accessor name (without ``reserved`` and ``Prefix``) -> prefix."""

SCALARS: dict[str, str] = {
    "LearningRate": "learningRate",
    "WeightDecay": "weightDecay",
    "LossScaling": "lossScaling",
    "MaxWeightNorm": "maxWeightNorm",
    "Step": "step",
    "AdamBeta1": "adamBeta1",
    "AdamBeta2": "adamBeta2",
    "AdamEps": "adamEps",
    "ScaledLearningRate0": "scaledLearningRate0",
    "WeightDecayScaleFactor0": "weightDecayScaleFactor0",
    "ScaledLearningRate1": "scaledLearningRate1",
    "ScaledWeightDecay1": "scaledWeightDecay1",
    "ScaledMomentum1": "scaledMomentum1",
    "DampeningScaleFactor1": "dampeningScaleFactor1",
    "ScaledLearningRate2": "scaledLearningRate2",
    "WeightDecayScaleFactor2": "weightDecayScaleFactor2",
    "DampeningScaleFactor2": "dampeningScaleFactor2",
    "ScaledMomentum2": "scaledMomentum2",
}
"""Accessor name -> name of the streamed optimizer scalar."""

INTERNAL_PREFIXES = ("Counter___", "t__", NORM_ANCHOR)
"""Reserved without an accessor."""


def default_scalar(parameter: str, dtype: str = "FLOAT") -> str:
    """Name of a streamed hyper-parameter that weights share: ``learningRate___default___FLOAT``."""
    return f"{parameter}___default___{dtype}"


def specific_scalar(parameter: str, weight: str) -> str:
    """Name of a streamed hyper-parameter of one weight: ``learningRate___specific___w``."""
    return f"{parameter}___specific___{weight}"


def gradient(tensor: str) -> str:
    """Name of the gradient of the loss with respect to ``tensor``."""
    return PREFIXES["Gradient"] + tensor


def reserved_prefixes() -> tuple[str, ...]:
    """Every string that no tensor of a model may start with."""
    scalars = [f"{name}___{kind}___" for name in SCALARS.values() for kind in ("default", "specific")]
    # Weights saved by modelToHost carry their optimizer state under these names, so state prefixes are
    # checked by the loader, which knows initializers from other tensors.
    return (*PREFIXES.values(), *scalars, *INTERNAL_PREFIXES)


def buffer_in_words(buffer: str, nodes: Iterable[Node]) -> str:
    """A buffer of a machine for messages: the operator that makes it, with its place in the program, or the weight
    whose gradient it is; else its name. ``nodes``: of the model.
    """
    for prefix in (GRADIENT_SUM, GRADIENT_COUNT, GRADIENT_ANCHOR):
        if buffer.startswith(prefix):
            return f"the gradient of {buffer.removeprefix(prefix)}"
    tensor = buffer.removeprefix(ANCHOR).removeprefix(CROSSING)
    node = next((node for node in nodes if tensor in node.outputs), None)
    if node is None:
        return tensor
    made_by = node.label if node.label != tensor else node.op_type
    return f"{tensor}, made by {made_by}" + (f" ({node.position})" if node.position else "") + ","


STATE_PREFIXES = ("Accl___", "Accl1___", "Accl2___", "Accl3___", "Step___", "lossScaleUpdate")
"""Prefixes of optimizer state that modelToHost writes and a later session reads."""


def reserved_prefix_of(tensor: str) -> str | None:
    """The reserved prefix that ``tensor`` starts with, or None."""
    return next((prefix for prefix in reserved_prefixes() if tensor.startswith(prefix)), None)
