"""How long `podrun` takes until a program's first step is done.

    python benchmarks/launch_time.py [--json FILE] [--repeats N]

* ``cold_s``: from typing ``podrun --num-replicas 16 examples/digits/train.py`` to its first step, nothing
running before:
  service, Ray, four machines, compilation.
* ``warm_s``: the same beside a ``vipu-server`` whose four machines are up and whose partition exists.
* ``help_s``: ``podrun --help`` from start to end; ``help_import_s`` is what it imports, as ``-X
importtime`` counts it.

Medians over repeats, in seconds of wall clock. The first step is seen from outside, as batches that the
machines report (asked every 20 ms; each question takes a few milliseconds). Each launch has a fresh
executable cache, as a first run has.
"""

from __future__ import annotations

import argparse
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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from short_mode import add_short

from podrun.core.errors import PodrunError
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.host.discovery import Registry

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
TARGETS = {"cold_s": 15.0, "warm_s": 4.0, "help_import_s": 0.15}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--repeats", type=int, default=3)
    add_short(parser, repeats=1)
    arguments = parser.parse_args()
    figures = measure(arguments.repeats)
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
    cold = [_in_fresh_home(_first_step) for _ in range(repeats)]
    with _home() as environment, _server(environment):
        warm = [_first_step(environment) for _ in range(repeats)]
    return {
        "schema_version": 1,
        "cold_s": statistics.median(cold),
        "warm_s": statistics.median(warm),
        "help_s": statistics.median(helps),
        "help_import_s": statistics.median(_import_seconds() for _ in range(5)),
        "repeats": repeats,
        "cores": len(os.sched_getaffinity(0)),
        "load_before": load,
        "python": platform.python_version(),
    }


@contextmanager
def _home() -> Iterator[dict[str, str]]:
    """An environment whose services and caches are its own."""
    home = Path(tempfile.mkdtemp(prefix="launch-"))
    kept = {
        k: v for k, v in os.environ.items() if not k.startswith(("PODRUN_", "IPUOF_", "VIPU_", "POPDIST_"))
    }
    environment = {
        # Compiled pieces stay where they are; all else that podrun keeps in a home goes with this one.
        "XDG_CACHE_HOME": os.path.expanduser("~/.cache"),
        **kept,
        "HOME": str(home),
        "XDG_STATE_HOME": str(home / "state"),
        "PODRUN_RUNTIME_DIR": str(home / "run"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # Nobody listens at port 1: a server that happens to run at the usual port is not part of the measurement.
    environment["IPUOF_VIPU_API_PORT"] = "1"
    os.environ["PODRUN_RUNTIME_DIR"] = environment[
        "PODRUN_RUNTIME_DIR"
    ]  # This process asks these servers too.
    try:
        yield environment
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _in_fresh_home(work: Any) -> float:
    with _home() as environment:
        seconds: float = work(environment)
        return seconds


@contextmanager
def _server(environment: Mapping[str, str]) -> Iterator[None]:
    """A `vipu-server` with its POD up and one partition of 16 IPUs."""
    server = subprocess.Popen(
        [str(BIN / "vipu-server"), "--cluster=pod16", "--port=0", "--no-state", "--prestart"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _entry(environment)
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


def _entry(environment: Mapping[str, str]) -> tuple[str, int]:
    """Where the service that this environment sees listens, as soon as there is one."""
    registry = Registry(Path(environment["PODRUN_RUNTIME_DIR"]))
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end:
        found = registry.find()
        if found is not None:
            return found.host, found.port
        time.sleep(0.01)
    raise SystemExit(f"no partition service within {DEADLINE_S:g} s")


def _first_step(environment: Mapping[str, str]) -> float:
    """Seconds from starting podrun to the first batch that its machines report."""
    already = _batches_so_far(environment)
    begin = time.monotonic()
    process = subprocess.Popen(COMMAND, env=environment, stdout=subprocess.DEVNULL)
    try:
        host, port = _entry(environment)
        with VipuClient(host, port, timeout=10.0) as client:
            while True:
                if _batches(client) > already:
                    return time.monotonic() - begin
                if process.poll() not in (None, 0):
                    raise SystemExit(f"podrun ended with exit code {process.returncode}")
                if time.monotonic() > begin + DEADLINE_S:
                    raise SystemExit(f"no step within {DEADLINE_S:g} s")
                time.sleep(0.02)
    finally:
        process.wait(DEADLINE_S)


def _batches_so_far(environment: Mapping[str, str]) -> int:
    found = Registry(Path(environment["PODRUN_RUNTIME_DIR"])).find() if _has_runtime(environment) else None
    if found is None:
        return 0
    with VipuClient(found.host, found.port, timeout=10.0) as client:
        return _batches(client)


def _has_runtime(environment: Mapping[str, str]) -> bool:
    return Path(environment["PODRUN_RUNTIME_DIR"]).is_dir()


def _batches(client: VipuClient) -> int:
    try:
        return max((report.batches_done for report in client.machine_reports()), default=0)
    except PodrunError:
        return 0  # Not up yet, or not any more.


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
