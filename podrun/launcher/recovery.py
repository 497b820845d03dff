"""Recovery under supervision: what happens after the instances of a launch have failed. Pure: no I/O, no clock.

`damage_of` reads from the machines' reports what is broken. `Coordinator.failed` takes how an attempt ended and answers
with a `Recovery`, the steps that make the IPUs usable again before the instances start once more, or with a `Verdict`:
no recovery helps. One coordinator decides for all instances; `podrun.launcher.repair` carries out its decisions.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import Any

from podrun.core.documents import Document, load_schema, read_document
from podrun.core.errors import RecoveryAction
from podrun.core.ipu_states import IpuErrorState
from podrun.core.quick_dataclass import dataclass
from podrun.core.telemetry import IpuReport, MachineReport


@dataclass(frozen=True, slots=True)
class EndingTimes:
    """Seconds in which a launch ends after a failure: ``settle`` from the first failure to SIGTERM for the others,
    ``grace`` from there to SIGKILL, ``end`` from there until podrun gives up on an instance (its host does not answer).
    The supervisor and simulations read the same value."""

    settle: float = 1.0
    grace: float = 3.0
    end: float = 5.0


ENDING_TIMES = EndingTimes()


class FailureKind(enum.Enum):
    """What failed, from the mildest to the worst; the values are the keys of a policy's ``after``."""

    PROGRAM = "program-error"
    """An instance ended, and nothing of the partition is broken."""
    TILE_EXCEPTION = "tile-exception"
    """Tiles stopped in an exception: an error of the program, cleared by loading it again."""
    IPU = "ipu-error"
    """An IPU needs IPU_RESET."""
    LINK = "link-down"
    """A link is down, or something else needs PARTITION_RESET."""
    POWER = "power-fault"
    """A machine needs FULL_RESET."""
    LOST = "machine-lost"
    """A machine is gone, or failed for good."""


