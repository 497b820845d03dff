"""PopART's session options that change no number and no modelled time, or that only `popart_options` itself reads.

A type for each name; for an enumeration the range of its members' numbers.
"""

from __future__ import annotations

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
_DICTIONARIES = "bufferingDepthMap prefetchBufferingDepthMap reportOptions lstmOptions gclOptions"

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
"""Type by name."""
