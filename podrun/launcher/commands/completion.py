"""Completion of podrun's commands in bash, zsh and fish, with click's own machinery.

`vipu` and the gc tools are click commands, which click completes by itself. `podrun` parses its options with its own
table; for completion that table becomes a click command, which is never run.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from podrun.core.command_line import HELP_OPTIONS, PodName
from podrun.core.environment import environment
from podrun.core.errors import present
from podrun.launcher.option_table import OPTIONS, Option, ValueKind

NAMES = ("podrun", "poprun")
_BEFORE = {"zsh": "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit -i; }\n"}
"""What a script begins with: a zsh that nobody has set up has no completion at all."""
_FILES = re.compile(r"FILE|DIR|PATH")


def completion_variable(command: str) -> str:
    """The environment variable by which a shell asks a command for completions, as click names it."""
    return f"_{command}_COMPLETE".replace("-", "_").upper()


def completion_script(shell: str) -> str:
    """The script that a shell has to read, for every installed command."""
    kind = present(get_completion_class(shell), "the shells of the command line are click's")
    names = [
        entry.name for entry in metadata.distribution("podrun").entry_points.select(group="console_scripts")
    ]
    return _BEFORE.get(shell, "") + (
        "\n".join(
            kind(click.Command(name), {}, name, completion_variable(name)).source() for name in sorted(names)
        )
        + "\n"
    )


def asking_command() -> str:
    """The name of podrun's command (of two) that the shell completes."""
    return next(name for name in NAMES if environment().get(completion_variable(name)))


def answer_shell(command: str) -> int:
    """Answer a shell that asks `podrun`."""
    launcher_command().main(
        args=[], prog_name=command, complete_var=completion_variable(command), standalone_mode=False
    )
    return 0


def launcher_command() -> click.Group:
    """The command line of ``podrun`` as click describes commands: options, verbs, a program and its arguments."""
    command = _Launcher("podrun", params=[_option(option) for option in OPTIONS], add_help_option=False)
    for name, verb in _click_verbs().items():
        command.add_command(verb, name)
    for name, text in _helps().items():
        command.add_command(_by_help(name, text))
    profile = command.commands["profile"]
    known = {word for param in profile.params for word in param.opts}
    profile.params[:0] = [option for option in command.params if not known & set(option.opts)]
    return command


def _click_verbs() -> dict[str, click.Command]:
    """The verbs that are made with click."""
    from podrun.compat.__main__ import compat_command
    from podrun.estimate.command import estimate_command
    from podrun.launcher.commands.click_verbs import verb_command
    from podrun.launcher.commands.verb_names import (
        MONITOR_VERBS,
        RECORD_VERBS,
        SERVING_VERBS,
        SIMULATION_VERBS,
    )
    from podrun.upkeep.verbs import VERBS

    return {
        **VERBS,
        "estimate": estimate_command,
        "compat": compat_command,
        **{
            verb: verb_command(verb)
            for verb in (
                *("faults", "inject", "completion", *RECORD_VERBS),
                *(*SIMULATION_VERBS, *SERVING_VERBS, *MONITOR_VERBS),
            )
        },
    }


class _Launcher(click.Group):
    """Completes verbs; where no verb fits, files; behind a program only files."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[Any]]:
        verbs = super().shell_complete(ctx, incomplete)
        return verbs or [CompletionItem(incomplete, type="file")]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] in self.commands:
            return super().resolve_command(ctx, args)
        return args[0], _by_help(args[0], ""), args[1:]


def _helps() -> dict[str, str]:
    """The help texts of verbs that are not made with click."""
    from podrun.launcher.commands.profile import HELP

    return {"profile": HELP, "help": ""}


def _by_help(name: str, text: str) -> click.Command:
    """A command whose options are those in its help text, and whose arguments are files."""
    words = sorted(set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)))
    takes = {word for word in words if re.search(rf"{word}[ =][A-Z]{{2,}}", text)}
    params: list[click.Parameter] = [click.Option([word], is_flag=word not in takes) for word in words]
    return click.Command(
        name,
        params=[*params, click.Argument(["files"], nargs=-1, type=click.Path())],
        add_help_option=False,
        context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True},
    )


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


@click.command("podrun completion", context_settings=HELP_OPTIONS)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion_verb(shell: str) -> None:
    """Print a script that completes podrun, vipu and the gc tools in a shell.

    \b
    bash: eval "$(podrun completion bash)" in ~/.bashrc
          (or write it to a file once, and read that in ~/.bashrc: . FILE)
    zsh:  eval "$(podrun completion zsh)" in ~/.zshrc
    fish: podrun completion fish > ~/.config/fish/conf.d/podrun.fish
    """
    click.echo(completion_script(shell), nl=False)
