"""The picture of `podrun top`: a POD16 on which a launch trains on eight IPUs, drawn by the live view itself."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from textual.widgets import DataTable, Static

from podrun.monitor.devices import connect_monitor
from podrun.monitor.live.arrangement import totals_of
from podrun.monitor.live.screen import PodTop
from podrun.monitor.live.sources import ServiceSource

JOB = ["--num-replicas", "8", "examples/digits/train.py", "--epochs", "1000000"]
SIZE = (92, 14)
"""Columns and rows of the terminal."""
DEADLINE_S = 300.0


def live_view(binaries: Path, root: Path) -> str:
    """An SVG of the screen once the job's IPUs are busy. Raises TimeoutError if they are not within the deadline."""
    with served_pod(binaries) as port:
        job = subprocess.Popen(
            [binaries / "podrun", "--vipu-server-port", str(port), "--vipu-partition", "train", *JOB],
            cwd=root,
            stdout=subprocess.DEVNULL,
        )
        source = ServiceSource(lambda: connect_monitor("127.0.0.1", port), time.time)
        try:
            picture = asyncio.run(_screen(source))
        finally:
            source.close()
            job.terminate()
            job.wait(DEADLINE_S)
    return re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # A picture fetches no fonts.


@contextlib.contextmanager
def served_pod(binaries: Path) -> Iterator[int]:
    """The port of a server whose machines are its threads, which ends with the block."""
    words = [str(binaries / "vipu-server"), "--in-process", "--no-state", "--port=0", "--cluster=pod16"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        line = next(line for line in server.stdout if "listens on" in line)
        yield int(line.rpartition(":")[2])
    finally:
        server.terminate()
        server.wait(DEADLINE_S)


async def _screen(source: ServiceSource) -> str:
    app = PodTop(source, 0.5)
    async with app.run_test(size=SIZE) as pilot, asyncio.timeout(DEADLINE_S):
        table = app.query_one("#machines", DataTable)
        while not table.row_count or not (totals_of(source.look()).busy_percent or 0) > 30:
            await asyncio.sleep(0.5)
        await asyncio.sleep(5)  # Rates are those of a look before.
        while not re.search(r"([3-9]\d|100)% busy", str(app.query_one("#headline", Static).content)):
            await asyncio.sleep(0.2)  # On a busy host the job stands still now and then.
        await pilot.pause()
        return app.export_screenshot(title="podrun top")
