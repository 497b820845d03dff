"""Reports of compiled programs: figures add up, documents come back whole, pages stand alone, two runs compare."""

from __future__ import annotations

import dataclasses
import html
import itertools
import json
import math
import os
import re
import sys
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import podrun
from podrun.compiler.timeline import CAUSES as TIMELINE_CAUSES
from podrun.core.errors import ConfigError, NotFoundError, UsageError
from podrun.report import Profile, read_report
from podrun.report import text as report_text
from podrun.report.__main__ import main
from podrun.report.analysis_profile import Report
from podrun.report.charts import memory_by_tile
from podrun.report.chrome_trace import DETAILED, chrome_trace, to_trace
from podrun.report.document import (
    SCHEMA_VERSION,
    from_json,
    json_schema,
    load_origin,
    load_profile,
    origin_of_process,
    profile_to_json,
    write_report,
)
from podrun.report.html import page, side_by_side
from podrun.report.model import CAUSES, PHASES, layer_of
from podrun.report.stage_runs import stage_runs
from podrun.report.text import byte_size, compare, folded_line, largest_by_layer, rate, summary
from tests.report.profiles import cost, pipeline_profile, pipeline_report

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(scope="module")
def profile() -> Profile:
    return pipeline_profile()


def test_a_profile_adds_its_stages_up(profile: Profile) -> None:
    cycles = sum(stage.cycles for stage in profile.stages)
    assert sum(profile.causes().values()) == pytest.approx(cycles, abs=15)
    assert sum(profile.operators().values()) == pytest.approx(cycles, abs=30)
    assert sum(profile.layers().values()) == pytest.approx(cycles, abs=30)
    assert profile.ipus == (0, 1)
    assert profile.fullest().ipu == 1
    assert profile.samples_per_batch == 4 * 6 * 8
    assert profile.samples_per_second == pytest.approx(4 * 6 * 8 / profile.seconds)
    # Segment 1 is the longest, but IPU 0 has two.
    assert max(profile.stages, key=lambda stage: stage.cycles).name == "segment 1"
    assert profile.bottleneck == "compute, most of it on IPU 0 (segment 0, segment 2)"
    waits = dataclasses.replace(profile, seconds_by_cause={"compute": 1e-6, "all_reduce": 2e-6})
    assert waits.bottleneck == "all_reduce"


@pytest.mark.parametrize(
    ("scope", "layer"),
    [
        ("jvp(conv1/Conv:0)", "conv1/Conv:0"),
        ("transpose(jvp(ipu:1))/transpose(jvp(stage:3))/dense", "dense"),
        ("transpose(jvp(ipu:0/stage:0/a (b)))", "a (b)"),
        ("ipu:2", "(no name)"),
        ("transpose(jvp())", "(no name)"),
        ("(no scope)", "(no scope)"),
    ],
)
def test_a_layer_keeps_its_own_name_only(scope: str, layer: str) -> None:
    assert layer_of(scope) == layer


def test_memory_by_tile_covers_every_tile_once(profile: Profile) -> None:
    for stage in profile.stages:
        intervals = stage.memory.by_tile
        assert intervals[0].first_tile == 0
        assert intervals[-1].end_tile == 1472
        assert all(a.end_tile == b.first_tile for a, b in itertools.pairwise(intervals))


def test_the_pipeline_overlaps_micro_batches_but_never_on_one_ipu(profile: Profile) -> None:
    found = stage_runs(profile, 4)
    assert len(found) == 4 * len(profile.stages)
    for ipu in profile.ipus:
        mine = sorted((r for r in found if r.stage.ipu == ipu), key=lambda r: r.start_cycles)
        assert all(a.end_cycles <= b.start_cycles for a, b in itertools.pairwise(mine))
    for micro_batch in range(4):
        chain = [r for r in found if r.micro_batch == micro_batch]
        ordered = sorted(chain, key=lambda r: r.stage.pipeline_cycle)
        assert all(a.end_cycles <= b.start_cycles for a, b in itertools.pairwise(ordered))
    length = max(r.end_cycles for r in found)
    alone = dataclasses.replace(profile, pipelined=False)
    assert (
        length < max(r.end_cycles for r in stage_runs(alone, 4)) == 4 * sum(s.cycles for s in profile.stages)
    )


