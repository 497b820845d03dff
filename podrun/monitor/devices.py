"""The devices of a partition: the server and its active partition, their reports, device ids, remedies for errors.

`fetch` talks to the server; the rest is pure. Device ids count single IPUs first, then pairs, then quads, up to the
whole partition.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun.core.cluster import ipu_number
from podrun.core.environment import IPUOF_VIPU_API_PARTITION_ID, environment
from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    DeniedError,
    NotFoundError,
    PodrunError,
    RecoveryAction,
    ServiceError,
)
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import IpuReport, MachineReport

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.host.discovery import ServiceEntry
    from podrun.partition.state.values import IpuofConfig, PartitionInfo


@dataclass(frozen=True, slots=True)
class Device:
    """One IPU as tools print it. ``id`` counts through the partitions shown; ``number`` is its IPU#."""

    id: int
    host: str
    number: int
    machine: MachineReport
    ipu: IpuReport


@dataclass(frozen=True, slots=True)
class View:
    """A partition and its IPUs, by device id."""

    info: PartitionInfo
    config: IpuofConfig
    reports: tuple[MachineReport, ...]
    devices: tuple[Device, ...]
    active: bool
    """True iff tools act on this partition by default."""


# --- device ids -------------------------------------------------------------------------------------------------


def device_sets(ipus: int, reconfigurable: bool) -> list[tuple[int, ...]]:
    """The IPUs of each device id in a partition of ``ipus`` IPUs.

    A reconfigurable partition has 2N - 1 devices: N single IPUs, N/2 pairs, ..., the whole. Any other has its single
    IPUs and the whole.
    """
    sets: list[tuple[int, ...]] = [(i,) for i in range(ipus)]
    size = 2 if reconfigurable else ipus
    while 1 < size <= ipus:
        sets += [tuple(range(first, first + size)) for first in range(0, ipus, size)]
        size *= 2
    return sets


def ipus_of_device(device: int, ipus: int, reconfigurable: bool) -> tuple[int, ...]:
    """The IPUs of one device id. Raises NotFoundError with the range of ids."""
    sets = device_sets(ipus, reconfigurable)
    if not 0 <= device < len(sets):
        raise NotFoundError(
            f"no such device set id: '{device}'",
            hint=f"Ids of this partition are 0 to {len(sets) - 1}: gc-info -l",
        )
    return sets[device]


# --- attributes -------------------------------------------------------------------------------------------------


def attributes_of_ipus(view: View) -> list[dict[str, str]]:
    """Attributes of every IPU of a partition, in device order: id and target first, the rest by name."""
    from podrun.partition.client.device_attributes import (
        hardware_attributes,
        live_attributes,
        partition_attributes,
    )

    result = []
    for device in view.devices:
        values = hardware_attributes(device.machine, device.number) | live_attributes(device.ipu)
        values |= partition_attributes(view.info, device.ipu.partition_ipu, device.host)
        if device.machine.state is MachineState.LOST:
            values["ipu error state"] = IpuErrorState.MACHINE_LOST
        result.append({"id": str(device.id), "target": "Fabric"} | dict(sorted(values.items())))
    return result


