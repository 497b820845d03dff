"""`vipu-server`: the partition service of one POD, until it is told to stop."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import click

from podrun.partition.cli_common import run

NAMES = {"help_option_names": ["-h", "--help"]}


@click.command(context_settings=NAMES)
@click.version_option(package_name="podrun", prog_name="vipu-server")
@click.option("--cluster", default="pod16", metavar="NAME|FILE", help="POD to emulate [pod16].")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, help="Port; 0 for a free one [8090].")
@click.option("--prestart", is_flag=True, help="Start all machines now, so that partitions are up at once.")
@click.option(
    "--state-file", type=click.Path(path_type=Path), metavar="FILE", help="Where partitions are kept."
)
@click.option("--no-state", is_flag=True, help="Forget partitions at the end.")
@click.option("--ray-address", metavar="ADDRESS", help="Use this Ray cluster [a private one].")
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
    pool = _pool(cluster, options)
    state = None if options["no_state"] else options["state_file"] or default_state_file(cluster.name)
    service = Service(cluster, Store(state, cluster.name), pool)
    try:
        port = service.start(options["host"], options["port"])
    except BaseException:
        service.stop(grace=0)
        raise
    reachable = "127.0.0.1" if options["host"] in ("0.0.0.0", "::") else options["host"]
    publication = registry.publish(Entry(VIPU_SERVER, reachable, port, this_process(), cluster.name))
    try:
        click.echo(
            f"V-IPU server of {cluster.name} ({cluster.ipu_count} IPUs, {len(cluster.agents)} "
            f"{cluster.machine_model}) listens on {options['host']}:{port}"
        )
        if options["prestart"] and not stop.is_set():
            pool.prestart([agent.id for agent in cluster.agents])
            click.echo(f"{len(cluster.agents)} machines are up")
        sys.stdout.flush()
        stop.wait()
        click.echo("stopping", err=True)
    finally:
        service.stop()
        publication.withdraw()
    return 0


def _pool(cluster: Any, options: dict[str, Any]) -> Any:
    if options["in_process"]:
        from podrun.partition.machine_pool import LocalMachinePool

        return LocalMachinePool(cluster, keep_spares=True)
    from podrun.partition.ray_pool import RayMachinePool

    return RayMachinePool(cluster, address=options["ray_address"], keep_spares=True)


def _stop_on_signals() -> threading.Event:
    """Set by Ctrl-C or SIGTERM; a second one ends the process at once (the guardian cleans up)."""
    stop = threading.Event()

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, handle)
    return stop


def default_state_file(cluster: str) -> Path:
    """Where partitions of a POD are kept: in the user's directory for such things."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "podrun" / f"vipu-server-{cluster}.sqlite"


def main() -> None:
    """Entry point of `vipu-server`."""
    sys.exit(run(vipu_server))
