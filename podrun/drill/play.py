"""A drill as it is played: the POD starts and breaks, answers come from this terminal or from ``podrun drill answer``
in another one, and at the end there is a score and an explanation.

Answers from other terminals are lines of the file ``drill-answers`` in the drill's directory; replies go to
``drill-replies``.
"""

from __future__ import annotations

import logging
import select
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from podrun.core.environment import environment
from podrun.core.errors import ConflictError, DeadlineError, NotFoundError, PodrunError
from podrun.drill.pod import POLL_S, DrillPod
from podrun.drill.scenario import DrillScenario, check_answer_form
from podrun.drill.scoring import DrillScore, Judgement, collateral_damage, judge, score_drill

ANSWERS, REPLIES, READ = "drill-answers", "drill-replies", "drill-read"
SERVICE_LOG = "vipu-server.log"
"""What the service and its machines say, as the log of a server does."""
REPLY_S = 10.0
HINT_WORD, END_WORD = "hint", "give up"
Say = Callable[[str], None]


class DrillGame:
    """The course of a drill that has been broken. ``clock``: seconds that go on evenly."""

    def __init__(self, pod: DrillPod, say: Say, clock: Callable[[], float] = time.monotonic) -> None:
        self._pod, self._say, self._clock = pod, say, clock
        self._scenario = pod.scenario
        self._begin = clock()
        self._struck = not pod.scenario.faults
        self._diagnosed: float | None = None
        self.wrong = self.hints = 0
        self.over = False

    @property
    def seconds(self) -> float:
        """Since the first fault struck, or was planned."""
        return self._clock() - self._begin

    def tick(self) -> None:
        """Look whether faults have struck, the POD is well again, or the time is over."""
        if not self._struck and self._diagnosed is None:
            self._struck = self._pod.has_struck()
            self._begin = self._clock()
        elif self._diagnosed is not None and self._pod.is_healthy():
            self._say("The POD is healthy again.")
            self._diagnosed, self.over = self.seconds, True
        elif self.seconds > self._scenario.limit_s:
            self._say(f"The time is over: {self._scenario.limit_s:.0f} s.")
            self._diagnosed, self.over = None, True

    def hear(self, words: str) -> str:
        """The reply to a line of the player."""
        words = words.strip().lower()
        if words == END_WORD:
            self._diagnosed, self.over = None, True
            return "You give up."
        if words == HINT_WORD:
            if self.hints < len(self._scenario.hints):
                self.hints += 1
                return self._scenario.hints[self.hints - 1]
            return "There are no more hints."
        try:
            check_answer_form(words)
        except PodrunError as error:
            return f"{error.message}. {error.hint}"
        judgement = judge(self._scenario, words)
        if judgement is not Judgement.RIGHT:
            self.wrong += 1
            return f"No: {judgement.value}."
        self._diagnosed = self.seconds
        if self._scenario.repair and not self._pod.is_healthy():
            return "Right. Now make the POD healthy again: podrun health"
        self.over = True
        return "Right."

    def score(self) -> DrillScore:
        """What the player has reached so far."""
        seconds = self._diagnosed
        ended = [] if "job ended" in self._scenario.allowed else self._pod.ended_jobs()
        damage = collateral_damage(self._scenario, self._pod.changes(), ended)
        return score_drill(self._scenario, seconds, self.wrong, self.hints, damage)


def play(scenario: DrillScenario, directory: Path, say: Say) -> DrillScore:
    """Run a drill in an empty directory until it is solved, given up or over. Ctrl-C gives up."""
    say(f"{scenario.title}\n\n{scenario.story}\n\nThe POD starts (up to a minute) ...")
    with _logged_to(directory / SERVICE_LOG):
        return _play(scenario, directory, say)


@contextmanager
def _logged_to(file: Path) -> Iterator[None]:
    """Log to a file meanwhile: on the player's terminal a line about a lost machine would be the answer."""
    handler, logger = logging.FileHandler(file, delay=True), logging.getLogger("podrun")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    propagated, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagated
        handler.close()


