"""The list of machines that a server starts: a file beside its entry in the runtime directory, for the next server.

A server that is killed leaves its machines. Ray knows them, but joining Ray takes longer than anything else in a start,
and Ray cannot tell which partition a machine works for while the machine does not answer. So each server keeps this
list, whole after every change, and the next one takes machines over by it; what Ray knows besides is looked at
afterwards. A list that is missing or cannot be read only costs time: Ray is asked first then.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from podrun.core.documents import parse_json, read_text
from podrun.core.errors import ConfigError, NotFoundError

log = logging.getLogger("podrun.vipu")

VERSION = 1


@dataclass(frozen=True, slots=True)
class ListedMachine:
    """A machine: its agent, where it listens, the partition that it works for (empty: a spare), the name of the actor
    that runs it, and whether that actor runs no other machine."""

    agent: str
    endpoint: str
    partition: str
    actor: str
    alone: bool


class MachineList:
    """The list of one POD. ``pod``: the id of its state; without one there is no list."""

    def __init__(self, directory: Path, pod: str) -> None:
        self._path = directory / f"{pod}.machines" if pod else None

    def read(self) -> list[ListedMachine] | None:
        """The machines; None if there is no list that can be read."""
        if self._path is None:
            return None
        try:
            plain = parse_json(read_text(self._path), str(self._path))
            if plain["version"] != VERSION:
                return None
            return [ListedMachine(**entry) for entry in plain["machines"]]
        except NotFoundError:
            return None
        except (ConfigError, KeyError, TypeError) as error:
            log.warning("the list of machines %s cannot be read: %s", self._path, error)
            return None

    def write(self, machines: Iterable[ListedMachine]) -> None:
        """Replace the list. One that cannot be written is removed: no list is better than an old one."""
        if self._path is None:
            return
        fresh = self._path.with_name(f"{self._path.name}.{os.getpid()}.new")
        try:
            plain = {"version": VERSION, "machines": [asdict(machine) for machine in machines]}
            fresh.write_text(json.dumps(plain), encoding="utf-8")
            fresh.replace(self._path)
        except OSError as error:
            log.warning("the list of machines cannot be written: %s", error)
            with contextlib.suppress(OSError):
                fresh.unlink(missing_ok=True)
            self.remove()

    def remove(self) -> None:
        """Remove the list. Idempotent."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
