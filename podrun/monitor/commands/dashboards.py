"""``podrun dashboards DIR``: files for Grafana and Prometheus."""

from __future__ import annotations

from pathlib import Path

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.errors import ConflictError


@click.command("podrun dashboards", context_settings=HELP_OPTIONS)
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
def dashboards_verb(directory: Path, force: bool) -> None:
    """Write a Grafana dashboard, Prometheus alerts and a scrape configuration into DIRECTORY."""
    import yaml

    from podrun.monitor import dashboards

    texts = {
        dashboards.DASHBOARD_FILE: dashboards.dashboard_json(),
        dashboards.RULES_FILE: yaml.safe_dump(dashboards.rules_document(), sort_keys=False, width=110),
        dashboards.SCRAPE_FILE: yaml.safe_dump(dashboards.scrape_document(), sort_keys=False),
    }
    if directory.exists() and not directory.is_dir():
        raise ConflictError(f"{directory} is a file", hint="Name a folder: podrun dashboards DIR")
    there = [name for name in texts if (directory / name).exists()]
    if there and not force:
        raise ConflictError(
            f"{directory} holds {', '.join(there)} already",
            hint=f"To overwrite: podrun dashboards --force {directory}",
        )
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
        click.echo(str(directory / name))
    click.echo(
        f"Import {dashboards.DASHBOARD_FILE} in Grafana. Copy the exporter's key beside {dashboards.SCRAPE_FILE}, "
        "as podrun exporter says."
    )
