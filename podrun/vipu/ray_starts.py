"""Starts actors together, all or none. An actor whose process died before it ran is started once more.

A busy cluster sometimes loses a worker process before its actor runs (in one of three runs on two hosts), and goes on
placing actors for seconds on a node that is gone. None of podrun's code has run by then, so a second attempt is safe.
An actor that ran and failed is not started again: it would fail again and hide the first error.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from podrun.core.errors import DeadlineError, PodrunError, ServiceError

log = logging.getLogger("podrun.vipu")

_NEVER_RAN = "The actor never ran"
_EXIT = re.compile(
    r"Worker exit type: (?P<type>\w+) Worker exit detail: (?P<detail>.*?)(?: Some common causes|\n|$)"
)
_NODE_DIED = re.compile(r"its node has died\. Node Id: (?P<id>\w{8})\w*\n\s*(?P<detail>.*)")
_NODE = re.compile(r"^\s*ip: (?P<ip>\S+)$", re.MULTILINE)
_NOT_BY_ITS_CODE = ("SYSTEM_ERROR", "INTENDED_SYSTEM_EXIT")
"""Ray's words for processes that the actor's code did not end: broken connections, workers it took for idle."""
_POLL_SECONDS = 0.2


class RayCalls(Protocol):
    """The calls of Ray that this module uses."""

    exceptions: Any

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """References whose values have arrived, and the others."""

    def get(self, ref: Any) -> Any:
        """The value of a reference; raises its error."""

    def kill(self, actor: Any) -> None:
        """End an actor."""


@dataclass(frozen=True, slots=True)
class ActorStart:
    """An actor that is starting. ``reply``: Ray's reference to its first answer."""

    actor: Any
    reply: Any


@dataclass(frozen=True, slots=True)
class ActorDeath:
    """A process that ended before its actor ran. ``node``: its address, if Ray names it."""

    node: str
    reason: str


def death_before_running(said: str) -> ActorDeath | None:
    """Parse Ray's message about a dead actor; None unless its process ended before the actor's code ran. An error in
    that code, or a shortage that Ray names, gives None."""
    if _NEVER_RAN not in said:
        return None
    if lost := _NODE_DIED.search(said):
        return ActorDeath(f"node {lost['id']}", lost["detail"])
    exit_ = _EXIT.search(said)
    if exit_ is None or exit_["type"] not in _NOT_BY_ITS_CODE:
        return None
    node = _NODE.search(said)
    return ActorDeath(node["ip"] if node else "a node that Ray does not name", exit_["detail"].rstrip("."))


def start_together(
    begin: Sequence[tuple[str, Callable[[], ActorStart]]],
    ray: RayCalls,
    *,
    timeout: float,
    hint: str,
    check_wanted: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Any, Any]]:
    """Start actors and wait for their first answers; returns actor and answer of each.

    ``begin``: the name of each in messages, and the function that starts it. ``check_wanted`` raises ServiceError if
    the result is no longer wanted. If one fails, all are ended and ``hint`` comes with the error: DeadlineError after
    ``timeout`` seconds, else ServiceError.
    """
    starts = [start() for _, start in begin]
    end = clock() + timeout

    def wait() -> None:
        while True:
            check_wanted()
            replies = [start.reply for start in starts]
            _, waiting = ray.wait(replies, num_returns=len(replies), timeout=_POLL_SECONDS)
            if not waiting:
                return
            if clock() >= end:
                late = ", ".join(
                    name for (name, _), reply in zip(begin, replies, strict=True) if reply in waiting
                )
                raise DeadlineError(f"not up after {timeout:g} s: {late}", hint=hint)

    try:
        wait()
        for i, (name, again) in enumerate(begin):
            death = _death(starts[i], ray)
            if death is not None:
                log.warning(
                    "the process of %s on %s ended before it ran (%s); starting it once more",
                    *(name, death.node, death.reason),
                )
                starts[i] = again()
        wait()
        return [
            (start.actor, _answer(name, start, ray, hint))
            for (name, _), start in zip(begin, starts, strict=True)
        ]
    except PodrunError:
        for start in starts:
            ray.kill(start.actor)
        raise


def _death(start: ActorStart, ray: RayCalls) -> ActorDeath | None:
    try:
        ray.get(start.reply)
    except ray.exceptions.RayError as error:
        return death_before_running(str(error))
    return None


def _answer(name: str, start: ActorStart, ray: RayCalls, hint: str) -> Any:
    try:
        return ray.get(start.reply)
    except ray.exceptions.RayError as error:
        death = death_before_running(str(error))
        why = (
            f"its process on {death.node} ended twice before it ran ({death.reason})" if death else str(error)
        )
        raise ServiceError(f"{name} did not start: {why}", hint=hint) from error
