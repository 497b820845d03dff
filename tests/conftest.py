"""Fixtures for all tests: commands that run to their end, and checks that nothing of podrun is left afterwards."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

from tests.quick_programs import forget_programs
from tests.sampling import ALL_EXAMPLES, chosen

# Hosts that run tests are often busy: how long an example takes says nothing about the code.
# Examples are the same in every run, so that a failure is a change's. A quarter of them are tried where slow tests do
# not run.
settings.register_profile("all", deadline=None, derandomize=True, max_examples=ALL_EXAMPLES)
settings.register_profile("few", settings.get_profile("all"), max_examples=ALL_EXAMPLES // 4)
settings.load_profile("all")
# Hypothesis tries constants of this project's modules too, of those that happen to be imported: examples would differ
# with the files that a run has. Reading a thousand modules for that takes seconds of every run in a fresh folder.
for _name in ("_get_local_constants", "_local_constants"):
    assert hasattr(providers, _name), (
        f"this Hypothesis has no {providers.__name__}.{_name}: see how it collects constants of modules"
    )
providers._get_local_constants = lambda: providers._local_constants

# Torch's compiler imports triton, if torch came with it. After TensorFlow in one process that ends in a crash.
with contextlib.suppress(ImportError):
    importlib.import_module("triton")

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
MARK = "PODRUN_TEST_MARK"
OF_A_RUN = "PODRUN_TEST_DIR"
"""Names the folder of the run whose tests started this process."""
# nohup has a run ignore SIGHUP, a shell's background job SIGINT, and so would all that tests start. A handler that does
# nothing keeps the run as deaf as it was; what it starts has the default again, since no handler outlives exec.
for _number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)
# Nobody reads the source lines of the programs that tests lower, which JAX looks up for each of their operations.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Tests plan anew, and leave no plans behind.
os.environ["PODRUN_PLAN_CACHE"] = "off"
# What takes five seconds, as it may on a busy host, would be told on standard error, which tests compare.
os.environ["PODRUN_PROGRESS"] = "off"
# Tests of one process find no service or machine that this host runs for others. Short: sockets lie below it.
# Processes that tests start by multiprocessing have that of the run: they end without removing one of their own.
if not os.path.isdir(os.environ.get(OF_A_RUN, "")):
    _RUNTIME = tempfile.TemporaryDirectory(prefix="podrun-")
    os.environ[OF_A_RUN] = _RUNTIME.name
os.environ["PODRUN_RUNTIME_DIR"] = os.environ[OF_A_RUN]
# Nor files of partitions in the home directory (~/.ipuof.conf.d). Compiled pieces stay where they are.
os.environ.setdefault("XDG_CACHE_HOME", os.path.expanduser("~/.cache"))
os.environ["HOME"] = os.environ[OF_A_RUN]
SCRATCH = ("podrun-*", "pymp-*")
"""Temporary folders that podrun makes, and those that Python makes for processes that share data."""
CHARACTERS = "".join(
    map(chr, (*range(0x180), 0x301, 0x3B1, 0x5D0, 0x4E2D, 0x200D, 0x2028, 0xFEFF, 0xFFFF, 0x1F600, 0x10FFFF))
)
"""Characters of generated texts, some of every kind. Of all that there are, Hypothesis makes a table first, which takes
three seconds of every run in a fresh folder."""
YOUNG_OBJECTS = 20_000
"""Objects that a test makes between two garbage collections; Python's own number is 700."""
LEAK_SECONDS = 60.0
"""Seconds that a process on its way out may take before it counts as left behind."""


def pytest_configure(config: pytest.Config) -> None:
    """Choose how many examples Hypothesis tries, before modules with tests are imported. Nothing of what they import is
    garbage: collections would look at all of it again and again, for a tenth of the time.
    """
    gc.disable()
    settings.load_profile("few" if "not slow" in config.getoption("markexpr") else "all")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked ``sample(n)`` about every n-th case runs by default (`tests.sampling`); the others are slow."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sample") is not None:
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("sample")
        assert mark is not None
        values = [item.callspec.params if hasattr(item, "callspec") else {} for item in cases]
        kept = set(chosen(values, mark.args[0]))
        for index, item in enumerate(cases):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        forget_programs(item, nextitem)


def pytest_collection_finish() -> None:
    """Freeze the objects that importing the tests made, so that no garbage collection in a test looks through them,
    and collect less often: JAX and Hypothesis have each collection call them.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def marked_processes(mark: str) -> dict[int, str]:
    """Living processes that a test started, by the mark in their environment: command by process id."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if f"{MARK}={mark}".encode() not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX":
                found[int(entry.name)] = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                )
        except OSError:
            continue
    return found


