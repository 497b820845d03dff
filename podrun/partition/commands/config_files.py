"""The IPUoF files that `vipu` writes for the partitions that it makes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.errors import PodrunError
from podrun.partition.host.ipuof_files import (
    ipuof_directory,
    read_mark,
    remove_dead,
    write_config,
)

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.state.values import PartitionInfo


def ipuof_files(name: str, service: str) -> list[Path]:
    """The IPUoF configuration files of a partition of a service that are there, also those without a mark."""
    pattern = re.compile(rf"{re.escape(name)}(_gcd\d+)?_ipuof\.conf")
    with contextlib.suppress(OSError):
        named = sorted(path for path in ipuof_directory().iterdir() if pattern.fullmatch(path.name))
        return [path for path in named if (mark := read_mark(path)) is None or mark.service == service]
    return []


def service_of(client: VipuClient, name: str) -> str:
    """The id of the service to which a partition belongs; empty if it does not say."""
    with contextlib.suppress(PodrunError):
        return client.ipuof_config(name).attributes.get("Service", "")
    return ""


def write_ipuof_files(client: VipuClient, info: PartitionInfo) -> None:
    """Write a file for each GCD of a partition, whole or not at all. Says so where that cannot be done: the partition
    is there nevertheless."""
    directory = ipuof_directory()
    remove_dead(directory)
    try:
        for gcd in range(info.num_gcds):
            suffix = f"_gcd{gcd}" if info.num_gcds > 1 else ""
            path = directory / f"{info.name}{suffix}_ipuof.conf"
            write_config(path, client.ipuof_config(info.name, gcd))
    except OSError as error:
        click.echo(f"note: no file was written into {directory}: {error.strerror or error}", err=True)
