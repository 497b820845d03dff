"""Collectives between IPU-M2000s: all-reduce and friends, the groups of ranks they run in, and their modelled time.

Code may enter that moves and combines arrays between ranks; the meaning of the arrays stays outside. Devices use groups
for gradients and weights, popdist for host data, and the compiler and reports use the modelled times.

In the order in which to read: `group` is the protocol of a group, with its errors; `communicator` applies it to any
arrays; `rendezvous` makes groups. A group has one rank, the ranks of one host (`shared_memory`: `barrier` and arenas on
the `board`, `host_memory`, `plans` of all-reduces) or ranks of several hosts (`hosts`: `registrar` brings them
together, `connection_security` checks keys and has TLS, `host_reduction` reduces over the `mesh` of `tcp_link`
connections). `arithmetic` is the only place where values are combined; `linux` holds what Python lacks. `timing` models
collectives on a POD; `perf` measures them on this host.
"""

import importlib
from typing import TYPE_CHECKING, Any

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
from podrun.core.executable import Reduction
from podrun.core.layout import GroupKind, replica_groups, slice_of

if TYPE_CHECKING:
    from podrun.collectives.communicator import Communicator, rank_groups
    from podrun.collectives.rendezvous import create, create_within, in_process, join_group

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
    "create",
    "create_within",
    "in_process",
    "join_group",
    "rank_groups",
    "replica_groups",
    "slice_of",
]

_MODULES = {
    "Communicator": "communicator",
    "create": "rendezvous",
    "create_within": "rendezvous",
    "in_process": "rendezvous",
    "join_group": "rendezvous",
    "rank_groups": "communicator",
}
"""Modules that are imported when somebody asks for a name of theirs: most programs read `timing` and errors alone."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
