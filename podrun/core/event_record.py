"""The application event record: the last warning or error that a program got from its IPUs, as a file for monitors.

The SDK's rules: a program writes it only if ``IPU_APP_EVENT_RECORD_PATH`` names a directory it may write to; there is
one record, and a new event takes its place if its severity is equal or higher. `gcipuinfo.getLastAppEventRecord` reads
it. The name of the file and the words for severities are podrun's, since none are published.
"""

from __future__ import annotations

import datetime
import enum
import json
import logging
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from podrun.core.documents import parse_json, read_text, write_whole
from podrun.core.environment import environment
from podrun.core.errors import ConfigError, IpusTakenError, PodrunError, PoplarError, RecoverableRuntimeError
from podrun.core.quick_dataclass import dataclass

log = logging.getLogger("podrun.device")

EVENT_PATH = "IPU_APP_EVENT_RECORD_PATH"
"""Names the directory of the event record."""
EVENT_FILE = "ipu_app_event_record.json"


class EventSeverity(enum.IntEnum):
    """How bad an event is."""

    WARNING = 1
    """The program lost its IPUs to a command; nothing is broken."""
    ERROR = 2
    """The program or the system failed."""


@dataclass(frozen=True, slots=True)
class AttachedIpus:
    """The IPUs of a program, by their indices in ``partition`` (empty: machines in its own process), and the host of
    each IPU's machine.
    """

    partition: str
    ipus: Sequence[int]
    hosts: Mapping[int, str]

    def hosts_of(self, ipus: Iterable[int]) -> str:
        """The hosts of some IPUs, each once."""
        return ", ".join(dict.fromkeys(self.hosts[ipu] for ipu in ipus if self.hosts.get(ipu)))

    def named_by(self, where: str, ipus_per_machine: int) -> list[int]:
        """The IPUs in an error's ``where``: ``ipu 5``, ``link 2-3``, ``machine 1``."""
        what, _, numbers = where.partition(" ")
        ids = [int(part) for part in numbers.split("-") if part.isdecimal()]
        if what == "machine" or what == "gw-link":
            ids = [ipu for ipu in self.ipus if ipu // ipus_per_machine in ids]
        return sorted(ids) if what in ("ipu", "link", "machine", "gw-link") else []


def record_error(
    error: PodrunError,
    attached: AttachedIpus,
    *,
    ipus_per_machine: int = 4,
    environ: Mapping[str, str] | None = None,
    now: datetime.datetime | None = None,
) -> Path | None:
    """Write an error that a program got from its IPUs, unless a worse one is recorded. Returns the file that was
    written.

    A directory that cannot be written to is only logged, because the error itself has to reach the program.
    """
    directory = environment(environ).get(EVENT_PATH, "")
    if not directory:
        return None
    severity = EventSeverity.WARNING if isinstance(error, IpusTakenError) else EventSeverity.ERROR
    named = attached.named_by(getattr(error, "where", ""), ipus_per_machine)
    fields = {
        "timestamp": (now or datetime.datetime.now(datetime.UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "severity": severity.name.lower(),
        "command line": " ".join(sys.argv),
        "pid": os.getpid(),
        "attached ipus": ", ".join(map(str, attached.ipus)),
        "specific ipus": ", ".join(map(str, named)),
        "attached ipu hosts": attached.hosts_of(attached.ipus),
        "specific ipu hosts": attached.hosts_of(named),
        "partition": attached.partition,
        "description": _description(error),
    }
    file = Path(directory) / EVENT_FILE
    try:
        if severity < _severity_in(file):
            return None
        write_whole(f"{json.dumps(fields, indent=1)}\n".encode(), file)
    except OSError as reason:
        log.warning("the event record %s cannot be written: %s", file, reason.strerror or reason)
        return None
    return file


def read_event_record(directory: str | Path) -> dict[str, str]:
    """The event record in a directory, or {}. Raises ConfigError for a file that is not an event record."""
    file = Path(directory) / EVENT_FILE
    if not file.is_file():
        return {}
    data = parse_json(read_text(file), str(file))
    if not isinstance(data, dict):
        raise ConfigError(f"{file} holds no event record", hint="Remove it, or name another directory.")
    return {str(key): str(value) for key, value in data.items()} | {"event record path": str(file)}


def _description(error: PodrunError) -> str:
    """What happened, as one line: the SDK's name of the error, its message, the recovery action."""
    name = error.type if isinstance(error, PoplarError) else type(error).__name__
    action = (
        f" (recovery action: {error.recovery_action.name})"
        if isinstance(error, RecoverableRuntimeError)
        else ""
    )
    return f"{name}: {error.message}{action}"


def _severity_in(file: Path) -> int:
    """The severity of the event in a file; 0 if the file holds none."""
    try:
        name = read_event_record(file.parent).get("severity", "").upper()
    except ConfigError:
        return 0
    return EventSeverity[name].value if name in EventSeverity.__members__ else 0
