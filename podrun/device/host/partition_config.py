"""Asks the partition service where the machines of a partition are."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import grpc

from podrun.core.access import OWN_SERVER, account_of, make_token, why_unreachable, with_account
from podrun.core.environment import (
    IPUOF_CONFIG_PATH,
    IPUOF_VIPU_API_GCD_ID,
    IPUOF_VIPU_API_HOST,
    IPUOF_VIPU_API_PARTITION_ID,
    IPUOF_VIPU_API_PORT,
    IPUOF_VIPU_API_TIMEOUT,
    PODRUN_LAUNCH_ID,
    runtime_directory,
)
from podrun.core.errors import ConfigError, DeniedError, NotFoundError, ServiceError, UsageError
from podrun.core.identity import connect_tcp
from podrun.core.known_servers import KnownServers, only_of
from podrun.core.proven_channel import open_channel
from podrun.device.host.client import PortConnection
from podrun.device.host.remote import RemotePort, RemotePorts
from podrun.device.host.stale_files import CONNECT_SECONDS, read_config, sites_of, why_gone
from podrun.device.service import wire
from podrun.protos import vipu_pb2
from podrun.protos.services import stub_of

STARTING_STATES = ("PENDING", "PROVISIONING", "RESETTING")
"""States of a partition that is about to become ACTIVE: programs may start before their machines are up."""
POLL_SECONDS = 0.05
SERVER_PATIENCE_SECONDS = 30.0
"""Seconds for which an instance of a launch lets a server start again that does not answer, as the launch does."""
SERVER_AGAIN_SECONDS = 0.5


def connect_files(environ: Mapping[str, str], paths: Sequence[Path]) -> PortConnection:
    """A connection to the partition that IPUoF configuration files describe, without asking the partition service.
    Raises ConfigError for inconsistent files.
    """
    wanted = _number(environ, IPUOF_VIPU_API_GCD_ID, 0)
    by_gcd: dict[int, vipu_pb2.PartitionConfig] = {}
    for path in paths:
        described = read_config(path)
        gcd = int(described.attributes.get("GCD Id", "0"))
        if gcd in by_gcd:
            raise ConfigError(
                f"{path} describes GCD {gcd}, and so does another of: {', '.join(map(str, paths))}",
                hint="Name the one to use: export IPUOF_CONFIG_PATH=FILE",
            )
        by_gcd[gcd] = described
    if environ.get(IPUOF_CONFIG_PATH) and (why := why_gone(by_gcd[min(by_gcd)], environ)):
        raise _outdated(why, paths)
    config = by_gcd.get(wanted) or (by_gcd[min(by_gcd)] if len(by_gcd) == 1 else None)
    if config is None:
        raise ConfigError(
            f"no GCD {wanted} is described by: {', '.join(map(str, paths))}",
            hint=f"Described: {', '.join(map(str, sorted(by_gcd)))}. Say which: export IPUOF_VIPU_API_GCD_ID=N",
        )
    for other in by_gcd.values():
        if other is not config:
            config.devices.extend(other.devices)
    _refuse_outdated(config, paths)
    directory = runtime_directory(environ)
    # Machines of this user prove themselves. Others may be those of a user whose server this one has used.
    open_port = partial(
        RemotePort,
        token=make_token(environ, directory),
        admit=only_of(KnownServers(directory).users()),
    )
    return _connection(config, paths[0].name.removesuffix(".conf").removesuffix("_ipuof"), open_port)


def _refuse_outdated(config: vipu_pb2.PartitionConfig, paths: Sequence[Path]) -> None:
    """Raise ConfigError if nothing listens where a file says that a machine is."""
    for host, port in sorted({(device.ip, device.server_port) for device in config.devices}):
        try:
            connect_tcp(host, port, CONNECT_SECONDS).close()
        except OSError as error:
            why = f"no machine listens at {host}:{port} ({error.strerror or error})"
            raise _outdated(why, paths) from error


def _outdated(why: str, paths: Sequence[Path]) -> ConfigError:
    named = ", ".join(map(str, paths))
    return ConfigError(
        f"{named} is out of date: {why}: the partition was reset, moved or removed since",
        hint="vipu list partitions shows which there are. Write it anew: vipu get partition NAME "
        f"--ipuof-configs > {paths[0]}; or remove it: rm {paths[0]}",
    )


def connect_partition(
    environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep
) -> PortConnection:
    """See `podrun.device.connection.connect`."""
    host, partition = environ[IPUOF_VIPU_API_HOST], environ[IPUOF_VIPU_API_PARTITION_ID]
    port, gcd = _number(environ, IPUOF_VIPU_API_PORT, 8090), _number(environ, IPUOF_VIPU_API_GCD_ID, 0)
    timeout = _number(environ, IPUOF_VIPU_API_TIMEOUT, 120)
    where = f"{host}:{port}"
    directory, own = runtime_directory(environ), environ.get(OWN_SERVER) == "1"
    token = make_token(environ, directory)
    admit = None if own else KnownServers(directory).admit
    end = time.monotonic() + timeout
    patience = SERVER_PATIENCE_SECONDS if environ.get(PODRUN_LAUNCH_ID) else 0.0
    give_up = min(end, time.monotonic() + patience)
    with open_channel(where, wire.CHANNEL_OPTIONS, token, own=own, admit=admit) as channel:
        stub = stub_of(vipu_pb2, "UserService", with_account(channel, account_of(environ)))

        def ask(number: int) -> vipu_pb2.PartitionConfig:
            request = vipu_pb2.GetPartitionIpuofConfigRequest(
                partition_id=partition, gcd_id=vipu_pb2.GcdId(id=number)
            )
            while True:
                try:
                    partition_config: vipu_pb2.PartitionConfig = stub.GetPartitionIpuofConfig(
                        request, timeout=timeout
                    ).ipuof_config
                    return partition_config
                except grpc.RpcError as error:
                    if wire.status_of(error)[0] != "UNAVAILABLE" or time.monotonic() >= give_up:
                        raise _no_config(error, where, partition) from error
                sleep(SERVER_AGAIN_SECONDS)

        while (config := ask(gcd)).state in STARTING_STATES and time.monotonic() < end:
            sleep(POLL_SECONDS)
        if config.state == "ACTIVE":
            _add_other_gcds(config, gcd, ask)
    if config.state != "ACTIVE" or not config.devices:
        why = config.attributes.get("Error", "")
        raise ServiceError(
            f"partition {partition} is {config.state or 'not ready'}: its IPUs cannot be reached"
            + (f": {why}" if why else ""),
            hint=f"vipu get partition {partition}",
        )
    # The machines are of whoever runs the service.
    open_port = partial(RemotePort, token=token, own=channel.proved, admit=only_of([channel.server_uid]))
    return _connection(config, partition, open_port)


def _connection(
    config: vipu_pb2.PartitionConfig, partition: str, open_port: Callable[..., RemotePort]
) -> PortConnection:
    connection = PortConnection(
        sites_of(config),
        RemotePorts(open_port),
        partition=partition,
        agents={device.machine: device.agent_id for device in config.devices},
    )
    # So that machines can tell a process that ends from one that dies.
    atexit.register(connection.close)
    return connection


def _add_other_gcds(
    config: vipu_pb2.PartitionConfig, gcd: int, ask: Callable[[int], vipu_pb2.PartitionConfig]
) -> None:
    """Add the devices of the partition's other GCDs. An instance owns IPUs of its own GCD only, but a machine may lie
    in two, and the numbers of devices count through the partition."""
    for other in range(int(config.attributes.get("Num GCDs", "1") or 1)):
        if other != gcd:
            config.devices.extend(ask(other).devices)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name) or str(default)
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; a number was expected") from None


def _no_config(error: Exception, where: str, partition: str) -> ServiceError | NotFoundError | DeniedError:
    status, details = wire.status_of(error)
    if status == "NOT_FOUND":
        return NotFoundError(details, hint="vipu list partitions")
    if status == "PERMISSION_DENIED":
        return DeniedError(details, hint="vipu list partitions shows whose partitions there are.")
    if status == "UNAVAILABLE":  # gRPC's own words are about its streams and addresses.
        details = why_unreachable(where) or "nobody answers there as a V-IPU server"
    return ServiceError(
        f"the partition service at {where} gave no configuration of partition {partition}: {details}",
        hint="Is it running? vipu --server-version",
    )
