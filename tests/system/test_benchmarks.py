"""Every script in ``benchmarks/`` runs, on smaller input (``--short``), and writes its figures.

A file with a main part is a script. Scripts that another one starts by name are tested with that one.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import ROOT, Commands

FOLDER = ROOT / "benchmarks"
SOURCES = {path.name: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.py"))}
OF_A_FUNCTION = ("bare_step.py", "bare_pipeline.py")
"""Files that are imported, and that a function of theirs starts as a process."""
SCRIPTS = [
    name
    for name, text in SOURCES.items()
    if 'if __name__ == "__main__":' in text
    and name not in OF_A_FUNCTION
    and not any(f'with_name("{name}")' in each for each in SOURCES.values())
]
NEED_ROOT = ("collectives_hosts.py",)
SECONDS = 600


def test_there_are_scripts_and_each_has_a_short_mode() -> None:
    assert len(SCRIPTS) > 15
    assert [name for name in SCRIPTS if "add_short(" not in SOURCES[name]] == []


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_benchmark_runs(commands: Commands, tmp_path: Path, name: str) -> None:
    if name in NEED_ROOT and os.geteuid():
        pytest.skip("it makes network namespaces, which needs root")
    figures = tmp_path / "figures.json"
    program = (sys.executable, FOLDER / name, "--short", "--json", figures)
    done = commands.run(*program, timeout=SECONDS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    numbers = list(numbers_in(json.loads(figures.read_text(encoding="utf-8"))))
    assert numbers
    assert all(map(math.isfinite, numbers))
    assert not (commands.home / ".ipuof.conf.d").exists(), "it leaves files in the home directory"


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers of a document."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers_in(each)
    elif isinstance(value, (int, float)):
        yield value


class Ended:
    """A worker whose process has ended before it is told to compute."""

    def __init__(self, *arguments: object, **options: object) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        self.stdin, self.stdout = open(writer, "w"), io.StringIO()  # noqa: SIM115 - `workers` closes it

    def wait(self, timeout: float) -> int:
        return 1


def test_a_worker_that_has_ended_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    bare_calls = importlib.import_module("bare_calls")
    monkeypatch.setattr(subprocess, "Popen", Ended)
    with (
        pytest.raises(SystemExit, match="a process of the bare calls ended"),
        bare_calls.workers("script.py", 2) as compute,
    ):
        compute()


@pytest.mark.parametrize(
    ("cores", "processes"),
    [(1, 1), (2, 2), (3, None), (4, 4), (5, None), (6, None), (7, None), (8, 8), (64, 8)],
)
def test_a_pipeline_has_a_limit_where_all_cores_have_as_many_layers(
    cores: int, processes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where some would idle, a pipeline that uses them may take less time."""
    monkeypatch.syspath_prepend(FOLDER)
    bare_pipeline, asked = importlib.import_module("bare_pipeline"), []
    workers = lambda script, count, *words: asked.append(count) or contextlib.nullcontext(lambda: (1.0, 1.0))  # noqa: E731
    monkeypatch.setattr(bare_pipeline, "workers", workers)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    with bare_pipeline.bare_pipelines(16, 64, 64, 8, training=True) as compute:
        assert (compute is None) == (processes is None)
    assert asked == ([] if processes is None else [processes])


@pytest.mark.parametrize("limits", [[], [(0.5, 1.0)]])
def test_figures_of_a_pipeline_without_a_limit(
    limits: list[tuple[float, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    side = SimpleNamespace(seconds=[1.0], processor_seconds=[2.0])
    figures = importlib.import_module("pipeline").figures_of(
        dict.fromkeys(("pipeline", "one_machine", "one_ipu"), side), limits
    )
    assert figures["vs_one_machine"] == 1
    assert [figures.get("vs_limit"), figures.get("limit_vs_one_machine")] == (
        [2, 0.5] if limits else [None, None]
    )


SUMMARY = FOLDER / "summary.py"
RECORDED = FOLDER / "data" / "side-by-side.json"


@pytest.fixture
def summary(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("summary")


def test_a_ratio_fails_the_guard_when_it_is_a_tenth_worse_twice_in_a_row(
    summary: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steady, once, twice = summary.RATIOS[:3]
    runs = [
        {steady.name: 1.09, once.name: 1.2, twice.name: 1.2},
        {once.name: 1.0, twice.name: 1.11},
    ]
    asked = []

    def measure(ratios: Any) -> dict[str, float]:
        asked.append([ratio.name for ratio in ratios])
        return runs[len(asked) - 1]

    monkeypatch.setattr(summary, "measured", measure)
    recorded = {ratio.name: [0.9, 1.0, 5.0] for ratio in (steady, once, twice)}
    assert summary.check({"host": summary.host(), "ratios": recorded}, summary.RATIOS) == 1
    assert asked == [[steady.name, once.name, twice.name], [once.name, twice.name]]
    assert capsys.readouterr().out.splitlines() == [
        f"{once.name}: worse once, 1.20 and 1.00, recorded 1.00",
        f"{twice.name}: WORSE TWICE, 1.20 and 1.11, recorded 1.00",
        "3 ratios compared, 1 worse by more than a tenth twice in a row",
    ]
    assert summary.check({"host": "a computer of 1970, 1 core", "ratios": recorded}, summary.RATIOS) == 0


def test_the_page_of_ratios_shows_what_is_recorded(summary: Any) -> None:
    record = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert (ROOT / "docs/side-by-side.md").read_text(encoding="utf-8") == summary.page(
        record, "side-by-side.svg"
    )
    drawn = (ROOT / "docs/pictures/side-by-side.svg").read_text(encoding="utf-8")
    assert drawn == summary.picture(record["ratios"])


COMPARED = sorted({name.partition("/")[0] for name in json.loads(RECORDED.read_text("utf-8"))["ratios"]})


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("name", COMPARED)
def test_no_ratio_is_worse_than_recorded(commands: Commands, name: str) -> None:
    words = ("--check", RECORDED, "--only", name)
    done = commands.run(sys.executable, SUMMARY, *words, timeout=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^[1-9]\d* ratios compared|not compared$", done.stdout, re.MULTILINE), done.stdout
