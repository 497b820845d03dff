"""`vipu-server`: the V-IPU service of one POD, which serves until it is told to stop.

Its verbs `stop`, `check` and `repair` act on servers of this user on this host, and on their state files.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun.core.access import is_loopback, tls_asked_for
from podrun.core.environment import environment
from podrun.core.errors import DeadlineError, NotFoundError, UsageError
from podrun.core.identity import user_name
from podrun.partition.commands.common import HELP_OPTIONS, SuggestingGroup, run, tls_options, use_tls
from podrun.partition.state.rights import Sharing, user_ids

if TYPE_CHECKING:
    from podrun.core.cluster import Cluster
    from podrun.partition.host.discovery import Registry, ServiceEntry
    from podrun.partition.machines.keeper import Keeper
    from podrun.partition.machines.ray_session import RaySession
    from podrun.partition.state.accounts import FrontDesk
    from podrun.partition.state.repair import StateDiagnosis


log = logging.getLogger("podrun.partition")

PRESTART_PATIENCE_S = 120.0


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
def vipu_server(ctx: click.Context, /, **options: Any) -> int:
    """Run the V-IPU service of an emulated IPU-POD, or stop it.

    Example: vipu-server --cluster pod64 --prestart
    """
    from podrun.core.cluster import cluster_names, load_cluster

    if ctx.invoked_subcommand is not None:
        _hand_over(ctx, ctx.invoked_subcommand)
        return 0

    if options["list_clusters"]:
        for name in cluster_names():
            cluster = load_cluster(name)
            click.echo(f"{name:12} {cluster.ipu_count:4} IPUs  {cluster.description}")
        return 0
    use_tls(options)
    if options["verbose"]:
        logging.basicConfig(
            level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S"
        )
    return _serve(load_cluster(options["cluster"]), options)


def _hand_over(ctx: click.Context, verb: str) -> None:
    """Pass the group's options to a verb that has them too (``--port 9000 stop``). Raises UsageError for the others:
    the verb would act on a server that was not named.
    """
    assert isinstance(ctx.command, click.Group)
    command = ctx.command.get_command(ctx, verb)
    own = {param.name for param in command.params} if command is not None else set()
    given = {
        name: value
        for name, value in ctx.params.items()
        if ctx.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE
    }
    if foreign := sorted(given.keys() - own - {"verbose"}):
        option = f"--{foreign[0].replace('_', '-')}"
        raise UsageError(f"vipu-server {verb} has no option {option}", hint=f"vipu-server {verb} --help")
    ctx.default_map = {verb: given}


def _serve(cluster: Any, options: dict[str, Any]) -> int:
    from podrun.partition.host.discovery import VIPU_SERVER, Registry, ServiceEntry, this_process
    from podrun.partition.host.ipuof_files import IpuofFiles, ipuof_directory
    from podrun.partition.machines.keeper import Keeper
    from podrun.partition.server.service import Service
    from podrun.partition.state.store import Store, default_state_file

    registry = Registry()
    registry.sweep()
    end = _End(_stop_on_signals(), leave=options["keep_machines"])
    # Published before the server listens, with what it starts; its port follows.
    published = _PublishedEntry(registry, ServiceEntry(VIPU_SERVER, "", 0, this_process(), cluster.name))
    try:
        state = None if options["no_state"] else options["state_file"] or default_state_file(cluster.name)
        store = Store(state, cluster.name)
        keeper = None
        if not (state is None or options["in_process"] or options["ray_address"]):
            keeper = Keeper(registry, cluster.name, store.uid)
        published.owns(store.uid)
        pool = _pool(cluster, options, published.add, keeper)
        service = Service(cluster, store, pool, heartbeats=True)
        aside = None if state is None else state.with_name(f"{state.name}.ipuof")
        service.files = IpuofFiles(ipuof_directory(), aside, service.id)
        service.on_superseded = end.superseded
        pool.on_keeper_ended = end.keeper_ended
        try:
            port = _run(service, pool, published, end.stop, options)
        except BaseException:
            # A failed start ends no job: the next server takes over what the previous one left.
            end.leave = end.leave or not service.serving
            raise
        finally:
            service.stop(leave_machines=end.leave)
    finally:
        published.withdraw()
    if end.again:
        log.warning("the keeper of the machines has ended, and they with it: the server begins anew")
        sys.stdout.flush()
        os.execv(sys.executable, [*sys.orig_argv, "--port", str(port)])
    return 0


class _End:
    """How the server ends, and what becomes of machines. ``again``: it starts again, because the Ray of its machines
    has ended, which this process cannot use any more.
    """

    def __init__(self, stop: threading.Event, *, leave: bool) -> None:
        self.stop, self.leave, self.again = stop, leave, False

    def superseded(self) -> None:
        """Another server owns the state, and therefore the machines."""
        self.leave = True
        self.stop.set()

    def keeper_ended(self) -> None:
        """The private Ray has ended."""
        if not self.stop.is_set():
            self.again = True
            self.stop.set()


def _run(
    service: Any, pool: Any, published: _PublishedEntry, stop: threading.Event, options: dict[str, Any]
) -> int:
    """Listen until ``stop``; returns the port."""
    host = options["host"]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    if options["ray_address"] and not is_loopback(host) and shown == "127.0.0.1":
        shown = pool.own_address()
    desk = _desk(options, service)
    sharing = desk.sharing
    port = service.start(host, options["port"], desk=desk)
    published.listens(shown, port)
    if pool.keeper is not None:
        pool.keeper.used_at(port)
    cluster = service.cluster
    click.echo(
        f"V-IPU server of {cluster.name} ({cluster.ipu_count} IPUs, {len(cluster.agents)} "
        f"{cluster.machine_model}) listens on {options['host']}:{port}"
    )
    if tls_asked_for():
        click.echo("TLS: clients need a certificate of the same authority")
    if desk.admin_port is not None:
        click.echo(f"administrators: {options['host']}:{desk.admin_port}")
    if desk.accounts is not None:
        _say_users(desk, shown, desk.admin_port or port)
    if sharing.shared:
        click.echo(
            "shared: every user of this host may create partitions here, and use and remove their own. Administrators: "
            + ", ".join(sorted({user_name(uid) for uid in {0, os.getuid(), *sharing.admins}}))
        )
    if options["prestart"] and not stop.is_set():
        service.wait_idle(
            PRESTART_PATIENCE_S
        )  # Partitions of the previous server come first, with their own machines.
        pool.prestart([agent.id for agent in cluster.agents if agent.id not in pool.running_agents()])
        click.echo(f"{len(cluster.agents)} machines are up")
    sys.stdout.flush()
    stop.wait()
    with contextlib.suppress(OSError):  # The terminal may be closed.
        click.echo("stopping", err=True)
    return int(port)


class _PublishedEntry:
    """The server's entry in the runtime directory: first the processes that it starts, then also where it listens."""

    def __init__(self, registry: Registry, entry: ServiceEntry) -> None:
        self._lock = threading.Lock()
        self._registry = registry
        self._publication = registry.publish(entry)

    def listens(self, host: str, port: int) -> None:
        """Publish where the server listens."""
        with self._lock:
            old = self._publication
            self._publication = self._registry.publish(replace(old.entry, host=host, port=port))
            if old.path != self._publication.path:
                old.withdraw()

    def owns(self, pod: str) -> None:
        """Publish the id of the server's state."""
        with self._lock:
            self._publication.update(pod=pod)

    def add(self, session: RaySession) -> None:
        """Publish a process or directory that must end with the server."""
        directories = () if session.directory is None else (str(session.directory),)
        with self._lock:
            self._publication.update(processes=session.processes, directories=directories)

    def withdraw(self) -> None:
        """Remove the entry."""
        with self._lock:
            self._publication.withdraw()


