"""Groups of processes, one of which is struck at a chosen moment: killed, stopped, out of files or out of memory.

A moment is a number of calls that the struck rank has made inside of `podrun.collectives`: so every stage comes up,
before, in and after what a rank publishes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import numpy.random

import podrun.collectives
from podrun.collectives import Communicator, Group, Reduction, create, join_group
from podrun.core.errors import PodrunError

ROOM = os.path.dirname(podrun.collectives.__file__)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["podrun.collectives"])
FATES = ("killed", "stopped", "out of files", "out of memory")
ENDS = ("killed", "stopped")
"""The fates after which a rank says nothing more."""


@dataclass(frozen=True)
class Strike:
    """What happens to which rank, after how many calls."""

    rank: int
    fate: str
    calls: int


@dataclass(frozen=True)
class Outcome:
    """How a rank ended: "done", or the name of an error's class, its message, whether podrun raised it on purpose, and
    how long it took.
    """

    kind: str
    message: str
    named: bool
    seconds: float


def arm(strike: Strike) -> None:
    """Have this process struck once it has made so many calls."""
    left = strike.calls

    def count(frame: Any, event: str, _argument: object) -> None:
        nonlocal left
        if event != "call" or not frame.f_code.co_filename.startswith(ROOM):
            return
        left -= 1
        if left:
            return
        sys.setprofile(None)
        if strike.fate == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif strike.fate == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif strike.fate == "out of files":
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) - 1,) * 2)
        else:
            mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (mapped + 2**20,) * 2)

    sys.setprofile(count)


def program(group: Group, seed: int) -> None:
    """Some collectives of every kind, the same on every rank."""
    draw = np.random.default_rng(seed)
    comm = Communicator(group)
    values = np.full(700_000, group.rank, np.float32)
    for _ in range(6):
        size, root = int(draw.choice([1, 3000, 70_000, 700_000])), int(draw.integers(group.size))
        mine = values[:size]
        match draw.integers(7):
            case 0:
                group.allocate(f"own {size}", "float32", size)[:] = mine
                group.all_reduce(f"own {size}", in_place=bool(root % 2))
            case 1:
                group.shared("weights", "float32", 1000)
                group.allocate("gradients", "float16", 1000)
                group.reduce_scatter("gradients", Reduction.MEAN, settle=False)
                group.all_gather("weights")
            case 2:
                comm.all_reduce(mine)
            case 3:
                comm.broadcast(mine, root)
            case 4:
                comm.send(mine, (group.rank + 1) % group.size, root)
                comm.receive(mine, (group.rank - 1) % group.size, root)
            case 5:
                order = [int(rank) for rank in draw.permutation(group.size)]
                part = comm.split([order[:1], order[1:]])
                assert part is not None
                try:
                    part.all_reduce(mine)
                finally:
                    part.close()
            case _:
                group.barrier()
    group.barrier()


def _rank(pipe: Connection, names: str, rank: int, timeout: float, seed: int, strike: Strike) -> None:
    """One rank: rank 0 sends the token up the pipe, the others get it from there. Says how it ended."""
    group = None
    began = time.monotonic()
    try:
        if rank:
            token = pipe.recv()
        if rank == strike.rank:
            arm(strike)
        host = names[rank] if len(set(names)) > 1 else None
        began = time.monotonic()
        if rank == 0:
            address = "127.0.0.1" if host else None
            group, token = create(len(names), address=address, timeout=timeout, host=host)
            pipe.send(token)
        else:
            group = join_group(token, rank, host=host)
        program(group, seed)
        kind, message, named = "done", "", True
    except Exception as error:
        trace = "" if isinstance(error, PodrunError) else traceback.format_exc()
        kind, message, named = type(error).__name__, f"{error}{trace}", isinstance(error, PodrunError)
    finally:
        if group is not None:
            group.close()
    sys.setprofile(None)
    pipe.send(Outcome(kind, message, named, time.monotonic() - began))


@contextlib.contextmanager
def _processes(names: str, *arguments: Any) -> Iterator[list[tuple[Any, Connection]]]:
    started = []
    for rank in range(len(names)):
        ours, theirs = PROCESSES.Pipe()
        process = PROCESSES.Process(target=_rank, args=(theirs, names, rank, *arguments))
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        yield started
    finally:
        for process, pipe in started:
            process.kill()
            process.join(60)
            process.close()
            pipe.close()


def outcomes(names: str, timeout: float, seed: int, strike: Strike) -> dict[int, Outcome]:
    """Run `program` on ranks of which one is struck; how each that still speaks ended: rank 0 alone, if it made no
    group.

    ``names`` as of `collective_ranks.hosts`; all the same: ranks of one host, without an address.
    """
    found: dict[int, Outcome] = {}
    with _processes(names, timeout, seed, strike) as started:
        pipes = {pipe: rank for rank, (_, pipe) in enumerate(started)}
        deadline = time.monotonic() + 60 + 4 * timeout
        silent = {strike.rank} if strike.fate == "stopped" else set()
        made = False
        while set(pipes.values()) - silent:
            if (
                strike.fate == "stopped"
                and strike.rank == 0
                and not made
                and not wait([started[0][1]], timeout)
            ):
                return found
            ready = wait(list(pipes), deadline - time.monotonic())
            assert ready, f"ranks {sorted(pipes.values())} hang; so far {found}"
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    said = pipe.recv()
                except EOFError:
                    said = None
                if isinstance(said, dict):
                    made = True
                    for _, other in started[1:]:
                        other.send(said)
                    continue
                rank = pipes.pop(pipe)
                if said is not None:
                    found[rank] = said
                if rank == 0 and not made:
                    return found
    return found
