"""One rank of a peer library's all-reduce, for ``benchmarks/collectives.py``: Open MPI (mpi4py) or gloo
(torch).

Run by that script under ``mpiexec``, or once a rank, with an interpreter that has the library. Needs
nothing of podrun. The loop is the one of ``podrun.collectives.measure``: rewrite the buffer, reduce, and
take off the time of the rewriting alone; of each the slowest rank counts, and the best of a few loops. Rank
0 prints one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np


class Mpi:
    """Open MPI: ``Allreduce`` from one NumPy buffer to another."""

    def __init__(self, options: argparse.Namespace) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        self.version = MPI.Get_library_version().split(",")[0]

    def barrier(self) -> None:
        self.comm.Barrier()

    def slowest(self, value: float) -> float:
        return float(self.comm.allreduce(value, self.mpi.MAX))

    def round(self, count: int) -> tuple[np.ndarray[Any, Any], Callable[[], np.ndarray[Any, Any]]]:
        mine, result = np.zeros(count, np.float32), np.empty(count, np.float32)

        def call() -> np.ndarray[Any, Any]:
            self.comm.Allreduce(mine, result)
            return result

        return mine, call


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

    def slowest(self, value: float) -> float:
        held = self.torch.tensor([value], dtype=self.torch.float64)
        self.dist.all_reduce(held, self.dist.ReduceOp.MAX)
        return float(held[0])

    def round(self, count: int) -> tuple[np.ndarray[Any, Any], Callable[[], np.ndarray[Any, Any]]]:
        tensor = self.torch.zeros(count, dtype=self.torch.float32)
        mine = tensor.numpy()

        def call() -> np.ndarray[Any, Any]:
            self.dist.all_reduce(tensor)
            return mine

        return mine, call


def loop(peer: Mpi | Gloo, rounds: int, mine: np.ndarray[Any, Any], call: Callable[[], Any] | None) -> float:
    """Seconds of so many rounds on this rank."""
    peer.barrier()
    began = time.perf_counter()
    for turn in range(rounds):
        mine[:] = 1 + (turn + peer.rank) % 3
        if call is not None:
            call()
    return time.perf_counter() - began


def main() -> None:
    """Measure every size; rank 0 prints the rows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=["mpi", "gloo"])
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--loops", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    peer: Mpi | Gloo = (Mpi if options.library == "mpi" else Gloo)(options)
    rows = []
    for nbytes in map(int, options.sizes.split(",")):
        mine, call = peer.round(max(1, nbytes // 4))
        wrong = 0
        for turn in range(2):
            mine[:] = 1 + (turn + peer.rank) % 3
            want = sum(1 + (turn + rank) % 3 for rank in range(peer.size))
            wrong += int(np.count_nonzero(call() != want))
        peer.barrier()
        began = time.perf_counter()
        mine[:] = 1
        call()
        once = peer.slowest(time.perf_counter() - began)
        rounds = int(np.clip(options.seconds / max(once, 1e-7), 2, 2000))
        both = alone = np.inf
        for _ in range(options.loops):
            both = min(both, peer.slowest(loop(peer, rounds, mine, call)))
            alone = min(alone, peer.slowest(loop(peer, rounds, mine, None)))
        best = max(both - alone, 1e-9) / rounds
        rows.append({"bytes": nbytes, "seconds": best, "wrong": wrong})
    if peer.rank == 0:
        print(json.dumps({"version": peer.version, "rows": rows}), flush=True)


if __name__ == "__main__":
    main()