def _pool(
    cluster: Any, options: dict[str, Any], on_session: Callable[[RaySession], None], keeper: Keeper | None
) -> Any:
    if options["in_process"]:
        from podrun.partition.machines.pool import LocalMachinePool

        return LocalMachinePool(cluster, keep_spares=True, options=_sharing(options).machine_options())
    from podrun.partition.machines.ray_pool import RayMachinePool
    from podrun.partition.machines.ray_session import check_installed

    check_installed()
    address = options["ray_address"]
    if address is not None:
        from podrun.partition.machines.ray_starts import resolve

        address = resolve(address, environment())
    return RayMachinePool(
        cluster,
        address=address,
        keep_spares=True,
        on_session=on_session,
        options=_sharing(options).machine_options(),
        keeper=keeper,
    )


def _sharing(options: dict[str, Any]) -> Sharing:
    """The users whom the server answers. Raises UsageError for sharing with users whom it cannot identify."""
    if not options["shared"]:
        if options["admin"]:
            raise UsageError("--admin is for a server that others use", hint="Add --shared.")
        return Sharing()
    if options["host"] != "127.0.0.1" or options["ray_address"]:
        raise UsageError(
            "a shared server listens on 127.0.0.1: users are known by this host's kernel, and on no other host",
            hint="Leave out --host and --ray-address; users log in on this host, or each runs a server of their own.",
        )
    return Sharing(shared=True, admins=user_ids(options["admin"]))