def shared_memory_files() -> set[str]:
    """Names in /dev/shm, where shared memory that outlives its process would be."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until ``condition()`` holds; fails the test after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        time.sleep(0.02)


@dataclass
class Commands:
    """Runs podrun's commands as a user would, each process marked. ``home``: where they keep their files."""

    home: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def runtime(self) -> Path:
        """Where services of this test publish themselves."""
        return self.home / "run"

    @property
    def scratch(self) -> Path:
        """Where these commands put temporary files. Short: sockets live below it."""
        return self.home / "t"

    def environment(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        """The test's own environment without anything of podrun's, and with the mark."""
        dropped = ("PODRUN_", "POPDIST_", "IPUOF_", "VIPU_", "OMPI_", "POPLAR_", "RAY_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        self.scratch.mkdir(exist_ok=True)
        kept |= {
            "PATH": f"{BIN}:{kept.get('PATH', '')}",
            "PODRUN_RUNTIME_DIR": str(self.runtime),
            # `vipu create partition` writes into the home directory; caches stay where they are.
            "HOME": str(self.home),
            "XDG_CACHE_HOME": kept.get("XDG_CACHE_HOME", os.path.expanduser("~/.cache")),
            "XDG_STATE_HOME": str(self.home / "state"),
            "TMPDIR": str(self.scratch),
            # Nobody listens there: whatever server this host has at the usual port, tests leave it alone.
            "IPUOF_VIPU_API_PORT": "1",
            "PODRUN_PLAN_CACHE": "off",
            "PODRUN_PROGRESS": "off",
            MARK: self.mark,
        }
        return kept | dict(extra or {})

    def start(
        self, *words: str | Path, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a command; its output is collected."""
        process = subprocess.Popen(
            [str(word) for word in words],
            env=self.environment(env),
            cwd=cwd or self.home,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(
        self,
        *words: str | Path,
        timeout: float = 180.0,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return subprocess.run(
            [str(word) for word in words],
            env=self.environment(env),
            cwd=cwd or self.home,
            stdin=subprocess.DEVNULL if stdin is None else None,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def processes(self) -> dict[int, str]:
        """Living processes that these commands started."""
        return marked_processes(self.mark)

    def wait_until_gone(self, seconds: float = LEAK_SECONDS) -> None:
        """Fails unless all processes of these commands end within that time."""
        end = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.02)
        assert left == {}, "processes are left"

    def kill_all(self) -> None:
        """End all remaining processes, so that one failing test does not spoil the next."""
        for pid in self.processes():
            os.kill(pid, 9)
        for process in self.started:
            process.kill()
            process.communicate()


def left_in_home(home: Path) -> list[str]:
    """Files that podrun's commands write into a home, and that go with what they describe."""
    return sorted(str(path.relative_to(home)) for path in (home / ".ipuof.conf.d").glob("*"))


@pytest.fixture(scope="module", autouse=True)
def _one_context_of_programs() -> Iterator[None]:
    """Lower the programs of a file's tests in one MLIR context: JAX makes one for each, which takes milliseconds."""
    if "jax" not in sys.modules:
        yield
        return
    from podrun.private_apis.jax import one_context

    with one_context():
        yield


@pytest.fixture(autouse=True)
def _leaves_no_files_in_the_home() -> Iterator[None]:
    """Fails a test that leaves files of partitions in the home of this process."""
    home = Path(os.environ["HOME"])
    yield
    assert left_in_home(home) == [], "files are left in the home"


def run_and_check_for_leaks(home: Path) -> Iterator[Commands]:
    """Body of a fixture: commands, and afterwards the check that nothing of theirs is left."""
    before, threads = shared_memory_files(), set(threading.enumerate())
    commands = Commands(home)
    try:
        yield commands
        commands.wait_until_gone()
        # Others use this machine's shared memory as well: only names that podrun or Ray could have made count.
        left = {name for name in shared_memory_files() - before if "podrun" in name or "ray" in name}
        assert left == set(), "shared memory is left"
        scratch = (
            [path.name for kind in SCRATCH for path in commands.scratch.glob(kind)]
            if commands.scratch.exists()
            else []
        )
        assert scratch == [], "scratch directories are left"
        assert left_in_home(home) == [], "files are left in the home"
        published = [p.name for p in commands.runtime.glob("*.json")] if commands.runtime.exists() else []
        assert published == [], "published services are left"
        for thread in set(threading.enumerate()) - threads:
            thread.join(LEAK_SECONDS)
            assert not thread.is_alive(), f"thread {thread.name!r} is left"
    finally:
        commands.kill_all()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    """Runs commands; fails the test if they leave processes, shared memory, scratch files or threads
    behind."""
    yield from run_and_check_for_leaks(tmp_path)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port of this host at which nobody listens. It stays taken, so that nothing else gets it meanwhile; a gRPC
    server of the test itself may listen there.
    """
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def script(directory: Path, text: str, name: str = "train.py") -> Path:
    """Write a small program."""
    path = directory / name
    path.write_text(text, encoding="utf-8")
    return path


def tagged(output: str, instance: int, channel: str = "stdout") -> list[str]:
    """Lines of one instance, without the tag."""
    start = f"[1,{instance}]<{channel}>:"
    return [line.removeprefix(start) for line in output.splitlines() if line.startswith(start)]


def lines_of(words: Sequence[str]) -> str:
    """A program from its lines."""
    return "\n".join(words) + "\n"
