"""Checks of a session's options, data flow and device against each other.

Source: graphcore/popart, willow/src/sessionoptions.cpp, ir.cpp, session.cpp and transforms/pipeline.cpp.
"""

from __future__ import annotations

import logging
import os

from podrun.popart.devices.device import DeviceInfo
from podrun.popart.optimizers import Adam
from podrun.popart.optimizers.base import Optimizer
from podrun.popart.options.session_options import SessionOptions
from podrun.popart.step_data.dataflow import DataFlow
from podrun.popart.values.enums import (
    AnchorReturnTypeId,
    BatchSerializationMethod,
    BatchSerializationTransformContext,
    DeviceType,
    RecomputationType,
    VirtualGraphMode,
)
from podrun.popart.values.exceptions import popart_exception
from podrun.runtime.loss_scaling import TRANSFORM


def check_options(options: SessionOptions, flow: DataFlow, device: DeviceInfo, *, training: bool) -> None:
    """popart_exception for options that contradict each other, the data flow or the device."""
    _check_accumulation(options, training)
    _check_replication(options, device)
    _check_distributed(options, device)
    _check_placement(options, device)
    _check_loops(options, training)
    _check_io(options, device)
    _check_scaling(options, training)
    _say_what_is_not_done(options)
    if not training and flow.nAnchors() == 0:
        raise popart_exception("User must specify an anchor tensor when doing inference.")


def _check_accumulation(options: SessionOptions, training: bool) -> None:
    if options.accumulationFactor < 1:
        raise popart_exception(f"accumulationFactor must be at least 1, not {options.accumulationFactor}.")
    if options.accumulationFactor > 1 and not options.enableGradientAccumulation:
        raise popart_exception(
            f"enableGradientAccumulation is false, but accumulationFactor > 1. It is {options.accumulationFactor}.",
            hint="Set enableGradientAccumulation to True, or accumulationFactor to 1.",
        )
    if options.enableGradientAccumulation and not training:
        raise popart_exception(
            "Gradient Accumulation only available when training: an inference session has no gradients."
        )


def _check_replication(options: SessionOptions, device: DeviceInfo) -> None:
    count = options.replicatedGraphCount
    if count < 1:
        raise popart_exception(f"replicatedGraphCount must be at least 1, not {count}.")
    if count > 1 and not options.enableReplicatedGraphs:
        raise popart_exception(
            f"enableReplicatedGraphs is false, but replicatedGraphCount > 1. It is {count}.",
            hint="Set enableReplicatedGraphs to True, or replicatedGraphCount to 1.",
        )
    replicas = options.local_replicas
    if device.numIpus % replicas:
        raise popart_exception(
            f"The device's {device.numIpus} IPUs are not divisible by the {replicas} replicas of this process."
        )
    if replicas > 1 and options.virtualGraphMode is VirtualGraphMode.Off and device.numIpus != replicas:
        raise popart_exception(
            f"If virtual graphs are disabled, the replicated graph count ({replicas}) needs to be equal to the "
            f"number of IPUs ({device.numIpus}): each replica has one.",
            hint=f"Use a device of {replicas} IPUs, or a virtualGraphMode other than Off.",
        )


def _check_distributed(options: SessionOptions, device: DeviceInfo) -> None:
    if not options.enableDistributedReplicatedGraphs:
        return
    total, offset, local = (
        options.globalReplicationFactor,
        options.globalReplicaOffset,
        options.local_replicas,
    )
    if total < 1:
        raise popart_exception(f"globalReplicationFactor must be at least 1, not {total}.")
    if not 0 <= offset <= total:
        raise popart_exception(f"globalReplicaOffset must be from 0 to {total}, not {offset}.")
    if local > total:
        raise popart_exception(
            f"This process has {local} replicas (replicatedGraphCount), more than the {total} of "
            "globalReplicationFactor."
        )
    if options.enableReplicatedGraphs and options.replicatedGraphCount == 1:
        raise popart_exception(
            "enableReplicatedGraphs with a replicatedGraphCount of 1 does not go with "
            "enableDistributedReplicatedGraphs: set enableReplicatedGraphs to False where a process has a "
            "single replica."
        )
    if device.type not in (DeviceType.Ipu, DeviceType.OfflineIpu):
        raise popart_exception(
            f"Distributed replicated graphs run on IPUs; this device is of type {device.type.name}."
        )


