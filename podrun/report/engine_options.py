"""POPLAR_ENGINE_OPTIONS and SessionOptions.engineOptions: which reports are written where, and what else counts.

Names are those of Poplar's Engine, and ``podrun.strict``. Options about reports and memory are honoured; the others are
accepted, because programs set them, and change nothing here. A name that Poplar does not have is an error. The
environment comes before the program.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from pathlib import Path

from podrun.core.environment import OMPI_COMM_WORLD_RANK, POPDIST_NUM_TOTAL_REPLICAS, POPLAR_ENGINE_OPTIONS
from podrun.core.errors import InvalidOptionError
from podrun.core.quick_dataclass import dataclass

FLAGS = (
    "autoReport.all",
    "autoReport.outputGraphProfile",
    "autoReport.outputExecutionProfile",
    "debug.allowOutOfMemory",
    "debug.floatPointOpException",
    "debug.nanOverflowException",
    "podrun.strict",
)
"""Honoured options that are true or false. ``podrun.strict`` is podrun's own: refuse what no tile planner knows."""
DIRECTORY = "autoReport.directory"
RUN_COUNT = "autoReport.executionProfileProgramRunCount"
ACCEPTED = (
    "autoReport.outputArchive",
    "autoReport.outputDebugInfo",
    "autoReport.outputLoweredVars",
    "autoReport.outputLoweredVarsCompressed",
    "autoReport.outputSerializedGraph",
    "autoReport.streamAtEachRun",
    "debug.branchRecordTile",
    "debug.checkForVertexNaNs",
    "debug.computeInstrumentationLevel",
    "debug.cpuMultiThreadExecution",
    "debug.cpuMultiThreadExecutor",
    "debug.exceptOnSOCError",
    "debug.executionProfile",
    "debug.externalExchangeInstrumentationLevel",
    "debug.graphReportDestination",
    "debug.instrument",
    "debug.instrumentCompute",
    "debug.instrumentControlFlow",
    "debug.instrumentExternalExchange",
    "debug.loweredVarDumpFile",
    "debug.outputAllSymbols",
    "debug.profilingTile",
    "debug.retainDebugInformation",
    "debug.runtimeVerify",
    "debug.supervisorStackSizeInBytes",
    "debug.trace",
    "debug.traceFile",
    "debug.verify",
    "debug.workerStackSizeInBytes",
    "exchange.enablePrefetch",
    "exchange.multicastPolicy",
    "exchange.streamBufferOverlap",
    "opt.enableInlining",
    "opt.enableMultiAccessCopies",
    "opt.enableSwSyncs",
    "opt.internalExchangeOptimisationTarget",
    "opt.maxCompilationThreads",
    "opt.maxComputeSetsPerLoopOnChip",
    "opt.maxCopyMergeSize",
    "opt.maxLinkerThreads",
    "opt.useAutoloader",
    "prng.enableStochasticRounding",
    "prng.seed",
    "profiler.blocks.filter",
    "profiler.format",
    "profiler.includeCycleEstimates",
    "profiler.includeFlopEstimates",
    "profiler.perExecutionStreamCopyCycles",
    "profiler.perTensorPlacementReport",
    "profiler.programs.filter",
    "profiler.replicaToProfile",
    "streamCallbacks.maxLookahead",
    "streamCallbacks.multiThreadMode",
    "streamCallbacks.numWorkerThreads",
    "streamCallbacks.numaAware",
    "target.deterministicWorkers",
    "target.exceptionPollPeriodUs",
    "target.extendedMemory",
    "target.firstRuntimeReplica",
    "target.gatewayMode",
    "target.gatewayWriteCombining",
    "target.hostSyncTimeout",
    "target.maxStreamCallbackThreadsPerNumaNode",
    "target.numberRuntimeReplica",
    "target.saveArchive",
    "target.supervisorStackSizeInBytes",
    "target.syncMethod",
    "target.syncPollPeriodUs",
    "target.syncReplicasIndependently",
    "target.textSectionSizeInBytes",
    "target.workerStackSizeInBytes",
)
"""Options of Poplar's Engine that change nothing here."""
KNOWN = tuple(sorted((*FLAGS, DIRECTORY, RUN_COUNT, *ACCEPTED)))


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The meaning of engine options. ``directory`` holds one folder of report files for each session, by name.

    ``graph_profile``: profile.json, profile.html and summary.txt; ``execution_profile``: trace.json as well.
    """

    directory: Path = Path(".")
    graph_profile: bool = False
    execution_profile: bool = False
    allow_out_of_memory: bool = False
    strict: bool = False
    floating_point_exceptions: bool = False
    """Whether tiles stop at infinities and NaNs."""
    run_count: int = 2
    """The most runs that a report shows."""

    @property
    def reports(self) -> bool:
        """True iff any report is written."""
        return self.graph_profile or self.execution_profile


def engine_options(program: Mapping[str, str], environ: Mapping[str, str]) -> EngineOptions:
    """What a program's options and the environment's ask for.

    Under ``podrun`` the directory gets ``__instance_<i>``, so that instances do not write over each other's.

    Raises:
        InvalidOptionError: a name that is no engine option, or a value it cannot have.
    """
    options = {
        **_checked(program, "engineOptions"),
        **_checked(_from_environment(environ), POPLAR_ENGINE_OPTIONS),
    }
    everything = _flag(options, "autoReport.all", False)
    _check_run_count(options)
    return EngineOptions(
        directory=_directory(options.get(DIRECTORY, "."), environ),
        graph_profile=_flag(options, "autoReport.outputGraphProfile", everything),
        execution_profile=_flag(options, "autoReport.outputExecutionProfile", everything),
        allow_out_of_memory=_flag(options, "debug.allowOutOfMemory", False),
        strict=_flag(options, "podrun.strict", False),
        floating_point_exceptions=any(
            _flag(options, f"debug.{name}Exception", False) for name in ("floatPointOp", "nanOverflow")
        ),
        run_count=int(options.get(RUN_COUNT, 2)),
    )


def _from_environment(environ: Mapping[str, str]) -> Mapping[str, object]:
    text = environ.get(POPLAR_ENGINE_OPTIONS, "")
    if not text.strip():
        return {}
    example = f'As in {POPLAR_ENGINE_OPTIONS}=\'{{"autoReport.all": "true"}}\''
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidOptionError(f"{POPLAR_ENGINE_OPTIONS} is no JSON: {error}", hint=example) from error
    if not isinstance(options, dict):
        raise InvalidOptionError(f"{POPLAR_ENGINE_OPTIONS} is no JSON object", hint=example)
    return options


def _checked(options: Mapping[str, object], source: str) -> dict[str, str]:
    texts = {}
    for name, value in options.items():
        if name not in KNOWN:
            raise _unknown(name, source)
        # JSON's true, and numbers, count as the strings that Poplar expects.
        if isinstance(value, (dict, list)) or value is None:
            raise InvalidOptionError(f"{source}: {name} is {value!r}; an option's value is a string")
        texts[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def _unknown(name: str, source: str) -> InvalidOptionError:
    close = difflib.get_close_matches(name, KNOWN, n=1)
    family = name.partition(".")[0] + "."
    valid = [known for known in KNOWN if known.startswith(family)] or list(KNOWN)
    meant = f"Did you mean {close[0]!r}? " if close else ""
    return InvalidOptionError(
        f"{source}: Unrecognised option '{name}'", hint=f"{meant}Valid: {', '.join(valid)}."
    )


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    value = options.get(name)
    if value is None:
        return default
    if value not in ("true", "false"):
        raise InvalidOptionError(f"Engine option {name} is {value!r}; it can be 'true' or 'false'.")
    return value == "true"


def _check_run_count(options: Mapping[str, str]) -> None:
    count = options.get(RUN_COUNT)
    if count is not None and not (count.isdecimal() and int(count) > 0):
        raise InvalidOptionError(f"Engine option {RUN_COUNT} is {count!r}; it is a whole number above 0.")


def _directory(text: str, environ: Mapping[str, str]) -> Path:
    instance = instance_index(environ)
    path = Path(text).expanduser()
    if instance is None:
        return path
    # A directory without a name of its own (".") cannot take a suffix: a folder in it does.
    return (
        path.with_name(f"{path.name}__instance_{instance}") if path.name else path / f"__instance_{instance}"
    )


def instance_index(environ: Mapping[str, str]) -> int | None:
    """The instance of a podrun launch that this process is; None outside of a launch."""
    if POPDIST_NUM_TOTAL_REPLICAS not in environ:
        return None
    text = environ.get(OMPI_COMM_WORLD_RANK, "0")
    return int(text) if text.isdecimal() else 0
