"""``podrun serve REPOSITORY``: the genuine Triton Inference Server with models on emulated IPUs."""

from __future__ import annotations

from pathlib import Path

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.core.environment import environment, pass_on
from podrun.core.errors import UsageError

_PORT = click.IntRange(1, 65535)
TRITON, TENSORFLOW = "triton", "tensorflow-serving"


@click.command(
    "podrun serve",
    context_settings=HELP_OPTIONS,
    epilog="Example: podrun serve models --http-port 8000 -- --log-verbose=1",
)
@click.argument("repository", type=click.Path(path_type=Path))
@click.option(
    "--protocol",
    type=click.Choice([TRITON, TENSORFLOW]),
    default=TRITON,
    show_default=True,
    help="Triton's server, or TensorFlow Serving's protocol.",
)
@click.option("--grpc-port", type=_PORT, help="Port of gRPC.  [default: 8001; of TensorFlow Serving 8500]")
@click.option("--http-port", type=_PORT, help="Port of HTTP.  [default: 8000; of TensorFlow Serving 8501]")
@click.option(
    "--metrics-port", type=_PORT, default=8002, show_default=True, help="Port of Prometheus metrics."
)
@click.option("--address", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--tritonserver", default="", metavar="PATH", help="The server's program, where it is not found."
)
@click.option(
    "--batch-delay-us",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="TensorFlow Serving's protocol: how long an incomplete batch waits for other requests.",
)
@click.option(
    "--fault", "faults", multiple=True, metavar="FAULT", help="Plan a fault, as `podrun --fault` does."
)
@click.option("--incidents", type=click.Path(path_type=Path), help="File for incidents, a line of JSON each.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve_verb(
    repository: Path,
    protocol: str,
    grpc_port: int | None,
    http_port: int | None,
    metrics_port: int,
    address: str,
    tritonserver: str,
    batch_delay_us: int,
    faults: tuple[str, ...],
    incidents: Path | None,
    options: tuple[str, ...],
) -> int:
    """Serve the models of a repository until the command is stopped.

    REPOSITORY has Triton's layout, as in MODEL/config.pbtxt with backend: "poplar", and MODEL/1/executable.popef. Words
    after -- go to tritonserver. With --protocol tensorflow-serving the newest version of each model answers TensorFlow
    Serving's predict, metadata and status calls.
    """
    from podrun.serving.repository import serving_environment
    from podrun.serving.triton_server import ServerPorts, serve

    variables = serving_environment(environment(), faults, incidents)
    if protocol == TENSORFLOW:
        from podrun.serving.tfserving.running import FrontSettings, serve_tensorflow

        if options or tritonserver:
            raise UsageError(
                "--tritonserver and words after -- are for Triton's server, which is not used here",
                hint="Leave them out.",
            )
        for variable in variables.items():
            pass_on(*variable)
        settings = FrontSettings(address, grpc_port or 8500, http_port or 8501, delay_us=batch_delay_us)
        return serve_tensorflow(repository, settings)
    ports = ServerPorts(grpc_port or 8001, http_port or 8000, metrics_port, address)
    return serve(repository, ports, variables, tritonserver, options)
