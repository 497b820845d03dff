"""Starting actors together: all of them, or none that stays; one whose process died before it ran is started once more.

A busy cluster now and then loses a worker process between being given to an actor and running it (seen in one of three
runs on two hosts), and takes seconds to notice that a node is gone, on which it goes on placing actors. Nothing of ours
has happened by then, so a second attempt is as good as the first. What ran and failed
is not tried again: it would fail again, and who reads the log would have to find the first error.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from podrun.errors import DeadlineError, PodrunError, ServiceError

log = logging.getLogger("podrun.partition")

_NEVER_RAN = "The actor never ran"
_EXIT = re.compile(
    r"Worker exit type: (?P<type>\w+) Worker exit detail: (?P<detail>.*?)(?: Some common causes|\n|$)"
)
_NODE_DIED = re.compile(r"its node has died\. Node Id: (?P<id>\w{8})\w*\n\s*(?P<detail>.*)")
_NODE = re.compile(r"^\s*ip: (?P<ip>\S+)$", re.MULTILINE)
_UNASKED = ("SYSTEM_ERROR", "INTENDED_SYSTEM_EXIT")
"""Ray's words for processes that no code of the actor's has ended: broken connections, workers it thought idle."""
_POLL_SECONDS = 0.2


class Ray(Protocol):
    """What is used of Ray."""

    exceptions: Any

    def wait(self, refs: list[Any], *, num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        """References that are there, and the others."""

    def get(self, ref: Any) -> Any:
        """What a reference stands for, or its error."""

    def kill(self, actor: Any) -> None:
        """End an actor."""


@dataclass(frozen=True, slots=True)
class Start:
    """An actor that is coming up. ``reply``: Ray's reference to what it says when it is there."""

    actor: Any
    reply: Any


@dataclass(frozen=True, slots=True)
class Death:
    """A process that ended before its actor ran. ``node``: its address, as far as Ray says."""

    node: str
    reason: str


def death_before_running(said: str) -> Death | None:
    """What Ray says of an actor that died, read: None unless its process ended before it ran anything of ours, and not
    by the will of code in it. An error in the actor's code or a shortage that Ray names is no such end."""
    if _NEVER_RAN not in said:
        return None
    if lost := _NODE_DIED.search(said):
        return Death(f"node {lost['id']}", lost["detail"])
    exit_ = _EXIT.search(said)
    if exit_ is None or exit_["type"] not in _UNASKED:
        return None
    node = _NODE.search(said)
    return Death(node["ip"] if node else "a node that Ray does not name", exit_["detail"].rstrip("."))


def start_together(
    begin: Sequence[tuple[str, Callable[[], Start]]],
    ray: Ray,
    *,
    timeout: float,
    hint: str,
    check_wanted: Callable[[], None] = lambda: None,
    clock: Callable[[], float] = time.monotonic,
) -> list[tuple[Any, Any]]:
    """Each one's actor and what it said. ``begin``: what it is called in messages, and what starts it.

    ``check_wanted`` raises ServiceError if nobody waits any more. If one fails all are ended: DeadlineError after
    ``timeout`` seconds, else ServiceError, with ``hint``.
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
                raise DeadlineError(f"not there after {timeout:g} s: {late}", hint=hint)

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
            (start.actor, _said(name, start, ray, hint))
            for (name, _), start in zip(begin, starts, strict=True)
        ]
    except PodrunError:
        for start in starts:
            ray.kill(start.actor)
        raise


def _death(start: Start, ray: Ray) -> Death | None:
    try:
        ray.get(start.reply)
    except ray.exceptions.RayError as error:
        return death_before_running(str(error))
    return None


def _said(name: str, start: Start, ray: Ray, hint: str) -> Any:
    try:
        return ray.get(start.reply)
    except ray.exceptions.RayError as error:
        death = death_before_running(str(error))
        why = (
            f"its process on {death.node} ended twice before it ran ({death.reason})" if death else str(error)
        )
        raise ServiceError(f"{name} did not start: {why}", hint=hint) from error
