"""``podrun schema [TOOL]``: JSON schemas of what tools print for programs."""

from __future__ import annotations

import click

from podrun.core.command_line import HELP_OPTIONS


@click.command("podrun schema", context_settings=HELP_OPTIONS)
@click.argument("tool", default="")
def schema_verb(tool: str) -> None:
    """Print the JSON schema of what TOOL prints with --format json, or the names of tools that have one.

    Its $defs.row describes a line of --format jsonl.
    """
    from podrun.core.machine_output import schema_names, schema_text

    click.echo(schema_text(tool).rstrip() if tool else "\n".join(schema_names()))
