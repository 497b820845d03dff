"""Options that several commands have, as decorators, and lists of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click


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


def use_tls(options: Mapping[str, Any]) -> None:
    """Use the files that the options name, in this process and its children. Raises UsageError or ConfigError."""
    files = [options[f"tls_{name}"] for name in ("cert", "key", "ca")]
    if any(files):
        from podrun.core import tls

        tls.use(*files)


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
            type=click.FloatRange(0.1),
            default=120.0,
            metavar="SECONDS",
            help="How long a request may take [120].",
        ),
        click.option(
            "--format",
            "output",
            type=click.Choice(["text", "json"]),
            default="text",
            help="What to print [text].",
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


def names_in(text: str) -> list[str]:
    """The names that an option lists, separated by commas."""
    return [name.strip() for name in text.split(",") if name.strip()]
