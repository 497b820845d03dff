"""A connection to a V-IPU service: who calls, how long a call may take, calls whose answer is lost, and what a failed
call means: who is at fault, and what to do next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from podrun.core.access import account_of, make_token, quiet_grpc, why_unreachable, with_account
from podrun.core.environment import environment, runtime_directory
from podrun.core.error_codec import error_from_json
from podrun.core.errors import (
    DeadlineError,
    DeniedError,
    LostAnswerError,
    PodrunError,
    ServiceError,
    UsageError,
)
from podrun.core.known_servers import KnownServers
from podrun.partition.host.discovery import DEFAULT_PORT, listens
from podrun.partition.state.codec import ERROR_METADATA_KEY
from podrun.private_apis.lean_imports import import_grpc

if TYPE_CHECKING:
    from google.protobuf.message import Message

CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
DEFAULT_HOST = "127.0.0.1"
DEFAULT_TIMEOUT_S = 120.0
"""PopRun's default --vipu-server-timeout."""
MOST_ANSWERS_LOST = 4
"""Answers to one request that may be lost before the client gives up."""


def import_what_connects() -> None:
    """Import what a connection takes, before a process begins threads: beside them gRPC is imported whole."""
    quiet_grpc()
    import_grpc()


class ServiceConnection:
    """The connection of a `VipuClient`, which says what its arguments mean."""

    def __init__(
        self,
        host: str = DEFAULT_HOST,
        port: int = DEFAULT_PORT,
        timeout: float = DEFAULT_TIMEOUT_S,
        *,
        own: bool = False,
        account: tuple[str, str] = ("", ""),
    ) -> None:
        import_what_connects()
        from podrun.core.proven_channel import open_channel
        from podrun.protos import vipu_pb2
        from podrun.protos.services import stub_of

        self.host, self.port, self.timeout, self.own = host, port, timeout, own
        self._pb: Any = vipu_pb2
        channel = open_channel(
            f"{host}:{port}",
            CHANNEL_OPTIONS,
            make_token(environment(), runtime_directory()),
            own=own,
            admit=None if own else KnownServers(runtime_directory()).admit,
        )
        self._channel = with_account(channel, account if any(account) else account_of(environment()))
        self._user = stub_of(vipu_pb2, "UserService", self._channel)
        self._admin = stub_of(vipu_pb2, "AdminService", self._channel)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._channel.close()

    def _call(self, method: Callable[..., Any], request: Message, *, again: bool = False) -> Any:
        """``again``: carried out twice, the request has the effect that it has once, so that it is made again if its
        answer is lost.
        """
        import grpc

        for left in reversed(range(MOST_ANSWERS_LOST if again else 1)):
            try:
                return method(request, timeout=self.timeout)
            except grpc.RpcError as error:
                known = self._translate(error)
                if not left or not isinstance(known, LostAnswerError):
                    raise known from None
        raise AssertionError

    def _ask(self, method: str, *, again: bool = False, **fields: object) -> Any:
        """Make a call by its name, with a request of these fields. Raises UsageError for one that a message cannot
        hold. ``again``: see `_call`."""
        stub = self._user if hasattr(self._user, method) else self._admin
        return self._call(getattr(stub, method), self._request(f"{method}Request", fields), again=again)

    def _request(self, kind: str, fields: Mapping[str, object]) -> Any:
        request = getattr(self._pb, kind)()
        for name, value in fields.items():
            try:
                request.MergeFrom(type(request)(**{name: value}))
            except ValueError:
                text = name.replace("_", "-")
                raise UsageError(f"{text} {value} is out of range", hint="Use a smaller number.") from None
        return request

    def _translate(self, error: object) -> PodrunError:
        return call_error(error, f"{self.host}:{self.port}", self.timeout)


class NoServerError(ServiceError):
    """No V-IPU server answers at an address; one may be starting again."""


def call_error(error: Any, where: str, timeout: float) -> PodrunError:
    """What a failed call to the V-IPU server at ``where`` (host:port) means. ``error``: gRPC's; ``timeout``: seconds
    that the call was given."""
    import grpc

    for key, value in error.trailing_metadata() or ():
        if key == ERROR_METADATA_KEY:
            return error_from_json(value)
    if error.code() is grpc.StatusCode.UNAVAILABLE and (why := why_unreachable(where)):
        return ServiceError(why)
    if error.code() is grpc.StatusCode.UNAVAILABLE and listens(where):
        return NoServerError(
            f"the program at {where} accepts connections but does not answer as a V-IPU server",
            hint="Check host and port: another program may use the port, or the server may be stopped.",
        )
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return NoServerError(
            f"no V-IPU server answers at {where}",
            hint="Start one (vipu-server --cluster pod16), or name another host and port: --vipu-server-host and "
            "--vipu-server-port in podrun, --api-host and --api-port in vipu.",
        )
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return DeniedError(
            f"the V-IPU server at {where} is another user's, or does not know this user's secret: {error.details()}",
            hint="Use a server of your own (vipu-server, or podrun --private yes), or ask that user to share it.",
        )
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return ServiceError(
            f"the program at {where} is no V-IPU server, or one of another release: {error.details()}",
            hint="Check host and port; vipu --server-version shows what is there.",
        )
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(
            f"the V-IPU server at {where} did not answer within {timeout:g} s",
            hint="Allow more time (--vipu-server-timeout SECONDS in podrun, --timeout in vipu).",
        )
    return ServiceError(
        f"the V-IPU server at {where} failed: {error.code().name}: {error.details()}",
        hint="vipu-server --verbose logs what happens.",
    )
