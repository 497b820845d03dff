"""Collectives between IPU-M2000s: all-reduce and friends, the groups of ranks they run in, and their modelled time.

What enters: moving and combining arrays between ranks. What the arrays mean does not. Devices use groups for gradients
and weights, popdist for host data, and the compiler and reports use the modelled times.

In the order in which to read: `group` is the protocol of a group, `communicator` applies it to any arrays, and
`rendezvous` makes groups. Their kinds are `solo` (one rank), `shared_memory` (one host: `barrier` and arenas on the
`board`, `host_memory`, messages by `channel`, `plans` of all-reduces) and `hosts` (several: `registrar` brings them
together, `admission` checks keys, `host_reduction` reduces over the `mesh` of `tcp_link` connections). `arithmetic` is
the only place where values are combined; `native` and `linux` hold what Python lacks. `links` and `timing` model
collectives on a POD; `measure` and `perf` measure them on this host.
"""

from podrun.collectives.communicator import Communicator, check_groups
from podrun.collectives.group import DEFAULT_TIMEOUT, Group, Token
from podrun.collectives.group_errors import (
    ClosedError,
    GroupError,
    HostLimitError,
    MismatchError,
    RankLostError,
    RankMissingError,
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
