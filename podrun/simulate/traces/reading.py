"""A log of jobs from a file of any known format.

The format is that of the name's end or of the first line, unless it is named. Lines that make no sense are counted and
named; above a share the log is refused. Jobs come out in the order of their arrivals, the first one at 0 s.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from podrun.core.documents import read_bytes
from podrun.core.errors import ConfigError, UsageError
from podrun.simulate.traces.batch_logs import PLAIN_COLUMNS, read_plain, read_sacct, read_swf
from podrun.simulate.traces.cluster_logs import read_acme, read_helios, read_openb, read_pai, read_philly
from podrun.simulate.traces.lines import JobLog

READERS: dict[str, Callable[[JobLog, str], None]] = {
    "swf": read_swf,
    "sacct": read_sacct,
    "philly": read_philly,
    "helios": read_helios,
    "acme": read_acme,
    "alibaba": read_pai,
    "openb": read_openb,
    "csv": read_plain,
}
"""By the name of the format."""
MAX_BROKEN = 0.05
"""Share of lines that may make no sense."""
LARGEST_LOG = 2 << 30
"""Bytes of a log that is read, packed or not."""


def read_trace(path: Path, format: str = "", *, most_broken: float = MAX_BROKEN, largest: int = 0) -> JobLog:
    """The log in a file. ``largest``: jobs larger than this are left out as broken lines; 0: of any size.

    Raises NotFoundError, and ConfigError, which names file and line, for one of which more than ``most_broken`` makes
    no sense.
    """
    text = _text(path)
    kind = format or format_of(path, text)
    if kind not in READERS:
        raise UsageError(f"there is no format {kind!r} of logs", hint=f"There are: {', '.join(READERS)}.")
    trace = JobLog(path, kind)
    READERS[kind](trace, text)
    if largest:
        _leave_out_larger(trace, largest)
    trace.check(most_broken)
    trace.jobs.sort(key=lambda job: job.submit)
    first = trace.jobs[0].submit
    trace.jobs = [replace(job, submit=job.submit - first) for job in trace.jobs]
    return trace


def _text(path: Path) -> str:
    data = read_bytes(path, LARGEST_LOG, hint="podrun simulate JOBS: a log such as KTH-SP2.swf.")
    if data[:2] == b"\x1f\x8b":
        unpacked = zlib.decompressobj(wbits=31)
        try:
            data = unpacked.decompress(data, LARGEST_LOG)
        except zlib.error as error:
            raise ConfigError(f"{path} cannot be unpacked: {error}", hint="Copy the file again.") from None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return data.decode("latin-1")  # Old logs name their people in it.


def format_of(path: Path, text: str) -> str:
    """The format of a log by its name and its first line. Raises ConfigError if it is none."""
    if not text.strip():
        raise ConfigError(f"{path} is empty", hint="podrun help simulate shows the formats of logs.")
    first = text.lstrip()[:2000].partition("\n")[0].strip()
    columns = {column.strip() for column in first.split(",")}
    if ".swf" in path.suffixes or first.startswith(";"):
        return "swf"
    if text.lstrip().startswith("["):
        return "philly"
    if "|" in first and "Submit" in first:
        return "sacct"
    if set(PLAIN_COLUMNS) <= columns:
        return "csv"
    if {"creation_time", "num_gpu"} <= columns:
        return "openb"
    if {"job_id", "gpu_num", "submit_time"} <= columns:
        return "helios" if "vc" in columns else "acme"
    if "plan_gpu" in columns or "job_name" in columns:
        return "alibaba"
    raise ConfigError(
        f"{path}:1: this is the first line of no known log: {first[:80]!r}",
        hint=f"Name the format: --format {'|'.join(READERS)}; a table needs {', '.join(PLAIN_COLUMNS)}.",
    )


def _leave_out_larger(trace: JobLog, largest: int) -> None:
    fitting = []
    for job in trace.jobs:
        if job.size > largest:
            trace.break_line(
                job.line, f"job {job.name} asks for {job.size} processors, and there are {largest}"
            )
        else:
            fitting.append(job)
    trace.jobs = fitting


def packed_log(text: str) -> bytes:
    """A log as a packed file holds it, the same bytes each time."""
    return gzip.compress(text.encode(), mtime=0)
