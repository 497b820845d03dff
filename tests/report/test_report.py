"""Reports of compiled programs: figures add up, pages stand alone, traces open, two runs compare."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from podrun.device.tiles.cost import cost_jaxpr
from podrun.errors import ConfigError
from podrun.report import Profile, read_report
from podrun.report.__main__ import main
from podrun.report.html import page
from podrun.report.text import compare, summary
from podrun.report.trace import chrome_trace


def _cost(width: int) -> dict[str, Any]:
    def step(w: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            with jax.named_scope("dense <1>"):
                return jnp.sum(jax.nn.relu(x @ w))

        return w - 0.1 * jax.grad(loss)(w)

    half = jnp.float16
    shapes = jax.ShapeDtypeStruct((256, width), half), jax.ShapeDtypeStruct((32, 256), half)
    return cost_jaxpr(jax.make_jaxpr(step)(*shapes), "gc200")


@pytest.fixture(scope="module")
def segments() -> dict[str, Any]:
    """A report in the compiler's shape: two segments on two IPUs and an update."""
    first, second = _cost(512), _cost(1024)
    seconds = {"compute": 2e-5, "copies": 1e-6, "update": 3e-6, "all_reduce": 4e-6}
    return {
        "version": 1,
        "step": {"cycles": 37240, "seconds": sum(seconds.values()), "seconds_by_cause": seconds},
        "pipelined": True,
        "segments": [
            {"ipu": 0, "cycle": 0, "sent_bytes": 64, "report": first},
            {"ipu": 1, "cycle": 1, "sent_bytes": 0, "report": second},
        ],
        "update": [{"ipu": 0, "report": first}],
    }


@pytest.fixture(scope="module")
def profile(segments: dict[str, Any]) -> Profile:
    return read_report(segments)


def test_a_profile_adds_its_stages_up(profile: Profile, segments: dict[str, Any]) -> None:
    cycles = sum(s["report"]["step"]["cycles"] for s in segments["segments"])
    assert sum(profile.causes().values()) == pytest.approx(cycles, abs=10)
    assert sum(profile.operators().values()) == pytest.approx(cycles, abs=20)
    assert profile.ipus == (0, 1)
    assert profile.fullest().ipu == 1


def test_the_summary_names_causes_layers_memory_and_trust(profile: Profile) -> None:
    text = summary(profile)
    for word in ("all_reduce", "matmul", "dense <1>", "fullest tile", "fits", "not measured"):
        assert word in text


def test_two_runs_compare(profile: Profile) -> None:
    single = read_report(_cost(512))
    text = compare(single, profile)
    assert "all_reduce" in text
    assert "new" in text
    assert "fullest tile, B" in text


class _Page(HTMLParser):
    """Collects what a page refers to, and checks that what opens closes."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.charts += tag == "svg"
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_stands_alone(profile: Profile) -> None:
    text = page(profile, title="a <b> & c", other=profile)
    parser = _Page()
    parser.feed(text)
    assert parser.links == []
    assert parser.open == []
    assert parser.charts >= 5 + 3 * len(profile.stages)
    assert "<script" not in text
    assert "a &lt;b&gt; &amp; c" in text
    assert "dense &lt;1&gt;" in text
    assert "http" not in text
    assert text == page(profile, title="a <b> & c", other=profile)


def test_the_trace_holds_every_cycle_in_order(profile: Profile) -> None:
    trace = json.loads(json.dumps(chrome_trace(profile)))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    in_stages = sum(
        e[p] for s in profile.stages for e in s.report["timeline"] for p in ("sync", "exchange", "compute")
    )
    in_updates = sum(
        e[p] for s in profile.updates for e in s.report["timeline"] for p in ("sync", "exchange", "compute")
    )
    assert sum(event["args"]["cycles"] for event in slices) == in_stages + in_updates
    for ipu in profile.ipus:
        mine = [event for event in slices if event["pid"] == ipu and event["args"]["segment"] != "update"]
        ends = [event["ts"] + event["dur"] for event in mine]
        assert all(later["ts"] >= end - 1e-3 for end, later in zip(ends, mine[1:], strict=False))


def test_command_writes_what_is_asked_for(
    segments: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "report.json"
    source.write_text(json.dumps(segments), encoding="utf-8")
    html, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert main([str(source), "--html", str(html), "--trace", str(trace)]) == 0
    assert "One batch" in capsys.readouterr().out
    assert html.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert main([str(source), "--compare", str(source)]) == 0


@pytest.mark.parametrize("content", [None, "not json", "[]", "{}", '{"step": {}}'])
def test_bad_files_are_refused_clearly(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "report.json"
    if content is not None:
        source.write_text(content, encoding="utf-8")
    assert main([str(source)]) == 2
    assert "error:" in capsys.readouterr().err


def test_a_report_without_a_model_says_so() -> None:
    with pytest.raises(ConfigError, match="tile report"):
        read_report({})
