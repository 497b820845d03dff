"""``podrun top``: a POD on the whole screen, now or from a recording."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from podrun.core.command_line import HELP_OPTIONS, JSON_SCHEMA_VERSION, FiniteRange
from podrun.core.errors import ConflictError, PodrunError, UsageError
from podrun.core.machine_output import format_option, is_for_people, print_output
from podrun.partition.commands.shared_options import server_options

if TYPE_CHECKING:
    from podrun.monitor.live.sources import ReplaySource, ServiceSource
    from podrun.partition.client.vipu_client import VipuClient


@click.command(
    "podrun top",
    context_settings=HELP_OPTIONS,
    epilog="Keys: 1 to 4 tabs, s sort, / filter, Enter details, Space pause, [ and ] move in a recording, q quit. "
    "Without a terminal, and with --once, it prints one sighting as text.",
)
@click.option("--once", is_flag=True, help="Print what is seen as text, and end.")
@click.option(
    "--replay", type=click.Path(path_type=Path), metavar="FILE", help="Show a recording of podrun record."
)
@click.option("--speed", type=FiniteRange(0.01, 10_000), default=1.0, metavar="X", help="Of the replay [1].")
@click.option(
    "--interval", type=FiniteRange(0.1, 60), default=0.5, metavar="S", help="Between two looks [0.5]."
)
@click.option(
    "--filter", "words", default="", metavar="WORDS", help="With --once: rows with all of these words."
)
@click.option(
    "--record",
    "launch",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --replay: tell a launch's record (podrun --record) among the incidents.",
)
@click.option("--web", is_flag=True, help="Serve it to browsers on this host, until Ctrl-C.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="With --web: port [a free one].", metavar="P"
)
@format_option
@server_options
def top_verb(
    once: bool,
    web: bool,
    port: int,
    replay: Path | None,
    speed: float,
    interval: float,
    words: str,
    launch: Path | None,
    form: str,
    **where: str | int | None,
) -> None:
    """Look at a POD: machines, IPUs, jobs, the queue, incidents. It changes nothing."""
    from podrun.monitor.live.recordings import read_recording
    from podrun.monitor.live.sources import ReplaySource, ServiceSource

    if launch is not None and replay is None:
        raise UsageError("--record goes with --replay", hint="podrun top --replay FILE --record FILE")
    if replay is not None and any(where.values()):
        raise UsageError("a replay asks no server", hint="Leave out --api-host and --api-port.")

    def connect() -> VipuClient:
        from podrun.monitor import devices

        host, port = where["api_host"], where["api_port"]
        return devices.connect_monitor(str(host) if host else None, int(port) if port else None)

    source: ReplaySource | ServiceSource
    if replay is not None:
        told = () if launch is None else _told(launch)
        source = ReplaySource(read_recording(replay), speed, time.monotonic, told)
    else:
        source = ServiceSource(connect, time.time)
    try:
        if web:
            _serve(source, interval, port)
        elif once or not is_for_people(form) or not _has_screen():
            _print_once(source, words, form)
        else:
            _fill_screen(source, interval)
    finally:
        if isinstance(source, ServiceSource):
            source.close()


def _told(launch: Path) -> list[tuple[float, str]]:
    """The events of a launch's record that people want to see among incidents, with their times."""
    from podrun.record.events import read_record
    from podrun.record.timeline import timed_events

    events = timed_events(read_record(launch), launch.with_name(f"{launch.name}.times.json"))
    return [(timed.seconds, timed.event.text) for timed in events if timed.event.kind not in QUIET_KINDS]


QUIET_KINDS = ("run", "ran", "write", "read", "collective", "checked")
"""Events of a record that come with every batch."""


def _serve(source: ReplaySource | ServiceSource, interval: float, port: int) -> None:
    from podrun.monitor.web.serving import SightingFeed, make_web_server, new_token

    feed, token = SightingFeed(source.look, interval), new_token()
    try:
        server = make_web_server(feed, port, token)
    except OSError as error:
        feed.close()
        raise ConflictError(
            f"cannot listen on port {port}: {error.strerror}", hint="Use another: --port 0"
        ) from error
    with server:
        click.echo(f"http://127.0.0.1:{server.server_address[1]}/?token={token}")
        click.echo("Open it on this host, or forward the port: ssh -L. Ctrl-C ends it.", err=True)
        try:
            server.serve_forever()
        finally:
            feed.close()


def _fill_screen(source: ReplaySource | ServiceSource, interval: float) -> None:
    """Show the first sighting as text at once: the library that draws the screen takes longer to load than a look."""
    from podrun.monitor.full_screen import FullScreen
    from podrun.monitor.live.arrangement import SortKey, as_lines

    seen, said = None, ""
    with FullScreen(sys.stdout, "Loading the view") as first:
        first.show("asking the partition service ...")
        try:
            seen = source.look()
        except PodrunError as error:
            said = f"{error.message}. {error.hint or ''}"
        width = shutil.get_terminal_size().columns
        first.show(said if seen is None else "\n".join(as_lines(seen, SortKey.NAME, "", width)))
        from podrun.monitor.live.screen import PodTop

        PodTop(source, interval, seen).run()


def _has_screen() -> bool:
    """Whether there is a terminal to fill. Textual reads the first stream and draws on the last."""
    from podrun.monitor.full_screen import fills_a_screen

    return all(map(fills_a_screen, (sys.stdin, sys.stdout, sys.stderr)))


def _print_once(source: ReplaySource | ServiceSource, words: str, form: str) -> None:
    from podrun.monitor.live.arrangement import SortKey, as_lines, ipu_rows_of

    seen = source.look()
    width = shutil.get_terminal_size((200, 24)).columns
    if seen is not None:
        print_output(
            form,
            text=lambda: "\n".join(as_lines(seen, SortKey.NAME, words, width)),
            document={"schema_version": JSON_SCHEMA_VERSION, "sighting": seen.plain()},
            rows=ipu_rows_of(seen, words),
        )
