"""``podrun exporter``: metrics of the POD for Prometheus."""

from __future__ import annotations

import click

from podrun.core.command_line import HELP_OPTIONS
from podrun.partition.commands.shared_options import server_options


@click.command("podrun exporter", context_settings=HELP_OPTIONS)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=2112, help="Port; 0 for a free one [2112].")
@click.option("--public", is_flag=True, help="Answer everybody who reaches it.")
@click.option(
    "--dcgm-names", is_flag=True, help="Add names of NVIDIA's DCGM exporter, as DCGM_FI_DEV_GPU_UTIL."
)
@server_options
def exporter_verb(
    host: str, port: int, public: bool, dcgm_names: bool, api_host: str | None, api_port: int | None
) -> None:
    """Serve metrics of the POD for Prometheus until Ctrl-C."""
    from podrun.core.access import make_token, tls_asked_for
    from podrun.core.environment import environment, runtime_directory
    from podrun.core.errors import ConflictError
    from podrun.monitor.devices import connect_monitor, on_stderr
    from podrun.monitor.exporter import KEY_FILE, make_key, make_server

    with connect_monitor(api_host, api_port, say=on_stderr) as client:
        try:
            directory = runtime_directory()
            key = "" if public else make_key(directory, make_token(environment(), directory))
            server = make_server(client, host, port, key, dcgm_names=dcgm_names)
        except OSError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="Use another port: --port 2113"
            ) from error
        with server:
            scheme = "https" if tls_asked_for() else "http"
            who = (
                "everybody who reaches it"
                if public
                else f"this user, and who shows the key in {directory / KEY_FILE}"
            )
            click.echo(f"{scheme}://{host}:{server.server_address[1]}/metrics answers {who}")
            server.serve_forever()
