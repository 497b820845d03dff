"""``podrun doctor``: can podrun work on this host? One line for each requirement, and what to do if it is not met.

A check is a function that returns one `Finding`; it looks at `HostFacts`, so tests need no broken
computer. They are given one by one, the quick ones first. JAX and oneDNN are tried in a process of their own.
"""

from __future__ import annotations

import enum
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from importlib import metadata
from pathlib import Path

from podrun import __version__
from podrun.core.environment import environment, podrun_cache_directory, runtime_directory
from podrun.core.errors import PodrunError, UsageError
from podrun.core.quick_dataclass import dataclass

GIB, MIB = 1 << 30, 1 << 20
LEAST_MEMORY, GOOD_MEMORY = 1 * GIB, 3 * GIB
"""A POD of one machine with a small program holds 1.0 GB on the test computer, one of 16 machines 2.4 GB."""
LEAST_DISK, GOOD_DISK = 64 * MIB, 1 * GIB
"""Ray's logs and sockets; programs that are kept in the cache."""
LEAST_FILES = 1024
LONGEST_TEMPORARY = 40
"""Letters of the path of the temporary directory: Linux limits the paths of sockets, which lie below it."""
PROBE_SECONDS = 120.0
PROBE = (
    "import json, jax\n"
    "from podrun.device.xla.clients import instruction_set\n"
    "from podrun.device.xla.convolutions import available, wanted\n"
    "from podrun.device.xla.clients import one_thread_device\n"
    "import numpy as np\n"
    "with jax.default_device(one_thread_device()):\n"
    "    found = int(jax.numpy.arange(7).sum())\n"
    "print(json.dumps({'sum': found, 'set': instruction_set(), 'wanted': wanted(), 'onednn': available()}))\n"
)
"""Ends with one line of JSON: 21 if JAX computes, the instruction set, and whether oneDNN takes the convolutions."""


class Soundness(enum.Enum):
    """The state of a requirement."""

    OK = "ok"
    WARNING = "warning"
    """podrun works, but slower or not for every program."""
    WRONG = "wrong"
    """podrun does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: a requirement, its state, what was found, and the command that helps (empty if nothing is wrong)."""

    what: str
    health: Soundness
    found: str
    remedy: str = ""


def _host_memory() -> int:
    from podrun.partition.machines.ray_starts import available_bytes

    return available_bytes()


def _probe() -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `PROBE`."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, timeout=PROBE_SECONDS, check=False
    )
    return done.returncode, done.stdout, done.stderr


def _installed(package: str) -> str:
    """The version of a package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _tritonserver(environ: Mapping[str, str]) -> str:
    from podrun.serving.triton_server import find_tritonserver

    return str(find_tritonserver(environ=environ).program)


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts that checks look at: of this host, or of an invented one in tests."""

    environ: Mapping[str, str] = field(default_factory=environment)
    system: str = field(default_factory=lambda: f"{platform.system()} {platform.machine()}")
    python: tuple[int, ...] = field(default_factory=lambda: tuple(sys.version_info[:3]))
    cpu_flags: frozenset[str] = field(default_factory=lambda: cpu_flags(Path("/proc/cpuinfo")))
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    memory: Callable[[], int] = _host_memory
    files: int = field(default_factory=lambda: resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    free: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free
    temporary: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))
    installed: Callable[[str], str] = _installed
    probe: Callable[[], tuple[int, str, str]] = _probe
    tritonserver: Callable[[Mapping[str, str]], str] = _tritonserver
    """Path of the server; PodrunError if there is none that can be used."""


