"""``podrun trace RECORD``: a recorded launch as spans, printed or sent to an OpenTelemetry collector."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.machine_output import format_option, print_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from podrun.record.timeline import TraceSpan


@click.command("podrun trace", context_settings=HELP_OPTIONS)
@click.argument("record", type=click.Path(path_type=Path))
@click.option(
    "--otlp", metavar="URL", help="Send them to a collector by OTLP over HTTP, as http://127.0.0.1:4318."
)
@format_option
def trace_verb(record: Path, otlp: str | None, form: str) -> None:
    """Show a recorded launch as spans: instances, ranges of batches, checkpoints, recoveries, incidents.

    RECORD is a file of podrun --record; its times lie beside it.
    """
    from podrun.launcher.recording import file_beside
    from podrun.record.events import read_record
    from podrun.record.timeline import spans_of, timed_events

    spans = spans_of(timed_events(read_record(record), file_beside(record, "times")))
    if otlp is not None:
        from podrun.record.otlp import send_trace

        seed = hashlib.sha256(record.read_bytes()).hexdigest() + f"{spans[0].start_s:.6f}" if spans else ""
        click.echo(f"trace {send_trace(spans, otlp, seed)}: {len(spans)} spans sent to {otlp}")
        return
    rows = [asdict(span) for span in spans]
    print_output(
        form, text=lambda: "\n".join(_lines(spans)), document={"schema_version": 1, "spans": rows}, rows=rows
    )


def _lines(spans: list[TraceSpan]) -> Iterator[str]:
    """A line a span, indented below its parent, with seconds since the launch began."""
    depth: list[int] = []
    for span in spans:
        depth.append(0 if span.parent is None else depth[span.parent] + 1)
        begin = span.start_s - spans[0].start_s
        failed = f"  FAILED: {span.failed}" if span.failed else ""
        yield f"{begin:9.3f} s {span.end_s - span.start_s:9.3f} s  {'  ' * depth[-1]}{span.name}{failed}"
