"""podrun doctor, cache, ps, stop, completion: their findings and refusals."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from podrun.core.command_line import run_command
from podrun.core.environment import environment
from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    MissingPackageError,
    NotFoundError,
    UsageError,
)
from podrun.core.identity import user_name
from podrun.core.terminal import error_lines, text_table
from podrun.launcher.commands.completion import completion_script, completion_verb, launcher_command
from podrun.partition.host.discovery import LAUNCHER, ProcessId, Registry, ServiceEntry, own_process_id
from podrun.serving.triton_server import INSTALL
from podrun.upkeep import verbs
from podrun.upkeep.cache import caches, chosen, clear
from podrun.upkeep.doctor import GIB, Finding, HostFacts, Soundness, check_numbers, cpu_flags, examine
from podrun.upkeep.running import Run, all_runs, find_run, program_of_process, stop_run

GOOD_PROBE = (0, '{"sum": 21, "set": "avx2-0", "wanted": true, "onednn": true}\n', "")


@pytest.fixture
def host(tmp_path: Path) -> HostFacts:
    """A host on which all is well."""
    return HostFacts(
        environ={
            "PODRUN_CACHE_DIR": str(tmp_path / "cache"),
            "PODRUN_RUNTIME_DIR": str(tmp_path / "runtime"),
        },
        system="Linux x86_64",
        python=(3, 11, 7),
        cpu_flags=frozenset({"avx", "avx2"}),
        cores=2,
        memory=lambda: 8 * GIB,
        files=1024,
        free=lambda path: 50 * GIB,
        temporary=Path("/tmp"),
        probe=lambda: GOOD_PROBE,
        tritonserver=lambda environ: "/opt/tritonserver/bin/tritonserver",
    )


def no_server(environ: Mapping[str, str]) -> str:
    raise MissingPackageError("there is no tritonserver on this host", hint=INSTALL)


def test_a_good_host_has_no_remedies(host: HostFacts) -> None:
    found = list(examine(host))
    assert [(f.what, f.health, f.remedy) for f in found] == [(f.what, Soundness.OK, "") for f in found]
    assert len({f.what for f in found}) == len(found) >= 10


@pytest.mark.parametrize(
    ("what", "change", "health", "words"),
    [
        ("host", {"system": "Darwin arm64"}, Soundness.WRONG, "Use Linux"),
        ("host", {"python": (3, 9, 1)}, Soundness.WRONG, "Python 3.11"),
        ("processor", {"cpu_flags": frozenset()}, Soundness.WRONG, "AVX"),
        ("processor", {"system": "Linux aarch64"}, Soundness.WARNING, "x86-64"),
        ("memory", {"memory": lambda: GIB // 2}, Soundness.WRONG, "podrun ps"),
        ("memory", {"memory": lambda: 2 * GIB}, Soundness.WARNING, "16 machines"),
        ("limits", {"files": 256}, Soundness.WRONG, "ulimit -n 4096"),
        ("temporary files", {"temporary": Path("/nowhere")}, Soundness.WRONG, "export TMPDIR="),
        ("temporary files", {"free": lambda path: 1 << 20}, Soundness.WRONG, "export TMPDIR="),
        ("cache", {"environ": {}}, Soundness.WARNING, "PODRUN_CACHE_DIR"),
        ("cache", {"free": lambda path: GIB // 2}, Soundness.WARNING, "df -h"),
        (
            "packages",
            {"installed": lambda name: "" if name == "jax" else "1"},
            Soundness.WRONG,
            "constraints.txt",
        ),
        ("packages", {"installed": lambda name: "0.1"}, Soundness.WRONG, "constraints.txt"),
        ("ray", {"installed": lambda name: ""}, Soundness.WARNING, "pip install ray"),
        (
            "tritonserver",
            {"tritonserver": no_server},
            Soundness.WARNING,
            "pip install --no-deps nvidia-pytriton",
        ),
        ("numbers", {"probe": lambda: (1, "", "Illegal instruction")}, Soundness.WRONG, "force-reinstall"),
        ("numbers", {"probe": lambda: (0, "21", "")}, Soundness.WRONG, "force-reinstall"),
    ],
)
def test_what_is_amiss_is_named_with_a_remedy(
    host: HostFacts, what: str, change: dict[str, object], health: Soundness, words: str
) -> None:
    broken = replace(host, **change)  # type: ignore[arg-type]
    (found,) = (f for f in examine(broken) if f.what == what)
    assert found.health is health
    assert words in found.remedy


def test_numbers_without_onednn_are_slower_unless_wanted(host: HostFacts) -> None:
    slow = '{"sum": 21, "set": "avx2-0", "wanted": true, "onednn": false}'
    assert check_numbers(replace(host, probe=lambda: (0, slow, ""))).health is Soundness.WARNING
    meant = slow.replace("true", "false")
    assert check_numbers(replace(host, probe=lambda: (0, meant, ""))).health is Soundness.OK

    def late() -> tuple[int, str, str]:
        raise subprocess.TimeoutExpired("python", 1)

    assert "within" in check_numbers(replace(host, probe=late)).found


def test_flags_of_a_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor : 0\nflags\t\t: fpu avx avx2\n\nprocessor : 1\nflags : none\n")
    assert cpu_flags(file) == {"fpu", "avx", "avx2"}
    assert cpu_flags(tmp_path / "none") == frozenset()


def test_doctor_prints_lines_and_ends_with_one_if_something_is_wrong(
    host: HostFacts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = [Finding("a", Soundness.OK, "fine"), Finding("b", Soundness.WRONG, "broken", "mend it")]
    monkeypatch.setattr("podrun.upkeep.doctor.examine", lambda host: iter(findings))
    assert verbs.main("doctor", []) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok       a                fine",
        "wrong    b                broken",
        "                          mend it",
        "1 of 2 things are wrong.",
    ]
    assert verbs.main("doctor", ["--format", "json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["findings"][1] == {"what": "b", "health": "wrong", "found": "broken", "remedy": "mend it"}


# --- caches -----------------------------------------------------------------------------------------------------------


def test_caches_are_cleared_by_name_and_own_files_only(tmp_path: Path) -> None:
    environ = {"PODRUN_CACHE_DIR": str(tmp_path / "c"), "POPART_CACHE_DIR": str(tmp_path / "p")}
    entry = f"{'0a' * 32}.popef"
    files = [
        "c/xla/avx2/a.done",
        "c/xla/avx2/a.lock",
        "c/plans/b.json",
        "c/programs/b.popef",
        "c/programs/.b.lock",
        "c/own-pieces/c",
        "p/executable.popef",
        f"p/{entry}",
    ]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(bytes(1000))
    (tmp_path / "c/xla/link").symlink_to(tmp_path / "p")
    found = caches(environ)
    assert [(c.name, len(c.files), c.size_bytes) for c in found] == [
        ("xla", 1, 1000),
        ("plans", 1, 1000),
        ("programs", 1, 1000),
        ("own-pieces", 1, 1000),
        ("executables", 1, 1000),
    ]
    with pytest.raises(UsageError, match="no cache plan") as error:
        chosen(found, ["plan"])
    assert "executables, own-pieces, plans, programs, xla" in str(error.value.hint)
    assert clear(chosen(found, ["plans"])) == (0, 0)  # Too young: somebody may be about to read it.
    later = time.time() + 3600
    assert clear(chosen(found, ["plans"]), later) == (1, 1000)
    assert clear(found, later) == (4, 4000)
    left = sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())
    assert left == ["c/xla/avx2/a.lock", "p/executable.popef"]


def test_clearing_says_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("PODRUN_PLAN_CACHE", "POPART_CACHE_DIR", "POPXL_CACHE_DIR", "POPTORCH_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PODRUN_CACHE_DIR", str(tmp_path))
    (tmp_path / "plans").mkdir()
    for name, age in (("new", 0), ("old", 3600)):
        (tmp_path / "plans" / name).write_bytes(bytes(2048))
        os.utime(tmp_path / "plans" / name, (time.time() - age,) * 2)
    assert verbs.main("cache", ["clear", "--dry-run"]) == 0
    assert verbs.main("cache", ["clear", "plans"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "would remove 1 files, 2 KiB; 1 of the last minute stay",
        "removed 1 files, 2 KiB; 1 of the last minute stay",
    ]
    assert [path.name for path in (tmp_path / "plans").iterdir()] == ["new"]
    for name in ("PODRUN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    assert verbs.main("cache", ["info"]) == 2
    assert "export PODRUN_CACHE_DIR=" in capsys.readouterr().err


def test_what_cannot_be_removed_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c" / "plans" / "a"
    file.parent.mkdir(parents=True)
    file.write_text("x")

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(NotFoundError, match="1 files cannot be removed"):
        clear(caches({"PODRUN_CACHE_DIR": str(tmp_path / "c")}), time.time() + 3600)


def test_plans_that_are_off_or_elsewhere(tmp_path: Path) -> None:
    base = {"PODRUN_CACHE_DIR": str(tmp_path)}
    assert "plans" not in [c.name for c in caches({**base, "PODRUN_PLAN_CACHE": "off"})]
    (elsewhere,) = (c for c in caches({**base, "PODRUN_PLAN_CACHE": "/x"}) if c.name == "plans")
    assert elsewhere.path == Path("/x")
    assert caches({}) == []


# --- runs -------------------------------------------------------------------------------------------------------------


def sleeper() -> subprocess.Popen[bytes]:
    """A process that waits for a signal, with its handlers in place."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"],
                             stdout=subprocess.PIPE)  # fmt: skip
    assert child.stdout is not None
    child.stdout.readline()
    return child