# --- errors -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why an IPU cannot be used. ``action``: the SDK's name of the recovery action, or None if none helps; ``remedy``:
    the command to type.
    """

    state: str
    action: RecoveryAction | None
    remedy: str


def diagnose_device(partition: str, device: Device) -> Diagnosis | None:
    """The diagnosis of a device of a partition; None if it is usable."""
    ipu, agent = device.ipu, device.machine.agent_id
    replace_machine = f"vipu-admin restart agent {agent}, then vipu reset partition {partition}"
    if device.machine.state.is_silent:
        return Diagnosis(f"machine {device.machine.state}", None, replace_machine)
    if not ipu.has_error:
        return None
    if ipu.error_state is IpuErrorState.UNRECOVERABLE:
        return Diagnosis(ipu.error_state.value, None, replace_machine)
    if ipu.error_state is IpuErrorState.NO_ERRORS:
        state = f"link down to {', '.join(map(str, ipu.links_down))}"
        action: RecoveryAction | None = ipu.recovery_action or RecoveryAction.PARTITION_RESET
    else:
        state, action = ipu.error_state.value, ipu.recovery_action
    return Diagnosis(state, action, _remedy(action, partition, device))


def _remedy(action: RecoveryAction | None, partition: str, device: Device) -> str:
    """The recovery action with the command to type."""
    commands = {
        RecoveryAction.IPU_RESET: f"gc-reset -d {device.id}, or load the program again",
        RecoveryAction.PARTITION_RESET: f"vipu reset partition {partition}",
        RecoveryAction.FULL_RESET: f"vipu-admin power-cycle agent {device.machine.agent_id}",
    }
    if action is None:
        return "see the application's error"
    return f"{action.value}: {commands[action]}" if action in commands else action.value


TIMEOUT_S = 10.0
FOLLOW_AGAIN_S = 1.0
"""Between two attempts to follow a server that does not answer."""


def connect_monitor(
    host: str | None = None,
    port: int | None = None,
    *,
    say: Callable[[str], None] = lambda line: None,
    one: bool = False,
) -> VipuClient:
    """A client of the server that options, environment or discovery name.

    If discovery finds several, it is the first one with the partition that IPUOF_VIPU_API_PARTITION_ID names, or with
    any partition if the variable is not set; ``say`` then gets a note about which server that is and how to choose.
    ``one``, for commands that take IPUs away: raises ConflictError if several servers qualify.
    """
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.commands.which_server import find_server
    from podrun.partition.host.discovery import Registry

    wanted = environment().get(IPUOF_VIPU_API_PARTITION_ID)
    where = find_server(host, port, partition=wanted)
    address = (where.host, where.port)
    if where.discovered:
        running = [entry for entry in Registry().entries() if entry.port]
        if len(running) > 1:
            address = _choose(running, wanted, say, one)
    return VipuClient(*address, TIMEOUT_S, own=where.own)


def _choose(
    running: Sequence[ServiceEntry], wanted: str | None, say: Callable[[str], None], one: bool
) -> tuple[str, int]:
    """Which of several services to ask; see `connect_monitor`."""
    partitions = {entry: _partitions_of(entry) for entry in running}
    meant = [e for e, names in partitions.items() if names and (not wanted or wanted in names)]
    chosen = meant[0] if meant else running[0]
    told = "; ".join(f"{e.kind} at {e.host}:{e.port} ({_listed(partitions[e])})" for e in running)
    how = f"--api-host {chosen.host} --api-port {chosen.port}, or the same in IPUOF_VIPU_API_HOST and _PORT"
    if one and len(meant) > 1:
        raise ConflictError(
            f"{len(running)} partition services of yours run here, and more than one could be meant: {told}",
            hint=f"Say which, as in: {how}",
        )
    say(f"note: asking {chosen.host}:{chosen.port}, one of {len(running)} services of yours: {told}")
    say(f"  To choose: {how}")
    return chosen.host, chosen.port


def _listed(names: Sequence[str] | None) -> str:
    return "does not answer" if names is None else ", ".join(names) or "no partitions"


def _partitions_of(entry: ServiceEntry) -> tuple[str, ...] | None:
    """Names of a service's partitions; None if it does not answer."""
    from podrun.partition.client.vipu_client import VipuClient

    try:
        with VipuClient(entry.host, entry.port, TIMEOUT_S, own=True) as client:
            return tuple(info.name for info in client.list_partitions())
    except ServiceError:
        return None


def on_stderr(line: str) -> None:
    """For `connect_monitor`: print notes to standard error, so that standard output stays one object or table."""
    import click

    click.echo(line, err=True)


def active_partition(
    partitions: Sequence[PartitionInfo], environ: Mapping[str, str] | None = None
) -> PartitionInfo | None:
    """The partition that tools use: IPUOF_VIPU_API_PARTITION_ID, else the first by name; None without partitions.

    Raises NotFoundError if no partition has the name in the environment.
    """
    env = environment(environ)
    wanted = env.get(IPUOF_VIPU_API_PARTITION_ID)
    if not wanted:
        return partitions[0] if partitions else None
    for info in partitions:
        if info.name == wanted:
            return info
    names = ", ".join(info.name for info in partitions) or "none"
    raise NotFoundError(
        f"there is no partition {wanted!r}, which IPUOF_VIPU_API_PARTITION_ID names",
        hint=f"Partitions: {names}. Or: unset IPUOF_VIPU_API_PARTITION_ID",
    )


