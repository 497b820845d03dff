"""How ranks find each other: rank 0 makes the group and a token, plain data with which the others join.

The token may be sent in any way that carries JSON, to nobody but the members. That of a group on one host names memory,
which the kernel lets only processes of the same user open, and holds a secret that lies in it: what a rank opens is the
group's board, whatever process and file a token names. That of a group over hosts holds the key that members prove to
know. The group of one rank, `SoloGroup`, has nobody to find and exchanges nothing: every result is the rank's own
buffer.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from podrun.collectives.arithmetic import check_reduction
from podrun.collectives.board import MAX_RANKS, GroupBoard
from podrun.collectives.group import (
    DEFAULT_TIMEOUT,
    ByteArray,
    ClosedError,
    Group,
    GroupError,
    GroupPlace,
    MismatchError,
    Movement,
    RankLostError,
    Token,
    check_arena,
    check_peer,
    first_elements,
    unknown_arena,
    within_limits,
    wrong_kind,
)
from podrun.collectives.hosts import HostsGroup
from podrun.collectives.linux import boot_ticks, host_identity
from podrun.collectives.registrar import Registrar
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core.aligned_memory import aligned_zeros
from podrun.core.error_codec import error_from_dict
from podrun.core.errors import ConflictError, UsageError
from podrun.core.executable import Array, Reduction, numpy_dtype


class SoloGroup:
    """The group of a single rank, which waits for nobody. See `podrun.collectives.group.Group` for what each call
    promises.
    """

    rank = 0
    size = 1
    host_ranks: tuple[int, ...] = (0,)

    def __init__(self) -> None:
        self._arenas: dict[str, tuple[str, Array]] = {}
        self._error: dict[str, Any] | None = None
        self._closed = False

    def allocate(self, arena: str, dtype: str, size: int) -> Array:
        return self._arena(arena, "allocated", dtype, size)

    def shared(self, arena: str, dtype: str, size: int) -> Array:
        return self._arena(arena, "shared", dtype, size)

    def _arena(self, arena: str, kind: str, dtype: str, size: int) -> Array:
        self._check()
        check_arena(arena, dtype, size)
        text = f"{kind} {dtype}[{size}]"
        if arena not in self._arenas:
            self._arenas[arena] = (text, aligned_zeros((size,), numpy_dtype(dtype)))
        known, array = self._arenas[arena]
        if known != text:
            raise MismatchError(
                f"arena {arena!r} was requested as {known} and then as {text}",
                hint="Request an arena with the same kind, dtype and size each time.",
            )
        return array

    def reduce_scatter(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        settle: bool = True,
        count: int | None = None,
    ) -> Array:
        return self._reduce(arena, "reduce_scatter", reduction, count)

    def all_reduce(
        self,
        arena: str,
        reduction: Reduction = Reduction.SUM,
        *,
        count: int | None = None,
        in_place: bool = False,
    ) -> Array:
        return self._reduce(arena, "all_reduce", reduction, count)

    def all_gather(self, arena: str) -> Array:
        return self._find(arena)[1]

    def exchange(self, posted: ByteArray, pattern: Movement) -> list[ByteArray]:
        self._check()
        offset, nbytes = pattern.part(0, 0)
        return [posted[offset : offset + nbytes].copy()]

    def send(self, array: Array, dest: int, tag: int = 0) -> None:
        check_peer(0, 1, dest, "send to")

    def receive(self, out: Array, source: int, tag: int = 0) -> None:
        check_peer(0, 1, source, "receive from")

    def place_for(self, ranks: Sequence[int]) -> GroupPlace:
        return GroupPlace(DEFAULT_TIMEOUT)

    def barrier(self) -> None:
        self._check()

    def abort(self, error: Mapping[str, Any]) -> None:
        self._error = self._error or dict(error)

    def close(self) -> None:
        self._closed = True
        self._arenas.clear()

    def _reduce(self, arena: str, operation: str, reduction: Reduction, count: int | None) -> Array:
        text, array = self._find(arena)
        if text.startswith("shared"):
            raise wrong_kind(arena, operation)
        check_reduction(array.dtype, reduction)
        return array[: first_elements(arena, array.size, count)]

    def _find(self, arena: str) -> tuple[str, Array]:
        self._check()
        if arena not in self._arenas:
            raise unknown_arena(arena, list(self._arenas))
        return self._arenas[arena]

    def _check(self) -> None:
        if self._error is not None:
            raise error_from_dict(self._error, unknown=GroupError)
        if self._closed:
            raise ClosedError("this group was closed", hint="Make a new group.")


_TOKENS: dict[str, dict[str, Any]] = {
    "host": {
        "size": int,
        "host": str,
        "pid": int,
        "started": int,
        "fd": int,
        "secret": str,
        "timeout": (int, float),
    },
    "hosts": {"size": int, "address": str, "port": int, "key": str, "timeout": (int, float)},
}
"""The fields of a token of each kind."""


def create(
    size: int,
    *,
    address: str | None = None,
    port: int = 0,
    key: str | None = None,
    timeout: float = DEFAULT_TIMEOUT,
    host: str | None = None,
) -> tuple[Group, Token]:
    """Make a group of ``size`` ranks; returns rank 0 of it, and the token for the others.

    Without ``address`` all ranks are on this host. With ``address``, an address of this host that the others can reach,
    ranks may be on any host; a listener there, on ``port`` or any free one, brings them together. Ranks that agreed on
    address, port and ``key`` beforehand need not receive the token: it is `hosts_token`. This call does not wait: the
    first collective does (between hosts, the first call of any kind). ``timeout``: seconds that collectives wait for
    other ranks. ``host``: a name to use for this host instead of its own; ranks with equal names share memory.

    Raises UsageError for an invalid size, address, port or timeout, ConflictError if the port is taken, HostLimitError
    if this host has no memory, file or thread for the group.
    """
    _check_size(size)
    _check_timeout(timeout)
    _check_port(port)
    if size == 1:
        return SoloGroup(), {"kind": "solo", "size": 1}
    if address is not None:
        _check_address(address)
        return _create_over_hosts(
            hosts_token(size, address, port, key or secrets.token_hex(16), timeout), host
        )
    board = GroupBoard.create(size)
    board.join(0, timeout)
    token = {
        "kind": "host",
        "size": size,
        "host": host_identity(),
        "pid": os.getpid(),
        "started": boot_ticks(os.getpid()),
        "fd": board.region.fd,
        "secret": board.secret,
        "timeout": timeout,
    }
    return SharedMemoryGroup(board, timeout), token


def hosts_token(size: int, address: str, port: int, key: str, timeout: float) -> Token:
    """The token of a group over hosts whose rank 0 listens at ``address`` and ``port``; members show ``key``."""
    return {"kind": "hosts", "size": size, "address": address, "port": port, "key": key, "timeout": timeout}


def _create_over_hosts(token: Token, host: str | None) -> tuple[Group, Token]:
    address, port = token["address"], token["port"]
    try:
        with within_limits("listener and thread for a group"):
            registrar = Registrar(address, port, token["size"], token["key"])
    except OSError as error:
        raise ConflictError(
            f"cannot listen on {address}:{port}: {error.strerror}", hint="Give another address or port."
        ) from error
    token = {**token, "port": registrar.port}
    try:
        return HostsGroup(token, 0, token["timeout"], registrar, host), token
    except BaseException:
        registrar.close()
        raise


def join_group(
    token: Mapping[str, Any], rank: int, *, timeout: float | None = None, host: str | None = None
) -> Group:
    """Join, as ``rank`` (1 or more), the group that `create` made. Does not wait.

    ``timeout``: seconds that this rank's collectives wait for the others; by default as for rank 0. ``host``: as for
    `create`. Raises UsageError for an invalid token or rank, ConflictError for a rank that is taken, RankLostError if
    the group's maker is gone.
    """
    _check_token(token)
    kind, size = token["kind"], token["size"]
    if not 0 < rank < size:
        raise UsageError(
            f"rank {rank} cannot join a group of {size}: rank 0 made it, 1 to {size - 1} may join"
        )
    seconds = timeout if timeout is not None else float(token["timeout"])
    _check_timeout(seconds)
    if kind == "hosts":
        _check_port(token["port"])
        return HostsGroup(dict(token), rank, seconds, None, host)
    return SharedMemoryGroup(_join_board(token, rank, size), seconds)


def _join_board(token: Mapping[str, Any], rank: int, size: int) -> GroupBoard:
    if token.get("host") != host_identity():
        raise UsageError(
            "the group is on another host, or in another PID namespace",
            hint="For ranks on several hosts give create() an address that all of them can reach.",
        )
    pid = int(token["pid"])
    if boot_ticks(pid) != token.get("started"):
        raise RankLostError(
            f"rank 0 (process {pid}), which made the group, is gone", rank=0, hint="Make a new group."
        )
    board = GroupBoard.open(pid, int(token["fd"]), size, str(token["secret"]))
    try:
        board.join(rank, float(token["timeout"]))
    except BaseException:
        board.region.close()
        raise
    return board


def create_within(group: Group, ranks: Sequence[int]) -> tuple[Group, Token]:
    """Make a further group of some ``ranks`` of a group; returns its rank 0 and the token for the others."""
    place = group.place_for(ranks)
    return create(len(ranks), address=place.address, timeout=place.timeout, host=place.host)


def in_process(size: int, *, timeout: float = DEFAULT_TIMEOUT) -> list[Group]:
    """A group whose ranks are threads of this process: the objects of all ranks, in order."""
    first, token = create(size, timeout=timeout)
    return [first, *(join_group(token, rank, timeout=timeout) for rank in range(1, size))]


def _check_token(token: Mapping[str, Any]) -> None:
    """Raise UsageError for a token that `create` cannot have returned."""
    try:
        kinds = _TOKENS[token["kind"]]
        fits = all(isinstance(token[name], kind) for name, kind in kinds.items())
    except (KeyError, TypeError, AttributeError):
        fits = False
    if not fits:
        raise UsageError(
            f"this is not a token of a group: {token!r}"[:300], hint="Use the token that `create` returned."
        )


def _check_timeout(timeout: float) -> None:
    """Raise UsageError for a timeout that is not positive and finite."""
    if not 0 < timeout < float("inf"):
        raise UsageError(f"collectives cannot wait for {timeout} seconds", hint="Give a positive number.")


def _check_port(port: int) -> None:
    if not 0 <= port < 65536:
        raise UsageError(f"there is no port {port}", hint="Ports are 1 to 65535; 0 takes any that is free.")


def _check_address(address: str) -> None:
    """Raise UsageError for an address that other hosts cannot use for this one."""
    if address in ("", "0.0.0.0", "::"):
        raise UsageError(
            f"ranks on other hosts cannot reach {address!r}",
            hint="Give one address of this host (ip address).",
        )


def _check_size(size: int) -> None:
    if not 1 <= size <= MAX_RANKS:
        raise UsageError(
            f"a group cannot have {size} ranks", hint=f"1 to {MAX_RANKS} are possible on one host."
        )
