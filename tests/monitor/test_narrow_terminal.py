"""On a terminal of 80 columns: no help, no table and no line of a launch is wider."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable

import click
import pytest
from click.testing import CliRunner

from podrun.collectives.perf import perf_command
from podrun.compat.__main__ import compat_command
from podrun.core.ipu_states import IpuErrorState
from podrun.core.telemetry import AttachedProcess, IpuReport, MachineReport
from podrun.core.terminal import text_table
from podrun.estimate.command import estimate_command
from podrun.launcher import help_text, summary
from podrun.launcher.commands import profile
from podrun.launcher.commands.click_verbs import RecordCommand, verb_command
from podrun.launcher.commands.completion import completion_verb
from podrun.launcher.commands.verb_names import RECORD_VERBS
from podrun.launcher.own_streams import Log
from podrun.launcher.spec import LaunchLayout
from podrun.monitor import monitor_tables
from podrun.monitor.devices import views
from podrun.report.__main__ import report_command
from podrun.upkeep import verbs
from podrun.upkeep.running import Run
from tests.partition.conftest import Pod
from tests.test_docs import COMMANDS

COLUMNS = 80
STYLE = re.compile(r"\x1b\[[0-9;]*m")


class NarrowTerminal(io.StringIO):
    """A terminal that shows colour."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TERM", "xterm")


def too_wide(text: str) -> list[str]:
    return [line for line in STYLE.sub("", text).splitlines() if len(line) > COLUMNS]


def record_help(verb: str) -> str:
    command = verb_command(verb)
    assert isinstance(command, RecordCommand)
    return command.help_page


def subcommands(command: click.Command, words: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return [words]
    inner = [subcommands(one, (*words, name)) for name, one in command.commands.items()]
    return [words, *(path for paths in inner for path in paths)]


ALONE = (compat_command, estimate_command, perf_command, report_command)
EVERY = {
    **COMMANDS,
    **verbs.VERBS,
    "completion": completion_verb,
    **{command.name or "": command for command in ALONE},
}


@pytest.mark.parametrize("name", sorted(EVERY))
def test_help_of_commands(name: str) -> None:
    command = EVERY[name]
    for words in subcommands(command):
        done = CliRunner().invoke(command, [*words, "--help"], prog_name=name)
        assert done.exit_code == 0, done.output
        assert too_wide(done.output) == [], words
        assert "None" not in done.output, words


@pytest.mark.parametrize(
    "text",
    [
        lambda: help_text.help_text(),
        lambda: profile.HELP,
        *(lambda verb=verb: record_help(verb) for verb in RECORD_VERBS),
    ],
)
def test_help_of_podrun_s_verbs(text: Callable[[], str]) -> None:
    assert too_wide(text()) == []


def report(work: int) -> MachineReport:
    ipus = tuple(IpuReport(ipu, ipu, batches_done=work) for ipu in range(4))
    return MachineReport(
        "ipum1", ipus=ipus,
        batches_done=work, samples_done=10**9, emulation_s=12345.6, modelled_s=work * 12.3e-3,
    )  # fmt: skip


def test_lines_of_a_launch() -> None:
    screen = NarrowTerminal()
    log = Log(stream=screen)
    layout = LaunchLayout(256, 1, 64, ("host",))
    what = "256 replicas, 64 instances; partition podrun-4194304 on a bow-pod256 of its own"
    log.progress(what)
    for line in summary.launch_summary(layout, [report(10**6)] * 64, 86400.0):
        log.progress(line)
    log.progress("partition podrun-1 was created anew on other machines: " + "ipum12, " * 20)
    shown = STYLE.sub("", screen.getvalue())
    assert too_wide(shown) == []
    assert shown.startswith("podrun: 256 replicas, ")
    assert " ".join(shown.split()).startswith(f"podrun: {what} podrun: done in 86400.0 s: 256 replicas")
    assert all(line.startswith(("podrun: ", "        ")) for line in shown.splitlines())
    assert f"podrun: ({summary.TRUST})\n" in shown


def test_in_a_pipe_lines_stay_whole() -> None:
    pipe = io.StringIO()
    Log(stream=pipe).progress("word " * 40)
    assert pipe.getvalue() == "podrun: " + "word " * 40 + "\n"
    wide = text_table(("A", "B"), [("x" * 70, "y" * 70)], io.StringIO())
    assert "x" * 70 + " | " + "y" * 70 in wide


def test_tables_go_on_in_further_lines() -> None:
    shown = text_table(("Name", "What"), [("a" * 30, "one two " * 20), ("b", "short")], NarrowTerminal())
    assert too_wide(shown) == []
    plain = STYLE.sub("", shown)
    assert plain.count("one") == plain.count("two") == 20
    assert "a" * 30 in plain


def test_podrun_ps_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run("podrun-4194304", "somebody", 256, "PROVISIONING", 1.0, "train.py " * 20, "h:1")
    monkeypatch.setattr(verbs, "_runs", lambda: ([run], []))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert verbs.main("ps", []) == 0
    assert too_wide(capsys.readouterr().out) == []


@pytest.mark.parametrize("words", [["partitions"], ["agents"], ["clusters"], ["allocations"]])
def test_lists_of_vipu(
    pod: Pod, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pod.active("a-partition-with-a-long-name-that-somebody-typed", 8)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    command = COMMANDS["vipu-admin"]
    command.main(["--api-port", str(pod.port), "list", *words], prog_name="vipu-admin", standalone_mode=False)
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) > 3
    assert too_wide(shown) == []


def test_processes_and_errors_of_gc_monitor(pod: Pod) -> None:
    pod.active("p", 8)
    command = "python /home/somebody/a/long/path/to/the/program/train.py"
    pod.pool.machine("ipum1", "p").process = AttachedProcess(4194304, "somebody", command, 1.0)
    pod.pool.machine("ipum2", "p").ipu_errors[0] = IpuErrorState.TILE_PARITY
    (view,) = views(pod.client)
    processes = monitor_tables.process_table(view, 1000.0, COLUMNS)
    assert too_wide(processes) == []
    assert processes.count("train.py") == processes.count("4194304") == 4
    errors = monitor_tables.error_table(view, COLUMNS)
    assert errors is not None
    assert too_wide(errors) == []
    assert "tile parity" in " ".join(errors.split())
    assert monitor_tables.process_table(view, 1000.0) != processes, "a pipe gets the whole table"
    assert command in monitor_tables.process_table(view, 1000.0)
