"""How ``podrun`` carries out verbs that are made with click, and the form of help and errors of those that read records
(`RecordCommand`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click

from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.relaunch import StartWords, start_podrun

F = TypeVar("F", bound=Callable[..., Any] | click.Command)


ELSEWHERE = {
    "capacity": "podrun.serving.commands.capacity",
    "chaos": "podrun.simulate.commands.chaos",
    "scale": "podrun.simulate.commands.scale",
    "dashboards": "podrun.monitor.commands.dashboards",
    "exporter": "podrun.monitor.commands.exporter",
    "health": "podrun.monitor.commands.health",
    "drill": "podrun.drill.commands.drill",
    "schema": "podrun.monitor.commands.schema",
    "record": "podrun.monitor.commands.record",
    "load": "podrun.serving.commands.load",
    "serve": "podrun.serving.commands.serve",
    "simulate": "podrun.simulate.commands.simulate",
    "top": "podrun.monitor.commands.top",
}
"""Verbs of rooms above the launcher, which use what it decides: each is imported when it is asked for."""


def verb_command(verb: str) -> click.Command:
    """The click command of a verb that has a file of its name in this folder or in another room's."""
    module = ELSEWHERE.get(verb, f"podrun.launcher.commands.{verb}")
    command: click.Command = getattr(import_module(module), f"{verb}_verb")
    return command


@dataclass(frozen=True, slots=True)
class RecordContext:
    """What a verb needs besides its words: the environment of launches, and how they start."""

    environ: Mapping[str, str]
    start: StartWords = start_podrun


class RecordCommand(click.Command):
    """A verb that takes ``records`` records. Its help is written in the form of ``podrun profile --help``, and a wrong
    word is answered with the usage line.
    """

    def __init__(self, *args: Any, usage: str, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "add_help_option": False})
        self.usage = usage

    def get_help(self, ctx: click.Context) -> str:
        """Usage, what the verb does, and its options, as `podrun.launcher` writes help."""
        options = [
            (" ".join(filter(None, [param.opts[0], param.metavar])), param.help or "")
            for param in self.params
            if isinstance(param, click.Option)
        ]
        rows = "".join(f"  {name:<18}{text}\n" for name, text in [*options, ("-h, --help", "this text")])
        return (
            f"Usage: {self.usage}\n\n{self.help}\n\n"
            f"RECORD is a file that podrun --record FILE has written.\n\nOptions:\n{rows}"
        )

    @property
    def help_page(self) -> str:
        """What ``--help`` shows."""
        return self.get_help(click.Context(self))

    def run_words(self, words: Sequence[str], context: RecordContext) -> int:
        """Carry out ``podrun VERB words``; the exit code. Raises UsageError, whose hint is the usage line."""
        if list(words) in (["-h"], ["--help"]):
            sys.stdout.write(self.help_page)
            return 0
        name = f"podrun {self.name}"
        try:
            return int(self.main(list(words), prog_name=name, standalone_mode=False, obj=context))
        except click.NoSuchOption as error:
            raise UsageError(f"{name} has no option {error.option_name}", hint=self.usage) from error
        except click.BadOptionUsage as error:
            raise UsageError(f"{name}: {error.option_name} needs a value", hint=self.usage) from error


def records_argument(count: int) -> Callable[[F], F]:
    """The argument ``records``: so many paths, whose number is checked."""

    def check(context: click.Context, parameter: click.Parameter, files: Sequence[Path]) -> Sequence[Path]:
        if len(files) != count:
            what = ("one record", "two records")[count - 1]
            usage = getattr(context.command, "usage", None)
            raise UsageError(f"podrun {context.command.name} takes {what}, not {len(files)}", hint=usage)
        return files

    return click.argument("records", nargs=-1, type=click.Path(path_type=Path), callback=check)


RECORD_OPTION = click.option(
    "--record", "keep", metavar="FILE", help="record of the new launch (shrink: of the smallest)"
)
DIRECTORY_OPTION = click.option(
    "--directory", metavar="DIR", help="folder for relative paths (shrink: a new one each)"
)
