"""Collectives between IPU-M2000s: all-reduce and friends, and the groups of ranks they run in.

In the order in which to read: `group` says what a group promises, `communicator` is its face for any arrays, and
`rendezvous` makes groups. Their kinds are `solo` (one rank), `shared_memory` (one host: ranks meet at the `board`,
messages go by `channel`) and `hosts` (several: `roster` and `registrar` bring them together, `admission` lets members
in, `lanes` says who reduces what, `host_reduction` does it over the `mesh` of `wire` links). `arithmetic` is the one
place where values are combined. `links` and `timing` model the same on a POD; `measure` and `perf` measure it here.

What enters here: moving and combining arrays between ranks, and its modelled time. Not: what is in the arrays.
"""

from podrun.collectives.communicator import Communicator, check_groups
from podrun.collectives.errors import (
    ClosedError,
    GroupError,
    HostLimitError,
    MismatchError,
    RankLostError,
    RankMissingError,
)
from podrun.collectives.group import DEFAULT_TIMEOUT, Group, Token, slice_of
from podrun.collectives.rendezvous import create, in_process, join
from podrun.collectives.replica_groups import GroupKind, replica_groups
from podrun.executable import Reduction

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
    "in_process",
    "join",
    "replica_groups",
    "slice_of",
]
