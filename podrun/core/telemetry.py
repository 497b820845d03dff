"""What a machine reports: the one schema that machines write, the service passes on, and monitor tools read.

A `MachineReport` is a snapshot of one IPU-M2000 as one partition sees it: who is attached, what state its IPUs are in,
how busy they are. It crosses processes as a JSON object (`MachineReport.to_json_dict`) that carries `SCHEMA_VERSION`;
keys end in their unit, numbers are numbers, and ``null`` means unknown, which is not the same as zero. Power,
temperatures, shares of time and counters of links are modelled (`podrun.costmodel.power`, `podrun.device.activity`).

`ATTRIBUTES` is the vocabulary of device attributes under the names that gc-info, gc-inventory and gcipuinfo print.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Any

from podrun.core.errors import ErrorCode, RecoveryAction, ServiceError, UsageError
from podrun.core.fault_spec import FaultSpec, Struck
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.quick_dataclass import dataclass

SCHEMA_VERSION = 1
"""Version of the JSON form. Keys may be added within a version; a reader refuses a newer version."""

PROCESS_ENDED = "its process ended"
"""Why a machine is lost of which nothing else is known."""


@dataclass(frozen=True, slots=True)
class AttachedProcess:
    """A host process that holds an IPU. ``start_time_s``: seconds since 1970, UTC, when the process started."""

    pid: int
    user: str
    command: str
    start_time_s: float | None = None
    host: str = ""

    @property
    def in_words(self) -> str:
        """For messages: ``process 4711 (train.py)``."""
        return f"process {self.pid} ({self.command})"


@dataclass(frozen=True, slots=True)
class IpuReport:
    """One IPU.

    ``partition_ipu`` is its index in the partition; ``ipu`` its index at the machine's endpoint, from 0 in partition
    order (tools print the hardware's IPU# beside it, which runs the other way). ``recovery_action``: what clears
    ``error_state``; None if nothing does, or nothing need. ``utilisation_percent`` is the share of the last second
    that the IPU was at work, ``utilisation_session_percent`` the share since the process attached. It divides into
    ``compute_percent``, ``exchange_percent``, ``sync_percent``, ``link_percent`` and ``host_percent`` (None: the
    program has no model); ``podrun.device.activity`` defines them. ``power_w`` and ``die_temperature_c`` are modelled.

    ``tile_bytes``: of the fullest tile of the loaded program, of ``tile_capacity_bytes``. Counters since the machine
    joined the partition: ``link_bytes`` sent on IPU-Links and ``host_bytes`` both ways between it and the host, as the
    model has them; ``parity_errors`` (corrected or not), ``link_correctable_errors`` (packets that were sent again).
    """

    partition_ipu: int
    ipu: int
    error_state: IpuErrorState = IpuErrorState.NO_ERRORS
    error_code: ErrorCode = ErrorCode.NONE
    recovery_action: RecoveryAction | None = None
    process: AttachedProcess | None = None
    clock_mhz: float | None = None
    die_temperature_c: float | None = None
    power_w: float | None = None
    utilisation_percent: float | None = None
    utilisation_session_percent: float | None = None
    batches_done: int = 0
    links_down: tuple[int, ...] = ()
    """Partition indices of the IPUs to which its IPU-Link is down."""
    link_correctable_errors: int | None = None
    compute_percent: float | None = None
    exchange_percent: float | None = None
    sync_percent: float | None = None
    link_percent: float | None = None
    host_percent: float | None = None
    tile_bytes: int | None = None
    tile_capacity_bytes: int | None = None
    parity_errors: int | None = None
    link_bytes: int | None = None
    host_bytes: int | None = None

    @property
    def shares(self) -> dict[str, float]:
        """The parts of the utilisation by name, in percent; empty if they are unknown."""
        parts = {
            "compute": self.compute_percent,
            "exchange": self.exchange_percent,
            "sync": self.sync_percent,
            "link": self.link_percent,
            "host": self.host_percent,
        }
        return {name: part for name, part in parts.items() if part is not None}

    @property
    def has_error(self) -> bool:
        """True iff the IPU or one of its links needs a recovery action before it can be used."""
        return self.error_state is not IpuErrorState.NO_ERRORS or bool(self.links_down)


@dataclass(frozen=True, slots=True)
class ControlEvent:
    """A request that changed a partition, or a machine that was lost. ``what``: its faults, machine or IPUs;
    ``time_s``: since 1970; ``why``: what ended a machine, as far as that is known.
    """

    did: str
    what: str
    time_s: float
    why: str = ""


@dataclass(frozen=True, slots=True)
class MachineReport:
    """One IPU-M2000 as one partition sees it.

    ``machine_index`` counts machines within the partition. ``board_power_w``: modelled, the sum of
    its IPUs in this partition. ``versions`` maps software to
    version; the known keys are "IPUoF server", "ICU firmware", "IPU-M software", "driver".

    Work since the machine joined the partition, of training programs if any ran, else of inference: ``batches_done``
    weight updates (or inference batches), ``samples_done`` samples on this machine's replicas (None if the program does
    not say how many a micro-batch holds), ``modelled_s`` seconds the model gives for them on the IPUs, ``emulation_s``
    seconds of wall clock in runs. They outlive the process that attached.
    """

    agent_id: str
    state: MachineState = MachineState.UP
    endpoint: str = ""
    pid: int | None = None
    partition: str = ""
    machine_index: int = 0
    serial: str = ""
    target: str = "gc200"
    board_temperature_c: float | None = None
    board_power_w: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    ipus: tuple[IpuReport, ...] = ()
    batches_done: int = 0
    samples_done: int | None = None
    modelled_s: float | None = None
    emulation_s: float | None = None
    planned_faults: tuple[FaultSpec, ...] = ()
    """Faults that have still to strike."""
    struck_faults: tuple[Struck, ...] = ()
    """Faults that have struck, oldest first."""
    control_events: tuple[ControlEvent, ...] = ()
    """In the report of a partition's first machine: requests that changed the partition and machines that were lost,
    oldest first."""
    stale_seconds: float | None = None
    """Age of the report's content, if the machine does not answer: the rest is from its last answer. None: the report
    is new, or the machine never answered.
    """

    def to_json_dict(self) -> dict[str, Any]:
        """Plain JSON data, with ``schema_version``."""
        return {"schema_version": SCHEMA_VERSION, **_plain(self)}

    @classmethod
    def from_json_dict(cls, data: Mapping[str, Any]) -> MachineReport:
        """The report that `to_json_dict` described; unknown keys are ignored.

        Raises ServiceError if the data are of a newer schema or no report at all.
        """
        version = data.get("schema_version")
        if not isinstance(version, int) or not 1 <= version <= SCHEMA_VERSION:
            raise ServiceError(
                f"a machine report has schema version {version!r}; this podrun reads 1 to {SCHEMA_VERSION}",
                hint="Run the same podrun release on both sides (vipu --server-version).",
            )
        try:
            return cls(
                **_known(cls, data)
                | {
                    "state": MachineState(data.get("state", MachineState.UP)),
                    "versions": dict(data.get("versions", {})),
                    "ipus": tuple(map(_ipu_from_json, data.get("ipus", ()))),
                    "planned_faults": tuple(map(_fault_from_json, data.get("planned_faults", ()))),
                    "struck_faults": tuple(map(_struck_from_json, data.get("struck_faults", ()))),
                    "control_events": tuple(
                        ControlEvent(**_known(ControlEvent, entry))
                        for entry in data.get("control_events", ())
                    ),
                }
            )
        except (TypeError, AttributeError, KeyError, ValueError, UsageError) as error:
            raise ServiceError(
                f"a machine report is malformed: {error}",
                hint="Run the same podrun release on both sides (vipu --server-version).",
            ) from error


def _plain(report: MachineReport) -> dict[str, Any]:
    """`dataclasses.asdict` copies every value deeply, which takes ten times as long; a POD has thousands of reports."""
    plain = _by_field(report)
    plain["state"] = report.state.value
    plain["versions"] = dict(report.versions)
    plain["planned_faults"] = [str(spec) for spec in report.planned_faults]
    plain["struck_faults"] = [strike_in_words(strike) for strike in report.struck_faults]
    plain["control_events"] = [_without_empty(_by_field(event), "why") for event in report.control_events]
    plain["ipus"] = [_plain_ipu(ipu) for ipu in report.ipus]
    return plain


def strike_in_words(strike: Struck) -> dict[str, Any]:
    """A strike as tools and the reports' JSON tell it: the fault as users write it."""
    return _without_empty(_by_field(strike) | {"fault": strike.fault.text}, "partition")


