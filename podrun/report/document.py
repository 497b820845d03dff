"""Profiles from the tile report of an `Executable` and as JSON documents, there and back; the files of a report.

The compiler's report holds ``segments`` (pieces of one micro-batch: IPU, place in the pipeline, the tile model's
report) and ``update`` (the same for the weight update of each IPU). A report of one function (`cost_jaxpr`) is read
as a program of one segment.

The document is ``{"schema": "podrun.profile", "schema_version": 1, "profile": {...}}``; the profile's keys are the
fields of `podrun.report.model`, units in their names, numbers as numbers, null for unknown. ``"origin"`` beside it says
which program and command it is of, and when. Same profile and origin, same bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import podrun
from podrun.core.documents import parse_json, read_bytes, write_together
from podrun.core.environment import PODRUN_COMMAND
from podrun.core.errors import ConfigError, NotFoundError
from podrun.core.executable import Executable
from podrun.core.quick_dataclass import dataclass
from podrun.costmodel.target import chip
from podrun.report.analysis_profile import AnalysisProfile, Report
from podrun.report.chrome_trace import to_trace
from podrun.report.html import page
from podrun.report.model import (
    SCHEMA_VERSION,
    Bound,
    BspStep,
    Content,
    IpuUse,
    MemoryUse,
    Profile,
    ReportOrigin,
    ReportStage,
    Share,
    TileInterval,
)
from podrun.report.text import compare, summary

SCHEMA = "podrun.profile"
"""Grows when a key changes its meaning or disappears; new keys alone do not change it."""

MOST_BYTES = 512 << 20
"""The largest report that is read."""
_SEE = "Give the profile.json that podrun profile or autoReport wrote."
_ANEW = "Write it again with this version: podrun profile --report-directory DIR train.py"


def profile_to_json(profile: Profile, origin: ReportOrigin | None = None) -> str:
    """The document's text, ending with a newline."""
    content: dict[str, Any] = {"schema": SCHEMA, "schema_version": SCHEMA_VERSION}
    if origin is not None:
        content["origin"] = dataclasses.asdict(origin)
    content["profile"] = dataclasses.asdict(profile)
    return document_text(content)


def document_text(content: Mapping[str, Any]) -> str:
    """A document as reports hold it."""
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def from_json(text: str, *, source: str = "the document") -> AnalysisProfile:
    """Read a document back; ``source`` names it in errors.

    Raises:
        ConfigError: it is no such document, of a newer version, or a field is missing, unknown or of a wrong type.
    """
    return from_object(parse_report(text, source=source), source=source)


def parse_report(text: str, *, source: str) -> dict[str, Any]:
    """The JSON object in a text. Raises ConfigError if there is none."""
    content = parse_json(text, source, hint=_SEE)
    if not isinstance(content, dict):
        raise ConfigError(f"{source} holds no report: an object was expected", hint=_SEE)
    return content


def from_object(content: Mapping[str, Any], *, source: str) -> AnalysisProfile:
    """The profile in a parsed document. Raises ConfigError as `from_json`."""
    from pydantic import ValidationError

    if content.get("schema") != SCHEMA:
        raise ConfigError(f"{source} is no profile: its 'schema' is not {SCHEMA!r}", hint=_SEE)
    if content.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"{source} has schema_version {content.get('schema_version')!r}; this podrun reads {SCHEMA_VERSION}",
            hint=_ANEW,
        )
    try:
        profile: Profile = _adapter().validate_json(json.dumps(content.get("profile")), strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in ("profile", *first["loc"]))
        raise ConfigError(f"{source}: {where}: {first['msg']}", hint=_ANEW) from error
    if not profile.stages or not profile.seconds_by_cause:
        raise ConfigError(
            f"{source}: profile.stages: a program has at least one stage and one cause", hint=_ANEW
        )
    return AnalysisProfile.of(profile)


def load_profile(path: Path | str) -> AnalysisProfile:
    """The profile in a file that podrun wrote. Raises ConfigError as `from_json`, or if there is no such file."""
    return from_json(read_report_text(Path(path)), source=str(path))


def load_origin(path: Path | str) -> ReportOrigin | None:
    """Where the report in a file comes from; None if it does not say. Raises ConfigError as `load_profile`."""
    origin = parse_report(read_report_text(Path(path)), source=str(path)).get("origin")
    if not isinstance(origin, dict):
        return None
    names = {field.name for field in dataclasses.fields(ReportOrigin)}
    return ReportOrigin(**{name: str(value) for name, value in origin.items() if name in names})


def origin_of_process(environ: Mapping[str, str], words: Sequence[str], now: datetime) -> ReportOrigin:
    """The origin of reports that this process writes. ``words``: its command line, program included, as Python has it.

    The command is that of ``podrun``, which says it in ``PODRUN_COMMAND``, else the process's own.
    """
    command = environ.get(PODRUN_COMMAND) or shlex.join([Path(words[0]).name, *words[1:]] if words else [])
    program = sys.argv[0] if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ""
    return ReportOrigin(program, command, now.isoformat(timespec="seconds"), podrun.__version__)


