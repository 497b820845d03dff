"""``import libpvti`` for programs that trace themselves with the SDK: `podrun.report.chrome_trace`."""

from podrun.report.chrome_trace import (
    TraceChannel,
    Tracepoint,
    createTraceChannel,
    instrument,
    instrument_fn,
)

__all__ = ["TraceChannel", "Tracepoint", "createTraceChannel", "instrument", "instrument_fn"]
