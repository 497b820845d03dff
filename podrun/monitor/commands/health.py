"""``podrun health``: what is broken, since when, who is hit, what to type."""

from __future__ import annotations

import sys
import time

import click

from podrun.core.command_line import HELP_OPTIONS, json_text
from podrun.core.errors import PodrunError
from podrun.core.terminal import show_error
from podrun.partition.commands.shared_options import server_options

CANNOT_TELL = 3
"""Exit code if no service answers."""


@click.command(
    "podrun health",
    context_settings=HELP_OPTIONS,
    epilog="Exit code: 0 nothing is broken, 1 something is (with --strict: or needs attention), 2 wrong options, "
    "3 no service answers.",
)
@click.option(
    "--format", "form", type=click.Choice(["text", "json"]), default="text", help="What to print [text]."
)
@click.option("--strict", is_flag=True, help="Fail for what needs attention, too.")
@server_options
def health_verb(form: str, strict: bool, api_host: str | None, api_port: int | None) -> int:
    """Say what is broken in a POD: since when, who is hit, and what to type."""
    from podrun.monitor.devices import connect_monitor, on_stderr
    from podrun.monitor.pod_health import as_text, examine_pod

    now = time.time()
    try:
        with connect_monitor(api_host, api_port, say=on_stderr) as client:
            health = examine_pod(client, now)
    except PodrunError as error:
        if form == "json":
            told = {"type": type(error).__name__, "message": error.message, "hint": error.hint or None}
            click.echo(json_text("error", told))
        show_error("podrun health", error, sys.stderr)
        return CANNOT_TELL
    if form == "json":
        click.echo(json_text("health", health.plain()))
    else:
        click.echo("\n".join(as_text(health, now)))
    return int(not health.healthy or (strict and bool(health.problems)))