def cpu_flags(cpuinfo: Path) -> frozenset[str]:
    """The instruction sets that the first processor has; none if the file says nothing."""
    try:
        match = re.search(r"^(?:flags|Features)\s*: (.*)$", cpuinfo.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(match[1].split()) if match else frozenset()


def check_host(host: HostFacts) -> Finding:
    """Check operating system and Python."""
    python = ".".join(map(str, host.python))
    description = f"podrun {__version__}, Python {python}, {host.system}"
    if not host.system.startswith("Linux"):
        return Finding(
            "host", Soundness.WRONG, description, "Use Linux: a container or a virtual machine will do."
        )
    if host.python < (3, 11):
        return Finding(
            "host", Soundness.WRONG, description, "Install Python 3.11 or later: make PYTHON=python3.11"
        )
    return Finding("host", Soundness.OK, description)


def check_processor(host: HostFacts) -> Finding:
    """Check cores and vector instructions."""
    level = next((name for name in ("avx512f", "avx2", "avx") if name in host.cpu_flags), "no AVX")
    description = f"{host.cores} core{'s' if host.cores > 1 else ''}, {level}"
    if not host.system.endswith("x86_64"):
        description = f"{host.cores} cores, {host.system.split()[-1]}: convolutions are XLA's own and slower"
        return Finding("processor", Soundness.WARNING, description, "Use an x86-64 host for convolutions.")
    if level == "no AVX":
        remedy = "jaxlib needs AVX: use another host, or give the virtual machine the host's processor."
        return Finding("processor", Soundness.WRONG, description, remedy)
    if level == "avx":
        return Finding("processor", Soundness.WARNING, f"{description}: slow", "Use a host with AVX2.")
    return Finding("processor", Soundness.OK, description)


def check_memory(host: HostFacts) -> Finding:
    """Check the memory that processes can still take."""
    free = host.memory()
    description = f"{free / GIB:.1f} GiB available"
    if free < LEAST_MEMORY:
        remedy = "End other programs, or give the container more; podrun ps shows your own runs."
        return Finding("memory", Soundness.WRONG, description, remedy)
    if free < GOOD_MEMORY:
        return Finding("memory", Soundness.WARNING, f"{description}: enough for a POD of a few machines",
                       "For 16 machines have 3 GiB: end other programs.")  # fmt: skip
    return Finding("memory", Soundness.OK, description)


def check_files(host: HostFacts) -> Finding:
    """Check the number of files that a process may have open."""
    description = "no limit" if host.files < 0 else f"{host.files} open files"
    if 0 <= host.files < LEAST_FILES:
        return Finding("limits", Soundness.WRONG, description, "Allow more: ulimit -n 4096")
    return Finding("limits", Soundness.OK, description)


def check_temporary(host: HostFacts) -> Finding:
    """Check the directory for temporary files: room, and a path that is short enough for sockets."""
    path = host.temporary
    problem = _directory_problem(path, host)
    if problem:
        return Finding("temporary files", Soundness.WRONG, problem, "Name another: export TMPDIR=/DIR")
    if len(str(path)) > LONGEST_TEMPORARY:
        return Finding("temporary files", Soundness.WARNING, f"{path}: too long a path for Ray's sockets, which go "
                       "elsewhere", "Name a shorter one: export TMPDIR=/tmp")  # fmt: skip
    return _with_room("temporary files", path, host)


def check_cache(host: HostFacts) -> Finding:
    """Check the directory of compiled programs."""
    path = podrun_cache_directory(host.environ)
    if path is None:
        return Finding("cache", Soundness.WARNING, "none: every process compiles for itself (HOME is not set)",
                       "Name one: export PODRUN_CACHE_DIR=DIRECTORY")  # fmt: skip
    there = next(parent for parent in (path, *path.parents) if parent.exists())
    problem = _directory_problem(there, host)
    if problem:
        room = "Make room: podrun cache clear; or name" if "full" in problem else "Name"
        return Finding("cache", Soundness.WARNING, f"{problem}: every process compiles for itself",
                       f"{room} another: export PODRUN_CACHE_DIR=DIRECTORY")  # fmt: skip
    return _with_room("cache", path, host, there)


def _directory_problem(path: Path, host: HostFacts) -> str:
    if not path.is_dir():
        return f"{path} is no directory"
    if not os.access(path, os.W_OK | os.X_OK):
        return f"{path} cannot be written"
    free = host.free(path)
    return f"{path} is full: {free / MIB:.0f} MiB free" if free < LEAST_DISK else ""


def _with_room(what: str, path: Path, host: HostFacts, there: Path | None = None) -> Finding:
    free = host.free(there or path)
    description = f"{path}, {free / GIB:.1f} GiB free"
    if free < GOOD_DISK:
        return Finding(what, Soundness.WARNING, description, f"Make room: df -h {there or path}")
    return Finding(what, Soundness.OK, description)


def check_runtime(host: HostFacts) -> Finding:
    """Check the directory that lists this user's servers."""
    try:
        return Finding("runtime files", Soundness.OK, str(runtime_directory(host.environ)))
    except UsageError as error:
        return Finding("runtime files", Soundness.WRONG, error.message, error.hint or "")


def check_packages(host: HostFacts) -> Finding:
    """Check the versions of packages that podrun needs."""
    wrong, shown = [], []
    for text in metadata.requires("podrun") or ():
        requirement, _, marker = text.partition(";")
        if "extra ==" in marker or ("platform_machine" in marker and not host.system.endswith("x86_64")):
            continue
        name = re.split(r"[<>=!~ \[(]", requirement, maxsplit=1)[0]
        version = host.installed(name)
        if not version:
            if name != "ray":  # Not all of podrun needs it: `check_ray`.
                wrong.append(f"{name} is not installed")
        elif not _fits(version, requirement[len(name) :]):
            wrong.append(f"{name} is {version}, not {requirement[len(name) :].strip()}")
        elif name in ("jax", "numpy", "onnx"):
            shown.append(f"{name} {version}")
    if wrong:
        remedy = "Install as tested, in podrun's checkout: pip install -c constraints.txt ."
        return Finding("packages", Soundness.WRONG, "; ".join(wrong), remedy)
    return Finding("packages", Soundness.OK, ", ".join(shown))


def _fits(version: str, specifiers: str) -> bool:
    """Whether a version is within bounds such as ``>=2.52,<2.61`` and ``==2023.2.0``."""
    own = _numbers(version)
    for compare, bound in re.findall(r"(>=|<=|==|<|>)\s*([0-9.]+)", specifiers):
        other = _numbers(bound)
        width = max(len(own), len(other))
        a, b = (n + (0,) * (width - len(n)) for n in (own, other))
        if not {">=": a >= b, "<=": a <= b, "==": a == b, "<": a < b, ">": a > b}[compare]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_ray(host: HostFacts) -> Finding:
    """Check Ray, which places machines on a POD."""
    version = host.installed("ray")
    if not version:
        remedy = "For podrun and vipu-server: pip install ray. podrun compat needs no Ray."
        return Finding("ray", Soundness.WARNING, "not installed: programs run in one process only", remedy)
    return Finding("ray", Soundness.OK, version)


def check_tritonserver(host: HostFacts) -> Finding:
    """Check the model server, which only `podrun serve` needs."""
    try:
        return Finding("tritonserver", Soundness.OK, host.tritonserver(host.environ))
    except PodrunError as error:
        return Finding("tritonserver", Soundness.WARNING, f"podrun serve does not work: {error.message}",
                       f"Only for podrun serve: {error.hint}")  # fmt: skip


def check_network(host: HostFacts) -> Finding:
    """Check sockets on the loopback address, and the port of the partition service."""
    try:
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
    except OSError as error:
        return Finding("network", Soundness.WRONG, f"no socket can listen on 127.0.0.1: {error.strerror}",
                       "Allow it in the sandbox or container: ip link set lo up")  # fmt: skip
    try:
        with socket.socket() as service:
            service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            service.bind(("127.0.0.1", 8090))
    except OSError:
        return Finding("network", Soundness.OK, "port 8090 is taken, as by vipu-server (podrun needs none)")
    return Finding("network", Soundness.OK, "127.0.0.1 can be used, port 8090 is free for vipu-server")


def check_numbers(host: HostFacts) -> Finding:
    """Check that JAX computes, and that oneDNN takes the convolutions."""
    try:
        code, out, err = host.probe()
    except subprocess.TimeoutExpired:
        return Finding("numbers", Soundness.WRONG, f"JAX did not compute within {PROBE_SECONDS:.0f} s",
                       "Look at what the host does: uptime; then run podrun doctor again.")  # fmt: skip
    last = out.strip().splitlines()[-1] if out.strip() else ""
    try:
        said = json.loads(last) if code == 0 else {}
    except ValueError:
        said = {}
    if not isinstance(said, dict) or said.get("sum") != 21:
        why = err.strip().splitlines()[-1] if err.strip() else f"the process ended with {code}"
        remedy = "Install as tested, in podrun's checkout: pip install --force-reinstall -c constraints.txt ."
        return Finding("numbers", Soundness.WRONG, f"JAX does not compute: {why}", remedy)
    description = f"JAX computes for {said['set']}"
    if said["onednn"]:
        return Finding(
            "numbers", Soundness.OK, f"{description}, oneDNN {host.installed('onednn-cpu-gomp')} convolves"
        )
    if not said["wanted"]:
        return Finding(
            "numbers", Soundness.OK, f"{description}; convolutions are XLA's, as PODRUN_CONVOLUTIONS says"
        )
    return Finding("numbers", Soundness.WARNING, f"{description}; convolutions are XLA's own and slower",
                   "pip install --force-reinstall podrun onednn-cpu-gomp (and the system's libgomp.so.1)")  # fmt: skip


CHECKS: tuple[Callable[[HostFacts], Finding], ...] = (
    check_host,
    check_processor,
    check_memory,
    check_files,
    check_temporary,
    check_cache,
    check_runtime,
    check_network,
    check_packages,
    check_ray,
    check_tritonserver,
    check_numbers,
)


def examine(host: HostFacts) -> Iterator[Finding]:
    """The findings, each as soon as it is known."""
    for check in CHECKS:
        yield check(host)
