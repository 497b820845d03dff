"""``podrun health``: what is broken, since when, who is hit, what to type."""

from __future__ import annotations

import sys
import time

import click

from podrun.core.command_line import HELP_OPTIONS, JSON_SCHEMA_VERSION
from podrun.core.errors import PodrunError
from podrun.core.machine_output import format_option, is_for_people, machine_lines, print_output
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
@format_option
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
        if not is_for_people(form):
            told = {"type": type(error).__name__, "message": error.message, "hint": error.hint or None}
            document = {"schema_version": JSON_SCHEMA_VERSION, "error": told}
            click.echo("\n".join(machine_lines(form, document, [])))
        show_error("podrun health", error, sys.stderr)
        return CANNOT_TELL
    plain = health.plain()
    print_output(
        form,
        text=lambda: "\n".join(as_text(health, now)),
        document={"schema_version": JSON_SCHEMA_VERSION, "health": plain},
        rows=plain["problems"],
    )
    return int(not health.healthy or (strict and bool(health.problems)))
