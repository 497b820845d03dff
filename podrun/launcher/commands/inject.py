"""``podrun inject``: new faults for a job while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.launcher.running_jobs import job_at, job_server_options


@click.command("podrun inject", context_settings=HELP_OPTIONS)
@click.argument("job")
@click.argument("texts", nargs=-1, required=True, metavar="FAULT...")
@job_server_options
def inject_verb(job: str, texts: Sequence[str], api_host: str | None, api_port: int | None) -> None:
    """Plan faults on JOB while it runs, as in: podrun inject mine ipu:5@batch=+10:tile-parity

    JOB is a partition, or the process id of podrun or of one of its instances. batch=+N counts from now on.
    """
    from podrun.faults import parse_fault

    specs = [parse_fault(text) for text in texts]
    with job_at(job, api_host, api_port) as (client, name):
        client.inject_faults(name, specs)
    click.echo(f"Planned on partition {name}: {', '.join(spec.text for spec in specs)}.")
