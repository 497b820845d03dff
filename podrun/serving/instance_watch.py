"""Watches the processes of Triton's instances: the model of one that was killed is loaded again.

Triton keeps a model whose instance's process is gone, and answers each of its requests with an error. `InstanceWatch`
looks at the processes each second. One that is gone while no other has its name, of a model that the server calls
ready, was killed: the folders of its versions get a new time and Triton is asked to load it, which it does beside what
still runs.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from podrun.core.quick_dataclass import dataclass
from podrun.serving.model_folder import versions_of

STUB = "triton_python_backend_stub"
LOOK_SECONDS = 1.0
_ANSWER_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class InstanceProcess:
    """The process of an instance: ``name`` is the instance's, such as ``net_0_1``."""

    model: str
    name: str
    pid: int


def instance_of(pid: int, words: list[str]) -> InstanceProcess | None:
    """The instance that a process runs, by its command: stub, MODEL/VERSION/model.py, ..., instance, backend's
    folder. None for a process that Triton asks for a model's configuration before it loads it: that has the model's
    name for an instance's, and ends by itself.
    """
    if len(words) < 5 or Path(words[0]).name != STUB or Path(words[1]).name != "model.py":
        return None
    model = Path(words[1]).parents[1].name
    return None if words[-2] == model else InstanceProcess(model, words[-2], pid)


def killed_models(
    before: Iterable[InstanceProcess], now: Iterable[InstanceProcess], ready: set[str]
) -> set[str]:
    """Models that lost a process of which no other has the instance's name, though the server calls them ready."""
    names = {(instance.model, instance.name) for instance in now}
    return {i.model for i in before if (i.model, i.name) not in names and i.model in ready}


class InstanceWatch:
    """Watches the processes of Triton's instances: the model of one that was killed is loaded again. ``http``: host and
    port of the server. A context: watches as long as it lasts.
    """

    def __init__(self, server: int, http: str, repository: Path) -> None:
        self._server, self._http, self._repository = server, http, repository
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="podrun-instance-watch", daemon=True)

    def __enter__(self) -> InstanceWatch:
        self._thread.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._ended.set()
        self._thread.join(5.0)

    def _watch(self) -> None:
        seen: dict[int, InstanceProcess] = {}
        suspects: set[str] = set()
        while not self._ended.wait(LOOK_SECONDS):
            now = self._instances()
            gone = [instance for pid, instance in seen.items() if pid not in now]
            lost = killed_models(gone, now.values(), self._ready()) if gone else set()
            for model in lost & suspects:  # Seen twice: not one that is just being replaced or unloaded.
                self._load_again(model)
            suspects = lost - suspects
            kept = {i.pid: i for i in gone if i.model in suspects}
            seen = {**kept, **now}

    def _instances(self) -> dict[int, InstanceProcess]:
        instances = {}
        try:
            family = psutil.Process(self._server).children(recursive=True)
        except psutil.Error:  # The server is gone.
            return {}
        for process in family:
            try:
                words = process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
            except psutil.Error:
                continue
            if (instance := instance_of(process.pid, words)) is not None:
                instances[process.pid] = instance
        return instances

    def _ready(self) -> set[str]:
        try:
            index = json.loads(self._post("/v2/repository/index", {}))
        except (OSError, ValueError):
            return set()
        return {entry["name"] for entry in index if entry.get("state") == "READY"}

    def _load_again(self, model: str) -> None:
        _say(f"a process of model {model} was killed; the model is loaded again")
        try:
            for version in versions_of(self._repository / model).values():
                os.utime(version)  # Triton makes instances anew where a version has changed.
            self._post(f"/v2/repository/models/{model}/load", {})
        except (OSError, ValueError) as error:
            reason = (
                error.read().decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else error
            )
            _say(
                f"model {model} cannot be loaded again: {reason}\n"
                "hint: Start the server again, or load the model with a client."
            )

    def _post(self, path: str, body: Mapping[str, object]) -> bytes:
        request = urllib.request.Request(f"http://{self._http}{path}", json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:  # noqa: S310
            data: bytes = answer.read()
        return data


def _say(text: str) -> None:
    sys.stderr.write(f"podrun serve: {text}\n")
    sys.stderr.flush()