def test_the_summary_fits_a_terminal(profile: Profile) -> None:
    assert max(map(len, summary(profile).splitlines())) <= 80
    line = "  exchange code 1.7 MiB, temporary 5.6 MiB, vertex code 8.6 MiB, control code 582.2 KiB, streams 1.0 MiB"
    assert folded_line(line).splitlines()[1] == "      582.2 KiB, streams 1.0 MiB"
    assert (
        folded_line(f"   12 ms  all_reduce  {'between replicas ' * 5}")
        .splitlines()[1]
        .startswith(" " * 22 + "rep")
    )
    assert folded_line("x" * 99) == "x" * 99


def test_the_summary_names_causes_layers_memory_and_trust(profile: Profile) -> None:
    text = summary(profile)
    for word in ("all_reduce", "matmul", "dense <1>", "fullest tile", "fits", "samples/s", "not measured"):
        assert word in text


def test_every_cause_is_explained_and_what_is_left_out_is_counted(profile: Profile) -> None:
    assert set(report_text.CYCLES) == set(CAUSES)
    assert set(report_text.BATCH) == {*TIMELINE_CAUSES, "host"}
    text = summary(profile, top=1)
    layers = profile.layers()
    assert f"({len(layers) - 1} more)" in text
    assert f"{sum(layers.values()) - max(layers.values()):,}" in text
    assert all(meaning in text for meaning in report_text.CYCLES.values())


def test_what_is_counted_is_one_or_many(profile: Profile) -> None:
    assert "(4 replicas x 6 micro-batches)" in summary(profile)
    one = dataclasses.replace(profile, replicas=1, accumulation_factor=1)
    assert "(1 replica x 1 micro-batch)" in summary(one)
    assert "6 micro-batches a batch" in page(profile)


def test_times_are_in_a_unit_that_shows_them(profile: Profile) -> None:
    for seconds, words in ((42e-6, "42.000 us"), (42e-3, "42.000 ms")):
        lasting = dataclasses.replace(profile, seconds=seconds)
        assert words in summary(lasting)
        assert f"<b>{words}</b>" in page(lasting)


def test_the_cards_answer_what_is_asked_first(profile: Profile) -> None:
    cards = page(profile).partition("<nav>")[0]
    memory = profile.fullest().memory
    assert f"<strong>{memory.max_tile_bytes / memory.tile_capacity_bytes:.1%}</strong>" in cards
    assert (
        f"<p>{byte_size(memory.max_tile_bytes)} of {byte_size(memory.tile_capacity_bytes)}, on IPU" in cards
    )
    assert f"<strong>{profile.bottleneck.partition(',')[0]}</strong>" in cards
    assert "<strong>Yes</strong>" in cards


def test_the_axis_of_tiles_ends_at_the_limit_or_says_where(profile: Profile) -> None:
    memory = profile.fullest().memory
    fullest = max(interval.total_bytes for interval in memory.by_tile)
    small = memory_by_tile(dataclasses.replace(memory, tile_capacity_bytes=fullest * 10))
    assert "Enlarged: the top is 12.5% of a tile" in small
    assert "stroke-dasharray" not in small
    large = memory_by_tile(dataclasses.replace(memory, tile_capacity_bytes=fullest * 2))
    assert "Enlarged" not in large
    assert f">{byte_size(fullest * 2)}</span>" in large
    assert "stroke-dasharray" in large


