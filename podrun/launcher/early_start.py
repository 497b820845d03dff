"""Starts the interpreters of a program while the launch is planned, so that both import at once.

What a program imports takes more than a second of a core, and so does all that `podrun` does before instances start.
`early_instances` starts the processes that the instances of this host are probably going to be. They import what the
program is going to (`early/sitecustomize.py`) and wait. `take` gives the process of an instance whose command,
directory, input and environment are those that were supposed; every other instance starts as if there were none.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from podrun.core.environment import PODRUN_EARLY_START, PODRUN_LAUNCH_ID
from podrun.core.trampoline import tied_words
from podrun.launcher.spec import own_environment
from podrun.partition.host.discovery import own_process_id

if TYPE_CHECKING:
    from podrun.launcher.process import Command

FOLDER = Path(__file__).with_name("early")
KNOWN_LATER = ("IPUOF_", "OMPI_", "PODRUN_", "POPDIST_", "POPLAR_TARGET_")
"""How the names of variables begin that nothing reads before the program runs."""


@dataclass(slots=True)
class EarlyInstance:
    """A process that waits to be an instance."""

    instance: int
    words: tuple[str, ...]
    directory: str
    stdin: int | None
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes]
    tell: IO[bytes]
    """The pipe that its environment goes into."""

    def is_for(self, command: Command) -> bool:
        """Whether the process is what would be started for a command."""
        return (
            (self.words, self.directory, self.stdin) == (command.words, command.directory, command.stdin)
            and _early_part(self.environment) == _early_part(command.environment)
        )  # fmt: skip

    def begin(self, environment: Mapping[str, str]) -> bool:
        """Let the program begin, with this environment. False if the process has ended."""
        try:
            with self.tell as pipe:
                pipe.write(json.dumps(dict(environment)).encode())
        except BrokenPipeError:
            return False
        return True

    def end(self) -> None:
        """End the process."""
        with contextlib.suppress(BrokenPipeError):
            self.tell.close()
        with self.process as process:
            process.kill()


_waiting: list[EarlyInstance] = []


def _early_part(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(KNOWN_LATER)}


@contextlib.contextmanager
def early_instances(
    options: Mapping[str, Any], program: Sequence[str], environ: Mapping[str, str]
) -> Iterator[None]:
    """Start the processes; those that are not taken end with the context. None start for anything but a script, and
    no more than the host has cores."""
    count = options.get("num-instances", 1)
    script = bool(program) and program[0].endswith(".py") and os.path.isfile(program[0])
    if script and count <= len(os.sched_getaffinity(0)):
        debug = bool(options.get("debug"))
        with contextlib.suppress(OSError):  # Whatever is wrong, the launch says.
            _waiting.extend(_start(instance, program, environ, debug=debug) for instance in range(count))
    try:
        yield
    finally:
        while _waiting:
            _waiting.pop().end()


def take(command: Command) -> subprocess.Popen[bytes] | None:
    """The process that waited to run a command, which it does now; None if none did. Call it in the thread that
    started them."""
    near = [early for early in _waiting if early.instance == command.instance]
    for early in near:
        _waiting.remove(early)
        if early.is_for(command) and early.begin(command.environment):
            return early.process
        early.end()
    return None


def _start(
    instance: int, program: Sequence[str], environ: Mapping[str, str], *, debug: bool
) -> EarlyInstance:
    directory, words = os.getcwd(), (sys.executable, *program)
    environment = own_environment(environ, debug=debug)
    owner, stdin = own_process_id(), forwarded_stdin() if instance == 0 else None
    read, write = os.pipe()
    try:
        process = subprocess.Popen(
            tied_words(list(words)),
            env=environment
            | {
                "PYTHONPATH": f"{FOLDER}:{environment['PYTHONPATH']}",
                PODRUN_LAUNCH_ID: f"{owner.pid}-{owner.start_ticks}",
                PODRUN_EARLY_START: str(read),
            },
            pass_fds=[read],
            stdin=subprocess.DEVNULL if stdin is None else stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
        )
    finally:
        os.close(read)
    return EarlyInstance(instance, words, directory, stdin, environment, process, open(write, "wb"))


def forwarded_stdin() -> int | None:
    """The input of instance 0: what is piped into podrun. A terminal cannot be given to a background process group."""
    if sys.stdin is None or sys.stdin.closed:
        return None
    try:
        number = sys.stdin.fileno()
        return None if os.isatty(number) else number
    except (OSError, ValueError):
        return None