def _plain_ipu(ipu: IpuReport) -> dict[str, Any]:
    return _by_field(ipu) | {
        "process": None if ipu.process is None else _by_field(ipu.process),
        "links_down": list(ipu.links_down),
        "error_state": ipu.error_state.value,
        "error_code": ipu.error_code.name,
        "recovery_action": None if ipu.recovery_action is None else ipu.recovery_action.value,
    }


def _by_field(value: AttachedProcess | IpuReport | MachineReport | ControlEvent | Struck) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _without_empty(plain: dict[str, Any], name: str) -> dict[str, Any]:
    return plain if plain[name] else {key: value for key, value in plain.items() if key != name}


def _known(kind: type, data: Mapping[str, Any]) -> dict[str, Any]:
    names = kind.__dataclass_fields__  # type: ignore[attr-defined]
    return {key: value for key, value in data.items() if key in names}


def _fault_from_json(text: str) -> FaultSpec:
    from podrun.core.fault_forms import (
        parse_fault,  # Few reports have faults: programs start without their grammar.
    )

    return parse_fault(text)


def _struck_from_json(data: Mapping[str, Any]) -> Struck:
    return Struck(**_known(Struck, data) | {"fault": _fault_from_json(data["fault"])})


def _ipu_from_json(data: Mapping[str, Any]) -> IpuReport:
    process, action = data.get("process"), data.get("recovery_action")
    state = data.get("error_state", IpuErrorState.NO_ERRORS)
    return IpuReport(
        **_known(IpuReport, data)
        | {
            "process": None if process is None else AttachedProcess(**_known(AttachedProcess, process)),
            "links_down": tuple(data.get("links_down", ())),
            "error_state": IpuErrorState(state) if state in _ERROR_STATES else IpuErrorState.OTHER,
            "error_code": ErrorCode.__members__.get(data.get("error_code", "NONE"), ErrorCode.UNKNOWN),
            "recovery_action": None if action is None else RecoveryAction(action),
        }
    )


