"""`VipuClient`: the V-IPU service as Python calls.

    with VipuClient("127.0.0.1", 8090) as client:
        client.create_partition(Requirements("p16", 16, reconfigurable=True))
        client.wait_for_state("p16", {PartitionState.ACTIVE}, deadline=60)

Every call has a deadline and raises `podrun.core.errors`: UsageError (wrong request), NotFoundError, ConflictError
(name or IPUs taken, wrong state), ServiceError (no answer, or the server failed), DeadlineError. gRPC is
imported on first use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from typing import Self

from podrun.partition.client.partition_calls import PartitionCalls
from podrun.partition.client.pod_calls import PodCalls
from podrun.partition.state.codec import from_message, to_message
from podrun.partition.state.values import (
    ServerVersion,
    ServiceMetrics,
    UserInfo,
    WatchedChange,
)

WATCH_PATIENCE_S = 30.0
"""Seconds for which a broken watch is tried again."""
WATCH_AGAIN_S = 0.5


class VipuClient(PartitionCalls, PodCalls):
    """A connection to a V-IPU service. ``timeout``: seconds each request may take. Not valid in a forked process.

    Every call proves who makes it (`podrun.core.access`). ``own``: the server has to prove that it is the same user's;
    pass it unless the user has named the server, which may then be one that another user of the host shares.
    ``account``: user and access key at a server with users of its own; by default those of the environment.
    """

    def __enter__(self) -> Self:
        return self

    def server_version(self) -> ServerVersion:
        """Version, address and process id of the server."""
        reply = self._ask("GetServerVersion")
        return from_message(ServerVersion, reply)

    def create_user(
        self, name: str, role: str = "user", allocations: Iterable[str] = (), *, may_inject: bool = False
    ) -> str:
        """Add a user of a server that was started with --secure; returns the access key, which cannot be read again."""
        user = to_message(UserInfo(name, role, tuple(allocations), may_inject), self._pb.User)
        reply = self._ask("CreateUser", user=user)
        return str(reply.access_key)

    def remove_user(self, name: str) -> None:
        """Remove a user; its key is invalid from then on."""
        self._ask("RemoveUser", user_id=name)

    def list_users(self) -> list[UserInfo]:
        """The users, by name."""
        reply = self._ask("ListUsers")
        return [from_message(UserInfo, user) for user in reply.users]

    def service_metrics(self) -> ServiceMetrics:
        """Figures of the service itself."""
        reply = self._ask("GetServiceMetrics")
        return from_message(ServiceMetrics, reply)

    def watch(self, kinds: Iterable[str] = (), *, token: str = "") -> Iterator[WatchedChange]:
        """The stream of changes, without end: the present state, then a change of kind ``synced``, then each change.

        ``kinds``: ``partition``, ``machine``, ``incident``; empty: all. ``token``: of the last change that the caller
        saw; the stream goes on after it. A connection that breaks is made again and goes on in this way; raises
        ServiceError if no server answers for `WATCH_PATIENCE_S`.
        """
        import grpc

        quiet_since = time.monotonic()
        while True:
            try:
                for event in self._user.Watch(self._pb.WatchRequest(resume_token=token, kinds=list(kinds))):
                    token, quiet_since = event.resume_token, time.monotonic()
                    value = json.loads(event.json) if event.json else None
                    yield WatchedChange(token, event.kind, event.name, value, event.time, event.initial)
            except grpc.RpcError as error:
                gone = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
                if not gone or time.monotonic() - quiet_since > WATCH_PATIENCE_S:
                    raise self._translate(error) from None
            else:
                if time.monotonic() - quiet_since > WATCH_PATIENCE_S:
                    return
            time.sleep(WATCH_AGAIN_S)