def read_report_text(path: Path) -> str:
    """The text of a file. Raises ConfigError if there is no such file, or it holds no text."""
    hint = "Write one first: podrun profile --report-directory DIR train.py"
    try:
        data = read_bytes(path, MOST_BYTES, hint=hint)
    except NotFoundError as error:
        raise ConfigError(f"{path} cannot be read: No such file or directory", hint=hint) from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not JSON: it is not UTF-8 text", hint=_SEE) from error


def json_schema() -> dict[str, Any]:
    """The JSON Schema of the document."""
    properties = {
        "schema": {"const": SCHEMA},
        "schema_version": {"const": SCHEMA_VERSION},
        "profile": {"$ref": "#/$defs/Profile"},
    }
    inner = _adapter().json_schema(ref_template="#/$defs/{model}")
    definitions = inner.pop("$defs", {})
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "$defs": {**definitions, "Profile": inner},
    }


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Profile)


DOCUMENT = "profile.json"
ARCHIVE = "profile.pop"
"""The SDK's name of a report. podrun writes the JSON document there; ``pva.openReport`` reads it."""
PAGE = "profile.html"
SUMMARY = "summary.txt"
TRACE = "trace.json"


def write_report(
    profile: Profile,
    directory: Path,
    *,
    trace: bool = True,
    other: Profile | None = None,
    origin: ReportOrigin | None = None,
    document: str | None = None,
) -> Path:
    """Write the files; returns the path of ``profile.pop``. ``other``: what page and summary compare with.
    ``document``: `profile_to_json` of the profile and its origin, if the caller has it.

    Raises:
        ConfigError: the directory cannot be written.
    """
    document = document or profile_to_json(profile, origin)
    texts = {
        DOCUMENT: document,
        ARCHIVE: document,
        PAGE: page(profile, other=other, origin=origin),
        SUMMARY: summary(profile) + ("" if other is None else compare(other, profile)),
    }
    if trace:
        texts[TRACE] = to_trace(profile)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_together(directory, texts)
    except OSError as error:
        raise ConfigError(
            f"the report cannot be written to {directory}: {error.strerror}",
            hint="Name another directory with autoReport.directory (or podrun profile --report-directory DIR).",
        ) from error
    return directory / ARCHIVE


def open_report(path: str | os.PathLike[str], debug: str | os.PathLike[str] = "") -> Report:
    """The report in a ``profile.pop`` (or ``profile.json``) that podrun wrote: JSON, whatever its name says.

    ``debug``: the SDK's debug information, of which podrun has none; ignored.

    Raises:
        ConfigError: there is no such file, or it is no report of podrun's (the SDK's own are in another format).
    """
    return Report(load_profile(Path(path)))


def profile_of(executable: Executable) -> AnalysisProfile:
    """The Profile of a compiled program. Raises ConfigError as `read_report`."""
    return read_report(
        executable.tile_report,
        name=executable.name,
        replicas=executable.layout.replicas,
        ipus_per_replica=executable.layout.ipus_per_replica,
        batching=Batching(
            executable.accumulation_factor,
            executable.batches_per_pass,
            executable.metadata.get("batches_per_step") or executable.batches_per_pass,
        ),
        samples_per_micro_batch=executable.metadata.get("samples_per_micro_batch"),
    )


@dataclass(frozen=True, slots=True)
class Batching:
    """How a program's micro-batches make batches and runs. The tile report's ``step`` is one pass: the micro-batches
    that run together, which are those of one batch, or of several that a pipeline overlaps.
    """

    micro_batches_per_pass: int = 1
    batches_per_pass: int = 1
    batches_per_run: int = 1

    @property
    def accumulation_factor(self) -> int:
        """Micro-batches of one batch."""
        return self.micro_batches_per_pass // self.batches_per_pass


