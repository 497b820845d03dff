"""Collectives between IPU-M2000s: all-reduce and friends, and the groups of ranks they run in.

`Communicator` is the public face: collectives on any arrays. `group` says what a group promises; `rendezvous`
makes groups; `shared_memory` and `solo` are its kinds, over
the `board` where ranks of a host meet; `arithmetic` is the one place where values are combined. What enters
here: moving and combining arrays between ranks, and modelled time for the same on IPU-Links. Not: what is in
the arrays.
"""

from podrun.collectives.communicator import Communicator, check_groups
from podrun.collectives.errors import ClosedError, GroupError, MismatchError, RankLostError, RankMissingError
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