def test_a_launch_is_listed_and_stopped(tmp_path: Path) -> None:
    child = sleeper()
    try:
        owner = ProcessId.of(child.pid)
        assert owner is not None
        registry = Registry(tmp_path)
        registry.publish(ServiceEntry(LAUNCHER, "", 0, owner, partition="p16"))
        found, silent = all_runs(registry, [])
        assert silent == []
        assert [(run.name, run.ipus, run.is_launch) for run in found] == [("p16", 0, True)]
        assert abs((found[0].since or 0) - time.time()) < 60
        assert find_run(found, "p16") is find_run(found, str(child.pid))
        # A child that nobody waits for is a zombie, which counts as ended.
        assert stop_run(found[0]) == "ended"
        assert child.wait(60) == -signal.SIGTERM
    finally:
        child.kill()
        child.wait()


def test_force_kills_what_does_not_end() -> None:
    sent: list[int] = []
    here = own_process_id()
    run = Run("p", "me", 4, "ACTIVE", None, "train.py", "", here)
    now = iter(range(1000))
    clock = {"sleep": lambda s: None, "clock": lambda: float(next(now)), "kill": lambda p, n: sent.append(n)}
    with pytest.raises(DeadlineError, match="has not ended") as error:
        stop_run(run, patience=3, **clock)  # type: ignore[arg-type]
    assert "podrun stop p --force" in str(error.value.hint)
    assert sent == [signal.SIGTERM]
    with pytest.raises(DeadlineError, match="was killed and is still there"):
        stop_run(run, force=True, patience=3, **clock)  # type: ignore[arg-type]
    assert sent == [signal.SIGTERM, signal.SIGTERM, signal.SIGKILL]


