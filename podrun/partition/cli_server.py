"""`vipu-server`: the partition service of one POD, until it is told to stop."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.access import is_loopback, make_token
from podrun.partition.cli_common import run

if TYPE_CHECKING:
    from podrun.partition.discovery import Entry, Registry
    from podrun.partition.ray_session import RaySession

PRESTART_PATIENCE_S = 120.0
NAMES = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=NAMES)
@click.version_option(package_name="podrun", prog_name="vipu-server")
@click.option("--cluster", default="pod16", metavar="NAME|FILE", help="POD to emulate [pod16].")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, help="Port; 0 for a free one [8090].")
@click.option("--prestart", is_flag=True, help="Start all machines now, so that partitions are up at once.")
@click.option(
    "--state-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where partitions are kept [~/.local/state/podrun/vipu-server-POD.sqlite].",
)
@click.option("--no-state", is_flag=True, help="Forget partitions at the end.")
@click.option("--ray-address", metavar="HOST:PORT", help="Use this Ray cluster [a private one].")
@click.option("--in-process", is_flag=True, help="Machines as threads of the server, without Ray.")
@click.option("--list-clusters", is_flag=True, help="List the PODs there are and exit.")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens to stderr.")
def vipu_server(**options: Any) -> int:
    """Run the partition service of an emulated IPU-POD.

    Example: vipu-server --cluster pod64 --prestart
    """
    from podrun.cluster import cluster_names, load_cluster

    if options["list_clusters"]:
        for name in cluster_names():
            cluster = load_cluster(name)
            click.echo(f"{name:12} {cluster.ipu_count:4} IPUs  {cluster.description}")
        return 0
    if options["verbose"]:
        import logging

        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
        )
    return _serve(load_cluster(options["cluster"]), options)


def _serve(cluster: Any, options: dict[str, Any]) -> int:
    from podrun.partition.discovery import VIPU_SERVER, Entry, Registry, this_process
    from podrun.partition.service import Service
    from podrun.partition.store import Store

    registry = Registry()
    registry.sweep()
    stop = _stop_on_signals()
    # Published before it listens, for what it starts; where it listens follows.
    notice = _Notice(registry, Entry(VIPU_SERVER, "", 0, this_process(), cluster.name))
    try:
        state = None if options["no_state"] else options["state_file"] or default_state_file(cluster.name)
        pool = _pool(cluster, options, notice.add)
        service = Service(cluster, Store(state, cluster.name), pool)
        try:
            _run(service, pool, notice, stop, options)
        finally:
            service.stop()
    finally:
        notice.withdraw()
    return 0


def _run(service: Any, pool: Any, notice: _Notice, stop: threading.Event, options: dict[str, Any]) -> None:
    """Listen until ``stop``."""
    host, token = options["host"], ""
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    if options["ray_address"] and not is_loopback(host):
        # The machines lie on several hosts' networks and want the token; so does the service that tells where they are.
        token, shown = _token(), pool.own_address() if shown == "127.0.0.1" else shown
    port = service.start(host, options["port"], token)
    notice.listens(shown, port)
    cluster = service.cluster
    click.echo(
        f"V-IPU server of {cluster.name} ({cluster.ipu_count} IPUs, {len(cluster.agents)} "
        f"{cluster.machine_model}) listens on {options['host']}:{port}"
    )
    if options["prestart"] and not stop.is_set():
        service.wait_idle(
            PRESTART_PATIENCE_S
        )  # Partitions of the last time come first, with machines of their own.
        pool.prestart([agent.id for agent in cluster.agents if agent.id not in pool.running_agents()])
        click.echo(f"{len(cluster.agents)} machines are up")
    sys.stdout.flush()
    stop.wait()
    with contextlib.suppress(OSError):  # The terminal may be what is gone.
        click.echo("stopping", err=True)


class _Notice:
    """The server's entry in the runtime directory as it grows: first what it starts, then where it listens."""

    def __init__(self, registry: Registry, entry: Entry) -> None:
        self._lock = threading.Lock()
        self._registry = registry
        self._publication = registry.publish(entry)

    def listens(self, host: str, port: int) -> None:
        """Say where."""
        with self._lock:
            old = self._publication
            self._publication = self._registry.publish(replace(old.entry, host=host, port=port))
            if old.path != self._publication.path:
                old.withdraw()

    def add(self, session: RaySession) -> None:
        """Say what must go when the server is gone."""
        directories = () if session.directory is None else (str(session.directory),)
        with self._lock:
            self._publication.update(processes=session.processes, directories=directories)

    def withdraw(self) -> None:
        """Say nothing any more."""
        with self._lock:
            self._publication.withdraw()


def _pool(cluster: Any, options: dict[str, Any], on_session: Callable[[RaySession], None]) -> Any:
    if options["in_process"]:
        from podrun.partition.machine_pool import LocalMachinePool

        return LocalMachinePool(cluster, keep_spares=True)
    from podrun.partition.ray_pool import RayMachinePool

    address = options["ray_address"]
    if address is not None:
        from podrun.partition.ray_address import resolve

        address = resolve(address, os.environ)
    return RayMachinePool(
        cluster,
        address=address,
        keep_spares=True,
        on_session=on_session,
        token=_token() if address else "",
    )


def _token() -> str:
    """This user's token on this host, made if need be."""
    from podrun.partition.discovery import runtime_directory

    return make_token(os.environ, runtime_directory())


def _stop_on_signals() -> threading.Event:
    """Set by Ctrl-C, SIGTERM or SIGHUP; a second one ends the process at once (the guardian cleans up).

    What the caller ignores (nohup, the background of a script) stays ignored.
    """
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)
    return stop


def default_state_file(cluster: str) -> Path:
    """Where partitions of a POD are kept: in the user's directory for such things."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "podrun" / f"vipu-server-{cluster}.sqlite"


def main() -> None:
    """Entry point of `vipu-server`."""
    code = run(vipu_server)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # All is stopped and removed by now. Ray's own farewell at exit could wait a minute for processes that are gone.
    os._exit(code)


if __name__ == "__main__":
    main()
