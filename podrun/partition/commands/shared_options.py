"""Options that several commands have, as decorators; lists of names; commands that have nothing but a name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.command_line import seconds_range
from podrun.core.machine_output import FORMATS
from podrun.partition.commands.context import CliContext

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient


def server_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--api-host and --api-port, as a decorator: the parameters ``api_host`` and ``api_port``."""
    options = [
        click.option("--api-host", "-H", metavar="HOST", help="Server [environment, else a running one]."),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port of the server."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def tls_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--tls-cert, --tls-key and --tls-ca, as a decorator; `use_tls` reads them."""
    for name, what in (
        ("ca", "the authority's certificate"),
        ("key", "its key"),
        ("cert", "this host's certificate"),
    ):
        variable = f"PODRUN_TLS_{name.upper()}"
        command = click.option(
            f"--tls-{name}",
            metavar="FILE",
            envvar=[f"VIPU_CLI_TLS_{name.upper()}", variable],
            help=f"Speak TLS: {what} [{variable}].",
        )(command)
    return command


def global_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The global options, as a decorator of the root command; it stores a CliContext in the context."""
    options: list[Callable[..., Any]] = [
        click.option(
            "--api-host", "-H", metavar="HOST", help="Server [VIPU_CLI_API_HOST, else a running one]."
        ),
        click.option("--api-port", type=click.IntRange(1, 65535), metavar="PORT", help="Port [8090]."),
        click.option("--api-user-id", metavar="ID", help="User, if the server has users (--secure)."),
        click.option("--api-access-key", metavar="KEY", help="That user's access key."),
        tls_options,
        click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="vipu-cli.hcl file."),
        click.option(
            "--timeout",
            type=seconds_range(0.1),
            default=120.0,
            metavar="SECONDS",
            help="How long a request may take [120].",
        ),
        click.option(
            "--format",
            "output",
            type=click.Choice(FORMATS),
            default="table",
            help="What to print [table].",
        ),
        click.option("--showjson", is_flag=True, hidden=True),
        click.option(
            "--watch", is_flag=True, help="With list and get: print again whenever something changes."
        ),
        click.option("--server-version", is_flag=True, help="Print the server's version and address."),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def generation_option(what: str) -> Callable[..., Any]:
    """--generation, as a decorator: what has happened since need not happen again."""
    return click.option(
        "--generation",
        type=click.IntRange(min=0),
        default=0,
        show_default=False,
        metavar="N",
        help=f"Leave it alone if {what} been reset since this generation (vipu get partition).",
    )


def names_in(text: str) -> list[str]:
    """The names that an option lists, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]


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
    @generation_option("all its partitions have")
    @click.pass_obj
    def command(cli: CliContext, name: str, generation: int) -> None:
        with cli.client() as client:
            ask(client, name, generation)
        cli.show(done, name, lambda: f"{verb} agent ({name}): success.")

    return command
