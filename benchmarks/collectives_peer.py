"""One rank of a library's all-reduce, for ``benchmarks/collectives.py``: podrun, Open MPI (mpi4py) or gloo (torch).

Run by that script once a rank, with an interpreter that has the library; of podrun only the podrun rank needs
anything. A rank connects to the script's socket and does what lines of JSON there tell it: take a size, do a
block of rounds, end. Between blocks it sleeps on that socket, so that the libraries are measured in turn with
all of them up. A round writes new values into the buffer and reduces; the same loop without the reduction is
timed too, to be taken off. The last result of every block is checked.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Round = tuple["np.ndarray[Any, Any]", Callable[[], "np.ndarray[Any, Any] | None"]]
"""The buffer to write a round's values into, and the call that reduces it; it returns the result, if there is one."""


class Podrun:
    """podrun's arenas: the result where all read it ("shared"), or in the rank's own buffer ("copy")."""

    def __init__(self, options: argparse.Namespace) -> None:
        from podrun import collectives

        self.version = "podrun"
        if options.rank == 0:
            self.group, self.token = collectives.create(options.ranks)
        else:
            self.group = collectives.join(json.loads(options.token), options.rank)
        self.rank, self.size = options.rank, options.ranks

    def barrier(self) -> None:
        self.group.barrier()

    def rounds(self, count: int) -> dict[str, Round]:
        arena, group = f"vector of {count}", self.group
        mine = group.allocate(arena, "float32", count)
        found: dict[str, Round] = {
            "shared": (mine, lambda: group.all_reduce(arena)),
            "copy": (mine, lambda: group.all_reduce(arena, in_place=True)),
        }
        if self.size == 2 and count > 1:
            found["floor"] = self._floor(count)
            found["floor_handed"] = self._floor_handed(count)
        return found

    def _floor(self, count: int) -> Round:
        """The least that two ranks can do where the vector lies: rewrite it, meet, and read half of the other's into
        memory of one's own. Nothing is added up, and nothing waits for the reading to be over.
        """
        rows = self.group.shared(f"floor of {count}", "float32", 2 * count)
        mine, theirs = (rows[rank * count : (rank + 1) * count] for rank in (self.rank, 1 - self.rank))
        half = slice(self.rank * (count // 2), (self.rank + 1) * (count // 2))
        theirs = theirs[half]
        read = np.empty_like(theirs)

        def call() -> None:
            self.group.barrier()
            np.copyto(read, theirs)

        return mine, call

    def _floor_handed(self, count: int) -> Round:
        """The same through other memory: rewrite the vector, copy half of it out, meet, and read what the other copied.
        The places to copy to take turns.
        """
        half = count // 2
        turns = max(1, min(8, (128 * 1024) // half))
        places = self.group.shared(f"floor of {count}, handed over", "float32", 2 * half * turns).reshape(
            2, turns, half
        )
        mine, read = np.zeros(count, np.float32), np.empty(half, np.float32)
        own = mine[(1 - self.rank) * half :][:half]
        pairs = itertools.cycle(zip(places[self.rank], places[1 - self.rank], strict=True))

        def call() -> None:
            out, theirs = next(pairs)
            np.copyto(out, own)
            self.group.barrier()
            np.copyto(read, theirs)

        return mine, call


class Mpi:
    """Open MPI: ``Allreduce`` from one NumPy buffer to another."""

    def __init__(self, options: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.comm = MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.version = MPI.Get_library_version().split(",")[0]

    def barrier(self) -> None:
        self.comm.Barrier()

    def rounds(self, count: int) -> dict[str, Round]:
        mine, result = np.zeros(count, np.float32), np.empty(count, np.float32)

        def call() -> np.ndarray[Any, Any]:
            self.comm.Allreduce(mine, result)
            return result

        return {"openmpi": (mine, call)}


class Gloo:
    """torch.distributed with gloo: ``all_reduce`` works in place, so each round's rewriting is its input."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.torch, self.dist = torch, dist
        self.rank, self.size = options.rank, options.ranks
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{options.port}", rank=self.rank, world_size=self.size
        )
        self.version = f"torch {torch.__version__} gloo"

    def barrier(self) -> None:
        self.dist.barrier()

    def rounds(self, count: int) -> dict[str, Round]:
        tensor = self.torch.zeros(count, dtype=self.torch.float32)
        mine = tensor.numpy()

        def call() -> np.ndarray[Any, Any]:
            self.dist.all_reduce(tensor)
            return mine

        return {"gloo": (mine, call)}


AWAKE = 3
"""Reductions before a block's time is taken: by then all ranks are awake and in step."""

LIBRARIES: dict[str, Any] = {"podrun": Podrun, "openmpi": Mpi, "gloo": Gloo}


def block(peer: Any, mine: Any, call: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Seconds of so many rounds on this rank, with and without the reduction, and wrong values at the end."""
    peer.barrier()
    for _ in range(AWAKE):
        call()
    began = time.perf_counter()
    for turn in range(rounds):
        mine[:] = 1 + (turn + peer.rank) % 3
        result = call()
    reduced = time.perf_counter() - began
    want = sum(1 + (rounds - 1 + rank) % 3 for rank in range(peer.size))
    wrong = 0 if result is None else int(np.count_nonzero(result != want))
    peer.barrier()
    began = time.perf_counter()
    for turn in range(rounds):
        mine[:] = 1 + (turn + peer.rank) % 3
    alone = time.perf_counter() - began
    return {"reduced": reduced, "alone": alone, "wrong": wrong}


@contextlib.contextmanager
def on_one_core(rank: int, wanted: bool) -> Iterator[None]:
    """With ``wanted``, this rank keeps to a core of its own meanwhile."""
    cores = os.sched_getaffinity(0)
    if wanted:
        os.sched_setaffinity(0, {sorted(cores)[rank % len(cores)]})
    yield
    os.sched_setaffinity(0, cores)


def main() -> None:
    """Do as told until told to end."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=list(LIBRARIES))
    parser.add_argument("--control", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token", default="")
    options = parser.parse_args()
    peer = LIBRARIES[options.library](options)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(options.control)
        stream = sock.makefile("rw", encoding="utf-8")

        def say(message: dict[str, Any]) -> None:
            print(json.dumps(message), file=stream, flush=True)

        say(
            {
                "rank": peer.rank,
                "pid": os.getpid(),
                "version": peer.version,
                "token": getattr(peer, "token", None),
            }
        )
        rounds: dict[str, Round] = {}
        for line in stream:
            order = json.loads(line)
            if "count" in order:
                rounds.clear()
                rounds.update(peer.rounds(order["count"]))
                say({})
            else:
                with on_one_core(peer.rank, order["variant"].startswith("floor")):
                    said = block(peer, *rounds[order["variant"]], order["rounds"])
                say(said)
        stream.close()


if __name__ == "__main__":
    main()
