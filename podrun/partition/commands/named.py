"""Commands with nothing but a name, on which the server acts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import click

from podrun.partition.commands.context import CliContext

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


def command_on_name(
    verb: str, noun: str, done: str, help_text: str, ask: Callable[[VipuClient, str], None]
) -> click.Command:
    """A command with one argument, the name of the object on which the server acts."""

    @click.command(noun, help=help_text)
    @click.argument("name")
    @click.pass_obj
    def command(cli: CliContext, name: str) -> None:
        with cli.client() as client:
            ask(client, name)
        cli.show(done, name, lambda: f"{verb} {noun} ({name}): success.")

    return command


def command_on_agent(
    verb: str, done: str, help_text: str, ask: Callable[[VipuClient, str, int], None]
) -> click.Command:
    """A command that acts on an agent once for each generation of its partitions."""

    @click.command("agent", help=help_text)
    @click.argument("name")
    @click.option(
        "--generation",
        type=click.IntRange(min=0),
        default=0,
        show_default=False,
        metavar="N",
        help="Leave it alone if all its partitions have been reset since this generation (vipu get partition).",
    )
    @click.pass_obj
    def command(cli: CliContext, name: str, generation: int) -> None:
        with cli.client() as client:
            ask(client, name, generation)
        cli.show(done, name, lambda: f"{verb} agent ({name}): success.")

    return command
