"""All-reduce between two hosts against a plain socket stream between them. Needs root and ``ip``.

    sudo python benchmarks/collectives_hosts.py [--gbit 10] [--json FILE]

The hosts are two network namespaces joined by a virtual cable, so the ranks share no memory and all data
goes by TCP.
``--gbit`` limits the cable both ways, as a network card would; without it the host's cores are the limit. Streams
and all-reduce take turns in the same two processes, so that a busy host is as bad for one as for the other; of each
the best round counts.

JSON keys, bytes per second: ``stream`` (plain sockets, one way, a buffer of 1 MiB sent and received again and again),
``duplex`` (the same both ways at once, each way), ``array`` (one way, from an array of 64 MiB into another, as an
all-reduce must), ``tuned`` (as ``array``, with the small buffers that the all-reduce has where the line is short),
``all_reduce`` (algorithm bandwidth of 64 MiB); ``vs_stream``, ``vs_duplex``, ``vs_array`` and ``vs_tuned`` are its
shares of these. ``cpu``: processor seconds of both sides together for a GB of bandwidth; two cores cannot do more than
2 / cpu GB/s.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from short_mode import add_short

from podrun.collectives import create, join_group
from podrun.collectives.tcp_link import CACHED_BUFFER

ADDRESSES = ("10.213.0.1", "10.213.0.2")
BYTES = 64 * 1024 * 1024
PIECE = 1024 * 1024


@contextlib.contextmanager
def two_hosts(gbit: float | None) -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable; gone at the end."""
    names = tuple(f"podrun{os.getpid()}{side}" for side in "ab")
    try:
        for name in names:
            _ip("netns", "add", name)
        cable = [f"v{os.getpid()}{side}" for side in "ab"]
        _ip(
            "link",
            "add",
            cable[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            cable[1],
            "netns",
            names[1],
        )
        for name, end, address in zip(names, cable, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if gbit:
                shape = ["root", "tbf", "rate", f"{gbit}gbit", "burst", "2mb", "latency", "20ms"]
                _run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", end, *shape)
        yield names[0], names[1]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()}")


def on_both(names: tuple[str, str], turns: int) -> dict[str, Any]:
    """Run both sides in the two namespaces; what side 0 prints."""
    sides = [
        subprocess.Popen(
            [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                __file__,
                "--side",
                str(side),
                "--turns",
                str(turns),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side, name in enumerate(names)
    ]
    assert sides[0].stdout is not None
    assert sides[1].stdin is not None
    sides[1].stdin.write(sides[0].stdout.readline())  # where side 0 listens
    sides[1].stdin.close()
    result: dict[str, Any] = json.loads(sides[0].stdout.readline())
    for side in sides:
        side.wait(60)
    return result


def one_side(side: int, turns: int) -> None:
    """One of the two processes."""
    if side == 0:
        group, token = create(2, address=ADDRESSES[0])
        with socket.create_server((ADDRESSES[0], 0)) as server:
            print(json.dumps({"token": token, "port": server.getsockname()[1]}), flush=True)
            sock, tuned = server.accept()[0], server.accept()[0]
    else:
        told = json.loads(sys.stdin.readline())
        group = join_group(told["token"], 1)
        sock, tuned = (socket.create_connection((ADDRESSES[0], told["port"])) for _ in range(2))
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        tuned.setsockopt(socket.SOL_SOCKET, option, CACHED_BUFFER // 2)
    mine = group.allocate("gradients", "float32", BYTES // 4)
    best = dict.fromkeys(("stream", "duplex", "array", "tuned", "all_reduce"), 0.0)
    small, large = (np.ones(size, np.uint8) for size in (1 << 20, BYTES))
    streams = {  # what is sent, into what, and whether both ways
        "stream": (sock, small, small.copy(), False),
        "duplex": (sock, small, small.copy(), True),
        "array": (sock, mine.view(np.uint8), large, False),
        "tuned": (tuned, mine.view(np.uint8), large, False),
    }
    spent = group.allocate("processor seconds", "float64", len(best))
    for turn in range(turns):
        for at, (name, (through, source, room, both)) in enumerate(streams.items()):
            group.barrier()
            began = time.process_time()
            rate = stream(through, source, room, sends=both or side == 1, receives=both or side == 0)
            best[name] = max(best[name], rate)
            spent[at] += (time.process_time() - began) / (4 * BYTES * turns / 1e9)
        for again in range(4):
            mine[:] = 4 * turn + again + side
            group.barrier()
            began, busy = time.perf_counter(), time.process_time()
            result = group.all_reduce("gradients")
            best["all_reduce"] = max(best["all_reduce"], BYTES / (time.perf_counter() - began))
            spent[-1] += (time.process_time() - busy) / (4 * BYTES * turns / 1e9)
            assert (result == 2 * (4 * turn + again) + 1).all()
    cpu = [round(float(seconds), 3) for seconds in group.all_reduce("processor seconds")]
    group.barrier()
    if side == 0:
        print(json.dumps({**best, "cpu": dict(zip(best, cpu, strict=True))}), flush=True)
    group.close()
    sock.close()
    tuned.close()


def stream(
    sock: socket.socket, source: np.ndarray, room: np.ndarray, *, sends: bool, receives: bool
) -> float:
    """Bytes per second through a socket, of four times what is reduced, seen by who receives. ``source`` is sent again
    and again, in pieces of 1 MiB, and comes to lie in ``room`` again and again.
    """
    count = 4 * BYTES
    pieces = [source[at : at + PIECE].data for at in range(0, source.size, PIECE)]
    sending = threading.Thread(
        target=lambda: [sock.sendall(pieces[turn % len(pieces)]) for turn in range(count // PIECE)]  # type: ignore[func-returns-value]
    )
    began = time.perf_counter()
    if sends:
        sending.start()
    received = 0
    while receives and received < count:
        at = received % room.size
        received += sock.recv_into(room[at : at + PIECE].data)
    seconds = time.perf_counter() - began
    if sends:
        sending.join()
    return received / seconds


def main() -> None:
    """Parse options; measure, or do one side of a measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--side", type=int, help=argparse.SUPPRESS)
    add_short(parser, turns=1)
    options = parser.parse_args()
    if options.side is not None:
        one_side(options.side, options.turns)
    else:
        result: dict[str, Any] = {"schema": 4, "gbit": options.gbit}
        with two_hosts(options.gbit) as names:
            result.update(on_both(names, options.turns))
        for peer in ("stream", "duplex", "array", "tuned"):
            result[f"vs_{peer}"] = result["all_reduce"] / result[peer]
        print(json.dumps(result, indent=1))
        if options.json:
            options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