_ERROR_STATES = frozenset(IpuErrorState)


def planned_in(reports: Iterable[MachineReport]) -> tuple[FaultSpec, ...]:
    """The faults that machines report as still planned, each once."""
    return tuple(dict.fromkeys(spec for report in reports for spec in report.planned_faults))


def attached_processes(reports: Iterable[MachineReport]) -> dict[int, AttachedProcess]:
    """The processes that hold IPUs of a partition, by the IPU's index in it."""
    return {
        ipu.partition_ipu: ipu.process for report in reports for ipu in report.ipus if ipu.process is not None
    }


@dataclass(frozen=True, slots=True)
class ReportedAttribute:
    """A device attribute: the key that tools print, the unit behind its value ("" if none), and what it means."""

    key: str
    unit: str
    meaning: str


ATTRIBUTES: tuple[ReportedAttribute, ...] = (
    ReportedAttribute("id", "", "unique id of the single or multi-IPU device"),
    ReportedAttribute("target", "", "Fabric for one IPU, Multi IPU for several"),
    ReportedAttribute("average board temp", "C", "mean of the board's sensors"),
    ReportedAttribute("average die temp", "C", "mean of the IPU's sensors"),
    ReportedAttribute("board ipu index", "", "IPU number on the machine (IPU#), 0 to 3"),
    ReportedAttribute("board serial number", "", "serial number of the board"),
    ReportedAttribute("board type", "", "M2000"),
    ReportedAttribute("board variant", "", "M2000 or Bow-2000"),
    ReportedAttribute("clock", "MHz", "tile clock now"),
    ReportedAttribute("driver version", "", "version of the driver: podrun's release"),
    ReportedAttribute("firmware version", "", "ICU firmware"),
    ReportedAttribute("gateway software version", "", "software of the IPU-Machine"),
    ReportedAttribute("graph streaming", "", "true: streaming memory is there"),
    ReportedAttribute("hexoatt total size (bytes)", "", "remote-buffer window of one IPU"),
    ReportedAttribute("hexopt total size (bytes)", "", "host-exchange stream window of one IPU"),
    ReportedAttribute("ipu architecture", "", "ipu2 for GC200 and Bow"),
    ReportedAttribute("ipu error state", "", "'no errors' or what is wrong"),
    ReportedAttribute("ipu power", "W", "power of the IPU"),
    ReportedAttribute("total board power", "W", "power of the board"),
    ReportedAttribute("ipu utilisation", "%", "share of the last second at work, without pauses"),
    ReportedAttribute("ipu utilisation (session)", "%", "share at work since the process attached"),
    ReportedAttribute("ipuof host", "", "address of the IPU-Machine"),
    ReportedAttribute("ipuof partition id", "", "partition that holds the IPU"),
    ReportedAttribute("ipuof routing id", "", "index of the IPU in the partition"),
    ReportedAttribute("ipuof routing type", "", "routing between the IPUs of the partition"),
    ReportedAttribute("ipuof server version", "", "version of the machine's IPUoF server"),
    ReportedAttribute("link correctable error count", "", "correctable errors on IPU-Links"),
    ReportedAttribute("link speed", "GT/s", "signalling rate of an IPU-Link lane"),
    ReportedAttribute("link width", "", "lanes of an IPU-Link"),
    ReportedAttribute("number of replicas", "", "property of the partition"),
    ReportedAttribute("partition sync type", "", "c2-compatible or pod-native-default"),
    ReportedAttribute("reconfigurable partition", "", "true or false"),
    ReportedAttribute("pci id", "", "on an IPU-Machine the IPU#"),
    ReportedAttribute("remote buffers supported", "", "1: yes"),
    ReportedAttribute("process start time", "", "when the attached process started, ISO basic, UTC"),
    ReportedAttribute("user executable", "", "program of the attached process"),
    ReportedAttribute("user name", "", "user of the attached process"),
    ReportedAttribute("user process id", "", "process id of the attached process"),
)
"""Device attributes in the order of the reference; text tools sort them after ``id`` and ``target``."""
