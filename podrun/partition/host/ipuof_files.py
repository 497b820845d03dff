"""The IPUoF configuration files that programs find in ``~/.ipuof.conf.d``, and when they go.

`vipu create partition` writes one for each GCD. A file says in its attributes whose it is: ``Service`` (the id of the
service: of its state file, or of its process if it has none), ``Partition`` and ``Epoch`` (this life of the partition).
The server removes files of a partition that ends, whoever ended it, writes them anew where its machines listen
elsewhere, and puts them aside while it is stopped. Files without these attributes are a user's own and are left alone.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrun.core.environment import environment
from podrun.core.quick_dataclass import dataclass
from podrun.partition.host.holders import lives

if TYPE_CHECKING:
    from podrun.partition.state.values import IpuofConfig

MOST_BYTES = 16 << 20
"""A file of more bytes is none of podrun's."""


@dataclass(frozen=True, slots=True)
class FileMark:
    """Whose a file is: see the module."""

    service: str
    partition: str
    epoch: str
    gcd: int


def ipuof_directory(environ: Mapping[str, str] | None = None) -> Path:
    """The folder in the user's home."""
    return Path((environ or environment()).get("HOME") or Path.home(), ".ipuof.conf.d")


def read_mark(path: Path) -> FileMark | None:
    """Whose a file is; None for one that no podrun has written, or that cannot be read."""
    try:
        if path.stat().st_size > MOST_BYTES:
            return None
        text = path.read_text(encoding="utf-8")
        attributes = json.loads(text[text.index("{") :])["attributes"]
        service, name, epoch = (attributes[key] for key in ("Service", "Partition", "Epoch"))
        return FileMark(str(service), str(name), str(epoch), int(attributes["GCD Id"]))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def marked_files(
    directory: Path, partitions: Collection[str] | None = None
) -> Iterator[tuple[Path, FileMark]]:
    """The files of a folder that a podrun has written: all, or those of partitions, which have their names."""
    begins = "" if partitions is None else tuple(f"{name}_" for name in partitions)
    with contextlib.suppress(OSError):
        for path in sorted(path for path in directory.glob("*.conf") if path.name.startswith(begins)):
            mark = read_mark(path)
            if mark is not None and (partitions is None or mark.partition in partitions):
                yield path, mark


def remove_dead(directory: Path) -> None:
    """Remove files of services without a state file whose process is gone: nobody else will."""
    for path, mark in marked_files(directory):
        with contextlib.suppress(
            ValueError, OSError
        ):  # ValueError: the service has a state file, and comes back.
            if lives(mark.service) is False:
                path.unlink(missing_ok=True)


def ipuof_json(config: IpuofConfig) -> dict[str, Any]:
    """An IPUoF configuration in the shape of the files."""
    return {"devices": [asdict(device) for device in config.devices], "attributes": dict(config.attributes)}


def write_config(path: Path, config: IpuofConfig) -> None:
    """Write a file, whole or not at all. Raises OSError."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(ipuof_json(config), indent=2) + "\n", encoding="utf-8")
    fresh.replace(path)
