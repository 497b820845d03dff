"""``--format json``, ``jsonl`` and ``csv`` of the tools, held against the schemas in the package."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
from click.testing import CliRunner

from podrun.core.ipu_states import IpuErrorState
from podrun.core.machine_output import csv_lines, schema_names, schema_text
from podrun.core.telemetry import AttachedProcess
from podrun.monitor.commands.health import health_verb
from podrun.monitor.commands.schema import schema_verb
from podrun.monitor.commands.top import top_verb
from podrun.monitor.device_listing import gc_info_command, gc_inventory_command
from podrun.monitor.device_tools import gc_monitor_command, gc_reset_command
from podrun.monitor.gc_gwlinkstraffictest import gc_gwlinkstraffictest_command
from podrun.monitor.host_tools import gc_hostsynclatencytest_command, gc_hosttraffictest_command
from podrun.monitor.link_tools import gc_iputraffictest_command, gc_links_command
from podrun.monitor.load_tools import gc_flops_command, gc_powertest_command
from podrun.partition.commands.vipu import vipu_command
from podrun.partition.commands.vipu_admin import vipu_admin_command
from podrun.upkeep.cache import KINDS
from podrun.upkeep.doctor import Finding, Soundness
from podrun.upkeep.verbs import cache_info, doctor, ps
from tests.monitor.real import RealPod
from tests.partition.conftest import Pod

Validator = jsonschema.Draft202012Validator


def printed(command: click.Command, words: Sequence[str], form: str) -> str:
    done = CliRunner().invoke(command, [*words, "--format", form])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.stdout


def check_formats(name: str, command: click.Command, *words: str) -> tuple[Any, list[dict[str, str]]]:
    """The document and the rows of a tool, valid and in agreement; also that text is no JSON."""
    schema = json.loads(schema_text(name))
    Validator.check_schema(schema)
    document = json.loads(printed(command, words, "json"))
    Validator(schema).validate(document)
    lines = [json.loads(line) for line in printed(command, words, "jsonl").splitlines()]
    row_schema = {"$defs": schema["$defs"], **schema["$defs"]["row"]}
    for line in lines:
        Validator(row_schema).validate(line)
    cells = list(csv.DictReader(io.StringIO(printed(command, words, "csv"))))
    assert len(cells) == len(lines)
    with pytest.raises(json.JSONDecodeError):
        json.loads(printed(command, words, "table"))
    return document, cells


@pytest.fixture
def busy(pod: Pod) -> Pod:
    """Two partitions, a process, an error."""
    pod.active("p", 8, reconfigurable=True)
    pod.active("q", 4)
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4711, "justina", 'a "command", with commas', 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    return pod


def test_gc_monitor_has_a_row_for_each_ipu(busy: Pod) -> None:
    document, rows = check_formats("gc-monitor", gc_monitor_command, "--all-partitions")
    assert len(rows) == sum(len(card["ipus"]) for card in document["cards"]) == 12
    assert (rows[0]["PID"], rows[0]["command"]) == ("4711", 'a "command", with commas')
    assert rows[4]["error_state"] == "tile parity error"


def test_gc_info_and_gc_inventory(busy: Pod) -> None:
    document, rows = check_formats("gc-info", gc_info_command, "-l")
    assert [device["id"] for device in document["devices"]] == list(range(15))
    assert len(rows) == 15
    _, (whole,) = check_formats("gc-info-device", gc_info_command, "-i", "-d", "0")
    document, rows = check_formats("gc-inventory", gc_inventory_command)
    assert rows[0]["id"] == whole["id"] == "0"
    assert document["devices"][0]["board type"] == whole["board type"]


def test_health_top_and_reset(busy: Pod) -> None:
    document, (problem,) = check_formats("podrun-health", health_verb)
    assert document["health"]["problems"][0]["agent"] == problem["agent"] == "ipum2"
    document, rows = check_formats("podrun-top", top_verb)
    assert len(rows) == 12
    assert document["sighting"]["jobs"][0]["partition"] == "p"
    _, ipus = check_formats("podrun-top", top_verb, "--filter", "justina")
    assert [row["agent"] for row in ipus] == ["ipum1"] * 4
    check_formats("gc-reset", gc_reset_command, "-d", "4", "--force")


@pytest.mark.parametrize("noun", ["partitions", "allocations", "clusters", "queue"])
def test_lists_of_vipu(busy: Pod, noun: str) -> None:
    check_formats("vipu", vipu_command, "list", noun)


def test_lists_of_vipu_admin(busy: Pod) -> None:
    document, rows = check_formats("vipu", vipu_admin_command, "list", "agents")
    assert len(rows) == len(document["agents"]) == 4


def test_ps_and_cache_say_the_same_in_every_format(
    pod: Pod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_formats("podrun-ps", ps)
    monkeypatch.setenv("PODRUN_CACHE_DIR", str(tmp_path))
    name = next(iter(KINDS))
    (tmp_path / name).mkdir()
    (tmp_path / name / "kept").write_bytes(b"12345")
    document, rows = check_formats("podrun-cache", cache_info)
    sizes = {one["name"]: (one["files"], one["size_bytes"]) for one in document["caches"]}
    assert sizes[name] == (1, 5)
    assert {row["name"]: (int(row["files"]), int(row["size_bytes"])) for row in rows} == sizes


def test_podrun_doctor_says_the_same_in_every_format(monkeypatch: pytest.MonkeyPatch) -> None:
    every = [
        Finding(state.name, state, "something", "a remedy" * (state is not Soundness.OK))
        for state in Soundness
    ]
    monkeypatch.setattr("podrun.upkeep.doctor.examine", lambda host: iter(every))
    document, rows = check_formats("podrun-doctor", doctor)
    assert [finding["health"] for finding in document["findings"]] == [state.value for state in Soundness]
    assert [row["health"] for row in rows] == [state.value for state in Soundness]


def test_without_a_service_the_error_is_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPUOF_VIPU_API_PORT", "1")
    done = CliRunner().invoke(health_verb, ["--api-port", "1", "--format", "json"], standalone_mode=False)
    document = json.loads(done.stdout)
    jsonschema.validate(document, json.loads(schema_text("podrun-health")))
    assert done.return_value == 3
    assert document["error"]["hint"]


def test_cells_of_nested_and_unknown_values() -> None:
    rows = [{"a": {"b": 1, "c": None}, "d": [1, "x"], "e": True}, {"f": 'say "hi", twice\nnow'}]
    assert list(csv.DictReader(io.StringIO("\n".join(csv_lines(rows))))) == [
        {"a.b": "1", "a.c": "", "d": '[1, "x"]', "e": "true", "f": ""},
        {"a.b": "", "a.c": "", "d": "", "e": "", "f": 'say "hi", twice\nnow'},
    ]
    assert list(csv_lines([])) == []


def test_podrun_schema_prints_each() -> None:
    names = CliRunner().invoke(schema_verb, []).stdout.split()
    assert names == schema_names()
    for name in names:
        schema = json.loads(CliRunner().invoke(schema_verb, [name]).stdout)
        Validator.check_schema(schema)
        assert "row" in schema["$defs"], name
    wrong = CliRunner().invoke(schema_verb, ["gc-moniter"])
    assert "gc-monitor" in str(getattr(wrong.exception, "hint", ""))


@pytest.mark.slow
def test_formats_of_the_test_tools(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("formats")
    pod = RealPod(directory, directory / "cache")
    for name in ("VIPU_CLI_API_HOST", "IPUOF_VIPU_API_HOST", "IPUOF_VIPU_API_PARTITION_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(directory))
    monkeypatch.setattr("podrun.monitor.tool_programs.PASSES", 3)
    try:
        pod.active("p", 4, reconfigurable=True)
        check_formats("gc-links", gc_links_command)
        check_formats("gc-iputraffictest", gc_iputraffictest_command, "--iterations", "1")
        check_formats("gc-iputraffictest", gc_iputraffictest_command, "--iterations", "1", "--all-links")
        check_formats("gc-hosttraffictest", gc_hosttraffictest_command)
        check_formats("gc-hostsynclatencytest", gc_hostsynclatencytest_command)
        check_formats("gc-flops", gc_flops_command)
        check_formats("gc-powertest", gc_powertest_command, "--time", "0", "--interval", "0")
    finally:
        pod.stop()


@pytest.mark.slow
def test_formats_of_the_gateway_test(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path_factory.mktemp("gateways")
    pod = RealPod(directory, directory / "cache", "pod128")
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(directory))
    try:
        pod.active("g", 8, num_gcds=2, num_ilds=2)
        check_formats("gc-gwlinkstraffictest", gc_gwlinkstraffictest_command, "--iterations", "1")
    finally:
        pod.stop()