def test_links_to_many_ipus_are_numbers(profile: Profile) -> None:
    links = re.findall(r"<nav>(.*)</nav>", page(profile))[0]
    assert re.findall(r">(Memory of IPU \d)</a>", links) == [
        f"Memory of IPU {use.ipu}" for use in profile.held()
    ]
    stages = tuple(dataclasses.replace(profile.stages[0], name=f"segment {n}", ipu=n) for n in range(5))
    links = re.findall(r"<nav>(.*)</nav>", page(dataclasses.replace(profile, stages=stages)))[0]
    numbers = "".join(f'<a href="#stage-{n}" title="Segment {n} on IPU {n}">{n}</a>' for n in range(5))
    assert f"<span>Timelines: {numbers}</span>" in links


def test_names_cannot_command_a_terminal(profile: Profile) -> None:
    stage = profile.stages[0]
    layers = tuple(
        dataclasses.replace(stage.layers[0], name=name) for name in ("two\nlines", "\x1b[31mred", "größe")
    )
    odd = dataclasses.replace(profile, stages=(dataclasses.replace(stage, layers=layers),))
    for text in (summary(odd), compare(profile, odd)):
        assert "\x1b" not in text
        assert "two\\nlines" in text
        assert "\\x1b[31mred" in text
        assert "größe" in text


def test_names_are_sorted_as_people_number_them(profile: Profile) -> None:
    stage = profile.stages[0]
    layers = tuple(dataclasses.replace(stage.layers[0], name=f"MatMul:0/{n}") for n in (10, 2, 1))
    one = dataclasses.replace(profile, stages=(dataclasses.replace(stage, layers=layers),))
    assert list(one.layers()) == list(one.layers_both_ways()) == ["MatMul:0/1", "MatMul:0/2", "MatMul:0/10"]


def test_values_of_a_layer_are_told_together(profile: Profile) -> None:
    held = profile.held()[0].memory
    value = dataclasses.replace(held.largest[0], scope="jvp(dense)", size_bytes=1024)
    backward = dataclasses.replace(value, scope="transpose(jvp(dense))", size_bytes=512)
    found = largest_by_layer(dataclasses.replace(held, largest=(value, value, backward)))
    assert found == [("dense", 2048), ("dense (backward)", 512)]


@pytest.mark.parametrize(
    ("speed", "words"),
    [(6113523.04, "6,113,523 samples/s"), (41.98, "42.0 samples/s"), (0.8121, "0.812 samples/s")],
)
def test_throughput_has_three_digits(speed: float, words: str) -> None:
    assert rate(speed) == words


def test_a_comparison_shows_what_is_new_and_both_fullest_tiles(profile: Profile) -> None:
    text = compare(read_report(cost(512)), profile)
    assert "all_reduce" in text
    assert "new" in text
    fullest = profile.fullest().memory.max_tile_bytes
    assert re.search(
        rf"^fullest tile +[\d.]+ [KM]?i?B +{re.escape(byte_size(fullest))} ", text, flags=re.MULTILINE
    )
    same = compare(profile, profile)
    assert "+0.0%" in same
    assert "new" not in same


# --- The document -----------------------------------------------------------------------------------------------------


def test_a_document_comes_back_whole(profile: Profile) -> None:
    text = profile_to_json(profile)
    assert from_json(text) == profile
    assert profile_to_json(from_json(text)) == text


def test_every_number_in_the_document_has_a_unit_in_its_key(profile: Profile) -> None:
    units = ("_cycles", "_bytes", "_hz", "_tile", "cycles", "seconds", "flops")
    counts = {
        "steps",
        "count",
        "ipu",
        "pipeline_cycle",
        "replicas",
        "ipus_per_replica",
        "accumulation_factor",
    }
    counts |= {"samples_per_batch", "batches_per_run", "batches_per_pass", "schema_version"}

    def check(value: Any, keys: tuple[str, ...]) -> None:
        if isinstance(value, dict):
            for name, item in value.items():
                # Tables by category or cause carry the unit in their own key.
                check(item, (*keys, name))
        elif isinstance(value, list):
            for item in value:
                check(item, keys)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            near = keys[-2:]
            named = any(key.endswith(units) or "_by_" in key or key in counts for key in near)
            assert named, f"{'.'.join(keys)} has no unit"

    check(json.loads(profile_to_json(profile)), ())


