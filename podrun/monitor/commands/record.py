"""``podrun record FILE``: keep what a monitor sees, for ``podrun top --replay``."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.command_line import HELP_OPTIONS, FiniteRange, seconds_range
from podrun.core.errors import ConflictError, PodrunError
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.monitor.live.sources import ServiceSource


@click.command("podrun record", context_settings=HELP_OPTIONS)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--for", "seconds", type=seconds_range(), metavar="S", help="End after S seconds [at Ctrl-C].")
@click.option(
    "--interval", type=FiniteRange(0.1, 3600), default=1.0, metavar="S", help="Between two looks [1]."
)
@server_options
def record_verb(
    file: Path, seconds: float | None, interval: float, api_host: str | None, api_port: int | None
) -> None:
    """Write what a monitor sees of a POD to FILE, which must be new, until Ctrl-C."""
    from podrun.monitor import devices
    from podrun.monitor.live.recordings import RecordingWriter
    from podrun.monitor.live.sources import ServiceSource

    probe = ServiceSource(
        lambda: devices.connect_monitor(api_host, api_port, say=devices.on_stderr), time.time
    )
    probe.look()  # Before the file: without a service there is nothing to record.
    probe.close()
    try:
        writer = RecordingWriter(file)
    except FileExistsError:
        raise ConflictError(f"{file} is there already", hint="Name a new file, or remove this one.") from None
    except OSError as error:
        raise _cannot_write(file, error) from error
    source = ServiceSource(lambda: devices.connect_monitor(api_host, api_port), time.time, writer)
    try:
        count = record_looks(source, seconds, interval, time.monotonic, time.sleep)
        writer.close()
    except OSError as error:
        raise _cannot_write(file, error) from error
    finally:
        source.close()
        with contextlib.suppress(OSError):  # It was told.
            writer.close()
    click.echo(f"{count} sightings in {file}. To see them: podrun top --replay {file}")


def _cannot_write(file: Path, error: OSError) -> PodrunError:
    kept = f"What is there can be seen: podrun top --replay {file}. " if file.is_file() else ""
    return PodrunError(
        f"cannot write {file}: {error.strerror}", hint=f"{kept}Free space (df -h), or name a file elsewhere."
    )


def record_looks(
    source: ServiceSource,
    seconds: float | None,
    interval: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> int:
    """Look every ``interval`` seconds until the time is over or Ctrl-C; the number of sightings. A service that is away
    is asked again."""
    begin, count, looks = clock(), 0, 0
    try:
        while True:
            try:
                source.look()
                count += 1
            except PodrunError as error:
                click.echo(f"note: {error.message}", err=True)
            looks += 1
            due = begin + looks * interval
            if seconds is not None and due - begin > seconds:
                return count
            sleep(max(0.0, due - clock()))
    except KeyboardInterrupt:
        return count
