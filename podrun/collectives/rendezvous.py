"""How ranks find each other: rank 0 makes the group, and a token, plain data, lets the others join.

The token may travel by any way that carries JSON. It names no secret: the kernel lets only processes of the
same user on the same host open the memory it points to.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from podrun.collectives.board import MAX_RANKS, Board
from podrun.collectives.errors import RankLostError
from podrun.collectives.group import DEFAULT_TIMEOUT, Group, Token
from podrun.collectives.process import host_identity, start_time
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.collectives.solo import SoloGroup
from podrun.errors import UsageError


def create(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> tuple[Group, Token]:
    """Make a group of ``size`` ranks on this host; returns rank 0 of it, and the token for the others.

    Waits for nobody: the first collective does. ``timeout``: seconds that this rank's collectives wait for
    the others.
    """
    _check_size(size)
    if size == 1:
        return SoloGroup(), {"kind": "solo", "size": 1}
    board = Board.create(size)
    board.join(0)
    token = {
        "kind": "host",
        "size": size,
        "host": host_identity(),
        "pid": os.getpid(),
        "started": start_time(os.getpid()),
        "fd": board.segment.fd,
        "timeout": timeout,
    }
    return SharedMemoryGroup(board, timeout), token


def join(token: Mapping[str, Any], rank: int, *, timeout: float | None = None) -> Group:
    """Join, as ``rank`` (1 or more), the group that `create` made. Waits for nobody.

    ``timeout``: seconds that this rank's collectives wait for the others; by default as for rank 0. Raises
    UsageError for a token or rank that cannot be right, ConflictError for a rank that is taken, RankLostError
    if the group's maker is gone.
    """
    kind, size = token.get("kind"), token.get("size")
    if kind != "host" or not isinstance(size, int):
        raise UsageError(
            f"this is no token of a group to join: {dict(token)!r}", hint="Use the one `create` gave."
        )
    if not 0 < rank < size:
        raise UsageError(
            f"rank {rank} cannot join a group of {size}: rank 0 made it, 1 to {size - 1} may join"
        )
    if token.get("host") != host_identity():
        raise UsageError(
            "the group is on another host, or in another PID namespace",
            hint="Groups over hosts are made with podrun.collectives.connect.",
        )
    pid = int(token["pid"])
    if start_time(pid) != token.get("started"):
        raise RankLostError(
            f"rank 0 (process {pid}), which made the group, is gone", rank=0, hint="Make a new group."
        )
    board = Board.open(pid, int(token["fd"]), size)
    try:
        board.join(rank)
    except BaseException:
        board.segment.close()
        raise
    return SharedMemoryGroup(board, timeout if timeout is not None else float(token["timeout"]))


def in_process(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[Group]:
    """A group whose ranks are all in this process, one thread each: the objects of all ranks, in order."""
    first, token = create(size, timeout=timeout)
    return [first, *(join(token, rank, timeout=timeout) for rank in range(1, size))]


def _check_size(size: int) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise UsageError(
            f"a group cannot have {size} ranks", hint=f"1 to {MAX_RANKS} are possible on one host."
        )
