"""Users of a server that was started with ``--secure``: names, hashed access keys, roles, allocations.

A call names a user and proves who it is with an access key, which the server made and told once. The server keeps an
Argon2id hash of it. A role says what its user may do; allocations say with whose partitions: users of one allocation
share its partitions, as in V-IPU. Planning faults is a right of its own. These checks come after those of who may talk
to the server at all (`podrun.core.access`).
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import json
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from podrun.core.access import ACCESS_KEY_KEY, USER_KEY
from podrun.core.errors import ConflictError, DeniedError, ExistsError, UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.partition.state.requirements import unknown_name
from podrun.partition.state.stored_rows import checked, parse_row
from podrun.partition.state.values import check_name

if TYPE_CHECKING:
    from podrun.partition.state.store import Store


WRONG_KEYS = 5
"""Wrong keys of one user in `WRONG_KEYS_S` seconds after which further ones are refused without a look at them."""
WRONG_KEYS_S = 60.0
_HOW = "vipu --api-user-id ID --api-access-key KEY, a file that --config names, or VIPU_CLI_API_USER_ID and _ACCESS_KEY"


class Role(enum.Enum):
    """What a user may do. Each role may also do what those before it may."""

    VIEWER = "viewer"
    """May look."""
    USER = "user"
    """Make, use, reset and remove partitions in the user's allocations."""
    OPERATOR = "operator"
    """Take agents out of service and repair them, reserve them, set priorities."""
    ADMIN = "admin"
    """Change agents, clusters, allocations and users."""

    def covers(self, other: Role) -> bool:
        """Whether this role may do what the other may."""
        order = list(Role)
        return order.index(self) >= order.index(other)


NEEDED: Mapping[str, Role] = {
    "GetServerVersion": Role.VIEWER,
    "GetCluster": Role.VIEWER,
    "ListClusters": Role.VIEWER,
    "GetPartition": Role.VIEWER,
    "ListPartitions": Role.VIEWER,
    "GetPartitionStatus": Role.VIEWER,
    "ListAllocations": Role.VIEWER,
    "ListQueue": Role.VIEWER,
    "PlanPartition": Role.VIEWER,
    "CaptureState": Role.VIEWER,
    "ListReservations": Role.VIEWER,
    "ListMachineReports": Role.VIEWER,
    "ListAgents": Role.VIEWER,
    "GetServiceMetrics": Role.VIEWER,
    "Watch": Role.VIEWER,
    "CreatePartition": Role.USER,
    "ResetPartition": Role.USER,
    "RemovePartition": Role.USER,
    "HoldPartition": Role.USER,
    "GetPartitionIpuofConfig": Role.USER,
    "ResetIpus": Role.USER,
    "InjectFaults": Role.USER,  # and the right to inject
    "SetMaintenance": Role.OPERATOR,
    "EndMaintenance": Role.OPERATOR,
    "CreateReservation": Role.OPERATOR,
    "RemoveReservation": Role.OPERATOR,
    "PowerCycleAgent": Role.OPERATOR,
    "RestartAgent": Role.OPERATOR,
}
"""The least role for each call; a call that is not listed is for administrators."""


@dataclass(frozen=True, slots=True)
class Account:
    """A user. ``allocations``: the allocations whose partitions it may use; empty: all. ``key_hash``: Argon2id of the
    access key.
    """

    name: str
    role: Role
    allocations: tuple[str, ...] = ()
    may_inject: bool = False
    created: float = 0.0
    key_hash: str = ""

    def may_use(self, allocation: str) -> bool:
        """Whether the user may use partitions of an allocation."""
        return not self.allocations or allocation in self.allocations

    def check(self, method: str, *, injects: bool = False) -> None:
        """Raise DeniedError unless the user may make a call. ``injects``: the call plans faults."""
        needed = NEEDED.get(method, Role.ADMIN)
        if not self.role.covers(needed):
            raise DeniedError(
                f"{method} needs the role {needed.value}; {self.name} is {self.role.value}",
                hint="Ask an administrator of this server.",
            )
        if (injects or method == "InjectFaults") and not self.may_inject:
            raise DeniedError(
                f"{self.name} may not inject faults on this server",
                hint="Ask an administrator for a user with that right: vipu-admin create user NAME --may-inject",
            )

    def check_allocation(self, allocation: str) -> None:
        """Raise DeniedError for an allocation that is not the user's, whether or not it is there."""
        if not self.may_use(allocation):
            raise DeniedError(
                f"{allocation} is no allocation of {self.name}",
                hint=f"Allocations of {self.name}: {', '.join(self.allocations)}.",
            )


