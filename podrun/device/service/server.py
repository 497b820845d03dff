"""A machine as a process of its own: its gRPC server, and the Ray actor that holds one.

Light to import: gRPC is imported when a server starts, JAX when the first program is loaded.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun import __version__
from podrun.core.environment import environment
from podrun.core.errors import ConflictError, UnrecoverableRuntimeError
from podrun.core.garbage import freeze_and_collect
from podrun.core.gate import Gate
from podrun.core.telemetry import MachineReport
from podrun.device.service.preload import Preload

if TYPE_CHECKING:
    import grpc

    from podrun.device.machine import Machine
    from podrun.device.machine_context import MachinePlace
    from podrun.device.xla.pieces import PieceCache

log = logging.getLogger("podrun.device")


class MachineServer:
    """One IPU-M2000 behind a gRPC server. It is in no partition until `MachineControl.configure`.

    ``on_lost``: called for the fault ``machine:N@batch=S:lost``; by default this server ends and the process lives on,
    for other machines in it. ``on_host_lost``: see `Machine`. ``own_process``: nothing but machines computes in this
    process (see `podrun.device.xla.pieces.PieceCache`). ``environ``: names the cache directory. ``token``: callers have
    to prove that they know it (`podrun.core.access`). ``shared``: users of this host may attach to partitions of their
    own, and ``admins`` (user ids) to all. ``pieces``: compiled code shared with other machines of this process.
    """

    def __init__(
        self,
        *,
        agent_id: str = "",
        serial: str = "",
        target: str = "gc200",
        environ: Mapping[str, str] | None = None,
        on_lost: Callable[[], None] | None = None,
        on_host_lost: Callable[[], None] | None = None,
        own_process: bool = False,
        token: str = "",
        shared: bool = False,
        admins: Sequence[int] = (),
        pieces: PieceCache | None = None,
        tls: Sequence[str] = (),
    ) -> None:
        if tls:
            from podrun.core.tls import use

            use(*tls)
        self._gate = Gate(token, shared=shared)
        self._admins = tuple(admins)
        self._own_process = own_process
        self._token = token
        self._pieces = pieces
        self._environ = dict(environment(environ))
        self._bare = MachineReport(
            agent_id=agent_id,
            pid=os.getpid(),
            serial=serial,
            target=target,
            versions={"IPUoF server": __version__, "driver": __version__},
        )
        self._on_lost = on_lost or self._end_abruptly
        self._on_host_lost = on_host_lost
        self._server: grpc.Server | None = None
        self._machine: Machine | None = None
        self._lock = threading.Lock()
        self.endpoint = ""

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the endpoint, ``host:port``. Raises ConflictError if the port is taken."""
        from podrun.device.crash_records import own_crash_record
        from podrun.device.service.control import MachineHolder
        from podrun.device.service.servicer import serve_machine

        holder = MachineHolder(self._make, self._bare, self._admins)
        try:
            if self._own_process:
                own_crash_record().write_stacks_on_fatal_signal()
            preload = Preload() if self._own_process else None
            self._server, bound = serve_machine(
                holder, (host, port), self.stop, self._gate, preload, self._environ
            )
        except RuntimeError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error}", hint="Choose another port, or 0 for any free one."
            ) from error
        self.endpoint = f"{host}:{bound}"
        return self.endpoint

    def stop(self) -> None:
        """End runs, sessions and the server. Idempotent."""
        with self._lock:
            server, self._server = self._server, None
        if self._machine is not None:
            self._machine.abort(
                UnrecoverableRuntimeError(
                    f"the machine at {self.endpoint} was stopped",
                    hint="Its partition was removed or its service ended.",
                )
            )
        if server is not None:
            server.stop(grace=0.2).wait(5.0)

    @property
    def listens(self) -> bool:
        """Whether it is started and neither stopped nor lost."""
        return self._server is not None

    def wait(self) -> None:
        """Until the server is stopped."""
        server = self._server
        if server is not None:
            server.wait_for_termination()

    def _make(self, place: MachinePlace) -> Machine:
        from podrun.device.machine import Machine
        from podrun.device.service.servicer import GrpcFabric
        from podrun.device.xla.kept_pieces import writable_cache
        from podrun.device.xla.pieces import MachinePieces, PieceCache

        fabric = GrpcFabric(lambda: machine.place, self._token)
        kind = MachinePieces if self._own_process else PieceCache
        pieces = self._pieces or kind(writable_cache(self._environ))
        machine = Machine(
            *(place, fabric, pieces),
            on_lost=self._on_lost,
            on_host_lost=self._on_host_lost,
            own_cores=self._own_process,
            shared=self._pieces is not None,
            agent=self._bare.agent_id,
        )
        self._machine = machine
        return machine

    def _end_abruptly(self) -> None:
        """End the server as if its process had been killed; other machines of the process go on."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            # In a thread: stopping waits for calls, which may wait for the calling thread.
            threading.Thread(
                target=lambda: server.stop(grace=None), name="podrun-end-machine", daemon=True
            ).start()


def kill_own_process() -> None:
    """End this process as a power cut would."""
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def kill_own_host() -> None:
    """End this node of a Ray cluster as a power cut would: its raylet, with which all its machines and instances end,
    and this process.
    """
    import signal

    os.kill(os.getppid(), signal.SIGKILL)
    kill_own_process()


class MachineActor:
    """The Ray actor: a process for one IPU-M2000, or for several if the host cannot hold a process for each.

    The ``lost`` fault kills a process that holds one machine. Of several machines, one ends: its server and connections
    end at once and for good, and the others stay. Results are the same either way.
    """

    def __init__(self) -> None:
        self._servers: dict[str, MachineServer] = {}

    def start(
        self,
        agent_ids: Sequence[str],
        target: str = "gc200",
        host: str = "127.0.0.1",
        *,
        joined: bool = False,
        **options: Any,
    ) -> list[str]:
        """Start a server for each agent; their endpoints. ``joined``: this host joined the Ray cluster of
        the service, so that a fault may end it.
        """
        from podrun.device.xla.kept_pieces import writable_cache
        from podrun.device.xla.pieces import MachinePieces

        alone = len(agent_ids) == 1
        pieces = None if alone else MachinePieces(writable_cache(options.get("environ", environment())))
        for agent in agent_ids:
            self._servers[agent] = MachineServer(
                agent_id=agent,
                target=target,
                on_lost=kill_own_process if alone else None,
                on_host_lost=kill_own_host if joined else None,
                own_process=True,
                pieces=pieces,
                **options,
            )
        endpoints = [self._servers[agent].start(host) for agent in agent_ids]
        freeze_and_collect()
        return endpoints

    def stop(self, agent_id: str) -> int:
        """End one machine's server; returns how many are left."""
        server = self._servers.pop(agent_id, None)
        if server is not None:
            server.stop()
        return len(self._servers)

    def endpoints(self) -> dict[str, str]:
        """Agents and endpoints of the machines that are up."""
        return {agent: server.endpoint for agent, server in self._servers.items() if server.listens}

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()


@functools.cache
def machine_actor() -> Any:
    """The Ray actor class. An actor ends with its owner unless it is started as detached, and is not restarted.

    It is one for all machines: Ray disassembles, pickles and sends each class of which it starts an actor.
    """
    import ray

    remote: Any = ray.remote
    return remote(max_restarts=0, max_concurrency=2)(MachineActor)
