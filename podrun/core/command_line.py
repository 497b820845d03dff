"""What podrun's commands have in common, all of them made with click: how they end, errors in one form,
groups that know the nearest command, JSON with a schema version.

    @click.command("podrun doctor", context_settings=HELP_OPTIONS)
    def doctor() -> int: ...

    sys.exit(run_command(doctor))

Click itself guesses what a misspelt option was meant to be, and wraps help at 80 columns. Nothing here imports what is
slow: `--help` answers at once.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import click
from click.shell_completion import CompletionItem

from podrun.core.errors import PodrunError, UnsupportedError, UsageError
from podrun.core.stop_signals import StopRequest
from podrun.core.terminal import error_lines, show_error

JSON_SCHEMA_VERSION = 1
"""Version of what --format json prints."""
AGAIN_SECONDS = 0.1
"""Seconds until a command whose reader has gone is interrupted once more."""
HELP_OPTIONS = {"help_option_names": ["-h", "--help"]}
"""Settings of every command: -h means --help."""


@runtime_checkable
class PrintsJson(Protocol):
    """A command's context that knows whether --format json was given."""

    json: bool


class SuggestingGroup(click.Group):
    """A group that answers an unknown command with the nearest one, and accepts other names for commands.

    ``refused``: commands of the real tool that podrun does not have, with what to do instead.
    """

    def __init__(
        self,
        *args: Any,
        aliases: Mapping[str, str] | None = None,
        refused: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.other_names = dict(aliases or {})
        self.refused = dict(refused or {})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, self.other_names.get(cmd_name, cmd_name))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except PodrunError as error:
            if ctx.parent is None and isinstance(ctx.obj, PrintsJson) and ctx.obj.json:
                plain = {"type": type(error).__name__, "message": error.message, "hint": error.hint or None}
                click.echo(json_text("error", plain))
            raise

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if ctx.parent is None:
            args = self._globals_first(ctx, args)
        return super().parse_args(ctx, args)

    def _globals_first(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Move the root's options before the command: users may put them anywhere, as in the real tools. A command's
        own option of the same name stays where it is."""
        known = {
            name: option
            for option in self.params
            if isinstance(option, click.Option)
            for name in option.opts
            if name not in ("-h", "--help", "--version")
        }
        front: list[str] = []
        rest: list[str] = []
        command: click.Command = self
        queue = list(args)
        while queue:
            word = queue.pop(0)
            if word == "--":
                return [*front, *rest, word, *queue]
            if not word.startswith("-"):
                if isinstance(command, click.Group):
                    command = command.get_command(ctx, word) or command
                rest.append(word)
                continue
            name, equals, _ = word.partition("=")
            own = {} if command is self else {o: p for p in command.params for o in p.opts}
            into = front if name in known and name not in own else rest
            option = known.get(name) if into is front else own.get(name)
            into.append(word)
            if isinstance(option, click.Option) and not (equals or option.is_flag) and queue:
                into.append(queue.pop(0))
        return front + rest

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0] if args else ""
        if hint := self.refused.get(self.other_names.get(name, name)):
            raise UnsupportedError(f"podrun does not have {ctx.command_path} {name}", hint=hint)
        unknown = args and not name.startswith("-") and self.get_command(ctx, name) is None
        if unknown and not ctx.resilient_parsing:  # A shell that asks for completions wants no error.
            known = self.list_commands(ctx)
            others = [other for other, real in self.other_names.items() if real in known]
            close = difflib.get_close_matches(name, [*known, *others], n=1)
            hint = f"Did you mean {close[0]!r}?" if close else f"Commands: {', '.join(known)}."
            raise click.UsageError(f"no such command {name!r}. {hint}", ctx)
        return super().resolve_command(ctx, args)


def run_command(
    command: click.Command, args: Sequence[str] | None = None, *, name: str = "", obj: object = None
) -> int:
    """Run a command; prints errors to stderr and returns the exit code (0, 1, 2, or 130 after Ctrl-C).

    ``name``: what errors call the command, if it is started otherwise than by its own name, as in
    ``python -m podrun.report``. ``obj``: see `click.Context`.
    """
    typed = command.name or ""
    said = name or typed
    try:
        result = command.main(
            args=None if args is None else list(args), prog_name=typed, standalone_mode=False, obj=obj
        )
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else typed
        message = error.format_message()
        sys.stderr.write(error_lines(said, message[:1].lower() + message[1:], f"{where} --help"))
        return error.exit_code
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    except UnicodeEncodeError as error:
        words = sys.argv[1:] if args is None else args
        if not any(error.object[error.start : error.end] in word for word in words):
            raise
        show_error(said, UsageError(f"{error.object!r} is no text in UTF-8", hint="Type it anew."))
        return 2
    except PodrunError as error:
        show_error(said, error)
        return error.exit_code
    return int(result) if isinstance(result, int) else 0


def json_text(key: str, value: object) -> str:
    """One JSON object with the schema version and ``value`` under ``key``."""
    return json.dumps({"schema_version": JSON_SCHEMA_VERSION, key: value}, indent=2)


class FiniteNumber(click.ParamType[float]):
    """A number without bounds, neither infinite nor NaN, which `click.FLOAT` takes."""

    name = "float"

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails as click's types do."""
        return _finite(self, click.FLOAT.convert(value, param, ctx), param, ctx)


class FiniteRange(click.FloatRange):
    """A number within bounds, at least one of them, neither infinite nor NaN, which `click.FloatRange` takes."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails as click's types do."""
        return _finite(self, super().convert(value, param, ctx), param, ctx)


def _finite(
    kind: click.ParamType[float], number: float, param: click.Parameter | None, ctx: click.Context | None
) -> float:
    if not math.isfinite(number):
        kind.fail(f"{number} is no finite number.", param, ctx)
    return number


MOST_SECONDS = 9_999_999
"""Longest time that an option takes: four months. Clocks and waits of the system overflow far above."""


def seconds_range(least: float = 0.0) -> FiniteRange:
    """Seconds from a least number on."""
    return FiniteRange(least, MOST_SECONDS)


class PodName(click.ParamType[str]):
    """The name of a POD, or a file that describes one."""

    name = "pod"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Names of PODs; files if none fits."""
        from podrun.core.cluster import cluster_names

        names = [CompletionItem(name) for name in cluster_names() if name.startswith(incomplete)]
        return names or [CompletionItem(incomplete, type="file")]


def run_while_read(body: Callable[[], object]) -> None:
    """Run the body of a command that prints until Ctrl-C; end it when nobody reads standard output any more
    (``| head``). A command that has nothing to print would wait for ever. In another thread than the main one, which
    alone is interrupted, it just runs the body."""
    if threading.current_thread() is not threading.main_thread():
        body()
        return
    try:
        output = os.dup(
            sys.stdout.fileno()
        )  # Stays the pipe when `podrun.commands` puts /dev/null in its place.
    except (OSError, ValueError):  # Not a file of the system.
        body()
        return
    gone, interrupted = threading.Event(), StopRequest()
    over, end = os.pipe()

    def wait() -> None:
        poll = select.poll()
        poll.register(output, 0)  # Errors alone: the other end is closed.
        poll.register(over, select.POLLIN)
        if all(number == output for number, _ in poll.poll()):
            gone.set()
            # A signal just before the main thread begins to wait does not end that wait.
            while not interrupted.is_set():
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                interrupted.wait(AGAIN_SECONDS)

    def interrupt(number: int, frame: FrameType | None) -> None:
        if gone.is_set() and not interrupted.is_set():
            interrupted.set()
            raise KeyboardInterrupt
        if callable(before) and not gone.is_set():
            before(number, frame)

    waiting = threading.Thread(target=wait, name="podrun-reader", daemon=True)
    before = signal.signal(signal.SIGINT, interrupt)
    try:
        waiting.start()
        body()
    except KeyboardInterrupt:
        if not gone.is_set():
            raise
    finally:
        interrupted.set()
        os.close(end)
        waiting.join()
        signal.signal(signal.SIGINT, before)
        os.close(over)
        os.close(output)
