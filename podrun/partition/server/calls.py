"""How calls are answered: who makes them, whether they may, what they see, and which status an error becomes."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import grpc

from podrun.core.error_codec import error_to_dict
from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    ExistsError,
    LostAnswerError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
)
from podrun.core.gate import caller_of
from podrun.core.identity import Caller, user_name
from podrun.faults import parse_fault
from podrun.partition.server.access import AccountCaller, FrontDesk
from podrun.partition.server.sharing import RIGHTS, Right
from podrun.partition.server.views import (
    ViewCache,
)
from podrun.partition.state.accounts import Account, Role
from podrun.partition.state.codec import ERROR_METADATA_KEY
from podrun.partition.state.records import ITSELF, Asker
from podrun.partition.state.values import AgentInfo, PartitionInfo
from podrun.protos import vipu_pb2 as messages

if TYPE_CHECKING:
    from google.protobuf.message import Message

    from podrun.partition.server.service import Service


log = logging.getLogger("podrun.partition")
ASK_ADMINISTRATOR = "Ask an administrator of this server."
MESSAGE_BYTES = 800
"""Longest error message or hint on the wire: gRPC drops an answer whose headers exceed 8 KiB."""
_STATUS: tuple[tuple[type[PodrunError], grpc.StatusCode], ...] = (
    (NotFoundError, grpc.StatusCode.NOT_FOUND),
    (DeniedError, grpc.StatusCode.PERMISSION_DENIED),
    (ExistsError, grpc.StatusCode.ALREADY_EXISTS),
    (ExhaustedError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ConflictError, grpc.StatusCode.FAILED_PRECONDITION),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (DeadlineError, grpc.StatusCode.DEADLINE_EXCEEDED),
    (ServiceError, grpc.StatusCode.UNAVAILABLE),
)
"""The gRPC status of an error: that of the first class of which it is an instance."""


def _status(error: PodrunError) -> grpc.StatusCode:
    return next((status for kind, status in _STATUS if isinstance(error, kind)), grpc.StatusCode.INTERNAL)


def _shortened(text: str) -> str:
    """A sentence that fits the headers of an answer; a request can cause a quotation of any length."""
    data = text.encode()
    return text if len(data) <= MESSAGE_BYTES else f"{data[:MESSAGE_BYTES].decode(errors='ignore')}..."


def abort_with(context: grpc.ServicerContext, error: PodrunError) -> None:
    """End a call with an error."""
    message, hint = _shortened(error.message), _shortened(error.hint or "") or None
    plain = {**error_to_dict(error), "message": message, "hint": hint}
    context.set_trailing_metadata(((ERROR_METADATA_KEY, json.dumps(plain).encode()),))
    context.abort(_status(error), message)


class ServiceCall(NamedTuple):
    """Who makes a call, and what the service may do and show for it."""

    caller: Caller
    asker: Asker


def answers(
    method: Callable[[Any, Any, ServiceCall], Any],
) -> Callable[[Any, Any, grpc.ServicerContext], Any]:
    """Make a gRPC handler from a method, which gets the request and a `ServiceCall`. The handler checks the caller. The
    answer None is the empty message. Errors become a status, with podrun's error in the metadata.
    """

    name = method.__name__

    @wraps(method)
    def handler(self: Servicer, request: Any, context: grpc.ServicerContext) -> Any:
        begin, failed = time.perf_counter(), True
        try:
            caller = self.admit(name, request, context)
            with self.desk.room.call(caller), self.desk.audit.call(name, who(caller), request):
                call = ServiceCall(caller, self.asker(caller, name))
                reply = self.answer(name, request, lambda: method(self, request, call))
            failed = False
            return getattr(messages, f"{name}Response")() if reply is None else reply
        except PodrunError as error:
            abort_with(context, error)
        except Exception as error:
            log.exception("%s failed", name)
            context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}")
        finally:
            self.meter.note(name, time.perf_counter() - begin, failed=failed)

    return handler


class Servicer:
    """The common part of both services: the service behind them, and the check of callers."""

    def __init__(self, service: Service, desk: FrontDesk, admin: bool = True) -> None:
        self._service, self.desk, self._admin = service, desk, admin
        self._sharing, self.meter = desk.sharing, service.meter
        self._partitions: ViewCache[PartitionInfo, Any] = ViewCache()
        self._agents: ViewCache[AgentInfo, Any] = ViewCache()

    def admit(self, method: str, request: Message, context: grpc.ServicerContext) -> Caller:
        """Who makes a call. Raises DeniedError, noted in the audit log, if the caller may not make it."""
        caller = caller_of(context)
        try:
            if not self._admin and RIGHTS.get(method, Right.ADMIN) is Right.ADMIN:
                raise DeniedError(
                    f"{method} is answered at the port for administrators",
                    hint=f"vipu-admin --api-port {self.desk.admin_port}",
                )
            if self.desk.accounts is None:
                self.check(caller, method, request)
                return caller
            metadata = {str(key): value for key, value in context.invocation_metadata() or ()}
            account = self.desk.accounts.authenticate(metadata)
            caller = AccountCaller(caller.uid, caller.own, account)
            self._check_account(account, method, request)
            self._check_there(caller, method, request)
        except PodrunError as error:
            self.desk.audit.refused(method, who(caller), request, error)
            raise
        return caller

    def _check_account(self, account: Account, method: str, request: Any) -> None:
        account.check(method, injects=bool(getattr(request, "faults", ())))
        asked = request.request if method == "PlanPartition" else request
        if method in ("CreatePartition", "PlanPartition"):
            wanted = asked.requirements.allocation_id
            if wanted:
                account.check_allocation(wanted)
            elif len(account.allocations) == 1:
                asked.requirements.allocation_id = account.allocations[0]
            elif account.allocations:
                raise UsageError(
                    f"{account.name} has several allocations: say which",
                    hint=f"--allocation {account.allocations[0]} (or: {', '.join(account.allocations[1:])})",
                )

    def _check_there(self, caller: Caller, method: str, request: object) -> None:
        """Raise NotFoundError for a partition that the caller does not see, and DeniedError for an agent, before faults
        that are planned for it could strike the call."""
        name = getattr(request, "partition_id", "")
        if name and method != "CreatePartition" and not self.seen_names(caller, [name]):
            self._service.partition(name, asker=self.asker(caller, method))
        agents = [*filter(None, [getattr(request, "agent_id", "")]), *getattr(request, "agent_ids", ())]
        outside = [agent for agent in agents if not self.sees_agents(caller, [agent])]
        if outside and isinstance(caller, AccountCaller):
            raise DeniedError(
                f"agent {outside[0]} is in no allocation of {caller.account.name}",
                hint="vipu-admin list agents shows yours; an operator without allocations has all.",
            )

    def asker(self, caller: Caller, method: str) -> Asker:
        """The caller of a method as the service needs it: what it sees, and what it may do with which partitions."""
        if isinstance(caller, AccountCaller):
            return ITSELF if self.sees_all(caller) else Asker(frozenset(caller.account.allocations))
        return Asker(check=partial(self._sharing.check, caller, method))

    def is_admin(self, caller: Caller) -> bool:
        """Whether the caller may see and do things that concern the whole POD."""
        if isinstance(caller, AccountCaller):
            return caller.account.role.covers(Role.OPERATOR)
        return self._sharing.is_admin(caller)

    def sees(self, caller: Caller, allocation: str | None) -> bool:
        """Whether the caller may see partitions of an allocation."""
        account = caller.account if isinstance(caller, AccountCaller) else None
        return account is None or account.may_use(allocation or "")

    def sees_agents(self, caller: Caller, agents: Iterable[str]) -> bool:
        """Whether the caller may use one of these agents."""
        wanted = set(agents)
        return self.sees_all(caller) or any(
            wanted & set(info.agents) for info in self._service.allocations() if self.sees(caller, info.name)
        )

    def seen_names(self, caller: Caller, names: Iterable[str]) -> list[str]:
        """Of partitions and queued requests those that the caller is told of."""
        if self.sees_all(caller):
            return list(names)
        return [name for name in names if self.sees(caller, self._service.allocation_of(name))]

    def is_current(self, caller: Caller) -> bool:
        """Whether the caller is a user still."""
        accounts = self.desk.accounts
        return accounts is None or (isinstance(caller, AccountCaller) and accounts.has(caller.account))

    def sees_all(self, caller: Caller) -> bool:
        """Whether the caller may see all partitions."""
        return not isinstance(caller, AccountCaller) or not caller.account.allocations

    def check(self, caller: Caller, method: str, request: object) -> None:
        """Raise DeniedError if the caller may not make this call."""
        name = getattr(request, "partition_id", "")
        owner = self._service.owners().get(name) if name and not caller.own else None
        self._sharing.check(caller, method, name, owner)
        if any(text.startswith("service:") for text in getattr(request, "faults", ())):
            self._sharing.check(caller, "faults of the service", name, owner)

    def answer(self, method: str, request: object, work: Callable[[], Any]) -> Any:
        """The answer to a call, unless a fault that is planned for it prevents it."""
        faults, name = self._service.request_faults, getattr(request, "partition_id", "")
        agent = getattr(request, "agent_id", "")
        concerned = list(self._service.partitions_on(agent)) if agent and not name else [name]
        log = self._service.control_log

        def work_and_note() -> Any:
            done = work()
            log.note_request(method, concerned, request)
            return done

        if method != "CreatePartition":
            return faults.answer(method, next(iter(concerned), ""), work_and_note)
        own = [spec for spec in map(parse_fault, getattr(request, "faults", ())) if spec.during == method]
        faults.plan(name, own)  # Those of the creation itself strike while there is no partition yet.
        try:
            return faults.answer(method, name, work_and_note)
        except LostAnswerError:
            raise
        except Exception:
            faults.cancel(name, [spec.text for spec in own])
            raise


def who(caller: Caller) -> str:
    """A caller's name in the audit log."""
    return caller.account.name if isinstance(caller, AccountCaller) else user_name(caller.uid)
