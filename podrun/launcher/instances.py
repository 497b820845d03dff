"""Starts the instances of a launch, on this host and on others, each with its environment."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from podrun.core.environment import PODRUN_CHECK_REPLICAS
from podrun.core.errors import NotFoundError
from podrun.core.quick_dataclass import dataclass
from podrun.faults.fault_errors import SUPERVISED
from podrun.launcher.host_names import LOCAL_HOST, is_this_host
from podrun.launcher.own_streams import Log
from podrun.launcher.process import Command, LaunchResources, ProcessRunner
from podrun.launcher.spec import InstanceSpec, LaunchSpec, PartitionAddress, instance_environment
from podrun.launcher.supervise import Runner


@dataclass(slots=True)
class InstanceStarter:
    """Starts all instances of one attempt. ``environ``: as the user had it when podrun started. ``cache``: the folder
    of compiled programs. ``of_launch``: further variables of all instances, ``of_host``: of those on this host.
    """

    spec: LaunchSpec
    environ: Mapping[str, str]
    log: Log
    resources: LaunchResources
    cache: str
    of_launch: Mapping[str, str] = field(default_factory=dict)
    of_host: Mapping[str, str] = field(default_factory=dict)

    def remote_runners(self, wake: Callable[[], None]) -> list[Runner]:
        """Runners for the other hosts of the launch. ``wake`` is called when one of them has an event. Raises
        NotFoundError, ServiceError.
        """
        others = sorted({host for host in self.spec.layout.hosts if not is_this_host(host)})
        if not others:
            return []
        from podrun.launcher.remote import connect_hosts
        from podrun.partition.machines.ray_starts import AUTO

        ray = self.spec.server.ray or AUTO
        return list(
            connect_hosts(others, self.log, wake, address=ray, environ=self.environ, scratch=self.cache)
        )

    def start(self, local: ProcessRunner, others: Sequence[Runner], address: PartitionAddress | None) -> None:
        """Start every instance. ``address``: where it finds its IPUs. Raises NotFoundError if one cannot start."""
        exchange_point = choose_exchange_point([instance.host for instance in self.spec.instances])
        for instance in self.spec.instances:
            here = is_this_host(instance.host)
            command = Command(
                instance.index,
                instance.command,
                instance.directory,
                self._environment(instance, address, exchange_point, here=here),
                _stdin(instance),
            )
            runner = local if here else _runner_of(instance.host, others)
            try:
                pid = runner.start(command)
            except OSError as error:
                raise _cannot_start(instance, error) from error
            if here:
                self.resources.watch(pid)
            self.log.debug(f"instance {instance.index} is process {pid} on {instance.host}")

    def _environment(
        self, instance: InstanceSpec, address: PartitionAddress | None, exchange_point: str, *, here: bool
    ) -> dict[str, str]:
        environment = instance_environment(
            self.spec.layout,
            instance,
            self.environ,
            address=address,
            cache_path=self.cache,
            own_cache=self.spec.cache_path is None,
            launch_id=self.resources.launch_id,
            local=here,
            debug=self.spec.debug,
            exchange_point=exchange_point,
        )
        environment |= self.of_launch
        environment |= self.of_host if here else {}
        if self.spec.check_replicas:
            environment[PODRUN_CHECK_REPLICAS] = str(self.spec.check_replicas)
        if self.spec.restarts is not None:
            environment[SUPERVISED] = "1"
        return environment


def _cannot_start(instance: InstanceSpec, error: OSError) -> NotFoundError:
    few = error.errno in (errno.EMFILE, errno.EAGAIN)
    return NotFoundError(
        f"instance {instance.index} cannot start in {instance.directory}: {error.strerror}",
        hint="Allow more files and processes: ulimit -n 4096, ulimit -u."
        if few
        else "Check the directory (-wdir in --mpi-local-args, or where podrun runs).",
    )


def _runner_of(host: str, runners: Sequence[Runner]) -> Runner:
    return next(runner for runner in runners if getattr(runner, "host", None) == host)


def _stdin(instance: InstanceSpec) -> int | None:
    """The input of an instance: instance 0 reads what is piped into podrun. A terminal cannot be given to a
    background process group.
    """
    if not instance.forward_stdin or sys.stdin is None or sys.stdin.closed:
        return None
    try:
        number = sys.stdin.fileno()
        return None if os.isatty(number) else number
    except (OSError, ValueError):
        return None


def choose_exchange_point(hosts: Sequence[str]) -> str:
    """The exchange point of instances on these hosts: an address of the first host, a port outside the range of
    ports that the kernel assigns, and a random key. Empty for a single instance.
    """
    import secrets
    import socket

    if len(hosts) < 2:
        return ""
    address = hosts[0]
    if all(is_this_host(host) for host in hosts):
        address = "127.0.0.1"
    elif address == LOCAL_HOST:
        address = socket.gethostname()
    return f"{address}:{20000 + secrets.randbelow(10000)}:{secrets.token_hex(16)}"
