"""The names of the graph rewrites ("patterns") that programs switch on and off.

podrun computes the same numbers whichever are on, so a front end accepts the names, checks them and leaves the graph
alone. Source of the names: graphcore/popart, willow/src/patterns.
"""

from __future__ import annotations

import difflib

MANDATORY = (
    "AbsGradOp",
    "AllReduceToIdentityPattern",
    "Atan2Arg0GradOp",
    "Atan2Arg1GradOp",
    "ConvDataGrad",
    "ConvFlipWeightsDoubleFlip",
    "ConvFlipWeightsGradOp",
    "ConvTranspose",
    "CosGradOp",
    "CoshOp",
    "DivArg0GradOp",
    "DivArg1GradOp",
    "ExpGradOp",
    "Expm1GradOp",
    "FmodArg0GradOp",
    "Log1pGradOp",
    "LogGradOp",
    "LoopScanOutPattern",
    "MatMulLhsGradOp",
    "MatMulOp",
    "MatMulRhsGradOp",
    "MulArgGradOp",
    "PowArg0GradOp",
    "PowArg1GradOp",
    "RandomNormalLikeOpPattern",
    "RandomUniformLikeOpPattern",
    "ReciprocalGradOp",
    "ScanToLoopPattern",
    "SinGradOp",
    "SqrtGradOp",
    "SubtractArg1GradOp",
    "TanToSinOverCos",
    "ZerosLikeOpPattern",
)
"""Rewrites that PopART cannot run without."""

OPT_IN = ("LSTMOp", "Slice2SliceSubsample", "SplitGather", "TiedGather", "TiedGatherAccumulate")
"""Rewrites that only PatternsLevel.All or the user switches on."""

OPTIONAL = (
    "AcoshOpPattern",
    "AsinhOpPattern",
    "ContiguateIpuCopyIndices",
    "DecomposeBinaryConstScalar",
    "InitAccumulate",
    "InPlace",
    "L1LossToIdentity",
    "LambSerialisedWeight",
    "NegativeOneScale",
    "NlllWithSoftMaxGradDirect",
    "OpToIdentity",
    "OptimizerDecompose",
    "PackedDataBlock",
    "PadSum",
    "PostNRepl",
    "PreUniRepl",
    "RemoveUnnecessaryLossGradCast",
    "SequenceExpander",
    "SoftMaxGradDirect",
    "SparseAccumulate",
    "SplitGradOpToConcat",
    "SumToAdd",
    "UpdateInplacePrioritiesForIpu",
    "UpsampleToResize",
    "ViewSimplify",
)
"""Rewrites that are on by default and may be switched off."""

NAMES = tuple(sorted((*MANDATORY, *OPT_IN, *OPTIONAL)))
"""Every pattern."""

_registered: set[str] = set()


def register_rewrite(name: str) -> None:
    """Let programs name a rewrite of their own (one that a compiled library would provide). It has no effect here."""
    _registered.add(name)


def known_rewrite(name: str) -> str | None:
    """The rewrite that a program's name stands for; None for an unknown one."""
    # The name in lists of rewrites; the attribute has another one.
    name = name.replace("SoftmaxGrad", "SoftMaxGrad")
    return name if name in NAMES or name in _registered else None


def similar_rewrite(name: str) -> str | None:
    """The known name that is most like an unknown one, if any is."""
    near = difflib.get_close_matches(name.removeprefix("enable"), NAMES, n=1)
    return near[0] if near else None