def test_the_schema_lists_every_key_of_the_document(profile: Profile) -> None:
    schema = json_schema()
    document = json.loads(profile_to_json(profile))
    assert set(document) == set(schema["properties"]) == set(schema["required"])
    stage = schema["$defs"]["ReportStage"]
    assert set(document["profile"]) == set(schema["$defs"]["Profile"]["properties"])
    assert set(document["profile"]["stages"][0]) == set(stage["properties"]) == set(stage["required"])


def _broken(change: str) -> str:
    document = json.loads(profile_to_json(pipeline_profile()))
    stage = document["profile"]["stages"][0]
    match change:
        case "no json":
            return "{"
        case "other schema":
            document["schema"] = "another"
        case "newer":
            document["schema_version"] = SCHEMA_VERSION + 1
        case "wrong type":
            stage["cycles"] = "12"
        case "missing":
            del stage["memory"]["fits"]
        case "no stages":
            document["profile"]["stages"] = []
        case "no profile":
            del document["profile"]
    return json.dumps(document)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("no json", "not JSON"),
        ("other schema", "no profile"),
        ("newer", "schema_version"),
        ("wrong type", r"profile.stages.0.cycles"),
        ("missing", r"memory.fits"),
        ("no stages", "at least one stage"),
        ("no profile", "profile"),
    ],
)
def test_a_document_that_is_wrong_is_refused_by_place(change: str, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        from_json(_broken(change))


def test_a_document_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_profile(str(tmp_path / "none.json"))
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_profile(tmp_path / "bytes.json")


@pytest.mark.parametrize("model", ["perceptron", "convolution"])
def test_reports_of_recorded_models_are_byte_identical(model: str, tmp_path: Path) -> None:
    """From the ``tile_report.json`` beside them. ``UPDATE_GOLDEN=1 pytest tests/report`` records anew."""
    report = json.loads((GOLDEN / model / "tile_report.json").read_text(encoding="utf-8"))
    write_report(read_report(report, name=model, samples_per_micro_batch=32), tmp_path)
    assert (tmp_path / "profile.pop").read_bytes() == (tmp_path / "profile.json").read_bytes()
    (tmp_path / "profile.pop").unlink()
    for path in sorted(tmp_path.iterdir()):
        recorded = GOLDEN / model / path.name
        if os.environ.get("UPDATE_GOLDEN"):
            recorded.write_bytes(path.read_bytes())
        assert path.read_bytes() == recorded.read_bytes(), (
            f"{recorded} differs: UPDATE_GOLDEN=1 records it anew"
        )
    assert len(list(tmp_path.iterdir())) == 4


# --- The page and the trace -------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Collects what a page refers to, and checks that what opens closes."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.open: list[str] = []
        self.charts = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        self.charts += tag == "svg"
        if tag not in ("meta", "br", "input"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        self.anchors |= {value or "" for name, value in attrs if name == "id"}


def test_the_page_stands_alone(profile: Profile) -> None:
    text = page(profile, title="a <b> & c", other=profile)
    parser = _Page()
    parser.feed(text)
    assert parser.open == []
    assert all(link.startswith("#") and link[1:] in parser.anchors for link in parser.links)
    assert {
        "batch",
        "compare",
        "pipeline",
        "operators",
        "layers",
        "bsp-0",
        "tiles-1",
        "bsp-2",
        "time-1",
    } <= parser.anchors
    assert parser.charts == 3 + 3 * len(profile.held()) + len(profile.stages)
    assert "a &lt;b&gt; &amp; c" in text
    assert "dense &lt;1&gt;" in text
    assert "http" not in text
    assert text == page(profile, title="a <b> & c", other=profile)


def test_a_page_says_program_command_date_and_version(profile: Profile, tmp_path: Path) -> None:
    now = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)
    origin = origin_of_process({"PODRUN_COMMAND": "podrun profile <train>.py"}, ["python", "x"], now)
    assert origin.podrun_version == podrun.__version__
    own = origin_of_process({}, ["/usr/bin/python", "-m", "podrun.compat", "a b.py"], now)
    assert own.command == "python -m podrun.compat 'a b.py'"
    text = page(profile, origin=dataclasses.replace(origin, program="train.py"))
    assert (
        "<b>train.py</b>, <code>podrun profile &lt;train&gt;.py</code>, 2024-05-06 07:08:09 UTC, podrun "
        in text
    )
    assert "<title>train.py: training</title>" in text
    assert 'class="origin"' not in page(profile)
    write_report(profile, tmp_path, origin=origin)
    assert load_origin(tmp_path / "profile.json") == origin
    assert load_profile(tmp_path / "profile.json") == profile
    write_report(profile, tmp_path)
    assert load_origin(tmp_path / "profile.json") is None


def test_two_reports_stand_side_by_side_with_ids_of_their_own(profile: Profile) -> None:
    text = side_by_side(profile, dataclasses.replace(profile, name="later"))
    parser = _Page()
    parser.feed(text)
    assert parser.open == []
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["What changed", "Before", "After"]
    ids = re.findall(r' id="([^"]+)"', text)
    assert len(ids) == len(set(ids)) > 8
    assert set(re.findall(r'data-for="([^"]+)"', text)) == {"s0-layer-table", "s1-layer-table"}


def test_sizes_have_one_style() -> None:
    assert [report_text.byte_size(n) for n in (0, 1023, 1024, 638_976, 5 << 20, 3 << 30)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "624.0 KiB",
        "5.0 MiB",
        "3.0 GiB",
    ]


def test_a_notebook_shows_the_page_in_a_frame(
    profile: Profile, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    profile.show()
    assert capsys.readouterr().out == summary(profile)
    published: list[dict[str, str]] = []
    shell = SimpleNamespace(kernel=1, display_pub=SimpleNamespace(publish=published.append))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    Report(profile).show(height=300)
    (shown,) = published
    assert shown["text/plain"] == summary(profile)
    assert shown["text/html"].startswith("<iframe srcdoc=")
    assert "height:300px" in shown["text/html"]
    base = '<base href="about:srcdoc">'
    assert page(profile).replace("<head>", f"<head>{base}") == html.unescape(
        profile._repr_html_().split('"')[1]
    )


def test_tables_need_pandas_and_a_known_name(profile: Profile, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="no table 'layer'"):
        profile.table("layer")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(NotFoundError, match="pandas is not installed") as error:
        profile.table("layers")
    assert error.value.hint == "pip install pandas"
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=lambda rows: rows))
    layers = profile.table("layers")
    assert sum(row["cycles"] for row in layers) == sum(profile.layers().values())
    assert all(row["forward_cycles"] + row["backward_cycles"] == row["cycles"] for row in layers)
    steps = profile.table("timeline")
    phases = ("sync_cycles", "exchange_cycles", "compute_cycles")
    assert sum(row[p] for row in steps for p in phases) == sum(
        step.total_cycles for stage in profile.stages for step in stage.timeline
    )
    assert {len(profile.table(name)) > 0 for name in ("causes", "operators", "tiles", "memory")} == {True}


