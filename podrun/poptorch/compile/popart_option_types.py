"""Types of PopART's session options: those without effect, by name, and how a value takes its type.

A type is a class of Python, or for an enumeration the range of its members' numbers.
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Mapping

_FLAGS = """
    stashAllTensorsInferencePipeline enablePrefetchDatastreams rearrangeAnchorsOnHost rearrangeStreamsOnHost
    disableGradAccumulationTensorStreams disableOptimizerStateTensorStreams useHostCopyOps groupHostSync
    enableNonStableSoftmax enableStableNorm decomposeGradSum throwIfLog2ScaleTensorNotInRange
    groupNormStridedChannelGrouping delayVarUpdates scheduleNonWeightUpdateGradientConsumersEarly
    batchSerializationSettings.concatOnVirtualGraphChange batchSerializationSettings.concatOnExecutionPhaseChange
    batchSerializationSettings.concatOnPipelineStageChange
    replicatedCollectivesSettings.prepareScheduleForMergingCollectives
    replicatedCollectivesSettings.mergeAllReduceCollectives
    replicatedCollectivesSettings.mergeReduceScatterCollectives
    replicatedCollectivesSettings.mergeAllGatherCollectives
    enableOutliningCopyCostPruning separateCallOpPdfs aliasZeroCopy useLoopCandidateCreator
    enableFullyConnectedPass enableMergeExchange enableEfficientOverlapIOTopoCons
    enableConstantFoldingOfMultipleConsumers enableConstantFoldingOfReductions enableInplaceAmbiguityChecking
    strictOpVersions opxAliasChecking opxModifyChecking compileEngine enableEngineCaching enableVariablesCaching
    experimentalSettings.createHostTransferableTensorWithOffset dotOpNames
"""
_NUMBERS = """
    defaultBufferingDepth defaultPrefetchBufferingDepth batchSerializationSettings.factor
    mergeVarUpdateMemThreshold looseThresholdAtPeak swapLimitScheduler transitiveClosureOptimizationThreshold
    firstDotOp finalDotOp
"""
_REAL_NUMBERS = "outlineThreshold outlineSequenceBreakCost timeLimitScheduler"
_TEXTS = "kahnTieBreaker cachePath customCodeletCompileFlags logDir saveInitializersToFile"
_LISTS = "updatableNamedBuffers updatableBuffers accumulateOuterFragmentSettings.excludedVirtualGraphs"
_DICTIONARIES = "bufferingDepthMap prefetchBufferingDepthMap reportOptions gclOptions"

_MEMBERS = {
    "executionPhaseSettings.optimizerStateIOSchedule": range(2),
    "executionPhaseSettings.accumulatorIOSchedule": range(2),
    "batchSerializationSettings.transformContext": range(2),
    "batchSerializationSettings.method": range(3),
    "batchSerializationSettings.batchSchedule": range(4),
    "mergeVarUpdate": range(4),
    "subgraphCopyingStrategy": range(2),
}

WITHOUT_EFFECT: Mapping[str, type | range] = {
    **dict.fromkeys(_FLAGS.split(), bool),
    **dict.fromkeys(_NUMBERS.split(), int),
    **dict.fromkeys(_REAL_NUMBERS.split(), float),
    **dict.fromkeys(_TEXTS.split(), str),
    **dict.fromkeys(_LISTS.split(), list),
    **dict.fromkeys(_DICTIONARIES.split(), dict),
    **_MEMBERS,
    "dotChecks": set,
}
"""Options that change no number and no modelled time, or that only `popart_options` itself reads: type by name."""


def in_type(kind: type | range, value: object) -> object:
    """A value in the form that an option's type has. TypeError or ValueError for another type."""
    return member_number(value, kind) if isinstance(kind, range) else _as(kind, value)


def member_number(value: object, members: range) -> int:
    """The number of a member of an enumeration. ValueError for one that has no such member."""
    number = value.value if isinstance(value, enum.Enum) else value
    if isinstance(number, bool) or not isinstance(number, int) or number not in members:
        raise ValueError(f"it is a number from 0 to {members.stop - 1}")
    return number


def _as(kind: type, value: object) -> object:
    if kind in (list, set) and isinstance(value, (list, tuple, set, frozenset)):
        return kind(value)
    if kind is float and not isinstance(value, bool) and isinstance(value, (int, float)):
        return float(value)
    if kind is int and not isinstance(value, bool):
        return operator.index(value)  # type: ignore[arg-type]
    if isinstance(value, kind):
        return value
    raise TypeError(f"use a value of type {kind.__name__}")
