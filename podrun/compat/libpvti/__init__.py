"""``import libpvti`` for programs that trace themselves with the SDK: `podrun.report.chrome_trace`."""

from podrun.report.chrome_trace import (
    Graph,
    Heatmap,
    Series,
    TraceChannel,
    Tracepoint,
    checkTraceChannel,
    closeTrace,
    createTraceChannel,
    disableTraceChannels,
    enableTraceChannels,
    getCurrentTraceFilename,
    instrument,
    instrument_fn,
    listTraceChannel,
)

traceDrivers, tracePoplar, traceFramework = map(TraceChannel, ("Drivers", "Poplar", "Framework"))
HeatmapDouble = HeatmapFloat = HeatmapInt = Heatmap

checkTraceChannelEnabled = checkTraceChannel
disableTraceChannel, enableTraceChannel = disableTraceChannels, enableTraceChannels
listTraceChannels = listTraceChannel

__all__ = [
    "Graph",
    "HeatmapDouble",
    "HeatmapFloat",
    "HeatmapInt",
    "Series",
    "TraceChannel",
    "Tracepoint",
    "checkTraceChannel",
    "checkTraceChannelEnabled",
    "closeTrace",
    "createTraceChannel",
    "disableTraceChannel",
    "disableTraceChannels",
    "enableTraceChannel",
    "enableTraceChannels",
    "getCurrentTraceFilename",
    "instrument",
    "instrument_fn",
    "listTraceChannel",
    "listTraceChannels",
    "traceDrivers",
    "traceFramework",
    "tracePoplar",
]
