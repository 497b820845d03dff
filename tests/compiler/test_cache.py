"""The executable cache: one file per program; others load it, wait for it, and are not fooled by a damaged
one."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from podrun.compiler import cache, compile
from podrun.compiler.cache import ExecutableCache
from podrun.compiler.compile import CompileOptions, compile_program
from podrun.compiler.program import Program
from podrun.core import executable_file
from podrun.core.errors import DeadlineError, UsageError
from podrun.core.executable import Executable
from podrun.core.kept_files import KeptFolder

from .programs import Momentum, Sgd, mlp


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of programs that were really compiled, in order."""
    done: list[str] = []
    real = compile._Compilation.executable

    def counted(self: compile._Compilation) -> Executable:
        done.append(self.program.name)
        return real(self)

    monkeypatch.setattr(compile._Compilation, "executable", counted)
    return done


def files(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_second_compilation_loads(tmp_path: Path, compilations: list[str]) -> None:
    options = CompileOptions(cache=ExecutableCache(tmp_path / "new" / "cache"))
    first = compile_program(mlp(replicas=2), options=options)
    second = compile_program(mlp(replicas=2), options=options)
    assert first == second
    assert compilations == ["mlp"]
    (name,) = files(tmp_path / "new" / "cache")
    assert name.endswith(".popef")
    assert executable_file.read_executable(tmp_path / "new" / "cache" / name) == first


@pytest.mark.parametrize(
    "other",
    [
        mlp(replicas=2),
        mlp(accumulation_factor=2),
        mlp(update=Momentum()),
        mlp(update=Sgd(rate=0.2)),
        mlp(loss_scaling=2.0),
        mlp(sizes=(6, 5, 4, 3)),
        replace(mlp(), metadata={"anchors": []}),
        replace(mlp(), forward=lambda p, i, k: {"loss": mlp().forward(p, i, k)["loss"] * 2}),
    ],
    ids=["replicas", "accumulation", "rule", "rate", "loss scaling", "layers", "metadata", "forward"],
)
@pytest.mark.sample(4)
def test_other_programs_are_other_entries(tmp_path: Path, compilations: list[str], other: Program) -> None:
    options = CompileOptions(cache=ExecutableCache(tmp_path))
    compile_program(mlp(), options=options)
    compile_program(other, options=options)
    assert len(compilations) == 2


def test_target_and_chunks_are_part_of_the_digest(tmp_path: Path, compilations: list[str]) -> None:
    options = CompileOptions(cache=ExecutableCache(tmp_path))
    compile_program(mlp(), options=options)
    compile_program(mlp(), target="bow", options=options)
    compile_program(mlp(), options=replace(options, chunk_bytes=1))
    assert len(compilations) == len(files(tmp_path)) == 3


def test_a_front_ends_digest_saves_the_trace(tmp_path: Path, compilations: list[str]) -> None:
    program = mlp()
    traces: list[None] = []

    def forward(*arguments: object) -> dict[str, object]:
        traces.append(None)
        return program.forward(*arguments)

    options = CompileOptions(cache=ExecutableCache(tmp_path), program_digest="model-1")
    for _ in range(2):
        compile_program(replace(program, forward=forward), options=options)
    assert (len(traces), len(compilations)) == (1, 1)
    compile_program(replace(program, forward=forward), options=replace(options, program_digest="model-2"))
    assert (len(traces), len(compilations)) == (2, 2)


def test_a_damaged_entry_is_compiled_again(
    tmp_path: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    options = CompileOptions(cache=ExecutableCache(tmp_path))
    first = compile_program(mlp(), options=options)
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert compile_program(mlp(), options=options) == first
    assert len(compilations) == 2
    assert "checksum" in caplog.text
    assert executable_file.read_executable(path) == first


def test_waiting_for_another_that_compiles(tmp_path: Path) -> None:
    """Eight at once: one compiles, all get its result, nothing but the entry is left."""
    executable = compile_program(mlp())
    calls: list[int] = []
    together = threading.Barrier(8)
    results: list[Executable] = []

    def slow() -> Executable:
        calls.append(1)
        return executable

    def ask() -> None:
        together.wait(timeout=30)
        results.append(cache.cached(ExecutableCache(tmp_path), "d" * 64, slow, wait=30))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert results == [executable] * 8
    assert len(calls) == 1
    assert files(tmp_path) == ["d" * 64 + ".popef"]


def test_waiting_ends_with_the_holders_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where `popart` was imported, the module's own logger hands its lines on and logs them at PopART's level.
    monkeypatch.setattr(cache, "_log", logging.getLogger("podrun.test.cache"))
    caplog.set_level(logging.INFO, "podrun.test.cache")
    lock = tmp_path / ".digest.lock"
    with lock.open("w") as held:
        held.write("4321")
        held.flush()
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(DeadlineError, match="process 4321"):
            cache.cached(ExecutableCache(tmp_path), "digest", lambda: pytest.fail("compiled"), wait=0.05)
    assert caplog.text.count("waiting for process 4321, which compiles the same program") == 1


def test_a_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no tensor of the program"):
        compile_program(
            replace(mlp(), loss="nothing"), options=CompileOptions(cache=ExecutableCache(tmp_path))
        )

    def fail() -> Executable:
        raise UsageError("wrong program")

    with pytest.raises(UsageError, match="wrong program"):
        cache.cached(ExecutableCache(tmp_path), "digest", fail, wait=1)
    assert files(tmp_path) == []


def test_a_directory_that_cannot_be_used(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        compile_program(mlp(), options=CompileOptions(cache=ExecutableCache(blocked / "cache")))


def test_instances_share_the_launchs_folder_where_the_users_cannot_be_written(
    tmp_path: Path, compilations: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    environ = {"PODRUN_CACHE_DIR": str(tmp_path / "file")}
    shared = CompileOptions(cache=cache.kept_programs(environ, str(tmp_path / "launch")))
    assert compile_program(mlp(), options=shared) == compile_program(mlp(), options=shared)
    assert compilations == ["mlp"]
    (name,) = files(tmp_path / "launch")
    assert name.endswith(".popef")
    alone = CompileOptions(cache=cache.kept_programs(environ, str(tmp_path / "file" / "launch")))
    compile_program(mlp(), options=alone)
    assert compilations == ["mlp", "mlp"]
    assert caplog.text == ""


@pytest.mark.parametrize("launch", ["", "launch"])
def test_a_program_that_would_drive_out_others_is_not_kept(
    tmp_path: Path, compilations: list[str], monkeypatch: pytest.MonkeyPatch, launch: str
) -> None:
    """The folder of a launch takes it, so that the other instances need not compile it."""
    executable = compile_program(mlp())
    monkeypatch.setattr(cache, "MOST_BYTES", 2 * len(executable_file.dumps(executable)))
    instead = str(tmp_path / launch) if launch else ""
    kept = cache.kept_programs({"PODRUN_CACHE_DIR": str(tmp_path / "user")}, instead)
    compilations.clear()
    for _ in range(2):
        assert compile_program(mlp(), options=CompileOptions(cache=kept)) == executable
    assert len(compilations) == (1 if launch else 2)
    assert files(tmp_path / "user" / "programs") == []


@pytest.mark.parametrize("kind", [OSError, DeadlineError])
def test_an_error_of_the_compilation_is_no_error_of_the_cache(tmp_path: Path, kind: type[Exception]) -> None:
    tries: list[None] = []

    def fail() -> Executable:
        tries.append(None)
        raise kind("of the compilation")

    kept = cache.kept_programs({"PODRUN_CACHE_DIR": str(tmp_path)})
    for folder in (kept, ExecutableCache(tmp_path / "own")):
        assert folder is not None
        with pytest.raises(kind, match="of the compilation"):
            cache.cached(folder, "digest", fail, wait=1)
    assert len(tries) == 2


def test_the_lock_of_a_dead_process_does_not_count(tmp_path: Path) -> None:
    (tmp_path / ".digest.lock").write_text(str(os.getpid()))
    executable = compile_program(mlp())
    assert cache.cached(ExecutableCache(tmp_path), "digest", lambda: executable, wait=1) == executable
    assert files(tmp_path) == ["digest.popef"]


def test_locks_of_killed_processes_go_with_the_oldest_programs(tmp_path: Path) -> None:
    held_lock, free = tmp_path / ".held.lock", tmp_path / ".free.lock"
    free.write_text("4321")
    with held_lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        KeptFolder(tmp_path, ".popef", 100, 10).cut_back()
        assert files(tmp_path) == [".held.lock"]
