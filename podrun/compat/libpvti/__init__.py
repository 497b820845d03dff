"""``import libpvti`` for programs that trace themselves with the SDK: `podrun.report.tracepoints`."""

from podrun.report.tracepoints import (
    TraceChannel,
    Tracepoint,
    createTraceChannel,
    instrument,
    instrument_fn,
)

__all__ = ["TraceChannel", "Tracepoint", "createTraceChannel", "instrument", "instrument_fn"]
