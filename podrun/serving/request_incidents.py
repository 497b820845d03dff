"""What errors of IPUs cost a service: one incident for each error, with the requests that it cost.

An incident is a line of JSON in the file that ``PODRUN_INCIDENTS`` names (`podrun serve --incidents FILE`), which
several processes may share, and a sentence for the server's log.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Mapping, Sequence

from podrun.core.environment import environment
from podrun.core.errors import PodrunError, PoplarError
from podrun.core.quick_dataclass import dataclass

log = logging.getLogger("podrun.serving")

VARIABLE = "PODRUN_INCIDENTS"
SCHEMA = "podrun-serving-incident-1"
_MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class ServingIncident:
    """An error and its cost. ``requests``: their ids, ``#N`` for the Nth of an instance that has none; ``action``: what
    was done, in words.
    """

    when: datetime.datetime
    model: str
    error: PodrunError
    requests: tuple[str, ...]
    rows: int
    action: str

    @property
    def text(self) -> str:
        """The incident in one sentence."""
        named = ", ".join(self.requests[:_MOST_NAMED])
        more = f" and {len(self.requests) - _MOST_NAMED} more" if len(self.requests) > _MOST_NAMED else ""
        noun = "request" if len(self.requests) == 1 else "requests"
        where = f" at {place}" if (place := getattr(self.error, "where", "")) else ""
        return (
            f"{self.model}: {self.error.message}{where}; it cost {len(self.requests)} {noun} ({named}{more}), "
            f"{self.rows} rows; {self.action}"
        )

    @property
    def plain(self) -> dict[str, object]:
        """The incident as values of JSON."""
        action = getattr(self.error, "recovery_action", None)
        return {
            "schema": SCHEMA,
            "time": self.when.isoformat(timespec="milliseconds"),
            "model": self.model,
            "error": {
                "type": getattr(self.error, "type_name", type(self.error).__name__),
                "where": getattr(self.error, "where", ""),
                "message": self.error.message,
                "recovery_action": None if action is None else str(action.value),
            },
            "cost": {"requests": list(self.requests), "rows": self.rows},
            "action": self.action,
        }


class IncidentLog:
    """Where incidents of one instance of a model go."""

    def __init__(self, model: str, environ: Mapping[str, str] | None = None) -> None:
        self.model = model
        self._path = environment(environ).get(VARIABLE, "")

    def note(
        self, error: PodrunError, requests: Sequence[str], rows: int, action: str
    ) -> ServingIncident | None:
        """Write an incident. None for an error that is not of the IPUs: those are for whoever asked.

        A file that cannot be written to is only logged, because the error itself has to reach the client.
        """
        if not isinstance(error, PoplarError):
            return None
        now = datetime.datetime.now(datetime.UTC)
        incident = ServingIncident(now, self.model, error, tuple(requests), rows, action)
        log.warning("incident: %s", incident.text)
        if self._path:
            try:
                place = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
                try:
                    os.write(place, (json.dumps(incident.plain) + "\n").encode())
                finally:
                    os.close(place)
            except OSError as reason:
                log.warning("incidents cannot be written to %s: %s", self._path, reason.strerror or reason)
        return incident
