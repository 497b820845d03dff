"""A device: IPUs of a partition or of this process, a model of them, or a description to compile for.

Under ``podrun`` the partition is the one that IPUOF_* names; alone, the process holds machines of its own. Devices are
contiguous, aligned ranges of a partition's IPUs whose size is a power of two. Their ids are counted as on a
reconfigurable partition: single IPUs first, then pairs, and so on, the whole partition last.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from enum import Enum
from typing import Any

from podrun.core.environment import (
    IPUOF_VIPU_API_HOST,
    IPUOF_VIPU_API_PARTITION_ID,
    PODRUN_FAULTS,
    PODRUN_LAUNCH_ID,
    PODRUN_OFFLINE_MODE,
)
from podrun.core.errors import UsageError
from podrun.core.identity import own_user_name
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest, Connection
from podrun.device.host.connecting import config_files
from podrun.record.recorder import RecordedConnection, process_recorder
from podrun.runtime.environment import ours

_ATTACH_POLL_SECONDS = 1.0


class DeviceKind(Enum):
    """What kind of device a session runs on."""

    IPU = "ipu"
    OFFLINE = "offline-ipu"
    """A description to compile for."""
    MODEL = "ipu-model"
    """An IPU model inside this process, without a partition and without faults."""
    CPU = "cpu"


def partition_configured(environ: Mapping[str, str]) -> bool:
    """True iff the environment, or a file of IPUoF configuration, names a partition."""
    named = bool(environ.get(IPUOF_VIPU_API_HOST) and environ.get(IPUOF_VIPU_API_PARTITION_ID))
    return named or bool(config_files(environ))


class _Standalone:
    """The IPUs of a process without a partition, and who holds them."""

    def __init__(self) -> None:
        self._held: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, owned: IpuRange) -> str | None:
        """Take the range. Returns None on success, else the reason for the failure."""
        with self._lock:
            busy = sorted(set(owned) & set(self._held))
            if busy:
                return f"IPU {busy[0]} is attached to this process already"
            self._held.update(dict.fromkeys(owned, os.getpid()))
            return None

    def release(self, owned: IpuRange) -> None:
        """Release the range."""
        with self._lock:
            for ipu in owned:
                self._held.pop(ipu, None)

    def holds(self, owned: IpuRange) -> bool:
        """True iff any of the range is held."""
        with self._lock:
            return not self._held.keys().isdisjoint(owned)


_standalone = _Standalone()


def held_here(owned: IpuRange) -> bool:
    """True iff this process, run without a partition, is attached to any of these IPUs."""
    return _standalone.holds(owned)


IPU_VERSIONS = ("ipu1", "ipu2", "ipu21")
"""The SDK's versions of IPUs."""


def ipu_version(target: str) -> str:
    """The version of the IPUs of a target (`podrun.costmodel.target`)."""
    return "ipu21" if target == "c600" else "ipu2"


def device_ids(total: int) -> dict[int, IpuRange]:
    """Device id -> IPUs, for a partition of ``total``: sizes 1, 2, 4, ... each from the first IPU on."""
    ranges: dict[int, IpuRange] = {}
    size = 1
    while size <= total:
        for first in range(0, total - size + 1, size):
            ranges[len(ranges)] = IpuRange(first, size)
        size *= 2
    return ranges


def _let_go(connection: Connection, taken: IpuRange | None) -> None:
    """Detach, and mark the IPUs inside this process as free."""
    try:
        connection.close()
    finally:
        if taken is not None:
            _standalone.release(taken)