def test_a_number_that_another_process_has_now_gets_no_signal() -> None:
    sent: list[int] = []
    gone = replace(own_process_id(), start_ticks=1)
    run = Run("p", "me", 4, "ACTIVE", None, "train.py", "", gone)
    assert stop_run(run, kill=lambda p, n: sent.append(n)) == "ended"
    assert sent == []


def test_only_launches_of_ones_own_are_stopped() -> None:
    mine = Run("mine", user_name(os.getuid()), 4, "ACTIVE", 1.0, "idle", "h:1")
    theirs = Run("theirs", "somebody", 4, "ACTIVE", 1.0, "", "h:1")
    with pytest.raises(ConflictError) as kept:
        find_run([mine, theirs], "mine")
    assert "vipu remove partition mine" in str(kept.value.hint)
    with pytest.raises(DeniedError, match="theirs belongs to somebody"):
        find_run([mine, theirs], "theirs")
    with pytest.raises(NotFoundError) as nothing:
        find_run([mine, theirs], "other")
    assert "podrun ps" in str(nothing.value.hint)


@pytest.mark.parametrize("terminal", [True, False])
def test_programs_are_cut_to_the_terminal_and_whole_in_a_pipe(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = f"podrun train.py{' --option 1' * 20}\n\x1b[31m--last"
    run = Run("podrun-7", "me", 4, "ACTIVE", None, program, "h:1", own_process_id())
    monkeypatch.setattr(verbs, "_runs", lambda: ([run], []))
    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    assert verbs.main("ps", []) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert "\x1b" not in row
    if terminal:
        assert (len(row), row[-3:]) == (89, "...")
    else:
        assert row.endswith("--option 1  [31m--last")


def test_watching_prints_changes_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs_ = [Run("podrun-7", "me", 4, state, None, "train.py", "h:1") for state in ("CREATED", "ACTIVE")]
    found = iter([[], [], [runs_[0]], [runs_[0]], [runs_[1]], [runs_[1]]])
    monkeypatch.setattr(verbs, "_runs", lambda: (next(found), []))
    monkeypatch.setattr("podrun.upkeep.running.changes", lambda registry, servers: iter([None] * 6))
    monkeypatch.setattr(verbs, "_servers", list)
    assert verbs.main("ps", ["--watch"]) == 0
    shown = capsys.readouterr().out
    assert [shown.count(word) for word in ("Nothing runs.", "CREATED", "ACTIVE")] == [1, 1, 1]


def test_a_server_that_is_silent_may_have_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verbs, "_runs", lambda: ([], ["127.0.0.1:1 does not answer: it is stopped"]))
    assert verbs.main("ps", []) == 0
    said = capsys.readouterr()
    assert said.out == "Nothing else is known to run.\n"
    assert said.err == "note: 127.0.0.1:1 does not answer: it is stopped\n"


