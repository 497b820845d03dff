"""DeviceManager and DeviceInfo: acquiring emulated IPUs.

Devices are contiguous, aligned ranges of a partition's IPUs whose size is a power of two. Their ids are
counted as on a reconfigurable partition: single IPUs first, then pairs, and so on, the whole partition
last. Under ``podrun`` the partition is the one that IPUOF_* names; alone, the process holds machines of its
own (a POD64 unless PODRUN_STANDALONE_IPUS says otherwise).
"""

from __future__ import annotations

import builtins
import getpass
import os
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest, Connection, config_files
from podrun.record.recorder import RecordedConnection, recorder
from podrun.session.enums import DeviceConnectionType, DeviceType, SyncPattern
from podrun.session.environment import ours
from podrun.session.exceptions import popart_exception, surfaced

TILES_PER_IPU = 1472
"""Tiles of a Mk2 IPU (GC200 and Bow)."""

STANDALONE_IPUS = 64
"""IPUs of a process that runs without a partition."""

MODEL_TILES = 4
"""Tiles of an IPU model by default, as in PopART."""

_ATTACH_POLL_SECONDS = 1.0


def partition_configured(environ: Mapping[str, str]) -> bool:
    """True iff the environment, or a file of IPUoF configuration, names a partition."""
    named = bool(environ.get("IPUOF_VIPU_API_HOST") and environ.get("IPUOF_VIPU_API_PARTITION_ID"))
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


def device_ids(total: int) -> dict[int, IpuRange]:
    """Device id -> IPUs, for a partition of ``total``: sizes 1, 2, 4, ... each from the first IPU on."""
    found: dict[int, IpuRange] = {}
    size = 1
    while size <= total:
        for first in range(0, total - size + 1, size):
            found[len(found)] = IpuRange(first, size)
        size *= 2
    return found


def _let_go(connection: Connection, taken: IpuRange | None) -> None:
    """Detach, and mark the IPUs inside this process as free."""
    try:
        connection.close()
    finally:
        if taken is not None:
            _standalone.release(taken)


