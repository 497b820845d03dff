"""The test tool: sizes, the table, the columns' arithmetic, and one real measurement."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from podrun.collectives import timing
from podrun.collectives.measurement import OPERATIONS, MeasuredSize, Measurement
from podrun.collectives.perf import main, modelled, parse_size, perf_command, render, table_row
from podrun.core.errors import UsageError


@pytest.mark.parametrize(("text", "size"), [("8", 8), ("64K", 65536), ("16m", 16 * 2**20), ("1G", 2**30)])
def test_sizes_in_bytes_and_with_a_unit_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-8", "8T", "0", "1.5M"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_the_table_has_the_columns_of_nccl_tests() -> None:
    job = Measurement("all_reduce", "copy", 4, (2**20,))
    fabric = timing.fabric("gc200")
    row = table_row(MeasuredSize(2**20, 2**18, 1e-3, 0), modelled("all_reduce", 2**20, 4, fabric), job)
    assert row["emulated_algbw_gb_s"] == pytest.approx(2**20 / 1e-3 / 1e9)
    assert row["emulated_busbw_gb_s"] == pytest.approx(row["emulated_algbw_gb_s"] * 2 * 3 / 4)
    assert row["modelled_seconds"] == timing.all_reduce_time(2**20, 4, fabric).seconds
    text = render([row, {**row, "wrong": 3}], job, "gc200")
    for word in (
        "size",
        "algbw",
        "busbw",
        "#wrong",
        "emulated",
        "modelled",
        "Out of bounds values : 3 FAILED",
    ):
        assert word in text
    assert "1048576     262144  float32    sum    1000.0     1.05     1.57       0" in text


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_has_a_model(operation: str) -> None:
    assert modelled(operation, 2**20, 4, timing.fabric("bow")).seconds > 0


@pytest.mark.system
@pytest.mark.parametrize(
    "extra", [["--variant", "shared"], ["--hosts", "2"], ["--operation", "send_receive"]]
)
def test_a_measurement_with_real_processes(extra: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["-g", "2", "-b", "64", "-e", "64K", "-f", "1024", "--seconds", "0.001"]
    run = CliRunner().invoke(perf_command, [*sizes, *extra, "--json", str(report)])
    assert run.exit_code == 0, run.output
    assert "Out of bounds values : 0 OK" in run.output
    data = json.loads(report.read_text())
    assert [row["bytes"] for row in data["rows"]] == [64, 65536]
    assert all(row["emulated_seconds"] > 0 and row["wrong"] == 0 for row in data["rows"])


@pytest.mark.system
@pytest.mark.slow
def test_one_table_for_each_operation(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    sizes = ["-g", "2", "-b", "96", "-e", "96", "--seconds", "0.0005"]
    run = CliRunner().invoke(perf_command, ["--operation", "all", *sizes, "--json", str(report)])
    assert run.exit_code == 0, run.output
    tables = json.loads(report.read_text())["tables"]
    assert [table["job"]["operation"] for table in tables] == list(OPERATIONS)
    for table in tables:
        assert table["rows"][0]["wrong"] == 0
        assert table["rows"][0]["modelled_seconds"] > 0
        assert f"# {table['job']['operation']} (array), 2 ranks" in run.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-b", "lots"], "'lots' is not a size"),
        (["--operation", "broadcast", "--variant", "shared"], "shared"),
        (["--rank", "3"], "no such option '--rank'. (Did you mean one of: '--ranks', '--variant'?)"),
    ],
)
def test_wrong_options_end_with_code_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("podrun.collectives.perf: error: ")
    assert "\nhint: " in error
    assert said in error