def test_a_page_of_many_layers_has_a_table_to_filter(profile: Profile) -> None:
    stage = profile.stages[0]
    layers = tuple(dataclasses.replace(stage.layers[0], name=f"layer {n}") for n in range(40))
    one = dataclasses.replace(profile, stages=(dataclasses.replace(stage, layers=layers),), pipelined=False)
    text = page(one)
    assert text.count("<tr><td>layer ") == 40
    assert 'data-for="layer-table"' in text
    assert 'id="pipeline"' not in text


def test_the_trace_holds_every_cycle_in_order(profile: Profile) -> None:
    trace = json.loads(to_trace(profile))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    phases = [event for event in events if event["cat"] in PHASES]
    once = sum(step.total_cycles for stage in profile.stages for step in stage.timeline)
    update = sum(step.total_cycles for stage in profile.updates for step in stage.timeline)
    assert sum(event["args"]["cycles"] for event in phases) == DETAILED * once + update
    whole = [event for event in events if event["cat"] == "segment"]
    assert len(whole) == profile.accumulation_factor * len(profile.stages) + len(profile.updates)
    for kind in (phases, whole):
        for ipu in profile.ipus:
            mine = sorted((event for event in kind if event["pid"] == ipu), key=lambda event: event["ts"])
            ends = [event["ts"] + event["dur"] for event in mine]
            assert all(later["ts"] >= end - 0.05 for end, later in zip(ends, mine[1:], strict=False))
    assert chrome_trace(profile)["metadata"]["micro_batches"] == 6


