"""What looking at a POD costs.

    python benchmarks/monitor.py [--json FILE] [--short]

* ``gc_monitor_ms``: a whole ``gc-monitor``, start-up of Python included, with a partition of all IPUs; beside it
  ``python_ms``, Python's own start-up and end in the same run. Median over repeats. Compiled modules are kept from the
  first start on, as on users' hosts, even where PYTHONDONTWRITEBYTECODE is set.
* ``top_first_frame_s``: from the start of ``podrun top`` in a terminal to the first machine on the screen;
  ``top_core_share``: processor time of it over time, while it looks twice a second.
* ``scrape_s``: a page of the exporter for the POD, and for an inventory of 65,536 IPUs without partitions.
* ``telemetry_vs_step``: how many times longer a training step takes while its machines are asked twice a second; steps
  are taken in short blocks, with and without questions in turn.

Machines are threads of one server process here (``--in-process``), idle unless said otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlp
from machines import machines
from short_mode import add_short
from step_time import block

BIN = Path(sys.executable).parent
TARGETS = {
    "gc_monitor_ms_pod16": 300.0,
    "gc_monitor_ms_pod256": 500.0,
    "top_first_frame_s": 0.7,
    "top_core_share": 0.05,
    "scrape_s_pod256": 1.0,
    "scrape_s_inventory": 5.0,
    "telemetry_vs_step": 1.01,
}
START_S = 300.0
IPUS_PER_DOMAIN = 64
"""IPUs of an IPU-Link domain of the larger PODs."""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=15.0, help="of podrun top")
    parser.add_argument("--large", default="pod256")
    parser.add_argument("--inventory", default="pod64k")
    add_short(parser, repeats=2, seconds=3.0, large="pod16", inventory="pod256")
    arguments = parser.parse_args()
    figures: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    figures["python_ms"], _ = median_ms([sys.executable, "-c", "pass"], os.environ, arguments.repeats)
    with serving("pod16") as environ:
        wall, processor = gc_monitor_ms(environ, 16, arguments.repeats)
        figures |= {"gc_monitor_ms_pod16": wall, "gc_monitor_processor_ms_pod16": processor}
    with serving(arguments.large) as environ:
        wall, processor = gc_monitor_ms(environ, ipus_of(arguments.large), arguments.repeats)
        figures |= {"gc_monitor_ms_pod256": wall, "gc_monitor_processor_ms_pod256": processor}
        figures["scrape_s_pod256"] = scrape_seconds(environ, arguments.repeats)
        figures |= top_figures(environ, arguments.seconds)
    with serving(arguments.inventory) as environ:
        figures["scrape_s_inventory"] = scrape_seconds(environ, arguments.repeats)
    figures |= step_cost(arguments.repeats * 2)
    for key, value in figures.items():
        target = f"   (at most {TARGETS[key]:g})" if key in TARGETS else ""
        print(f"{key:24} {value:.4g}{target}" if isinstance(value, float) else f"{key:24} {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def ipus_of(cluster: str) -> int:
    """The IPUs of a POD."""
    from podrun.core.cluster_file import load_cluster

    return load_cluster(cluster).ipu_count


@contextlib.contextmanager
def serving(cluster: str) -> Iterator[dict[str, str]]:
    """A server of a POD in a runtime directory of its own; the environment that finds it."""
    with tempfile.TemporaryDirectory(prefix="podrun-benchmark-") as directory:
        environ = {**os.environ, "PODRUN_RUNTIME_DIR": directory, "HOME": directory}
        environ.pop("PYTHONDONTWRITEBYTECODE", None)
        environ["PYTHONPYCACHEPREFIX"] = str(Path(directory) / "compiled")
        words = [str(BIN / "vipu-server"), "--cluster", cluster, "--in-process", "--no-state", "--port", "0"]
        server = subprocess.Popen(
            words, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            if server.stdout is None or "listens" not in server.stdout.readline():
                raise SystemExit(f"vipu-server of {cluster} does not start")
            yield environ
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(120)


def median_ms(words: list[str], environ: Any, repeats: int) -> tuple[float, float]:
    """Median milliseconds of a command that must end well: by the clock, and of its own processor time, which other
    load on the host hardly changes."""
    taken, worked = [], []
    for _ in range(repeats):
        begin, before = time.perf_counter(), _children_seconds()
        subprocess.run(words, env=environ, check=True, capture_output=True, timeout=120)
        taken.append(time.perf_counter() - begin)
        worked.append(_children_seconds() - before)
    return 1e3 * statistics.median(taken), 1e3 * statistics.median(worked)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def gc_monitor_ms(environ: dict[str, str], ipus: int, repeats: int) -> tuple[float, float]:
    """A partition of the whole POD, then gc-monitor."""
    words = [str(BIN / "vipu"), "--timeout", str(START_S), "create", "partition", "p", "--size", str(ipus)]
    domains = max(ipus // IPUS_PER_DOMAIN, 1)
    words += ["--num-gcds", str(domains), "--num-ilds", str(domains)]
    subprocess.run(words, env=environ, check=True, capture_output=True, timeout=START_S)
    monitor = [str(BIN / "gc-monitor")]
    median_ms(monitor, environ, 1)  # Compiles the modules.
    return median_ms(monitor, environ, repeats)


def scrape_seconds(environ: dict[str, str], repeats: int) -> float:
    """Median of some pages of an exporter."""
    import urllib.request

    words = [str(BIN / "podrun"), "exporter", "--port", "0", "--public"]
    exporter = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        address = (exporter.stdout.readline() if exporter.stdout else "").split()[0]
        taken = []
        for _ in range(repeats + 1):
            begin = time.perf_counter()
            opener.open(address, timeout=120).read()
            taken.append(time.perf_counter() - begin)
        return statistics.median(taken[1:])  # The first page also waits for what is there.
    finally:
        exporter.send_signal(signal.SIGINT)
        exporter.wait(60)


def top_figures(environ: dict[str, str], seconds: float) -> dict[str, float]:
    """``podrun top`` in a terminal of 120 columns."""
    compiled = [sys.executable, "-c", "import podrun.monitor.live.screen"]
    subprocess.run(compiled, env=environ, check=True, timeout=120)
    begin = time.perf_counter()
    pid, terminal = pty.fork()
    if pid == 0:
        screen = environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        os.execve(str(BIN / "podrun"), ["podrun", "top"], screen)
    try:
        shown = b""
        while b"ipum1" not in shown and time.perf_counter() - begin < 60:
            shown += _read(terminal, 0.01)
        first = time.perf_counter() - begin
        _drain(terminal, 2.0)
        before, start = _processor_seconds(pid), time.perf_counter()
        _drain(terminal, seconds)
        used, took = _processor_seconds(pid) - before, time.perf_counter() - start
        return {"top_first_frame_s": first, "top_core_share": used / took}
    finally:
        os.write(terminal, b"q")
        _drain(terminal, 2.0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def _read(terminal: int, wait_s: float) -> bytes:
    readable, _, _ = select.select([terminal], [], [], wait_s)
    try:
        return os.read(terminal, 65_536) if readable else b""
    except OSError:  # The program has ended.
        time.sleep(wait_s)
        return b""


def _drain(terminal: int, seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        _read(terminal, 0.05)


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def step_cost(blocks: int) -> dict[str, float]:
    """A step of 16 replicas while its machines are asked twice a second, over one without."""
    from podrun.device.service.control import MachineControl

    with machines(4) as pod:
        connection = pod.attach()
        connection.load(mlp.executable(16))
        connection.write_variables(mlp.weights())
        data = mlp.inputs(16)
        controls = [MachineControl(endpoint) for endpoint in pod.endpoints]
        asking, over = threading.Event(), threading.Event()

        def ask() -> None:
            while not over.is_set():
                asking.wait()
                for control in controls:
                    control.telemetry()
                over.wait(0.5)

        def step() -> float:
            return float(connection.run(1, data).anchors["loss"].mean())

        asker = threading.Thread(target=ask)
        asker.start()
        block(step)
        ratios = []
        for _ in range(blocks):
            asking.clear()
            alone = block(step)
            asking.set()
            ratios.append(block(step) / alone)
        over.set()
        asking.set()
        asker.join()
        for control in controls:
            control.close()
        connection.close()
    return {"telemetry_vs_step": statistics.median(ratios), "telemetry_vs_step_best": min(ratios)}


if __name__ == "__main__":
    main()
