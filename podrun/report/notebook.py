"""Profiles in notebooks: the page inline, and pandas tables of what it shows.

    report = session.getReport()
    report.show()                       # or just: report
    report.table("layers").head(10)

Neither IPython nor pandas is needed to import this module; pandas is needed for tables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from html import escape
from typing import Any

from podrun.core.errors import NotFoundError, UsageError
from podrun.report.html import page
from podrun.report.model import PHASES, Profile, layer_of
from podrun.report.text import summary

HEIGHT = 700


def frame(profile: Profile, height: int = HEIGHT) -> str:
    """The page in a frame of its own, ``height`` pixels high, so that its style and script touch nothing else."""
    # Without a base of its own the frame's links to its sections would lead to the notebook.
    whole = page(profile).replace("<head>", '<head><base href="about:srcdoc">', 1)
    return (
        f'<iframe srcdoc="{escape(whole)}" style="width:100%;height:{height}px;border:1px solid #ccc" '
        f'title="{escape(profile.name)}"></iframe>'
    )


def show(profile: Profile, height: int = HEIGHT) -> None:
    """Show the page inline where IPython runs with a display of its own (a notebook); elsewhere print the summary."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not hasattr(shell, "kernel"):
        sys.stdout.write(summary(profile))
        return
    shell.display_pub.publish({"text/html": frame(profile, height), "text/plain": summary(profile)})


def table(profile: Profile, what: str) -> Any:
    """A ``pandas.DataFrame`` with one of `TABLES`; units are in the columns' names.

    Raises UsageError for another name, NotFoundError if pandas is not installed.
    """
    if what not in TABLES:
        raise UsageError(f"a report has no table {what!r}", hint=f"Tables: {', '.join(TABLES)}.")
    try:
        import pandas
    except ImportError as error:
        raise NotFoundError(
            "pandas is not installed, and report.table() gives its tables", hint="pip install pandas"
        ) from error
    return pandas.DataFrame(list(TABLES[what](profile)))


def _causes(profile: Profile) -> Iterator[dict[str, Any]]:
    for cause, seconds in profile.seconds_by_cause.items():
        yield {"cause": cause, "seconds": seconds, "share": seconds / (profile.seconds or 1.0)}


def _operators(profile: Profile) -> Iterator[dict[str, Any]]:
    total = sum(profile.causes().values()) or 1
    for name, cycles in profile.operators().items():
        yield {"operator": name, "cycles": cycles, "share": cycles / total}


def _layers(profile: Profile) -> Iterator[dict[str, Any]]:
    total = sum(profile.causes().values()) or 1
    for name, (forward, backward) in profile.layers_both_ways().items():
        both = forward + backward
        yield {
            "layer": name,
            "cycles": both,
            "forward_cycles": forward,
            "backward_cycles": backward,
            "share": both / total,
        }


def _timeline(profile: Profile) -> Iterator[dict[str, Any]]:
    for stage in profile.stages:
        begin = 0
        for step in stage.timeline:
            cycles = {f"{phase}_cycles": step.cycles(phase) for phase in PHASES}
            place = {"stage": stage.name, "ipu": stage.ipu, "begin_cycle": begin}
            yield {
                **place,
                "operator": step.operator,
                "layer": layer_of(step.scope),
                "steps": step.steps,
                **cycles,
            }
            begin += step.total_cycles


def _tiles(profile: Profile) -> Iterator[dict[str, Any]]:
    for use in profile.held():
        for part in use.memory.by_tile:
            place = {"ipu": use.ipu, "first_tile": part.first_tile, "end_tile": part.end_tile}
            sizes = {f"{name}_bytes": held for name, held in part.bytes_by_category.items()}
            yield {**place, **sizes, "total_bytes": part.total_bytes}


def _memory(profile: Profile) -> Iterator[dict[str, Any]]:
    for use in profile.held():
        for name, held in use.memory.bytes_by_content.items():
            yield {"ipu": use.ipu, "content": name, "bytes": held}


TABLES: Mapping[str, Callable[[Profile], Iterator[dict[str, Any]]]] = {
    "causes": _causes,
    "operators": _operators,
    "layers": _layers,
    "timeline": _timeline,
    "tiles": _tiles,
    "memory": _memory,
}
"""What `table` gives, by name."""