class Answer(enum.Enum):
    """What a policy answers to a failure."""

    RESTART = "restart"
    """Do the recovery action that the error names, and start the instances again."""
    SPARE = "spare"
    """Use the same number of IPUs elsewhere: a new partition without the lost machine."""
    REPLACE = "replace"
    """Put a fresh machine in place of the lost one (``vipu-admin restart agent``), and reset."""
    FEWER = "fewer-replicas"
    """Go on with half as many replicas, or a quarter, on the machines that are left."""
    STOP = "stop"
    """End the launch."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """What to do after failures. ``max_restarts`` 0: nothing. ``crash_loop_after``: that many attempts that end alike,
    none further in the training than the others, end the launch. ``after``: answers by kind of failure, tried in order.
    """

    max_restarts: int = 0
    crash_loop_after: int = 3
    pause_seconds: float = 0.0
    min_replicas: int = 1
    after: Mapping[FailureKind, tuple[Answer, ...]] = field(default_factory=dict)

    def answers(self, kind: FailureKind) -> tuple[Answer, ...]:
        """The answers to a kind of failure."""
        usual = (Answer.SPARE, Answer.REPLACE) if kind is FailureKind.LOST else (Answer.RESTART,)
        return self.after.get(kind, usual)


EXAMPLE = (
    "As in: version: 1, max-restarts: 3, after: {machine-lost: [spare, fewer-replicas]} (podrun help faults)."
)


def read_policy(path: Path) -> RestartPolicy:
    """The policy in a YAML or JSON file. Raises NotFoundError, or ConfigError that names file, line and key."""
    return policy_of(read_document(path, hint=EXAMPLE))


def policy_of(document: Document) -> RestartPolicy:
    """The policy in a document that has been read. Raises ConfigError that names file, line and key."""
    document.check(load_schema("podrun.launcher", "restart-policy.schema.json"), hint=EXAMPLE)
    values: dict[str, Any] = document.value
    usual = RestartPolicy()
    after: dict[FailureKind, tuple[Answer, ...]] = {}
    for name, value in values.get("after", {}).items():
        words = value if isinstance(value, list) else [value]
        after[FailureKind(name)] = tuple(map(Answer, words))
    return RestartPolicy(
        max_restarts=values.get("max-restarts", 3),
        crash_loop_after=values.get("crash-loop-after", usual.crash_loop_after),
        pause_seconds=float(values.get("pause-seconds", usual.pause_seconds)),
        min_replicas=values.get("min-replicas", usual.min_replicas),
        after=after,
    )


# --- what is broken --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Damage:
    """What is broken in a partition.

    ``ipus``: partition indices of IPUs that need IPU_RESET. ``links``: the ends of links that are down. ``power``,
    ``lost``: agents. ``partition``: something else needs PARTITION_RESET. ``words``: the states that machines report,
    each once.
    """

    ipus: tuple[int, ...] = ()
    tile_exceptions: tuple[int, ...] = ()
    links: tuple[tuple[int, int], ...] = ()
    power: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    partition: bool = False
    words: tuple[str, ...] = ()

    @property
    def kind(self) -> FailureKind:
        """The worst kind of failure among them."""
        broken = (
            (self.lost, FailureKind.LOST),
            (self.power, FailureKind.POWER),
            (self.links or self.partition, FailureKind.LINK),
            (self.ipus, FailureKind.IPU),
            (self.tile_exceptions, FailureKind.TILE_EXCEPTION),
        )
        return next((kind for there, kind in broken if there), FailureKind.PROGRAM)


def damage_of(reports: Iterable[MachineReport]) -> Damage:
    """What the machines of a partition report as broken."""
    damage, words = Damage(), []
    for report in reports:
        if report.state.is_silent:
            damage = replace(damage, lost=(*damage.lost, report.agent_id))
            words.append(f"machine {report.agent_id} lost")
            continue
        for ipu in report.ipus:
            damage = _with_ipu(damage, report.agent_id, ipu, words)
    return replace(damage, words=tuple(dict.fromkeys(words)))


def _with_ipu(damage: Damage, agent: str, ipu: IpuReport, words: list[str]) -> Damage:
    number = ipu.partition_ipu
    for other in ipu.links_down:
        ends = (min(number, other), max(number, other))
        words.append(f"IPU-Link {ends[0]}-{ends[1]} down")
        damage = replace(damage, links=tuple(sorted({*damage.links, ends})))
    if ipu.error_state in (IpuErrorState.NO_ERRORS, IpuErrorState.NOT_READY):
        return damage
    resets = ipu.recovery_action is RecoveryAction.PARTITION_RESET
    whole = resets or ipu.recovery_action in (None, RecoveryAction.FULL_RESET)
    words.append(f"{ipu.error_state} of {f'machine {agent}' if whole else f'IPU {number}'}")
    if ipu.recovery_action is None:
        return replace(damage, lost=tuple(dict.fromkeys((*damage.lost, agent))))
    if resets:
        return replace(damage, partition=True)
    if whole:
        return replace(damage, power=tuple(dict.fromkeys((*damage.power, agent))))
    if ipu.error_code.is_tile_exception:
        return replace(damage, tile_exceptions=(*damage.tile_exceptions, number))
    return replace(damage, ipus=(*damage.ipus, number))


def without_partition(damage: Damage, what: str) -> Damage:
    """The damage of a partition that is not active, for a reason that ``what`` says: at least a reset is needed."""
    if damage.lost or damage.power or damage.links or damage.partition:
        return damage
    return replace(damage, partition=True, words=(*damage.words, what))


# --- what is done about it -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ResetTheseIpus:
    """Recovery step IPU_RESET: reset the IPUs that the error names."""

    ipus: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ResetThePartition:
    """Recovery step PARTITION_RESET: reset all IPUs of the partition."""


@dataclass(frozen=True, slots=True)
class PowerCycleMachine:
    """FULL_RESET of an agent's machine."""

    agent: str


@dataclass(frozen=True, slots=True)
class ReplaceMachine:
    """A fresh machine at an agent."""

    agent: str


@dataclass(frozen=True, slots=True)
class TakeSpare:
    """A new partition of the same size without lost machines. Impossible where there is no room."""


@dataclass(frozen=True, slots=True)
class GoOnWithFewer:
    """A new partition for half as many replicas, or a quarter, and so on, but at least ``at_least``."""

    at_least: int


