"""When requests come: drawn with stated moments, or read from a trace; in an open loop or from clients that wait.

Times are drawn once, for a rate of 1, and scaled: plans that differ in rate, batch or replicas meet the same requests
(common random numbers), and a seed gives the same times each time.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from podrun.core.documents import read_text
from podrun.core.errors import ConfigError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.serving.capacity.quantities import duration_seconds
from podrun.simulate.streams import RandomStreams
from podrun.simulate.traces.lines import BrokenLineError, read_moment, table_rows

FORMS = "poisson, even, burst:cv=4, trace:FILE, closed:clients=64,think=10ms"
_TIME_COLUMNS = ("TIMESTAMP", "timestamp", "time", "time_s", "arrival", "arrival_s", "submit_s")
MOST_BROKEN = 0.05
"""Share of a trace's lines that may make no sense."""


@dataclass(frozen=True, slots=True)
class ArrivalProcess:
    """``kind``: poisson, even, burst, trace or closed. ``cv``: coefficient of variation of the times between
    bursts' requests (gamma distributed). ``clients`` send one request each, and the next ``think_s`` after the
    answer. ``times``: of a trace, seconds from its first request."""

    kind: str = "poisson"
    cv: float = 1.0
    clients: int = 0
    think_s: float = 0.0
    path: str = ""
    times: tuple[float, ...] = ()

    @property
    def label(self) -> str:
        """The process as it is typed on a command line."""
        details = {
            "burst": f":cv={self.cv:g}",
            "trace": f":{self.path}",
            "closed": f":clients={self.clients},think={self.think_s * 1e3:g}ms",
        }
        return self.kind + details.get(self.kind, "")

    @property
    def trace_rate(self) -> float:
        """Requests a second of a trace as it was recorded."""
        return (len(self.times) - 1) / self.times[-1]

    def unit_times(self, requests: int, seed: int, name: str) -> np.ndarray:
        """Times of requests at a mean rate of 1 a second, ascending; ``name``: of the stream of random numbers. A
        trace that is shorter than asked gives what it has."""
        if self.kind == "trace":
            return np.asarray(self.times[:requests]) * self.trace_rate
        if self.kind == "even":
            return np.arange(1, requests + 1, dtype=np.float64)
        stream = RandomStreams(seed).of(name, "arrivals")
        if self.kind == "burst":
            shape = 1.0 / self.cv**2
            return np.cumsum(stream.gamma(shape, 1.0 / shape, requests))
        return np.cumsum(stream.standard_exponential(requests))


def read_arrivals(text: str) -> ArrivalProcess:
    """The arrivals of ``--arrivals``. Raises UsageError, and ConfigError for a trace that cannot be read."""
    kind, _, rest = text.partition(":")
    if kind in ("poisson", "even") and not rest:
        return ArrivalProcess(kind)
    if kind == "trace" and rest:
        return ArrivalProcess(kind, path=rest, times=tuple(read_request_times(Path(rest))))
    settings = dict(word.partition("=")[::2] for word in rest.split(","))
    if kind == "burst" and set(settings) == {"cv"}:
        cv = _positive(settings["cv"], "a coefficient of variation")
        return ArrivalProcess(kind, cv=cv)
    if kind == "closed" and "clients" in settings and set(settings) <= {"clients", "think"}:
        clients = _positive(settings["clients"], "a number of clients")
        if clients != int(clients):
            raise UsageError(
                f"--arrivals: {settings['clients']} clients are no whole number", hint=f"One of {FORMS}"
            )
        think = duration_seconds(settings["think"], "--arrivals") if "think" in settings else 0.0
        return ArrivalProcess(kind, clients=int(clients), think_s=think)
    raise UsageError(f"--arrivals: {text!r} says nothing that is known", hint=f"One of {FORMS}")


def _positive(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UsageError(f"--arrivals: {text!r} is not {what}", hint=f"One of {FORMS}")
    return value


def read_request_times(path: Path) -> list[float]:
    """Seconds from the first request of a table with a column of times (`_TIME_COLUMNS`; seconds or dates), ascending.

    Raises ConfigError with file and line: no such column, no two requests, or more than `MOST_BROKEN` of the lines
    without a time or with a clock that runs backwards."""
    text = read_text(path, hint="--arrivals trace:FILE reads a table with a column of times.")
    moments: list[float] = []
    broken: list[str] = []
    column = ""
    for line, row in table_rows(text):
        column = column or next((name for name in _TIME_COLUMNS if name in row), "")
        if not column:
            raise ConfigError(
                f"{path}:1: there is no column of times", hint=f"Name one of {', '.join(_TIME_COLUMNS)}."
            )
        try:
            moment = read_moment(row[column], column)
        except BrokenLineError as error:
            broken.append(f"{path}:{line}: {error}")
            continue
        if moment is None:
            broken.append(f"{path}:{line}: there is no {column}")
        elif moments and moment < moments[-1]:
            broken.append(f"{path}:{line}: the clock runs backwards by {moments[-1] - moment:g} s")
        else:
            moments.append(moment)
    if len(broken) > MOST_BROKEN * (len(moments) + len(broken)):
        raise ConfigError(f"{broken[0]}; {len(broken)} lines make no sense", hint="Correct the trace.")
    if len(moments) < 2 or moments[-1] == moments[0]:
        raise ConfigError(f"{path} has no two requests at different times", hint="Give a longer trace.")
    return [moment - moments[0] for moment in moments]