def _check_placement(options: SessionOptions, device: DeviceInfo) -> None:
    per_replica = device.numIpus // options.local_replicas
    mode = options.virtualGraphMode
    if options.enablePipelining and (mode is VirtualGraphMode.Off or per_replica < 2):
        raise popart_exception(
            f"Pipelining requires more than 1 IPU for each replica (there are {per_replica}) and a virtualGraphMode "
            f"other than Off (it is {mode.name})."
        )
    ratios = options.virtualGraphSplitRatios
    if ratios and (
        len(ratios) != per_replica
        or any(not 0 < ratio < 1 for ratio in ratios)
        or abs(sum(ratios) - 1) > 1e-4
    ):
        raise popart_exception(
            f"virtualGraphSplitRatios needs {per_replica} numbers between 0 and 1 with the sum 1, not {ratios}."
        )
    _check_forward_only(options)
    phases = options.executionPhaseSettings.phases
    if phases > 1 and options.virtualGraphMode is not VirtualGraphMode.ExecutionPhases:
        raise popart_exception(
            f"> 1 execution phases requires VirtualGraphMode::ExecutionPhases; there are {phases}, and "
            f"virtualGraphMode is {options.virtualGraphMode.name}."
        )
    if options.virtualGraphMode is VirtualGraphMode.ExecutionPhases and phases > 1:
        if options.enablePipelining:
            raise popart_exception("Pipelining does not go with virtualGraphMode ExecutionPhases.")
        if options.executionPhaseSettings.stages not in (1, 2):
            raise popart_exception(
                f"executionPhaseSettings.stages is 1 (one IPU) or 2 (IPUs take turns), not "
                f"{options.executionPhaseSettings.stages}."
            )


def _check_forward_only(options: SessionOptions) -> None:
    if not options.createImplicitPipeliningFwdOnlyProgram:
        return
    wrong = ""
    if options.enablePipelining and options.enableExplicitMainLoops:
        wrong = "with explicit pipelining"
    elif not options.enablePipelining:
        wrong = "without implicit pipelining"
    elif not options.enableGradientAccumulation:
        wrong = "without gradient accumulation"
    if wrong:
        raise popart_exception(
            f"Implicit pipelining forward-only program is not supported {wrong}.",
            hint="createImplicitPipeliningFwdOnlyProgram needs enablePipelining and enableGradientAccumulation, "
            "and enableExplicitMainLoops switched off.",
        )


def _check_loops(options: SessionOptions, training: bool) -> None:
    """Check options for loops that the program runs itself."""
    if options.enableExplicitMainLoops and not options.useHostCopyOps:
        raise popart_exception("enableExplicitMainLoops requires useHostCopyOps.")
    if options.aliasZeroCopy and options.enablePipelining:
        raise popart_exception(
            "Alias zero copy is not supported with pipelining.", hint="Unset aliasZeroCopy."
        )
    if options.aliasZeroCopy and not options.explicitRecomputation:
        raise popart_exception(
            "Alias zero copy is not supported with implicit recomputation.",
            hint="Set explicitRecomputation to True, or unset aliasZeroCopy.",
        )
    batches = options.batchSerializationSettings
    if (
        training
        and batches.method is BatchSerializationMethod.Loop
        and batches.transformContext is BatchSerializationTransformContext.Fwd
    ):
        raise popart_exception(
            "Loop batch serialization is only supported in BatchSerializationTransformContext::Bwd in training.",
            hint="Set batchSerializationSettings.transformContext to Bwd.",
        )


def _check_io(options: SessionOptions, device: DeviceInfo) -> None:
    tiles = options.numIOTiles
    if tiles and (not 32 <= tiles <= 192 or tiles % 2 or tiles >= max(device.tilesPerIPU, 33)):
        raise popart_exception(
            f"{tiles} is an invalid number of IO tiles (numIOTiles). It must be even, in the range [32, 192], and "
            f"fewer than the {device.tilesPerIPU} tiles of an IPU."
        )
    depths = {
        "defaultBufferingDepth": options.defaultBufferingDepth,
        **options.bufferingDepthMap,
    }
    for name, depth in depths.items():
        if depth < 1:
            raise popart_exception(f"The buffering depth of {name!r} must be at least 1, not {depth}.")
    if options.partialsTypeMatMuls not in ("", "float", "half"):
        raise popart_exception(
            f"partialsTypeMatMuls is 'float' or 'half', not {options.partialsTypeMatMuls!r}."
        )
    for path in options.customCodelets:
        raise popart_exception(
            f"Custom codelet {os.path.basename(path)!r} is code for the IPU's own instruction set and cannot run here. "
            "Give the operator's meaning as a JAX function with podrun.popart.register_op."
        )


