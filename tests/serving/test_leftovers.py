"""What killed servers leave behind: processes that end with the server, shared memory and folders that are removed."""

from __future__ import annotations

import mmap
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from podrun.serving import leftovers
from podrun.serving.compiler import Compiler
from podrun.serving.leftovers import SHARED_MEMORY, remove_leftovers, server_folder
from tests.serving.servers import triton
from tests.serving.test_runner import OPTIONS, model

DEADLINE_SECONDS = 300.0


def ends(pidfd: int) -> bool:
    """Whether a process ends within the deadline."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(DEADLINE_SECONDS * 1000))


def test_what_nobody_uses_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("triton_poplar_a", "triton_poplar_b", "triton_other", "podrun_x")
    for name in names:
        (tmp_path / name).write_bytes(bytes(4096))
    (tmp_path / "podrun-serve-old" / "backends").mkdir(parents=True)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with (tmp_path / names[0]).open("r+b") as file, mmap.mmap(file.fileno(), 4096), server_folder() as held:
        assert remove_leftovers(tmp_path, tmp_path, young_seconds=3600.0) == []  # All of it is younger.
        removed = remove_leftovers(tmp_path, tmp_path, young_seconds=-60.0)
        assert removed == [tmp_path / names[1], tmp_path / "podrun-serve-old"]
        assert held.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted({*names} - {names[1]})


@pytest.mark.system
@pytest.mark.parametrize("reaped", [True, False])
def test_a_process_ends_with_the_server_that_it_names(tmp_path: Path, reaped: bool) -> None:
    """Also if nobody reaps the server: its process id is in use then."""
    region = tmp_path / "triton_poplar_1"
    region.write_bytes(b"")
    server = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    script = (
        "import sys, time; from pathlib import Path; from podrun.serving.leftovers import end_with_server\n"
        "end_with_server(int(sys.argv[1]), Path(sys.argv[2])); print('watches', flush=True); time.sleep(600)"
    )
    stub = subprocess.Popen(
        [sys.executable, "-c", script, str(server.pid), str(region)], stdout=subprocess.PIPE
    )
    try:
        assert stub.stdout is not None
        assert stub.stdout.readline() == b"watches\n"
        server.kill()
        if reaped:
            server.wait(DEADLINE_SECONDS)
        assert stub.wait(DEADLINE_SECONDS) == -signal.SIGKILL
        assert not region.exists()
    finally:
        for process in (stub, server):
            process.kill()
            process.wait(DEADLINE_SECONDS)
        stub.communicate()


@pytest.mark.system
def test_a_process_whose_server_is_gone_ends_at_once(tmp_path: Path) -> None:
    most = int(Path("/proc/sys/kernel/pid_max").read_text())  # No process has this id.
    script = (
        "import sys; from pathlib import Path; from podrun.serving.leftovers import end_with_server\n"
        "end_with_server(int(sys.argv[1]), Path(sys.argv[2]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(most), str(tmp_path / "region")],
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("with_server", [True, False])
def test_nothing_stays_of_a_server_that_is_killed(
    tmp_path: Path, with_server: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed is `podrun serve`, with the server or before it. Of a process that Triton's own watch ends first, the
    region stays until the next start: `remove_leftovers` for this server's names stands for that.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder = tmp_path / "models" / "net" / "1"
    folder.mkdir(parents=True)
    Compiler.compile_and_export(model(), None, folder, OPTIONS)
    environ = {**os.environ, "TMPDIR": str(scratch)}
    with triton(tmp_path / "models", ["net"], environ=environ) as served:
        stubs = served.stubs()
        family = psutil.Process(served.process.pid).children(recursive=True)
        server = next(one for one in family if "tritonserver" in one.name())
        regions = [SHARED_MEMORY / stub.cmdline()[2].lstrip("/") for stub in stubs]
        assert regions
        assert all(region.name.startswith(leftovers.REGION_PREFIX) for region in regions)
        assert all(region.exists() for region in regions)
        assert list(scratch.glob("podrun-serve-*"))
        watched = [os.pidfd_open(one.pid) for one in (server, *stubs)]
        try:
            served.process.kill()
            if with_server:
                server.kill()
            assert all(ends(pidfd) for pidfd in watched)
        finally:
            for pidfd in watched:
                os.close(pidfd)
    monkeypatch.setattr(leftovers, "REGION_PREFIX", regions[0].name.rstrip("0123456789"))
    remove_leftovers(folders=scratch, young_seconds=-60.0)
    assert not any(region.exists() for region in regions)
    assert list(scratch.glob("podrun-serve-*")) == []