def test_the_trace_has_the_trace_event_format(profile: Profile) -> None:
    """The JSON object format: metadata and complete events only, slices of a thread nested or apart."""
    trace = json.loads(to_trace(profile))
    assert set(trace) <= {"traceEvents", "displayTimeUnit", "metadata"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    named: set[tuple[int, int]] = set()
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(type(event[key]) is int for key in ("pid", "tid"))
        thread = event["pid"], event["tid"]
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add(thread)
            continue
        assert event["ph"] == "X"
        assert isinstance(event["cat"], str)
        assert isinstance(event["args"], dict)
        for key in ("ts", "dur"):
            assert type(event[key]) in (int, float)
            assert math.isfinite(event[key])
            assert event[key] >= 0
        slices.setdefault(thread, []).append((event["ts"], event["ts"] + event["dur"]))
    assert set(slices) <= named
    for found in slices.values():
        open_slices: list[float] = []
        for start, end in sorted(found, key=lambda slice: (slice[0], -slice[1])):
            while open_slices and open_slices[-1] <= start + 1e-3:
                open_slices.pop()
            # Times are rounded to a tenth of a nanosecond.
            assert not open_slices or end <= open_slices[-1] + 1e-3
            open_slices.append(end)


# --- The command ------------------------------------------------------------------------------------------------------


def test_command_writes_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "report.json"
    source.write_text(json.dumps(pipeline_report()), encoding="utf-8")
    made, trace, document = tmp_path / "page.html", tmp_path / "trace.json", tmp_path / "profile.json"
    assert main([str(source), "--html", str(made), "--trace", str(trace), "--json", str(document)]) == 0
    assert "One batch" in capsys.readouterr().out
    assert made.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert main([str(document), "--compare", str(source)]) == 0
    assert "+0.0%" in capsys.readouterr().out


@pytest.mark.parametrize(
    "content", [None, "not json", "[]", "{}", '{"step": {}}', '{"step": {}, "segments": [{}]}', '{"step": 1}']
)
def test_bad_files_are_refused_clearly(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "report.json"
    if content is not None:
        source.write_text(content, encoding="utf-8")
    assert main([str(source)]) == 2
    assert "error:" in capsys.readouterr().err


def test_what_cannot_be_written_or_is_no_option_is_one_named_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "report.json"
    source.write_text(json.dumps(pipeline_report()), encoding="utf-8")
    for words, said in (
        (["--html", str(tmp_path / "none" / "page.html")], "page.html cannot be written"),
        (["--json", str(tmp_path)], "cannot be written"),
        (["--nosuch"], "--nosuch"),
        (["--html"], "--html"),
    ):
        assert main([str(source), *words]) == 2
        told = capsys.readouterr()
        assert said in told.err
        assert "\nhint: " in told.err
        assert told.out == ""


def test_a_report_without_a_model_says_so() -> None:
    with pytest.raises(ConfigError, match="tile report"):
        read_report({})


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path, profile: Profile) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report(profile, tmp_path / "file" / "below")