class Accounts:
    """All users of a server, kept in its store. Safe to use from several threads."""

    def __init__(self, store: Store, clock: Callable[[], float] = time.time) -> None:
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._known = {name: account_of_row(name, text) for name, text in store.users().items()}
        self._verified: dict[str, tuple[str, bytes]] = {}
        self._wrong: dict[str, list[float]] = {}
        self._spice = secrets.token_bytes(16)
        self.on_change: Callable[[], None] = lambda: None

    def all(self) -> list[Account]:
        """The users, by name."""
        with self._lock:
            return sorted(self._known.values(), key=lambda account: account.name)

    def has(self, account: Account) -> bool:
        """Whether a user is there, as it was."""
        with self._lock:
            return self._known.get(account.name) == account

    def create(self, account: Account, tell: Callable[[str], None] = lambda key: None) -> str:
        """Add a user; returns its access key, which is kept nowhere. ``tell`` gets the key first: if it raises, the
        user is not added. Raises UsageError, ExistsError."""
        check_name(account.name, "a user")
        key = secrets.token_urlsafe(24)
        account = replace(account, key_hash=_hasher().hash(key), created=self._clock())
        with self._lock:
            if account.name in self._known:
                raise ExistsError(
                    f"user {account.name} exists already",
                    hint=f"Choose another name, or remove it first: vipu-admin remove user {account.name}",
                )
            tell(key)
            self._store.put_user(account.name, _to_text(account))
            self._known[account.name] = account
        self.on_change()
        return key

    def remove(self, name: str) -> None:
        """Remove a user, but not the last administrator. Raises NotFoundError, ConflictError."""
        with self._lock:
            account = self._known.get(name)
            if account is None:
                raise unknown_name("user", name, self._known, "vipu-admin create user NAME")
            admins = [other for other in self._known.values() if other.role is Role.ADMIN]
            if admins == [account]:
                raise ConflictError(
                    f"{name} is the only administrator",
                    hint="Make another first: vipu-admin create user NAME --role admin",
                )
            self._store.put_user(name, None)
            del self._known[name]
            self._verified.pop(name, None)
        self.on_change()

    def authenticate(self, metadata: Mapping[str, str | bytes]) -> Account:
        """The user that a call's metadata names and authenticates. Raises DeniedError, with the same message for an
        unknown name and a wrong key.
        """
        name, key = str(metadata.get(USER_KEY, "")), str(metadata.get(ACCESS_KEY_KEY, ""))
        if not name or not key:
            raise DeniedError("this V-IPU server wants a user and an access key", hint=f"Say them: {_HOW}.")
        with self._lock:
            account, known = self._known.get(name), self._verified.get(name)
            self._check_rate(name)
        digest = hmac.digest(self._spice, key.encode(), hashlib.sha256)
        same = account is not None and known is not None and known[0] == account.key_hash
        if account is not None and known is not None and same and hmac.compare_digest(known[1], digest):
            return account
        if account is not None and _verifies(account.key_hash, key):
            with self._lock:
                self._verified[name] = (account.key_hash, digest)
                self._wrong.pop(name, None)
            return account
        with self._lock:
            self._note_wrong(name)
        raise DeniedError(
            f"the user {name!r} or its access key is not known to this V-IPU server",
            hint="Check both; an administrator makes a new key: vipu-admin remove user NAME, then create user NAME.",
        )

    def _check_rate(self, name: str) -> None:
        now = self._clock()
        wrong = [at for at in self._wrong.get(name, ()) if 0 <= now - at < WRONG_KEYS_S]
        if len(wrong) >= WRONG_KEYS:
            raise DeniedError(
                f"there were {len(wrong)} wrong access keys for user {name!r} within a minute",
                hint="Wait a minute, then try again with the right one.",
            )

    def _note_wrong(self, name: str) -> None:
        if (
            len(self._wrong) > 1000
        ):  # Callers choose the names, so this dictionary must stay small whatever they send.
            self._wrong.clear()
        self._wrong[name] = [*self._wrong.get(name, ()), self._clock()][-WRONG_KEYS:]


def role_of(text: str) -> Role:
    """The role of a name. Raises UsageError, which lists them."""
    try:
        return Role(text or Role.USER.value)
    except ValueError:
        roles = ", ".join(role.value for role in Role)
        raise UsageError(f"there is no role {text!r}", hint=f"Roles: {roles}.") from None


def _hasher() -> Any:
    """Argon2id with the least settings that OWASP recommends: keys are random, and a server answers many calls."""
    from argon2 import PasswordHasher

    return PasswordHasher(time_cost=2, memory_cost=19_456, parallelism=1)


def _verifies(key_hash: str, key: str) -> bool:
    from argon2.exceptions import Argon2Error, InvalidHashError

    try:
        return bool(_hasher().verify(key_hash, key))
    except (Argon2Error, InvalidHashError):
        return False


def _to_text(account: Account) -> str:
    return json.dumps({**asdict(account), "role": account.role.value})


def account_of_row(name: object, text: object) -> Account:
    """The user of a row. Raises ValueError if the row is none."""
    data = parse_row(text)
    if isinstance(data, dict) and isinstance(data.get("role"), str):
        data["role"] = data["role"].upper()
    account: Account = checked(Account, data, "")
    if account.name != name:
        raise ValueError(f"it is recorded as {account.name}")
    return account