def _desk(options: dict[str, Any], service: Any) -> FrontDesk:
    """The users whom the server answers, and the audit log."""
    from podrun.partition.state.accounts import Accounts, AuditLog, FrontDesk

    path, state = options["audit_log"], service.store.path
    if options["secure"] and not is_loopback(options["host"]) and not tls_asked_for():
        raise UsageError(
            "--secure needs TLS, or a loopback address: access keys would cross the network in the clear",
            hint="Leave out --host, or make certificates: podrun help security.",
        )
    if options["secure"] and path is None and state is not None:
        path = state.with_name(f"{state.name}.audit.jsonl")
    accounts = Accounts(service.store) if options["secure"] else None
    return FrontDesk(_sharing(options), accounts, AuditLog(path), options["admin_port"])


def _say_users(desk: FrontDesk, host: str, port: int) -> None:
    """Make the first administrator, if there is no user."""
    from podrun.core.environment import runtime_directory
    from podrun.partition.commands.common import write_account
    from podrun.partition.state.accounts import Account, Role

    assert desk.accounts is not None
    users = desk.accounts.all()
    if users:
        click.echo(f"secure: {len(users)} users")
        return
    path = runtime_directory() / f"admin-{port}.vipu-cli.hcl"

    def write(key: str) -> None:
        with contextlib.suppress(OSError):  # `write_account` says what is wrong.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_account(path, host, port, ("admin", key))

    desk.accounts.create(Account("admin", Role.ADMIN, may_inject=True), write)
    click.echo(f"secure: the first user is admin: vipu-admin --config {path} create user NAME")