def _play(scenario: DrillScenario, directory: Path, say: Say) -> DrillScore:
    pod = DrillPod(scenario, directory, environment())
    try:
        pod.start(say)
        say(f"\nIn another terminal:\n  export PODRUN_RUNTIME_DIR={directory}")
        say(
            f"  podrun top, podrun health, gc-monitor, vipu, vipu-admin, podrun ps, the files above, {SERVICE_LOG}"
        )
        say(f"Answer here or with podrun drill answer TARGET:PLACE:KIND. Also: {HINT_WORD}, {END_WORD}.")
        (directory / ANSWERS).touch()
        pod.break_it()
        game = DrillGame(pod, say)
        heard = _Lines(directory / ANSWERS)
        try:
            while not game.over:
                for line in _typed_lines(POLL_S):
                    say(game.hear(line))
                for line in heard.new():
                    (directory / READ).unlink(missing_ok=True)
                    reply = game.hear(line)
                    with (directory / REPLIES).open("a", encoding="utf-8") as file:
                        file.write(reply.replace("\n", " ") + "\n")
                    say(f"> {line.strip()}\n{reply}")
                if not game.over:
                    game.tick()
        except KeyboardInterrupt:
            say(game.hear(END_WORD))
        _until_read(directory)
        return game.score()
    finally:
        pod.stop()


def _until_read(directory: Path) -> None:
    """Wait briefly until the other terminal has read its reply, before the directory goes."""
    end = time.monotonic() + REPLY_S
    while (directory / REPLIES).exists() and not (directory / READ).exists() and time.monotonic() < end:
        time.sleep(0.05)


def explained(scenario: DrillScenario, score: DrillScore) -> Iterator[str]:
    """The end of a drill in lines: what it was, how to see it, and the score."""
    yield f"\nIt was {scenario.answers[0]}."
    yield scenario.explanation
    yield "Commands that show it:"
    yield from (f"  {command}" for command in scenario.solution)
    solved = "not solved" if score.seconds is None else f"solved in {score.seconds:.0f} s"
    yield f"\n{score.points} points: {solved}, {score.wrong_answers} wrong answers, {score.hints} hints"
    yield from (f"  damage: {one}" for one in score.damage)


class _Lines:
    """New whole lines of a file that others append to."""

    def __init__(self, file: Path) -> None:
        self._file, self._read = file, 0

    def new(self) -> list[str]:
        with self._file.open("rb") as file:
            file.seek(self._read)
            content = file.read(65_536)
        whole = content[: content.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.decode(errors="replace").splitlines()


def _typed_lines(wait_s: float) -> Iterator[str]:
    """Lines typed within some seconds; nothing where standard input is no terminal."""
    if not sys.stdin.isatty():
        time.sleep(wait_s)
        return
    readable, _, _ = select.select([sys.stdin], [], [], wait_s)
    if readable and (line := sys.stdin.readline()).strip():
        yield line


def send_answer(directory: Path, words: str) -> str:
    """Give an answer to the drill of a runtime directory, and return its reply. Raises NotFoundError, DeadlineError."""
    if not (directory / ANSWERS).is_file():
        raise NotFoundError(
            f"no drill runs in {directory}",
            hint="Point at it: export PODRUN_RUNTIME_DIR=DIRECTORY, as the drill says",
        )
    replies = directory / REPLIES
    before = len(replies.read_text(encoding="utf-8").splitlines()) if replies.is_file() else 0
    with (directory / ANSWERS).open("a", encoding="utf-8") as file:
        file.write(words.replace("\n", " ") + "\n")
    end = time.monotonic() + REPLY_S
    while time.monotonic() < end:
        lines = replies.read_text(encoding="utf-8").splitlines() if replies.is_file() else []
        if len(lines) > before:
            (directory / READ).touch()
            return lines[before]
        time.sleep(0.05)
    raise DeadlineError("the drill does not reply", hint="Is it still running? See its terminal.")


def new_directory(parent: Path) -> Path:
    """A directory for a drill, for this user alone. Raises ConflictError if it cannot be made."""
    import tempfile

    try:
        return Path(tempfile.mkdtemp(prefix="podrun-drill-", dir=parent))
    except OSError as error:
        raise ConflictError(
            f"cannot make a directory in {parent}: {error.strerror}", hint="df -h; export TMPDIR=DIRECTORY"
        ) from error


def remove_directory(directory: Path) -> None:
    """Remove a drill's directory with all in it."""
    shutil.rmtree(directory, ignore_errors=True)