class DeviceInfo:
    """A device: IPUs, a model of them, or a description to compile for. A context manager that detaches at
    its end.
    """

    def __init__(
        self,
        kind: DeviceType,
        ipus: IpuRange,
        *,
        identifier: int = 0,
        connection_type: DeviceConnectionType = DeviceConnectionType.Always,
        tiles: int = TILES_PER_IPU,
        target: str = "gc200",
        environ: Mapping[str, str] | None = None,
        pattern: SyncPattern = SyncPattern.Full,
        job: IpuRange | None = None,
        version: str = "ipu2",
    ) -> None:
        self._kind, self._ipus, self._id = kind, ipus, identifier
        self._connection_type, self._tiles, self.target = connection_type, tiles, target
        self._environ = dict(ours(environ))
        self._pattern = pattern
        self._job = job or ipus
        self._version = version
        self._held = ipus.count
        self._connection: Connection | None = None
        self._attached = False
        self._timeout = 0.0
        self._letting_go: weakref.finalize[Any, Any] | None = None
        self._program: weakref.ref[Any] | None = None

    # -- PopART's properties ----------------------------------------------------------------------

    @property
    def type(self) -> DeviceType:
        """The kind of device."""
        return self._kind

    @property
    def connectionType(self) -> DeviceConnectionType:
        """When it is attached."""
        return self._connection_type

    @property
    def id(self) -> int:
        """The device id."""
        return self._id

    @property
    def numIpus(self) -> int:
        """How many IPUs it has."""
        return self._ipus.count

    @property
    def tilesPerIPU(self) -> int:
        """Tiles of each."""
        return self._tiles

    tilesPerIpu = tilesPerIPU

    @property
    def driverIds(self) -> list[int]:
        """The partition's numbers of its IPUs."""
        return list(self._ipus)

    @property
    def numWorkerContexts(self) -> int:
        """Worker threads of a tile."""
        return 1 if self._kind is DeviceType.Cpu else 6

    @property
    def ipuVersion(self) -> str:
        """The architecture: ``ipu2``, or the name of what replaces hardware."""
        return self.version

    @property
    def architecture(self) -> str:
        """The architecture of its IPUs, attached or not: ``ipu2``."""
        return self._version

    @property
    def version(self) -> str:
        """The architecture in PopART's form, which knows it of attached IPUs only."""
        if self._kind is DeviceType.Cpu:
            return "<unknown-cpu>"
        if self._kind is DeviceType.OfflineIpu:
            return "<offline-ipu>"
        if self._kind is DeviceType.Ipu and not self._attached:
            return "<unknown-ipu-unattached>"
        return self._version

    @property
    def _loaded(self) -> Any:
        """The session whose program is on the device; None if there is none or the session no longer exists."""
        return None if self._program is None else self._program()

    @_loaded.setter
    def _loaded(self, session: Any) -> None:
        self._program = None if session is None else weakref.ref(session)

    @property
    def isAttached(self) -> bool:
        """True iff this process holds the device. A partition reset takes it away."""
        if self._attached and not self.connection.holds_ipus:
            self.detach()
        return self._attached

    # -- attaching --------------------------------------------------------------------------------

    def attach(self) -> bool:
        """Take the IPUs; False if another process has them. Does not wait: `tryAttachUntilTimeout` does."""
        return self._refusal() is None

    def _refusal(self) -> str | None:
        """Try to attach. Returns None on success, otherwise who or what prevents it."""
        if self._kind is DeviceType.OfflineIpu:
            raise popart_exception(
                "An offline device is a description to compile for: it cannot be attached."
            )
        if self.isAttached:
            return None
        if self._uses_partition:
            refusal = self.connection.try_attach(self._request())
        else:
            connection = self.connection  # Check before IPUs are taken, because this may refuse.
            refusal = _standalone.take(self._ipus) if self._kind is DeviceType.Ipu else None
            if refusal is None:
                refusal = connection.try_attach(self._request())
        self._attached = refusal is None
        if self._attached:
            # Release a device that the program drops, as the SDK does when its last user is gone.
            taken = None if self._uses_partition or self._kind is not DeviceType.Ipu else self._ipus
            self._letting_go = weakref.finalize(self, _let_go, self.connection, taken)
            self._letting_go.atexit = False
        return refusal

    def hold(self, count: int) -> None:
        """Take as many IPUs as a program covers: for a model of three IPUs, a program of four, one of which is idle."""
        if self._kind in (DeviceType.IpuModel, DeviceType.Sim) and count != self._held:
            self.detach()
            self._connection, self._held = None, count

    def _request(self) -> AttachRequest:
        own = self._uses_partition
        job = self._job if own else IpuRange(0, self._held)
        owned = self._ipus if own else IpuRange(0, self._held)
        return AttachRequest(
            job,
            owned,
            os.getpid(),
            _user(),
            " ".join([os.path.basename(sys.executable), *sys.argv]),
            self._environ.get("PODRUN_LAUNCH_ID", ""),
        )

    @property
    def _uses_partition(self) -> bool:
        return self._kind is DeviceType.Ipu and partition_configured(self._environ)

    @property
    def connection(self) -> Connection:
        """The IPUoF connection, opened on first use."""
        if self._connection is None:
            connection = open_connection(self._environment, self._held)
            notes = recorder(self._environment)
            self._connection = connection if notes is None else RecordedConnection(connection, notes)
        return self._connection

    @property
    def _environment(self) -> Mapping[str, str]:
        """Environment variables for the connection. An IPU model gets no partition and no faults."""
        if self._kind is DeviceType.Ipu:
            return self._environ
        not_for_models = ("IPUOF_", "PODRUN_OFFLINE_MODE", "PODRUN_FAULTS")
        return {name: value for name, value in self._environ.items() if not name.startswith(not_for_models)}

    @property
    def ipus(self) -> IpuRange:
        """The IPUs, in the partition's numbering."""
        return self._ipus

    def tryAttachUntilTimeout(self) -> bool:
        """Try to attach once a second until the time of `setOnDemandAttachTimeout` is over."""
        deadline = time.monotonic() + self._timeout
        while not self.attach():
            if time.monotonic() >= deadline:
                return False
            time.sleep(min(_ATTACH_POLL_SECONDS, max(0.0, deadline - time.monotonic())))
        return True

    def setOnDemandAttachTimeout(self, attachTimeout: int) -> None:
        """Seconds to wait for the IPUs when a session loads its program."""
        self._timeout = float(attachTimeout)

    def getOnDemandAttachTimeout(self) -> int:
        """Seconds set."""
        return int(self._timeout)

    def detach(self) -> None:
        """Release the IPUs."""
        if self._kind is DeviceType.OfflineIpu:
            raise popart_exception(
                "An offline device is a description to compile for: it cannot be detached."
            )
        if not self._attached:
            return
        self._attached = False
        self._loaded = None
        with surfaced():
            if self._letting_go is not None:
                self._letting_go()
        self._connection = None

    def ensure_attached(self) -> None:
        """Attach an OnDemand device before a session loads. popart_exception if that fails."""
        if self.isAttached:
            return
        if self._kind is DeviceType.OfflineIpu:
            raise popart_exception(
                "The device is an offline device, which can be compiled for but not run on. Acquire one with "
                "DeviceManager().acquireAvailableDevice(...)."
            )
        with surfaced():
            if not self.tryAttachUntilTimeout():
                raise popart_exception(
                    f"Failed to attach to device {self._id} ({self.numIpus} IPUs): {self._refusal()}. "
                    "gc-monitor shows who "
                    "holds them."
                )

    def __enter__(self) -> DeviceInfo:
        return self

    def __exit__(
        self,
        kind: builtins.type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._kind is not DeviceType.OfflineIpu:
            self.detach()

    def __str__(self) -> str:
        return (
            f"DeviceInfo(type={self._kind.name}, id={self._id}, numIpus={self.numIpus}, "
            f"tilesPerIPU={self._tiles}, version={self.version})"
        )

    __repr__ = __str__


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # The user id has no name, as in containers.
        return str(os.getuid())


def open_connection(environ: Mapping[str, str], ipus: int) -> Connection:
    """An IPUoF connection: to the partition that ``environ`` names, else to ``ipus`` IPUs inside this
    process.
    """
    from podrun.device.connection import connect

    with surfaced():
        return connect(environ, standalone_ipus=ipus)
