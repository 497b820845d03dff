"""The report keys of ``POPLAR_ENGINE_OPTIONS``: which reports a program asks for, and where they go.

The variable holds one JSON object of strings, as for the SDK: ``{"autoReport.all": "true", "autoReport.directory":
"./report"}``. Options of the engine that podrun accepts without a meaning here are listed too, so that a misspelt
one is refused.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from podrun.errors import InvalidOptionError

REPORTS = {
    "autoReport.outputExecutionProfile": "trace",
    "autoReport.outputGraphProfile": "profile",
    "autoReport.outputLoweredVars": "memory",
    "autoReport.outputArchive": "archive",
    "autoReport.outputSerializedGraph": "graph",
    "autoReport.outputDebugInfo": "debug",
    "autoReport.outputLoweredVarsCompressed": "memory",
}
"""Report keys and what each makes podrun write beside the profile."""
OTHERS = frozenset(
    {
        "autoReport.all",
        "autoReport.directory",
        "autoReport.executionProfileProgramRunCount",
        "autoReport.streamAtEachRun",
        "debug.allowOutOfMemory",
        "debug.instrument",
        "debug.instrumentCompute",
        "debug.instrumentControlFlow",
        "debug.instrumentExternalExchange",
        "debug.computeInstrumentationLevel",
        "debug.branchRecordTile",
        "debug.retainDebugInformation",
        "debug.cpuMultiThreadExecutor",
        "debug.floatPointOpException",
        "debug.outputAllSymbols",
        "exchange.enablePrefetch",
        "exchange.streamBufferOverlap",
        "opt.enableInlining",
        "opt.enableMultiAccessCopies",
        "opt.internalExchangeOptimisationTarget",
        "opt.maxComputeSetsPerLoopOnChip",
        "opt.maxCopyMergeSize",
        "prng.seed",
        "profiler.perTensorPlacementReport",
        "streamCallbacks.multiThreadMode",
        "streamCallbacks.maxLookahead",
        "streamCallbacks.numWorkerThreads",
        "target.deterministicWorkers",
        "target.gatewayMode",
        "target.gatewayWriteCombining",
        "target.hostSyncTimeout",
        "target.saveArchive",
        "target.syncReplicasIndependently",
        "target.syncPollPeriodUs",
    }
)
"""Further options that are known. Those without a meaning for a model are accepted and change nothing."""
_TRUE, _FALSE = ("true", "1", "on", "yes"), ("false", "0", "off", "no")


@dataclass(frozen=True, slots=True)
class ReportOptions:
    """Where to write which reports. ``out_of_memory``: still report when the program does not fit."""

    directory: Path
    reports: frozenset[str]
    out_of_memory: bool = False

    @property
    def wanted(self) -> bool:
        """True iff any report is asked for."""
        return bool(self.reports)


def report_options(environ: Mapping[str, str]) -> ReportOptions:
    """What ``POPLAR_ENGINE_OPTIONS`` of ``environ`` asks for; nothing if it is not set.

    Raises:
        InvalidOptionError: not JSON, an option that does not exist, or a value it cannot have.
    """
    text = environ.get("POPLAR_ENGINE_OPTIONS", "").strip()
    options = _parse(text) if text else {}
    for name in options:
        if name not in REPORTS and name not in OTHERS:
            raise InvalidOptionError(f"unknown engine option {name!r}", hint=_nearest(name))
    everything = _flag(options, "autoReport.all")
    wanted = {made for name, made in REPORTS.items() if _flag(options, name, default=everything)}
    directory = Path(options.get("autoReport.directory", "."))
    return ReportOptions(directory, frozenset(wanted), _flag(options, "debug.allowOutOfMemory"))


def _parse(text: str) -> dict[str, str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidOptionError(f"POPLAR_ENGINE_OPTIONS is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise InvalidOptionError("POPLAR_ENGINE_OPTIONS must be one JSON object of option names and values")
    return {
        str(name): value if isinstance(value, str) else json.dumps(value) for name, value in found.items()
    }


def _flag(options: Mapping[str, str], name: str, *, default: bool = False) -> bool:
    if name not in options:
        return default
    value = options[name].lower()
    if value not in (*_TRUE, *_FALSE):
        raise InvalidOptionError(
            f"engine option {name!r} cannot be {options[name]!r}", hint="Give true or false."
        )
    return value in _TRUE


def _nearest(name: str) -> str:
    known = sorted((*REPORTS, *OTHERS))
    close = difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {', '.join(close)}?" if close else f"Known: {', '.join(known)}."