def test_a_process_is_described_by_its_command() -> None:
    program, since = program_of_process(os.getpid())
    assert "pytest" in program
    assert since is not None
    assert since <= time.time()
    assert program_of_process(2**22 + 1) == ("", None)


def test_a_server_that_does_not_answer_is_a_note(tmp_path: Path) -> None:
    found, silent = all_runs(Registry(tmp_path), [("127.0.0.1", 1, False)])
    assert found == []
    assert silent[0].startswith("127.0.0.1:1 does not answer")


# --- completion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "do", ["doctor"]),
        ([], "--num-r", ["--num-replicas"]),
        (["--print-topology"], "", ["yes", "no"]),
        (["cache"], "c", ["clear"]),
        (["completion"], "f", ["fish"]),
        (["profile"], "--rep", ["--report-directory"]),
        (["profile"], "--num-r", ["--num-replicas"]),
        (["replay"], "--rec", ["--record"]),
        (["faults"], "h", ["history"]),
        (["--num-replicas", "4", "train.py"], "--num", []),
        (["cache", "clear"], "x", ["xla"]),
        (["--cluster"], "pod1", ["pod16", "pod128"]),
        (["--sync-type"], "ST_P", ["ST_POD_NATIVE_DEFAULT"]),
        (["estimate", "--target"], "bow-pod1", ["bow-pod16", "bow-pod128"]),
        (["estimate", "--format"], "", ["text", "json"]),
    ],
)
def test_words_of_podruns_commands_are_completed(
    words: list[str], incomplete: str, expected: list[str]
) -> None:
    found = BashComplete(launcher_command(), {}, "podrun", "_PODRUN_COMPLETE").get_completions(
        words, incomplete
    )
    assert [item.value for item in found if item.type == "plain"] == expected


def test_launches_complete_what_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    registry = Registry(tmp_path)
    registry.publish(ServiceEntry(LAUNCHER, "", 0, own_process_id(), partition="p16"))
    complete = BashComplete(launcher_command(), {}, "podrun", "_PODRUN_COMPLETE")
    assert [item.value for item in complete.get_completions(["stop"], "p")] == ["p16"]
    assert complete.get_completions(["stop"], "x") == []


def test_a_word_that_no_verb_begins_with_completes_to_files() -> None:
    complete = BashComplete(launcher_command(), {}, "podrun", "_PODRUN_COMPLETE")
    for words, incomplete in (([], "trai"), (["train.py"], "da"), (["estimate"], "mod")):
        assert [item.type for item in complete.get_completions(words, incomplete)] == ["file"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_know_every_command(shell: str) -> None:
    text = completion_script(shell)
    for variable in ("_PODRUN_COMPLETE", "_VIPU_COMPLETE", "_GC_MONITOR_COMPLETE"):
        assert f"{variable}={shell}_complete" in text


# --- how commands speak -----------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stream that a terminal shows."""

    def isatty(self) -> bool:
        return True


def test_colour_is_for_terminals_that_want_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("podrun.core.terminal.environment", lambda given=None: environment({"TERM": "xterm"}))
    assert (
        error_lines("vipu", "no", "do", Terminal())
        == "vipu: \x1b[1;31merror:\x1b[0m no\n\x1b[1mhint:\x1b[0m do\n"
    )
    assert error_lines("vipu", "no", "do", io.StringIO()) == "vipu: error: no\nhint: do\n"
    assert text_table(("A",), [("b",)], io.StringIO()) == " A\n---\n b\n---"
    assert text_table(("A",), [("b",)], Terminal()).startswith("\x1b[1m A\x1b[0m\n\x1b[2m---\x1b[0m\n b\n")
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        monkeypatch.setattr(
            "podrun.core.terminal.environment", lambda given=None, found=environ: environment(found)
        )
        assert error_lines("vipu", "no", None, Terminal()) == "vipu: error: no\n"


def test_errors_of_click_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    assert verbs.main("ps", ["--formt", "json"]) == 2
    assert capsys.readouterr().err == (
        "podrun ps: error: no such option '--formt'. Did you mean '--format'?\nhint: podrun ps --help\n"
    )
    assert run_command(completion_verb, ["tcsh"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("podrun completion: error: invalid value for")
