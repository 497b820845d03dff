"""Completion of podrun's commands in bash, zsh and fish, with click's own machinery.

`vipu` and the gc tools are click commands, which click completes by itself. `podrun` parses its options with its own
table; for completion that table becomes a click command, which is never run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from podrun.core.environment import environment
from podrun.launcher.option_table import OPTIONS, Option, ValueKind

NAMES = ("podrun", "poprun")
_BEFORE = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }\n"}
"""What a script begins with: a zsh that nobody has set up has no completion at all."""
_FILES = re.compile(r"FILE|DIR|PATH")


def variable(command: str) -> str:
    """The environment variable by which a shell asks a command for completions, as click names it."""
    return f"_{command}_COMPLETE".replace("-", "_").upper()


def script(shell: str) -> str:
    """The script that a shell has to read, for every installed command."""
    kind = get_completion_class(shell)
    assert kind is not None, "the shells of the command line are click's"
    names = [
        entry.name for entry in metadata.distribution("podrun").entry_points.select(group="console_scripts")
    ]
    return _BEFORE.get(shell, "") + (
        "\n".join(kind(click.Command(name), {}, name, variable(name)).source() for name in sorted(names))
        + "\n"
    )


def asked() -> str:
    """The name of podrun's command (of two) that the shell completes."""
    return next(name for name in NAMES if environment().get(variable(name)))


def answer(command: str) -> int:
    """Answer a shell that asks `podrun`."""
    launcher().main(args=[], prog_name=command, complete_var=variable(command), standalone_mode=False)
    return 0


def launcher() -> click.Group:
    """The command line of ``podrun`` as click describes commands: options, verbs, a program and its arguments."""
    from podrun.launcher.fault_commands import faults, inject
    from podrun.upkeep.verbs import VERBS

    made = _Launcher("podrun", params=[_option(option) for option in OPTIONS], add_help_option=False)
    for name, verb in {**VERBS, "faults": faults, "inject": inject}.items():
        made.add_command(verb, name)
    for name, text in _helps().items():
        made.add_command(_by_help(name, text))
    profile = made.commands["profile"]
    known = {word for param in profile.params for word in param.opts}
    profile.params[:0] = [option for option in made.params if not known & set(option.opts)]
    return made


class _Launcher(click.Group):
    """Completes verbs; where no verb fits, files; behind a program only files."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        found = super().shell_complete(ctx, incomplete)
        return found or [CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return args[0], _by_help(args[0], ""), args[1:]


def _helps() -> dict[str, str]:
    """The help texts of verbs that are not made with click."""
    from podrun.compat.__main__ import USAGE
    from podrun.estimate.command import parser
    from podrun.launcher import profile, recording

    texts = {"profile": profile.HELP, "compat": USAGE, "estimate": parser().format_help(), "help": ""}
    return texts | recording.USAGE


class PodName(click.ParamType[str]):
    """The name of a POD, or a file that describes one."""

    name = "pod"

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Names of PODs; files if none fits."""
        from podrun.core.cluster import cluster_names

        found = [CompletionItem(name) for name in cluster_names() if name.startswith(incomplete)]
        return found or [CompletionItem(incomplete, type="file")]


def _by_help(name: str, text: str) -> click.Command:
    """A command whose options are those in its help text, and whose arguments are files."""
    words = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)))
    takes = {word for word in words if re.search(rf"{word}[ =][A-Z]{{2,}}|{word} \{{", text)}
    choices = dict(re.findall(r"(--[a-z-]+) \{([\w,]+)\}", text))
    params: list[click.Parameter] = [
        click.Option([word], is_flag=word not in takes, type=_type_of(word, choices)) for word in words
    ]
    return click.Command(
        name,
        params=[*params, click.Argument(["files"], nargs=-1, type=click.Path())],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    )


def _type_of(word: str, choices: Mapping[str, str]) -> click.ParamType[Any] | None:
    if word in choices:
        return click.Choice(choices[word].split(","))
    return PodName() if word == "--target" else None


def _option(option: Option) -> click.Option:
    names = [f"--{option.name}", *([f"-{option.short}"] if option.short else [])]
    if not option.takes_value:
        return click.Option(names, is_flag=True, help=option.help)
    kind: click.ParamType[Any] = click.STRING
    if option.kind is ValueKind.BOOLEAN:
        kind = click.Choice(["yes", "no"])
    elif option.choices:
        kind = click.Choice(option.choices)
    elif option.name == "cluster":
        kind = PodName()
    elif option.name == "sync-type":
        kind = click.Choice(re.findall(r"ST_\w+", option.help))
    elif _FILES.search(option.metavar):
        kind = click.Path()
    return click.Option(names, type=kind, multiple=option.repeatable, help=option.help)
