"""``podrun serve REPOSITORY``: the genuine Triton Inference Server with models on emulated IPUs."""

from __future__ import annotations

from pathlib import Path

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.environment import environment

_PORT = click.IntRange(1, 65535)


@click.command(
    "podrun serve",
    context_settings=HELP_OPTIONS,
    epilog="Example: podrun serve models --http-port 8000 -- --log-verbose=1",
)
@click.argument("repository", type=click.Path(path_type=Path))
@click.option("--grpc-port", type=_PORT, default=8001, show_default=True, help="Port of gRPC.")
@click.option("--http-port", type=_PORT, default=8000, show_default=True, help="Port of HTTP.")
@click.option(
    "--metrics-port", type=_PORT, default=8002, show_default=True, help="Port of Prometheus metrics."
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--tritonserver", default="", metavar="PATH", help="The server's program, where it is not found."
)
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve_verb(
    repository: Path,
    grpc_port: int,
    http_port: int,
    metrics_port: int,
    address: str,
    tritonserver: str,
    options: tuple[str, ...],
) -> int:
    """Serve the models of a repository until the command is stopped.

    REPOSITORY has Triton's layout, as in MODEL/config.pbtxt with backend: "poplar", and MODEL/1/executable.popef. Words
    after -- go to tritonserver.
    """
    from podrun.serving.triton_server import ServerPorts, serve

    ports = ServerPorts(grpc_port, http_port, metrics_port, address)
    return serve(repository, ports, environment(), tritonserver, options)
