"""`vipu-server check` and `vipu-server repair`: what a state file holds, and its consistent part."""

from __future__ import annotations

from collections.abc import Callable, Sized
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from podrun.core.cluster import Cluster
    from podrun.partition.state.repair import StateDiagnosis


_STATE_OPTIONS = (
    click.option("--cluster", default="pod16", metavar="NAME|FILE", help="POD of the file [pod16]."),
    click.option(
        "--state-file", type=click.Path(path_type=Path), metavar="FILE", help="The file [that of the POD]."
    ),
)


def state_options(command: Callable[..., int]) -> Callable[..., int]:
    """Decorator: give a command the options that name a POD and its state file."""
    for option in _STATE_OPTIONS:
        command = option(command)
    return command


@click.command("check")
@state_options
def check_state(cluster: str, state_file: Path | None) -> int:
    """Say what is wrong with a state file, and what a repair would do. Exit code 1 if there is anything."""
    path, diagnosis, _ = diagnosis_of(cluster, state_file)
    print_diagnosis(path, diagnosis)
    if diagnosis.problems:
        click.echo(f"Repair it: vipu-server repair --cluster {cluster} --state-file {path} --yes")
    return 1 if diagnosis.problems else 0


@click.command("repair")
@state_options
@click.option("--yes", is_flag=True, help="Do it; without this option only say what would be done.")
def repair_state(cluster: str, state_file: Path | None, yes: bool) -> int:
    """Keep of a damaged state file what holds together. The old file stays beside it under another name."""
    from podrun.partition.state.repair import repair

    path, diagnosis, pod = diagnosis_of(cluster, state_file)
    print_diagnosis(path, diagnosis)
    if not diagnosis.problems:
        return 0
    if not yes:
        click.echo("Nothing was changed; with --yes it is.")
        return 1
    backup = repair(path, pod, diagnosis)
    click.echo(f"repaired; the file as it was: {backup}")
    return 0


def diagnosis_of(cluster: str, state_file: Path | None) -> tuple[Path, StateDiagnosis, Cluster]:
    """The state file of a POD, what is wrong with it, and the POD."""
    from podrun.core.cluster_file import load_cluster
    from podrun.partition.state.repair import diagnose_rows, read_rows
    from podrun.partition.state.store import default_state_file

    pod = load_cluster(cluster)
    path = state_file or default_state_file(pod.name)
    return path, diagnose_rows(pod, read_rows(path)), pod


def print_diagnosis(path: Path, diagnosis: StateDiagnosis) -> None:
    """Print each problem of a state file with what a repair does, and what is kept."""
    for problem in diagnosis.problems:
        click.echo(f"{problem.what}: {problem.action}")
    kept = diagnosis.kept
    problems = _how_many(diagnosis.problems, "problem")
    partitions, requests = (
        _how_many(kept.partitions, "partition"),
        _how_many(kept.plans.queue, "queued request"),
    )
    click.echo(f"{path}: {problems}; it keeps {partitions}, {requests}")


def _how_many(values: Sized, noun: str) -> str:
    return f"{len(values)} {noun}{'' if len(values) == 1 else 's'}"