def no_partition() -> NotFoundError:
    """The error of tools that need a partition when there is none."""
    return NotFoundError(
        "no active partition",
        hint="Create one: vipu create partition NAME --size N. Or run something with podrun.",
    )


def views(client: VipuClient, *, everything: bool = False) -> list[View]:
    """The active partition, and with ``everything`` the others after it. Raises NotFoundError without partitions."""
    partitions = client.list_partitions()
    active = active_partition(partitions)
    if active is None:
        raise no_partition()
    chosen = [active] + ([info for info in partitions if info is not active] if everything else [])
    return views_of(client, chosen, active)


def views_of(
    client: VipuClient, partitions: Sequence[PartitionInfo], active: PartitionInfo | None = None
) -> list[View]:
    """The IPUs of these partitions; their ids count on from one partition to the next."""
    hosts = {agent.agent_id: agent.host for agent in client.list_agents()}
    result: list[View] = []
    first = 0
    for info in partitions:
        result.append(_view(client, info, hosts, first, info is active))
        first += info.size
    return result


def _view(
    client: VipuClient, info: PartitionInfo, hosts: Mapping[str, str], first: int, active: bool
) -> View:
    reports = tuple(client.machine_reports(info.name))
    configs = _configs(client, info)
    numbers = {device.partition_ipu: device.ipu_number for config in configs for device in config.devices}
    devices = tuple(
        Device(
            id=first + ipu.partition_ipu,
            host=hosts.get(report.agent_id, report.agent_id),
            number=numbers.get(ipu.partition_ipu, ipu_number(ipu.ipu)),
            machine=report,
            ipu=ipu,
        )
        for report in reports
        for ipu in report.ipus
    )
    return View(info, configs[0], reports, devices, active)


def _configs(client: VipuClient, info: PartitionInfo) -> list[IpuofConfig]:
    """Where the IPUs of each GCD are; without addresses for those who may look and not use."""
    from podrun.partition.state.values import IpuofConfig

    try:
        return [client.ipuof_config(info.name, gcd) for gcd in range(info.num_gcds)]
    except DeniedError:
        return [IpuofConfig(info.name, info.state, (), {"GCD Id": str(gcd)}) for gcd in range(info.num_gcds)]


# --- what changes -----------------------------------------------------------------------------------------------


class Followed:
    """What is there, followed by a thread through the server's changes (`VipuClient.watch`) until `close`.

    It goes on where it broke off, and begins again if the server was away for long.
    """

    def __init__(self, client: VipuClient) -> None:
        from podrun.partition.server.event_log import Mirror

        self._client, self._mirror = client, Mirror()
        self._changed = threading.Condition()
        self._error: PodrunError | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="podrun-followed", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        while not self._closed.is_set():
            try:
                for change in self._client.watch(("partition", "machine", "incident")):
                    with self._changed:
                        self._error = None
                        self._mirror.take(change.kind, change.name, change.value, initial=change.initial)
                        self._changed.notify_all()
            except PodrunError as error:
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
            except ValueError:  # The client is closed.
                return
            self._closed.wait(FOLLOW_AGAIN_S)

    def all(self, kind: str) -> dict[str, Any]:
        """Partitions or machines by name, as --format json has them. Raises PodrunError if they cannot be followed."""
        with self._changed:
            self._changed.wait_for(lambda: self._mirror.synced or self._error is not None, TIMEOUT_S)
            if self._error is not None:
                raise self._error
            if not self._mirror.synced:
                raise DeadlineError("the server does not say what is there", hint="vipu --server-version")
            return self._mirror.all(kind)

    @property
    def incidents(self) -> int:
        """Partitions that went into ERROR since it began."""
        with self._changed:
            return self._mirror.incidents

    def close(self) -> None:
        """End with the client, which is closed too."""
        self._closed.set()
        self._client.close()
        self._thread.join(TIMEOUT_S)
