"""How long `podrun` takes until a program's first step is done.

    python benchmarks/launch_time.py [--json FILE] [--repeats N] [--nothing-kept]

* ``cold_s``: from typing ``podrun --num-replicas 16 examples/digits/train.py`` until a machine has done its first
  batch, nothing running before: service, Ray, four machines, compilation.
* ``warm_s``: the same beside a ``vipu-server`` whose four machines are up and whose partition exists.
* ``cold_cpu_s``, ``warm_cpu_s``: processor time of all processes of the launch (and of the server) until then; it
  says more than seconds of wall clock where other work runs.
* ``help_s``: ``podrun --help`` from start to end; ``help_import_s`` is what it imports, as ``-X
importtime`` counts it.

Medians over repeats, in seconds of wall clock. Machines note their first batch themselves (PODRUN_MOMENTS), so that
nobody asks them meanwhile. podrun's caches are in a folder of this run, which a first launch fills: cold and warm
launches find compiled pieces and what podrun keeps of the program, as after an earlier launch. With
``--nothing-kept`` they find only the pieces, and each launch traces and compiles. Python's bytecode is there, as pip
leaves it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from short_mode import add_short

from podrun.core.environment import PODRUN_PLAN_CACHE
from podrun.core.terminal import FIRST_BATCH
from podrun.partition.host.discovery import Registry
from podrun.partition.host.guardian import marked_processes

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
COMMAND = (
    str(BIN / "podrun"),
    "--quiet",
    "--num-replicas",
    "16",
    str(ROOT / "examples/digits/train.py"),
    "--epochs",
    "3",
)
DEADLINE_S = 180.0
SETTINGS: dict[str, str] = {}
"""Variables of all launches beside those of their home."""
FirstStep = Callable[[Mapping[str, str], list[str]], tuple[float, float]]
TARGETS = {"cold_s": 3.0, "warm_s": 1.5, "help_import_s": 0.15}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeline", action="store_true", help="print the steps of each launch")
    parser.add_argument("--nothing-kept", action="store_true", help="let each launch trace and compile")
    add_short(parser, repeats=1)
    arguments = parser.parse_args()
    if arguments.nothing_kept:
        SETTINGS[PODRUN_PLAN_CACHE] = "off"
    figures = measure(arguments.repeats)
    timelines = figures.pop("timelines")
    if arguments.timeline:
        print("\n\n".join(timelines))
    for key, value in figures.items():
        if isinstance(value, float):
            aim = f"  (aim: at most {TARGETS[key]:g})" if key in TARGETS else ""
            print(f"{key:16} {value:8.3f}{aim}")
    print(f"{figures['cores']} cores, load {figures['load_before']:.1f} before")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


def measure(repeats: int) -> dict[str, Any]:
    """All figures."""
    load = os.getloadavg()[0]
    helps = [_timed([str(BIN / "podrun"), "--help"]) for _ in range(max(5, repeats))]
    with tempfile.TemporaryDirectory(prefix="caches-") as caches:
        timelines: list[str] = []
        _in_fresh_home(_first_step, caches, timelines)  # Fills the caches.
        timelines.clear()
        cold = [_in_fresh_home(_first_step, caches, timelines) for _ in range(repeats)]
        with _home(caches) as environment, _server(environment):
            warm = [_first_step(environment, timelines) for _ in range(repeats)]
    return {
        "schema_version": 3,
        "timelines": timelines,
        "cold_s": statistics.median(wall for wall, _ in cold),
        "warm_s": statistics.median(wall for wall, _ in warm),
        "cold_cpu_s": statistics.median(cpu for _, cpu in cold),
        "warm_cpu_s": statistics.median(cpu for _, cpu in warm),
        "help_s": statistics.median(helps),
        "help_import_s": statistics.median(_import_seconds() for _ in range(5)),
        "repeats": repeats,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "python": platform.python_version(),
    }


@contextlib.contextmanager
def _home(caches: str) -> Iterator[dict[str, str]]:
    """An environment whose services are its own. ``caches``: a folder for podrun's caches and Python's bytecode."""
    home = Path(tempfile.mkdtemp(prefix="launch-"))
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PODRUN_", "IPUOF_", "VIPU_", "POPDIST_"))
    }
    environment = {
        **kept,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "PODRUN_RUNTIME_DIR": str(home / "run"),
        "PYTHONPYCACHEPREFIX": f"{caches}/bytecode",
        "PODRUN_CACHE_DIR": f"{caches}/podrun",
        "PODRUN_MOMENTS": str(home / "moments"),
        **SETTINGS,
    }
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    # Nobody listens at port 1: a server that happens to run at the usual port is not part of the measurement.
    environment["IPUOF_VIPU_API_PORT"] = "1"
    os.environ["PODRUN_RUNTIME_DIR"] = environment[
        "PODRUN_RUNTIME_DIR"
    ]  # This process asks these servers too.
    try:
        yield environment
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _in_fresh_home(work: FirstStep, caches: str, timelines: list[str]) -> tuple[float, float]:
    with _home(caches) as environment:
        return work(environment, timelines)


@contextlib.contextmanager
def _server(environment: Mapping[str, str]) -> Iterator[None]:
    """A `vipu-server` with its POD up and one partition of 16 IPUs."""
    server = subprocess.Popen(
        [str(BIN / "vipu-server"), "--cluster=pod16", "--port=0", "--no-state", "--prestart"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_service(environment)
        subprocess.run(
            [str(BIN / "vipu"), "create", "partition", "p16", "--size", "16"],
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        yield
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(30)


def _await_service(environment: Mapping[str, str]) -> None:
    """Wait for a service that this environment sees."""
    registry = Registry(Path(environment["PODRUN_RUNTIME_DIR"]))
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        if registry.find() is not None:
            return
        time.sleep(0.01)
    raise SystemExit(f"no partition service within {DEADLINE_S:g} s")


def _first_step(environment: Mapping[str, str], timelines: list[str]) -> tuple[float, float]:
    """Seconds, and processor seconds, from starting podrun to the first batch that a machine has done. Adds the
    launch's steps to ``timelines``."""
    used, moments = _processor_seconds(environment), Path(environment["PODRUN_MOMENTS"])
    moments.unlink(missing_ok=True)
    begin, clock = time.monotonic(), time.time()
    process = subprocess.Popen(COMMAND, env=environment, stdout=subprocess.DEVNULL)
    try:
        while True:
            done = [float(row[0]) for row in _moments(moments) if row[-1] == FIRST_BATCH]
            if done:
                cpu = _processor_seconds(environment) - used
                timelines.append(_timeline(moments, clock))
                return min(done) - clock, cpu
            if process.poll() is not None:
                raise SystemExit(f"podrun ended with exit code {process.returncode}, and no batch is noted")
            if time.monotonic() > begin + DEADLINE_S:
                raise SystemExit(f"no batch within {DEADLINE_S:g} s")
            time.sleep(0.01)
    finally:
        process.wait(DEADLINE_S)