def _stop_on_signals() -> threading.Event:
    """An event that Ctrl-C, SIGTERM or SIGHUP sets; a second signal ends the process at once (the guardian cleans up).

    Signals that the caller ignores (nohup, a script's background) stay ignored.
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


_STATE_OPTIONS = (
    click.option("--cluster", default="pod16", metavar="NAME|FILE", help="POD of the file [pod16]."),
    click.option(
        "--state-file", type=click.Path(path_type=Path), metavar="FILE", help="The file [that of the POD]."
    ),
)
STOP_SECONDS = 60.0
"""Longest wait for a server to end in order."""


@click.command("stop")
@click.option("--port", type=click.IntRange(1, 65535), help="The server at this port [the only one].")
@click.option("--cluster", metavar="NAME", help="The server of this POD.")
def stop_server(port: int | None, cluster: str | None) -> int:
    """Stop a server, or end the machines that a killed server left. Partitions stay in the state file."""
    from podrun.partition.host.discovery import VIPU_SERVER, Registry
    from podrun.partition.machines.keeper import end_keeper, keepers

    registry = Registry()
    registry.sweep()
    servers = [entry for entry in registry.entries() if entry.kind == VIPU_SERVER]
    owned = {entry.pod for entry in servers}
    left = [entry for entry in keepers(registry) if entry.pod not in owned]
    entry = choose([*servers, *left], port, cluster)
    if entry.kind == VIPU_SERVER:
        _stop(entry)
        for keeper in keepers(registry):
            if entry.pod and keeper.pod == entry.pod:  # The entry of a server that left its machines.
                end_keeper(keeper)
        click.echo(f"the server of {entry.cluster} at port {entry.port} has ended")
    else:
        end_keeper(entry)
        click.echo(
            f"the machines of {entry.cluster}, which a server at port {entry.last_port} left, have ended"
        )
    return 0


def choose(entries: list[ServiceEntry], port: int | None, cluster: str | None) -> ServiceEntry:
    """The one server, or keeper without a server, that the options name. Raises NotFoundError or UsageError."""
    found = [
        entry
        for entry in entries
        if port in (None, entry.port or entry.last_port) and cluster in (None, entry.cluster)
    ]
    if len(found) == 1:
        return found[0]
    known = [f"{e.cluster} at port {e.port or e.last_port}" for e in found or entries]
    if not found:
        asked = f" at port {port}" if port else f" of {cluster}" if cluster else ""
        raise NotFoundError(
            f"this user runs no V-IPU server{asked} on this host, and none has left machines",
            hint=f"There are: {', '.join(known)}." if known else "vipu --server-version shows what answers.",
        )
    raise UsageError(f"there are several servers: {', '.join(known)}", hint="Name one: --port PORT")


def _stop(entry: ServiceEntry) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(entry.owner.pid, signal.SIGTERM)
        os.kill(entry.owner.pid, signal.SIGCONT)  # The process may be stopped (SIGSTOP).
    end = time.monotonic() + STOP_SECONDS
    while entry.owner.alive:
        if time.monotonic() >= end:
            raise DeadlineError(
                f"the server at port {entry.port} (process {entry.owner.pid}) has not ended in {STOP_SECONDS:g} s",
                hint=f"Kill it, then end its machines: kill -9 {entry.owner.pid}; vipu-server stop --port {entry.port}",
            )
        time.sleep(0.05)


def _with_state_options(command: Callable[..., int]) -> Callable[..., int]:
    for option in _STATE_OPTIONS:
        command = option(command)
    return command


@click.command("check")
@_with_state_options
def check_state(cluster: str, state_file: Path | None) -> int:
    """Say what is wrong with a state file, and what a repair would do. Exit code 1 if there is anything."""
    path, found, _ = _diagnosis(cluster, state_file)
    _tell(path, found)
    if found.problems:
        click.echo(f"Repair it: vipu-server repair --cluster {cluster} --state-file {path} --yes")
    return 1 if found.problems else 0


@click.command("repair")
@_with_state_options
@click.option("--yes", is_flag=True, help="Do it; without this option only say what would be done.")
def repair_state(cluster: str, state_file: Path | None, yes: bool) -> int:
    """Keep of a damaged state file what holds together. The old file stays beside it under another name."""
    from podrun.partition.state.repair import repair

    path, found, pod = _diagnosis(cluster, state_file)
    _tell(path, found)
    if not found.problems:
        return 0
    if not yes:
        click.echo("Nothing was changed; with --yes it is.")
        return 1
    backup = repair(path, pod, found)
    click.echo(f"repaired; the file as it was: {backup}")
    return 0


def _diagnosis(cluster: str, state_file: Path | None) -> tuple[Path, StateDiagnosis, Cluster]:
    from podrun.core.cluster import load_cluster
    from podrun.partition.state.repair import diagnose, read_rows
    from podrun.partition.state.store import default_state_file

    pod = load_cluster(cluster)
    path = state_file or default_state_file(pod.name)
    return path, diagnose(pod, read_rows(path)), pod


def _tell(path: Path, found: StateDiagnosis) -> None:
    for problem in found.problems:
        click.echo(f"{problem.what}: {problem.action}")
    kept = found.kept
    click.echo(
        f"{path}: {len(found.problems)} problems; it keeps {len(kept.partitions)} partitions, "
        f"{len(kept.plans.queue)} queued requests"
    )


for _verb in (stop_server, check_state, repair_state):
    vipu_server.add_command(_verb)


def main() -> None:
    """Entry point of `vipu-server`."""
    code = run(vipu_server)
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    # Everything has ended by now. Ray's exit handler can wait a minute for processes that have ended.
    os._exit(code)


if __name__ == "__main__":
    main()