NOT_DONE = {
    "exportPoplarComputationGraph": "there is no Poplar graph to write; session.getSerializedGraph() has podrun's",
    "exportPoplarVertexGraph": "there is no Poplar graph to write; session.getSerializedGraph() has podrun's",
    "serializedPoprithmsShiftGraphsDir": "there is no such scheduler whose graphs could be written",
    "serializedPoprithmsAnnealGraphsDir": "there is no such scheduler whose graphs could be written",
}
"""Options that ask for an effect beside the result; podrun does not have these effects."""


def _say_what_is_not_done(options: SessionOptions) -> None:
    for name, reason in NOT_DONE.items():
        if getattr(options, name):
            logging.getLogger("podrun.popart.session").warning("%s has no effect: %s.", name, reason)
    if options.experimentalSettings.customTransformApplierSettings:
        raise popart_exception(
            "experimentalSettings.customTransformApplierSettings names transforms of a compiled library, which is code "
            "for the SDK and cannot be loaded.",
            hint="Leave it empty. What the transforms compute can be given as JAX functions: "
            "podrun.popart.register_op.",
        )


def _check_scaling(options: SessionOptions, training: bool) -> None:
    settings = options.automaticLossScalingSettings
    if not settings.enabled:
        return
    if not training:
        raise popart_exception(f"{TRANSFORM} Only compatible when doing training")
    if not 0 <= settings.binEdgeLocation <= 1:
        raise popart_exception(
            f"{TRANSFORM} Out of range value for 'binEdgeLocation'. It must be in [0, 1], not "
            f"{settings.binEdgeLocation}."
        )
    if not 0 <= settings.thresholdUpperCountProportion <= 1:
        raise popart_exception(
            "Out of range value for 'thresholdUpperCountProportion'. It must be in [0, 1], not "
            f"{settings.thresholdUpperCountProportion}."
        )
    if options.enablePipelining and not options.enableGradientAccumulation:
        raise popart_exception(
            f"{TRANSFORM} Automatic loss scaling is not currently supported when the 'enablePipelining' SessionOption "
            "is set to 'true', but the 'enableGradientAccumulation' SessionOption is set to 'false'"
        )


def check_scaling_optimizer(options: SessionOptions, optimizer: Optimizer | None) -> None:
    """popart_exception for an optimizer, or an update period, that automatic loss scaling cannot work with."""
    settings = options.automaticLossScalingSettings
    if optimizer is None or not settings.enabled:
        return
    if optimizer.lossScaling.isConst():
        raise popart_exception(
            f"{TRANSFORM} The optimizer must have non-const loss scaling",
            hint=f'Give {optimizer.NAME} "lossScaling": ({optimizer.lossScaling.val():g}, False).',
        )
    if isinstance(optimizer, Adam) and optimizer.scaled_optimizer_state:
        raise popart_exception(
            f"{TRANSFORM} scaledOptimizerState does not go with automatic loss scaling: the state "
            "would be scaled by a loss scaling that changes."
        )
    if settings.updatePeriod < 1:
        raise popart_exception(f"updatePeriod must be at least 1, not {settings.updatePeriod}.")


def check_recomputation(options: SessionOptions, annotated: bool) -> None:
    """popart_exception if recomputation is asked for both automatically and by hand, or by hand in a pipeline."""
    if annotated and options.enablePipelining and not options.explicitRecomputation:
        raise popart_exception(
            "The model says itself which outputs to compute again (recomputeOutputInBackwardPass); with pipelining "
            "and implicit recomputation only whole stages can be.",
            hint="Set autoRecomputation to RecomputationType.Pipeline, or explicitRecomputation to True.",
        )
    if annotated and options.autoRecomputation not in (
        RecomputationType.NoRecompute,
        RecomputationType.RecomputeAll,
    ):
        raise popart_exception(
            "A mixture of auto and manual recomputaion is not supported",  # PopART's spelling, which programs know.
            hint="The model says itself which outputs to compute again (recomputeOutputInBackwardPass), so "
            f"autoRecomputation {options.autoRecomputation.name} cannot decide it too. Use one of them.",
        )


def check_every_n_with_pipelining(options: SessionOptions, flow: DataFlow) -> None:
    """popart_exception for EveryN anchors of a pipelined program (raised when the device is prepared)."""
    if not options.enablePipelining:
        return
    wrong = [name for name in flow.anchors() if flow.art(name).id() is AnchorReturnTypeId.EveryN]
    if wrong:
        raise popart_exception(f"Anchor {wrong[0]!r}: AnchorReturnType EveryN does not go with pipelining.")
