"""Logs of the Parallel Workloads Archive that nobody may ship: rows O21 to O23, O26 and O27 of the reference.

A log that lies in the folder that PODRUN_TRACES names, under the archive's name and packed or not, is run and held
against the published figures; without it the row is skipped. KTH's row shows that the way of reading and running is
right. Row O24 (CEA-Curie) is missing: the number of processors changes in that log, and the reference does not say
which number its figures are for.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from podrun.simulate.counted_pool import CountedPool
from podrun.simulate.jobs import TraceJob, arrivals_scaled, clairvoyant
from podrun.simulate.queue_metrics import QueueFigures, queue_figures
from podrun.simulate.traces.reading import read_trace


@dataclass(frozen=True, slots=True)
class ArchiveLog:
    """A log by the pattern of its file's name, and how many of its jobs ran."""

    pattern: str
    jobs: int


KTH = ArchiveLog("kth*.swf*", 28_481)
CTC = ArchiveLog("ctc-sp2*.swf*", 77_199)
SDSC = ArchiveLog("sdsc-sp2*.swf*", 54_006)
BLUE = ArchiveLog("sdsc-blue*.swf*", 232_542)
NASA = ArchiveLog("nasa-ipsc*.swf*", 18_066)


def jobs_of(log: ArchiveLog) -> tuple[list[TraceJob], int]:
    """The jobs of a log and the processors that its header names; skips the test if there is no log."""
    folder = Path(os.environ.get("PODRUN_TRACES") or "/nowhere")
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    paths = [path for path in files if Path(path.name.lower()).match(log.pattern)]
    if not paths:
        pytest.skip(f"PODRUN_TRACES names no folder with {log.pattern}")
    # Of a log and its cleaned form, cleaned ones come first.
    path = min(paths, key=lambda path: ("cln" not in path.name, path.name))
    processors = int(read_trace(path, most_broken=1.0).header["MaxProcs"])
    trace = read_trace(path, largest=processors)
    assert len(trace.jobs) == log.jobs
    return trace.jobs, processors


def outcome(log: ArchiveLog, policy: str, *, known: bool = False, scale: float = 1.0) -> QueueFigures:
    jobs, processors = jobs_of(log)
    jobs = clairvoyant(jobs) if known else jobs
    jobs = arrivals_scaled(jobs, scale) if scale != 1 else jobs
    return queue_figures(CountedPool(processors, policy).run(jobs), processors)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("log", "easy", "shortest", "known", "flow"),
    [
        (KTH, 92.5765, 69.405, None, 15_696.8),
        (CTC, 49.5713, 30.0411, 17.5717, 25_526.8),
        (SDSC, 87.8703, 84.8889, 56.8362, 27_850.9),
        (BLUE, 36.5234, 19.8260, 13.1776, None),
    ],
    ids=["kth", "ctc", "sdsc", "blue"],
)
def test_backfilling_has_the_published_slowdown(
    log: ArchiveLog, easy: float, shortest: float, known: float | None, flow: float | None
) -> None:
    """EASY within .1 %; shortest first within 1 %, as the order of equal requests is not published."""
    figures = outcome(log, "easy")
    assert figures.mean_bounded_slowdown == pytest.approx(easy, rel=1e-3)
    if flow is not None:
        assert figures.mean_flow_s == pytest.approx(flow, rel=1e-3)
    assert outcome(log, "sjbf").mean_bounded_slowdown == pytest.approx(shortest, rel=1e-2)
    if known is not None:
        assert outcome(log, "sjbf", known=True).mean_bounded_slowdown == pytest.approx(known, rel=1e-2)


@pytest.mark.slow
def test_nasa_waits_as_measured() -> None:
    """Nobody asked for a time in this log, so that the run counts."""
    easy = outcome(NASA, "easy")
    assert easy.mean_wait_s == pytest.approx(4.067, rel=1e-3)
    assert easy.mean_bounded_slowdown == pytest.approx(1.0119, rel=1e-3)
    crowded = outcome(NASA, "fcfs", scale=0.6)
    assert crowded.mean_bounded_slowdown == pytest.approx(3800.74, rel=1e-3)
    assert crowded.mean_wait_s == pytest.approx(165_494, rel=1e-3)