def _moments(file: Path) -> list[list[str]]:
    """Time, process, seconds of a core and name of each moment so far; the last line may still be written."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []
    return [line.split(" ", 3) for line in lines]


def _timeline(file: Path, begin: float) -> str:
    """The steps of a launch since ``begin`` (seconds since 1970): when, seconds of a core that the process had used."""
    rows = [f"{'after s':>8} {'core s':>7} {'process':>8}"]
    for at, pid, used, name in sorted(_moments(file), key=lambda row: float(row[0])):
        if not rows[-1].endswith(f" {pid:>8} {name}"):
            rows.append(f"{float(at) - begin:8.2f} {float(used):7.2f} {pid:>8} {name}")
    return "\n".join(rows)


def _processor_seconds(environment: Mapping[str, str]) -> float:
    """What all processes of an environment have used so far, with their children that have ended."""
    ticks = 0
    for pid in marked_processes(f"PODRUN_RUNTIME_DIR={environment['PODRUN_RUNTIME_DIR']}"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            words = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2]
            ticks += sum(map(int, words.split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _timed(command: list[str]) -> float:
    begin = time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - begin


def _import_seconds() -> float:
    """Cumulative import time of everything `podrun --help` imports beyond a bare interpreter."""
    code = "import podrun.launcher.cli as c; c.main(['--help'])"
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True
    )
    own = [line.split("|")[0].removeprefix("import time:") for line in run.stderr.splitlines() if "|" in line]
    return sum(int(text) for text in own if text.strip().isdecimal()) / 1e6


if __name__ == "__main__":
    main()
