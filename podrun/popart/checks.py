"""Checks of a session's options, data flow and device against each other (semantics, sections 8 to 10)."""

from __future__ import annotations

import logging
import os

from podrun.popart.dataflow import DataFlow
from podrun.popart.device import DeviceInfo
from podrun.popart.enums import AnchorReturnTypeId, DeviceType, RecomputationType, VirtualGraphMode
from podrun.popart.errors import popart_exception
from podrun.popart.options import SessionOptions

_log = logging.getLogger("podrun.popart.session")


def check_options(options: SessionOptions, flow: DataFlow, device: DeviceInfo, *, training: bool) -> None:
    """popart_exception for options that contradict each other, the data flow or the device."""
    _check_accumulation(options, training)
    _check_replication(options, device)
    _check_distributed(options, device)
    _check_placement(options, device)
    _check_io(options, device)
    _check_scaling(options, training)
    if not training and flow.nAnchors() == 0:
        raise popart_exception(
            "An inference session needs at least one anchor in its DataFlow: it would give nothing."
        )
    _check_rounding(options)


def _check_accumulation(options: SessionOptions, training: bool) -> None:
    if options.accumulationFactor < 1:
        raise popart_exception(f"accumulationFactor must be at least 1, not {options.accumulationFactor}.")
    if options.accumulationFactor > 1 and not options.enableGradientAccumulation:
        raise popart_exception(
            f"accumulationFactor is {options.accumulationFactor}, but enableGradientAccumulation is False. "
            "Set it to True."
        )
    if options.enableGradientAccumulation and not training:
        raise popart_exception(
            "Gradient accumulation goes with training: an inference session has no gradients."
        )


def _check_replication(options: SessionOptions, device: DeviceInfo) -> None:
    count = options.replicatedGraphCount
    if count < 1:
        raise popart_exception(f"replicatedGraphCount must be at least 1, not {count}.")
    if count > 1 and not options.enableReplicatedGraphs:
        raise popart_exception(
            f"replicatedGraphCount is {count}, but enableReplicatedGraphs is False. Set it to True."
        )
    replicas = options.local_replicas
    if device.numIpus % replicas:
        raise popart_exception(
            f"The device's {device.numIpus} IPUs are not divisible by the {replicas} replicas of this "
            "process."
        )
    if replicas > 1 and options.virtualGraphMode is VirtualGraphMode.Off and device.numIpus != replicas:
        raise popart_exception(
            f"With virtualGraphMode Off each replica has one IPU, so {replicas} replicas need a device of "
            f"{replicas} IPUs; this one has {device.numIpus}."
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
    if options.virtualGraphMode is VirtualGraphMode.Off and per_replica > 1 and options.enablePipelining:
        raise popart_exception(
            "Pipelining requires more than 1 IPU per replica in use: set a virtualGraphMode other than Off."
        )
    if options.enablePipelining and per_replica < 2:
        raise popart_exception(
            f"Pipelining requires more than 1 IPU per replica; each replica has {per_replica} of the "
            f"device's {device.numIpus}."
        )
    ratios = options.virtualGraphSplitRatios
    if ratios and (
        len(ratios) != per_replica
        or any(not 0 < ratio < 1 for ratio in ratios)
        or abs(sum(ratios) - 1) > 1e-4
    ):
        raise popart_exception(
            f"virtualGraphSplitRatios needs {per_replica} numbers between 0 and 1 with the sum 1, not "
            f"{ratios}."
        )
    if options.createImplicitPipeliningFwdOnlyProgram and (
        not options.enablePipelining
        or not options.enableGradientAccumulation
        or options.enableExplicitMainLoops
    ):
        raise popart_exception(
            "createImplicitPipeliningFwdOnlyProgram needs enablePipelining and enableGradientAccumulation, and "
            "enableExplicitMainLoops switched off."
        )
    phases = options.executionPhaseSettings.phases
    if phases > 1 and options.virtualGraphMode is not VirtualGraphMode.ExecutionPhases:
        raise popart_exception(f"{phases} execution phases need virtualGraphMode ExecutionPhases.")
    if options.virtualGraphMode is VirtualGraphMode.ExecutionPhases:
        if options.enablePipelining:
            raise popart_exception("Pipelining does not go with virtualGraphMode ExecutionPhases.")
        if options.executionPhaseSettings.stages not in (1, 2):
            raise popart_exception(
                f"executionPhaseSettings.stages is 1 (one IPU) or 2 (IPUs take turns), not "
                f"{options.executionPhaseSettings.stages}."
            )


def _check_io(options: SessionOptions, device: DeviceInfo) -> None:
    if options.enableExplicitMainLoops and not options.useHostCopyOps:
        raise popart_exception("enableExplicitMainLoops needs useHostCopyOps.")
    tiles = options.numIOTiles
    if tiles and (tiles < 32 or tiles % 2 or tiles >= max(device.tilesPerIPU, 33)):
        raise popart_exception(
            f"numIOTiles must be even, at least 32 and fewer than the {device.tilesPerIPU} tiles of an IPU, "
            f"not {tiles}."
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
            f"Custom codelet {os.path.basename(path)!r} is code for the IPU's own instruction set and cannot "
            "run here. "
            "Give the operator's meaning as a JAX function with podrun.popart.register_op."
        )


def _check_scaling(options: SessionOptions, training: bool) -> None:
    settings = options.automaticLossScalingSettings
    if not settings.enabled:
        return
    if not training:
        raise popart_exception("Automatic loss scaling goes with training.")
    if not 0 <= settings.binEdgeLocation <= 1:
        raise popart_exception(f"binEdgeLocation must be in [0, 1], not {settings.binEdgeLocation}.")
    if not 0 <= settings.thresholdUpperCountProportion <= 1:
        raise popart_exception(
            f"thresholdUpperCountProportion must be in [0, 1], not {settings.thresholdUpperCountProportion}."
        )
    if options.enablePipelining and options.micro_batches == 1:
        raise popart_exception(
            "[AutomaticLossScale transform] Automatic loss scaling is not supported when enablePipelining is True "
            "and enableGradientAccumulation is False."
        )


def _check_rounding(options: SessionOptions) -> None:
    """Say what stochastic rounding covers."""
    if not options.enableStochasticRounding:
        return
    _log.warning(
        "enableStochasticRounding: float16 weights and optimizer state are rounded stochastically where they are "
        "updated; all other float16 results are rounded to nearest."
    )


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
            "The model says itself which outputs to compute again (recomputeOutputInBackwardPass), so "
            "autoRecomputation "
            f"{options.autoRecomputation.name} cannot decide it too. Use one of them."
        )


def check_every_n_with_pipelining(options: SessionOptions, flow: DataFlow) -> None:
    """popart_exception for EveryN anchors of a pipelined program (raised when the device is prepared)."""
    if not options.enablePipelining:
        return
    wrong = [name for name in flow.anchors() if flow.art(name).id() is AnchorReturnTypeId.EveryN]
    if wrong:
        raise popart_exception(f"Anchor {wrong[0]!r}: AnchorReturnType EveryN does not go with pipelining.")