class RunDevice:
    """A device that a program is compiled for, loaded onto and run on. ``ipus``: in the partition's numbering; ``job``:
    those of the whole program.
    """

    def __init__(
        self,
        kind: DeviceKind,
        ipus: IpuRange,
        *,
        identifier: int = 0,
        target: str = "gc200",
        environ: Mapping[str, str] | None = None,
        job: IpuRange | None = None,
    ) -> None:
        self.kind, self.ipus, self.identifier, self.target = kind, ipus, identifier, target
        self.environ = dict(ours(environ))
        self.job = job or ipus
        self.attach_seconds = 0.0
        """Seconds to wait for the IPUs when a program is loaded."""
        self._held = ipus.count
        self._connection: Connection | None = None
        self._attached = False
        self._letting_go: weakref.finalize[Any, Any] | None = None
        self._program: weakref.ref[Any] | None = None

    @property
    def ipu_count(self) -> int:
        """How many IPUs it has."""
        return self.ipus.count

    @property
    def loaded(self) -> Any:
        """The session whose program is on the device; None if there is none or the session no longer exists."""
        return None if self._program is None else self._program()

    @loaded.setter
    def loaded(self, session: object) -> None:
        self._program = None if session is None else weakref.ref(session)

    @property
    def is_attached(self) -> bool:
        """True iff this process holds the device. A partition reset takes it away."""
        if self._attached and not self.connection.holds_ipus:
            self.detach()
        return self._attached

    def attach(self) -> bool:
        """Take the IPUs; False if another process has them. Does not wait: `attach_in_time` does."""
        return self.refusal() is None

    def refusal(self) -> str | None:
        """Try to attach. Returns None on success, otherwise who or what prevents it."""
        if self.kind is DeviceKind.OFFLINE:
            raise UsageError("An offline device is a description to compile for: it cannot be attached.")
        if self.is_attached:
            return None
        refusal: str | None
        if self._uses_partition:
            refusal = self.connection.try_attach(self._request())
        else:
            connection = self.connection  # Check before IPUs are taken, because this may refuse.
            refusal = _standalone.take(self.ipus) if self.kind is DeviceKind.IPU else None
            if refusal is None:
                refusal = connection.try_attach(self._request())
        self._attached = refusal is None
        if self._attached:
            # Release a device that the program drops, as the SDK does when its last user is gone.
            taken = None if self._uses_partition or self.kind is not DeviceKind.IPU else self.ipus
            self._letting_go = weakref.finalize(self, _let_go, self.connection, taken)
            self._letting_go.atexit = False
        return refusal

    def hold(self, count: int) -> None:
        """Take as many IPUs as a program covers: for a model of three IPUs, a program of four, one of which is idle."""
        if self.kind is DeviceKind.MODEL and count != self._held:
            self.detach()
            self._connection, self._held = None, count

    def _request(self) -> AttachRequest:
        own = self._uses_partition
        job = self.job if own else IpuRange(0, self._held)
        owned = self.ipus if own else IpuRange(0, self._held)
        return AttachRequest(
            job,
            owned,
            os.getpid(),
            own_user_name(),
            " ".join([os.path.basename(sys.executable), *sys.argv]),
            self.environ.get(PODRUN_LAUNCH_ID, ""),
        )

    @property
    def _uses_partition(self) -> bool:
        return self.kind is DeviceKind.IPU and partition_configured(self.environ)

    @property
    def connection(self) -> Connection:
        """The IPUoF connection, opened on first use."""
        if self._connection is None:
            connection = open_connection(self._environment, self._held)
            notes = process_recorder(self._environment)
            self._connection = connection if notes is None else RecordedConnection(connection, notes)
        return self._connection

    @property
    def _environment(self) -> Mapping[str, str]:
        """Environment variables for the connection. An IPU model gets no partition and no faults."""
        if self.kind is DeviceKind.IPU:
            return self.environ
        not_for_models = ("IPUOF_", PODRUN_OFFLINE_MODE, PODRUN_FAULTS)
        return {name: value for name, value in self.environ.items() if not name.startswith(not_for_models)}

    def attach_in_time(self) -> bool:
        """Try to attach once a second until ``attach_seconds`` are over."""
        deadline = time.monotonic() + self.attach_seconds
        while not self.attach():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(_ATTACH_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        return True

    def detach(self) -> None:
        """Release the IPUs."""
        if self.kind is DeviceKind.OFFLINE:
            raise UsageError("An offline device is a description to compile for: it cannot be detached.")
        if not self._attached:
            return
        self._attached = False
        self.loaded = None
        if self._letting_go is not None:
            self._letting_go()
        self._connection = None

    def ensure_attached(self) -> None:
        """Attach before a program is loaded. UsageError if that fails."""
        if self.is_attached:
            return
        if self.kind is DeviceKind.OFFLINE:
            raise UsageError(
                "The device is an offline device, which can be compiled for but not run on. Acquire one with "
                "DeviceManager().acquireAvailableDevice(...)."
            )
        if not self.attach_in_time():
            raise UsageError(
                f"Failed to attach to device {self.identifier} ({self.ipu_count} IPUs): {self.refusal()}. gc-monitor "
                "shows who holds them."
            )


def open_connection(environ: Mapping[str, str], ipus: int) -> Connection:
    """An IPUoF connection: to the partition that ``environ`` names, else to ``ipus`` IPUs inside this process."""
    from podrun.device.host.connecting import connect

    return connect(environ, standalone_ipus=ipus)