def read_report(
    report: Mapping[str, Any],
    *,
    name: str = "program",
    replicas: int = 1,
    ipus_per_replica: int | None = None,
    batching: Batching = Batching(),
    samples_per_micro_batch: int | None = None,
) -> AnalysisProfile:
    """The Profile of a tile report; ``samples_per_micro_batch`` is what one replica sees in one micro-batch.

    ``ipus_per_replica``: None for those that have work.

    Raises:
        ConfigError: it is not a tile report, or there is no tile model of this program in it.
    """
    samples = samples_per_micro_batch
    if "step" not in report:
        raise ConfigError(
            "this is not a tile report: it has no 'step'", hint="Give a program that podrun compiled."
        )
    try:
        profile = _profile(report)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ConfigError(
            f"the tile report is malformed: {type(error).__name__} at {error}",
            hint="Compile the program again with this version.",
        ) from error
    return dataclasses.replace(
        profile,
        name=name,
        replicas=replicas,
        ipus_per_replica=ipus_per_replica or profile.ipus_per_replica,
        cycles=round(profile.cycles / batching.batches_per_pass),
        seconds=profile.seconds / batching.batches_per_pass,
        seconds_by_cause={
            cause: seconds / batching.batches_per_pass for cause, seconds in profile.seconds_by_cause.items()
        },
        accumulation_factor=batching.accumulation_factor,
        samples_per_batch=None if samples is None else samples * batching.accumulation_factor * replicas,
        batches_per_run=batching.batches_per_run,
        batches_per_pass=batching.batches_per_pass,
        run_cycles=profile.cycles * max(1, batching.batches_per_run // batching.batches_per_pass),
    )


def _profile(report: Mapping[str, Any]) -> AnalysisProfile:
    step = report["step"]
    if "segments" in report:
        stages = tuple(
            _stage(f"segment {index}", s["report"], s["ipu"], s["cycle"], s["sent_bytes"])
            for index, s in enumerate(report["segments"])
        )
        updates = tuple(_stage("update", u["report"], u["ipu"]) for u in report.get("update", ()))
        causes = {name: float(seconds) for name, seconds in step.get("seconds_by_cause", {}).items()}
    elif "memory" in report:
        stages, updates = (_stage("program", report),), ()
        causes = {"compute": float(step["seconds"])}
    else:
        raise ConfigError(
            "the program holds no tile model's report", hint="Compile it again with this version."
        )
    if not stages:
        raise ConfigError(
            "the tile report holds no segments", hint="Compile the program again with this version."
        )
    first = report["segments"][0]["report"] if "segments" in report else report
    return AnalysisProfile(
        name="program",
        target=str(first["target"]),
        clock_hz=float(chip(str(first["target"])).clock_hz),
        replicas=1,
        ipus_per_replica=1 + max(stage.ipu for stage in stages),
        accumulation_factor=1,
        samples_per_batch=None,
        pipelined=bool(report.get("pipelined", False)),
        schedule=str(report.get("pipeline", {}).get("schedule", "grouped")),
        cycles=int(step["cycles"]),
        seconds=float(step["seconds"]),
        seconds_by_cause=causes,
        stages=stages,
        updates=updates,
        ipu_memory=tuple(IpuUse(int(e["ipu"]), _memory(e["memory"])) for e in report.get("ipus", ())),
    )


def _stage(
    name: str, report: Mapping[str, Any], ipu: int = 0, pipeline_cycle: int = 0, sent_bytes: int = 0
) -> ReportStage:
    step = report["step"]
    return ReportStage(
        name=name,
        ipu=int(ipu),
        pipeline_cycle=int(pipeline_cycle),
        sent_bytes=int(sent_bytes),
        cycles=int(step["cycles"]),
        seconds=float(step["seconds"]),
        flops=int(step.get("flops", 0)),
        cycles_by_cause={cause: int(value) for cause, value in step["by_cause"].items()},
        operators=_shares(report["by_operator"].items()),
        layers=tuple(Share(scope, int(cycles), 0) for scope, cycles in report["by_scope"].items()),
        timeline=tuple(
            BspStep(e["scope"], e["operator"], e["steps"], e["sync"], e["exchange"], e["compute"])
            for e in report["timeline"]
        ),
        memory=_memory(report["memory"]),
        bounds=tuple(
            Bound(name, int(e["cycles"]), int(e["count"]), tuple(e.get("scopes", ())))
            for name, e in report.get("bounds", {}).items()
        ),
    )


def _shares(entries: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[Share, ...]:
    return tuple(Share(name, int(entry["cycles"]), int(entry["count"])) for name, entry in entries)


def _memory(memory: Mapping[str, Any]) -> MemoryUse:
    return MemoryUse(
        always_live_bytes=int(memory["always_live_bytes"]),
        not_always_live_peak_bytes=int(memory["not_always_live_peak_bytes"]),
        code_bytes_by_category={name: int(size) for name, size in memory["code"].items()},
        total_bytes=int(memory["total_bytes"]),
        max_tile_bytes=int(memory["max_tile_bytes"]),
        tile_capacity_bytes=int(memory["tile_bytes"]),
        fits=bool(memory["fits"]),
        by_tile=tuple(
            TileInterval(int(i["first"]), int(i["last"]), {n: int(b) for n, b in i["bytes"].items()})
            for i in memory["by_tile"]
        ),
        over_time_bytes=tuple(int(size) for size in memory["by_time"]),
        largest=tuple(Content(str(item["scope"]), int(item["bytes"])) for item in memory["largest"]),
        bytes_by_content={name: int(size) for name, size in memory.get("by_content", {}).items()},
    )
