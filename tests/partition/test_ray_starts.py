"""Actors that start together, on a fake Ray whose processes die on demand."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import pytest

from podrun.core.errors import DeadlineError, ServiceError
from podrun.partition.machines.ray_starts import ActorDeath, ActorStart, death_before_running, start_together

# As Ray 2.60 says it (tests/partition/test_ray_system.py makes it say so).
NEVER_RAN = """The actor died unexpectedly before finishing this task.
\tclass_name: MachineActor
\tpid: 24754
\tip: 10.0.0.2
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: \
Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the process \
was killed by the OOM killer due to high memory usage.
The actor never ran - it was cancelled before it started running."""
NODE_DIED = """The actor died unexpectedly before finishing this task.
	class_name: MachineActor
	namespace: podrun
The actor died because its node has died. Node Id: 4e9c9d84364899f969e0657a96a638f51e39acf9e42057d0663a0be3
	the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats
The actor never ran - it was cancelled before it started running."""
REASON = "Worker unexpectedly exits with a connection error code 2. End of file"


class RayError(Exception):
    pass


class OutOfMemoryError(RayError):
    pass


@dataclass
class PretendedRay:
    """``outcomes``: what each start of an actor comes to, by its name; None: it never answers."""

    outcomes: dict[str, list[str | None]]
    begun: list[str] = field(default_factory=list)
    killed: list[str] = field(default_factory=list)
    now: float = 0.0
    exceptions: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(RayError=RayError, OutOfMemoryError=OutOfMemoryError)
    )

    def begin(self, name: str) -> ActorStart:
        self.begun.append(name)
        outcome = self.outcomes[name].pop(0)
        return ActorStart(f"{name}.{self.begun.count(name)}", (name, outcome))

    def wait(
        self, refs: list[tuple[str, str | None]], *, num_returns: int, timeout: float
    ) -> tuple[list[tuple[str, str | None]], list[tuple[str, str | None]]]:
        self.now += timeout
        assert num_returns == len(refs)
        return [r for r in refs if r[1] is not None], [r for r in refs if r[1] is None]

    def get(self, ref: tuple[str, str | None]) -> str:
        assert ref[1] is not None
        if ref[1].startswith("the endpoint"):
            return ref[1]
        raise RayError(ref[1])

    def kill(self, actor: str) -> None:
        self.killed.append(actor)

    def start(self, wanted: list[bool] | None = None) -> list[tuple[str, str]]:
        left = wanted or [True] * 1000

        def check() -> None:
            if not left.pop(0):
                raise ServiceError("the pool was closed")

        begin = [(f"machine {name}", partial(self.begin, name)) for name in self.outcomes]
        return start_together(
            begin, self, timeout=2.0, hint="Try again.", check_wanted=check, clock=lambda: self.now
        )


def test_a_process_that_died_before_it_ran_is_started_once_more_and_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "podrun.partition")
    ray = PretendedRay({"a": ["the endpoint of a"], "b": [NEVER_RAN, "the endpoint of b"]})
    assert ray.start() == [("a.1", "the endpoint of a"), ("b.2", "the endpoint of b")]
    assert (ray.begun, ray.killed) == (["a", "b", "b"], [])
    assert [record.getMessage() for record in caplog.records] == [
        f"the process of machine b on 10.0.0.2 ended before it ran ({REASON}); starting it once more"
    ]


@pytest.mark.parametrize(
    ("outcomes", "says", "begun"),
    [
        (
            [NEVER_RAN, NEVER_RAN],
            r"machine b did not start: its process on 10\.0\.0\.2 ended twice before",
            2,
        ),
        ([NEVER_RAN, "no such port"], "machine b did not start: no such port", 2),
        (["no such port"], "machine b did not start: no such port", 1),
    ],
    ids=["dies twice", "fails then", "fails"],
)
def test_one_failure_ends_all_actors_and_has_a_hint(
    outcomes: list[str | None], says: str, begun: int
) -> None:
    ray = PretendedRay({"a": ["the endpoint of a"], "b": outcomes})
    with pytest.raises(ServiceError, match=says) as caught:
        ray.start()
    assert caught.value.hint == "Try again."
    assert ray.begun.count("b") == begun
    assert ray.killed == ["a.1", f"b.{begun}"]


def test_an_actor_that_never_answers_is_named() -> None:
    ray = PretendedRay({"a": ["the endpoint of a"], "b": [NEVER_RAN, None]})
    with pytest.raises(DeadlineError, match=r"not up after 2 s: machine b$"):
        ray.start()
    assert ray.killed == ["a.1", "b.2"]


def test_a_start_that_is_no_longer_wanted_ends() -> None:
    ray = PretendedRay({"a": [None]})
    with pytest.raises(ServiceError, match="the pool was closed"):
        ray.start([True, True, False])
    assert ray.killed == ["a.1"]


def test_which_messages_of_ray_mean_death_before_running() -> None:
    assert death_before_running(NEVER_RAN) == ActorDeath("10.0.0.2", REASON)
    assert death_before_running(NEVER_RAN.replace("\tip: 10.0.0.2\n", "")) == ActorDeath(
        "a node that Ray does not name", REASON
    )
    for said in (NEVER_RAN, NODE_DIED):
        assert death_before_running(said.rpartition("\n")[0]) is None, "it ran"
    assert death_before_running(NODE_DIED) == ActorDeath(
        "node 4e9c9d84",
        "the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats",
    )
    for kind in ("USER_ERROR", "INTENDED_USER_EXIT", "NODE_OUT_OF_MEMORY"):
        assert death_before_running(NEVER_RAN.replace("SYSTEM_ERROR", kind)) is None, kind
    assert death_before_running("The actor died because of an error raised in its creation task, ...") is None


def test_a_machine_that_rays_memory_monitor_ends_as_it_starts_is_told_in_one_line() -> None:
    long = "Memory on the node (IP: 10.0.0.7, ID: 2f18) was 5.90GB used / 23.54GB limit (0.25)\n- bytes spillable: 0"

    class Ray(PretendedRay):
        def get(self, ref: tuple[str, str | None]) -> str:
            if ref[0] == "b":
                raise OutOfMemoryError(long)
            return super().get(ref)

    with pytest.raises(ServiceError) as caught:
        Ray({"a": ["the endpoint of a"], "b": ["ends"]}).start()
    phrase = "Ray's memory monitor ended its process when 5.90GB of 23.54GB were used on 10.0.0.7"
    assert caught.value.message == f"machine b did not start: {phrase}"
    assert "RAY_memory_monitor_refresh_ms=0" in caught.value.hint
