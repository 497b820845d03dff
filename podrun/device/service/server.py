"""A machine as a process of its own: its gRPC server, and the Ray actor that holds one.

Light to import: gRPC is imported when a server starts, JAX when the first program is loaded.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podrun import __version__
from podrun.errors import ConflictError, UnrecoverableRuntimeError
from podrun.telemetry import MachineReport

if TYPE_CHECKING:
    import grpc

    from podrun.device.job import Place
    from podrun.device.machine import Machine
    from podrun.device.xla.pieces import PieceCache

log = logging.getLogger("podrun.device")


class MachineServer:
    """One IPU-M2000 behind a gRPC server. It is in no partition until it is told so
    (`MachineControl.configure`).

    ``on_lost``: what the fault ``machine:N@step=S:lost`` does; by default this server ends without a word, so
    that several machines can live in one process. ``own_process``: nothing else computes in this one (see
    `podrun.device.xla.pieces.PieceCache`). ``environ``: where to find the cache of compiled code. ``token``: what
    callers have to show (`podrun.access`). ``pieces``: compiled code shared with other machines of this process.
    """

    def __init__(
        self,
        *,
        agent_id: str = "",
        serial: str = "",
        target: str = "gc200",
        environ: Mapping[str, str] | None = None,
        on_lost: Callable[[], None] | None = None,
        own_process: bool = False,
        token: str = "",
        pieces: PieceCache | None = None,
    ) -> None:
        self._own_process = own_process
        self._token = token
        self._pieces = pieces
        self._environ = dict(os.environ if environ is None else environ)
        self._bare = MachineReport(
            agent_id=agent_id,
            pid=os.getpid(),
            serial=serial,
            target=target,
            versions={"IPUoF server": __version__, "driver": __version__},
        )
        self._on_lost = on_lost or self._vanish
        self._server: grpc.Server | None = None
        self._machine: Machine | None = None
        self._lock = threading.Lock()
        self.endpoint = ""

    def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; returns the endpoint, ``host:port``. Raises ConflictError if the port is taken."""
        from podrun.device.service.preload import Preload
        from podrun.device.service.servicer import serve
        from podrun.device.service.session import MachineHolder

        holder = MachineHolder(self._make, self._bare)
        try:
            preload = Preload() if self._own_process else None
            self._server, bound = serve(holder, host, port, self.stop, self._token, preload)
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

    def wait(self) -> None:
        """Until the server is stopped."""
        server = self._server
        if server is not None:
            server.wait_for_termination()

    def _make(self, place: Place) -> Machine:
        from podrun.device.machine import Machine
        from podrun.device.service.servicer import GrpcFabric
        from podrun.device.xla.cache_place import writable_cache
        from podrun.device.xla.lapack import OwnPieces
        from podrun.device.xla.pieces import PieceCache

        fabric = GrpcFabric(lambda: machine.place, self._token)
        kind = OwnPieces if self._own_process else PieceCache
        pieces = self._pieces or kind(writable_cache(self._environ))
        machine = Machine(
            *(place, fabric, pieces),
            on_lost=self._on_lost,
            own_cores=self._own_process,
            shared=self._pieces is not None,
        )
        self._machine = machine
        return machine

    def _vanish(self) -> None:
        """As if the process had been killed, for a server that shares its process with others."""
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            # From a thread of its own: it waits for calls that may wait for the one that came here.
            threading.Thread(
                target=lambda: server.stop(grace=None), name="podrun-vanish", daemon=True
            ).start()


def _die() -> None:
    """End this process as a power cut would: no goodbye to anyone."""
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


class MachineActor:
    """What Ray runs: a process for one IPU-M2000, or for several where a host could not hold a process for each.

    The ``lost`` fault kills the process of a machine that has it for itself. One of several vanishes: its server and
    connections end at once and for good, the others stay. Results are the same either way.
    """

    def __init__(self) -> None:
        self._servers: dict[str, MachineServer] = {}

    def start(
        self, agent_ids: Sequence[str], target: str = "gc200", host: str = "127.0.0.1", **options: Any
    ) -> list[str]:
        """Start a server for each agent; their endpoints."""
        from podrun.device.service.preload import collect_from_now_on
        from podrun.device.xla.cache_place import writable_cache
        from podrun.device.xla.lapack import OwnPieces

        alone = len(agent_ids) == 1
        pieces = None if alone else OwnPieces(writable_cache(options.get("environ", os.environ)))
        for agent in agent_ids:
            self._servers[agent] = MachineServer(
                agent_id=agent,
                target=target,
                on_lost=_die if alone else None,
                own_process=True,
                pieces=pieces,
                **options,
            )
        endpoints = [self._servers[agent].start(host) for agent in agent_ids]
        collect_from_now_on()
        return endpoints

    def stop(self, agent_id: str) -> int:
        """End one machine's server; how many are left."""
        server = self._servers.pop(agent_id, None)
        if server is not None:
            server.stop()
        return len(self._servers)

    def pid(self) -> int:
        """Process id of the actor."""
        return os.getpid()


def machine_actor() -> Any:
    """The Ray actor class. An actor ends with its owner (Ray's default lifetime), and does nothing on
    restart.
    """
    import ray

    remote: Any = ray.remote
    return remote(max_restarts=0, max_concurrency=2)(MachineActor)