RecoveryStep = (
    ResetTheseIpus | ResetThePartition | PowerCycleMachine | ReplaceMachine | TakeSpare | GoOnWithFewer
)


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one attempt of all instances ended. ``cause``: the first instance that failed and how, in words; ``batches``:
    how many it did (None: unknown, no machine is left to tell); ``seconds``: how long it took. ``reached``: the batch
    of the training that it came to, counted from the training's first batch and not from the checkpoint it began with;
    None: unknown. ``in_recovery``: it ended before instances started.
    """

    cause: str
    code: int
    damage: Damage
    batches: int | None = 0
    seconds: float = 0.0
    reached: int | None = None
    in_recovery: bool = False

    @property
    def text(self) -> str:
        """The attempt in words."""
        broken = f" ({', '.join(self.damage.words)})" if self.damage.words else ""
        return f"{self.cause}{'' if self.in_recovery else self._how_far}{broken}"

    @property
    def _how_far(self) -> str:
        if self.batches is not None:
            return f" after {self.batches} {'batch' if self.batches == 1 else 'batches'}"
        return "" if self.reached is None else f" at batch {self.reached} of the training"

    def is_like(self, other: Attempt) -> bool:
        """True iff both ended in the same way at the same batch of the training, as far as that is known."""
        if self.in_recovery or other.in_recovery or self._place is None:
            return False
        return (self.code, self.damage, self._place) == (other.code, other.damage, other._place)

    @property
    def _place(self) -> int | None:
        return self.batches if self.reached is None else self.reached


@dataclass(frozen=True, slots=True)
class Recovery:
    """Start the instances again after ``pause_seconds`` and the first possible one of ``ways``. ``number``: of the
    restart, from 1.
    """

    number: int
    ways: tuple[tuple[RecoveryStep, ...], ...]
    pause_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The instances do not start again. ``text``: why, and how each attempt ended."""

    text: str


class Coordinator:
    """Decides for all instances of a launch. ``attempts``: how each ended so far. A recovery that fails half-way,
    because something else breaks meanwhile, is an attempt that failed too.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self.policy = policy
        self.attempts: list[Attempt] = []

    def failed(self, attempt: Attempt) -> Recovery | Verdict:
        """What to do about a failed attempt."""
        self.attempts.append(attempt)
        kind = attempt.damage.kind
        answers = self.policy.answers(kind)
        restarts = len(self.attempts) - 1
        if answers[0] is Answer.STOP:
            return self._verdict(f"the policy stops after {kind.value}")
        if restarts >= self.policy.max_restarts:
            return self._verdict(f"{restarts} restarts, as many as are allowed, did not help")
        last = self.attempts[-self.policy.crash_loop_after :]
        if len(last) == self.policy.crash_loop_after and all(attempt.is_like(other) for other in last):
            return self._verdict(f"crash loop: the last {len(last)} attempts ended alike")
        until = answers.index(Answer.STOP) if Answer.STOP in answers else len(answers)
        ways = tuple(self._way(answer, attempt.damage) for answer in answers[:until])
        return Recovery(restarts + 1, ways, self.policy.pause_seconds)

    def impossible(self) -> Verdict:
        """The verdict when no way of a recovery was possible."""
        return self._verdict("there is no machine to go on with")

    def broke_off(self, why: str) -> Verdict:
        """The verdict when nobody says what is broken: the partition service stays away."""
        return self._verdict(f"the recovery failed: {why}")

    def _way(self, answer: Answer, damage: Damage) -> tuple[RecoveryStep, ...]:
        if answer is Answer.SPARE:
            return (TakeSpare(),)
        if answer is Answer.FEWER:
            return (GoOnWithFewer(self.policy.min_replicas),)
        replaced: Sequence[RecoveryStep] = tuple(map(ReplaceMachine, damage.lost))
        cycled: Sequence[RecoveryStep] = tuple(map(PowerCycleMachine, damage.power))
        if replaced or cycled or damage.links or damage.partition:
            return (*replaced, *cycled, ResetThePartition())
        ipus = tuple(sorted({*damage.ipus, *damage.tile_exceptions}))
        return (ResetTheseIpus(ipus),) if ipus else ()

    def _verdict(self, why: str) -> Verdict:
        lines = [f"  attempt {number}: {attempt.text}" for number, attempt in enumerate(self.attempts, 1)]
        return Verdict("\n".join([why, *lines]))
