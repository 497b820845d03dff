"""`vipu-server`: the V-IPU service of one POD, which serves until it is told to stop.

Its verbs `stop`, `check` and `repair` act on servers of this user on this host, and on their state files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from podrun.core.command_line import HELP_OPTIONS, SuggestingGroup, run_command
from podrun.core.environment import environment
from podrun.core.errors import UsageError
from podrun.partition.commands.serve import serve_pod
from podrun.partition.commands.shared_options import tls_options
from podrun.partition.commands.state_files import check_state, repair_state
from podrun.partition.commands.stop import stop_server
from podrun.partition.commands.which_server import use_tls


@click.group(cls=SuggestingGroup, context_settings=HELP_OPTIONS, invoke_without_command=True)
@click.version_option(package_name="podrun", prog_name="vipu-server")
@click.option("--cluster", default="pod16", metavar="NAME|FILE", help="POD to emulate [pod16].")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=8090, help="Port; 0 for a free one [8090].")
@click.option("--prestart", is_flag=True, help="Start all machines now, so that partitions are up at once.")
@click.option(
    "--state-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where partitions are stored [~/.local/state/podrun/vipu-server-POD.sqlite].",
)
@click.option("--no-state", is_flag=True, help="Store no partitions.")
@click.option("--ray-address", metavar="HOST:PORT", help="Use this Ray cluster [a private one].")
@click.option("--in-process", is_flag=True, help="Machines as threads of the server, without Ray.")
@click.option("--shared", is_flag=True, help="Let all users of this host have partitions of their own.")
@click.option(
    "--admin", multiple=True, metavar="USER", help="A user with all rights, with --shared; repeatable."
)
@tls_options
@click.option("--secure", is_flag=True, help="Answer only users with an access key (vipu-admin create user).")
@click.option("--admin-port", type=click.IntRange(0, 65535), help="Answer administrators at this port alone.")
@click.option(
    "--audit-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Note who changed what [with --secure: beside the state file].",
)
@click.option(
    "--keep-machines",
    is_flag=True,
    help="When the server is stopped, leave machines and jobs to the next one (vipu-server stop ends them).",
)
@click.option("--list-clusters", is_flag=True, help="List the known PODs and exit.")
@click.option("-v", "--verbose", is_flag=True, help="Log what happens to stderr.")
@click.pass_context
def vipu_server_command(ctx: click.Context, /, **options: Any) -> int:
    """Run the V-IPU service of an emulated IPU-POD, or stop it.

    Example: vipu-server --cluster pod64 --prestart
    """
    from podrun.core.cluster import cluster_names
    from podrun.core.cluster_file import load_cluster
    from podrun.partition.machines.ray_starts import own_machines_per_process

    if ctx.invoked_subcommand is not None:
        _hand_over(ctx, ctx.invoked_subcommand)
        return 0

    if options["list_clusters"]:
        for name in cluster_names():
            cluster = load_cluster(name)
            click.echo(f"{name:12} {cluster.ipu_count:4} IPUs  {cluster.description}")
        return 0
    own_machines_per_process(environment())
    use_tls(options)
    if options["verbose"]:
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
        )
    return serve_pod(load_cluster(options["cluster"]), options)


def _hand_over(ctx: click.Context, verb: str) -> None:
    """Pass the group's options to a verb that has them too (``--port 9000 stop``). Raises UsageError for the others:
    the verb would act on a server that was not named.
    """
    command = vipu_server_command.get_command(ctx, verb)
    own = {param.name for param in command.params} if command is not None else set()
    options = {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if foreign := sorted(options.keys() - own - {"verbose"}):
        option = f"--{foreign[0].replace('_', '-')}"
        raise UsageError(f"vipu-server {verb} has no option {option}", hint=f"vipu-server {verb} --help")
    ctx.default_map = {verb: options}


for _verb in (stop_server, check_state, repair_state):
    vipu_server_command.add_command(_verb)


def main() -> None:
    """Entry point of `vipu-server`."""
    code = run_command(vipu_server_command)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    # Everything has ended by now. Ray's exit handler can wait a minute for processes that have ended.
    os._exit(code)


if __name__ == "__main__":
    main()
