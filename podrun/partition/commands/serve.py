"""What `vipu-server` does until it is told to stop: state, machines, sharing, users, signals."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import click

from podrun.core.access import is_loopback, tls_asked_for
from podrun.core.environment import environment
from podrun.core.errors import UsageError, present
from podrun.core.identity import user_name
from podrun.core.stop_signals import StopRequest, stop_on_signals

if TYPE_CHECKING:
    from podrun.core.cluster import Cluster
    from podrun.partition.host.discovery import Registry, ServiceEntry
    from podrun.partition.machines.keeper import Keeper
    from podrun.partition.machines.pool import MachinePool
    from podrun.partition.machines.ray_pool import RayMachinePool
    from podrun.partition.machines.ray_session import RaySession
    from podrun.partition.server.access import FrontDesk
    from podrun.partition.server.service import Service
    from podrun.partition.server.sharing import Sharing


log = logging.getLogger("podrun.partition")


PRESTART_PATIENCE_S = 120.0


def serve_pod(cluster: Cluster, options: dict[str, Any]) -> int:
    """Serve a POD until a signal ends it. ``options``: those of the command. Returns the exit code."""
    from podrun.partition.host.discovery import VIPU_SERVER, Registry, ServiceEntry, own_process_id
    from podrun.partition.host.ipuof_files import ipuof_directory
    from podrun.partition.machines.keeper import Keeper
    from podrun.partition.server.config_folder import IpuofFiles
    from podrun.partition.server.service import Service
    from podrun.partition.state.store import Store, default_state_file

    registry = Registry()
    registry.sweep()
    end = ServerEnd(stop_on_signals(), leave=options["keep_machines"])
    # Published before the server listens, with what it starts; its port follows.
    published = PublishedServer(registry, ServiceEntry(VIPU_SERVER, "", 0, own_process_id(), cluster.name))
    try:
        state = None if options["no_state"] else options["state_file"] or default_state_file(cluster.name)
        store = Store(state, cluster.name)
        keeper = None
        if not (state is None or options["in_process"] or options["ray_address"]):
            keeper = Keeper(registry, cluster.name, store.uid)
        published.owns(store.uid)
        pool = _machine_pool(cluster, options, published.add, keeper)
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


class ServerEnd:
    """How the server ends, and what becomes of machines. ``again``: it starts again, because the Ray of its machines
    has ended, which this process cannot use any more.
    """

    def __init__(self, stop: StopRequest, *, leave: bool) -> None:
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
    service: Service,
    pool: MachinePool,
    published: PublishedServer,
    stop: StopRequest,
    options: dict[str, Any],
) -> int:
    """Listen until ``stop``; returns the port."""
    host = options["host"]
    shown = "127.0.0.1" if host in ("0.0.0.0", "::") else host
    if options["ray_address"] and not is_loopback(host) and shown == "127.0.0.1":
        shown = cast("RayMachinePool", pool).places.own_address()
    desk = access_of(options, service)
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
        tell_users(desk, shown, desk.admin_port or port)
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


class PublishedServer:
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
        """Remove the entry by which clients of this host find the server."""
        with self._lock:
            self._publication.withdraw()


def _machine_pool(
    cluster: Cluster, options: dict[str, Any], on_session: Callable[[RaySession], None], keeper: Keeper | None
) -> MachinePool:
    machine_options = sharing_of(options).machine_options()
    if options["in_process"]:
        from podrun.partition.machines.local_pool import LocalMachinePool

        if options["ray_address"]:
            raise UsageError(
                "--in-process runs machines without Ray, and --ray-address names a cluster of Ray",
                hint="Leave one of the two options out.",
            )
        return LocalMachinePool(cluster, keep_spares=True, options=machine_options)
    from podrun.partition.machines.ray_obstacles import check_installed
    from podrun.partition.machines.ray_pool import RayMachinePool

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
        options=machine_options,
        keeper=keeper,
    )


def sharing_of(options: dict[str, Any]) -> Sharing:
    """The users whom the server answers. Raises UsageError for sharing with users whom it cannot identify."""
    from podrun.partition.server.sharing import Sharing, user_ids

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


def access_of(options: dict[str, Any], service: Service) -> FrontDesk:
    """The users whom the server answers, and the audit log."""
    from podrun.partition.server.access import AuditLog, FrontDesk
    from podrun.partition.state.accounts import Accounts

    path, state = options["audit_log"], service.store.path
    if options["secure"] and not is_loopback(options["host"]) and not tls_asked_for():
        raise UsageError(
            "--secure needs TLS, or a loopback address: access keys would cross the network in the clear",
            hint="Leave out --host, or make certificates: podrun help security.",
        )
    if options["secure"] and path is None and state is not None:
        path = state.with_name(f"{state.name}.audit.jsonl")
    accounts = Accounts(service.store) if options["secure"] else None
    return FrontDesk(sharing_of(options), accounts, AuditLog(path), options["admin_port"])


def tell_users(desk: FrontDesk, host: str, port: int) -> None:
    """Make the first administrator, if there is no user."""
    from podrun.core.environment import runtime_directory
    from podrun.partition.commands.which_server import write_account
    from podrun.partition.state.accounts import Account, Role

    accounts = present(desk.accounts, "a server that is secure has accounts")
    users = accounts.all()
    if users:
        click.echo(f"secure: {len(users)} users")
        return
    path = runtime_directory() / f"admin-{port}.vipu-cli.hcl"

    def write(key: str) -> None:
        with contextlib.suppress(OSError):  # `write_account` says what is wrong.
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_account(path, host, port, ("admin", key))

    accounts.create(Account("admin", Role.ADMIN, may_inject=True), write)
    click.echo(f"secure: the first user is admin: vipu-admin --config {path} create user NAME")
