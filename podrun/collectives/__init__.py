"""Collectives between IPU-M2000s: all-reduce and friends, the groups of ranks they run in, and their modelled time.

What enters: moving and combining arrays between ranks. What the arrays mean does not. Devices use groups for gradients
and weights, popdist for host data, and the compiler and reports use the modelled times.

In the order in which to read: `group` is the protocol of a group, with its errors; `communicator` applies it to any
arrays, and `rendezvous` makes groups: of one rank, of those of one host (`shared_memory`: `barrier` and arenas on the
`board`, `host_memory`, `plans` of all-reduces) or of several (`hosts`: `registrar` brings them together,
`connection_security` checks keys and has TLS, `host_reduction` reduces over the `mesh` of `tcp_link` connections).
`arithmetic` is the only place where values are combined; `linux` holds what Python lacks. `timing` models collectives
on a POD; `perf` measures them on this host.
"""

from podrun.collectives.communicator import Communicator, check_groups
from podrun.collectives.group import (
    DEFAULT_TIMEOUT,
    ClosedError,
    Group,
    GroupError,
    HostLimitError,
    MismatchError,
    RankLostError,
    RankMissingError,
    Token,
)
from podrun.collectives.rendezvous import create, create_within, in_process, join
from podrun.core.executable import Reduction
from podrun.core.layout import GroupKind, replica_groups, slice_of

__all__ = [
    "DEFAULT_TIMEOUT",
    "ClosedError",
    "Communicator",
    "Group",
    "GroupError",
    "GroupKind",
    "HostLimitError",
    "MismatchError",
    "RankLostError",
    "RankMissingError",
    "Reduction",
    "Token",
    "check_groups",
    "create",
    "create_within",
    "in_process",
    "join",
    "replica_groups",
    "slice_of",
]
