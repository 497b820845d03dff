"""The V-IPU server of a launch: one that runs already, or podrun's own, which lives in this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, TypeVar

from podrun.core.access import is_loopback, make_token
from podrun.core.environment import runtime_directory
from podrun.core.errors import ConflictError, PodrunError, UsageError, present
from podrun.core.quick_dataclass import dataclass
from podrun.launcher.own_streams import Log
from podrun.launcher.placement import fit_to_pod
from podrun.launcher.server import (
    LOCAL,
    ServerAddress,
    choose_cluster,
    facts_of,
    find_launch_server,
    pods_by_size,
)
from podrun.launcher.spec import CurrentLaunch, PodFacts
from podrun.partition.machines.ray_template import end_early_template

if TYPE_CHECKING:
    from podrun.partition.client.vipu_client import VipuClient
    from podrun.partition.machines.ray_pool import RayMachinePool
    from podrun.partition.server.service import Service


Answer = TypeVar("Answer")

ASK_AGAIN_SECONDS = 0.5
"""Pause between two questions to a server that may be starting again."""


class LaunchOverError(PodrunError):
    """The launch has ended while a thread waited for its partition."""


class LaunchPauses:
    """The pauses between two questions to a server. They end when the launch ends, whichever thread pauses."""

    def __init__(self) -> None:
        self._closing = threading.Event()

    def pause(self, seconds: float) -> None:
        """Wait. Raises Closed once `close` has been called."""
        if self._closing.wait(seconds):
            raise LaunchOverError("podrun ends while its partition is on its way")

    def close(self) -> None:
        """End this pause and all later ones."""
        self._closing.set()


@dataclass(slots=True)
class LaunchServer:
    """A connection to the server of a launch. `connect` finds the server or starts one; `close` ends both."""

    current: CurrentLaunch
    environ: Mapping[str, str]
    log: Log
    others: Sequence[str] = ()
    """Other hosts that run instances and must reach the server."""
    address: ServerAddress | None = None
    pod: PodFacts | None = None
    token: str = field(default="", repr=False)
    _client: VipuClient | None = None
    _service: Service | None = None
    _pool: RayMachinePool | None = None
    """The machines of podrun's own server, whose Ray may run before there is the server that closes them."""

    @property
    def client(self) -> VipuClient:
        """The connection. There is one after `connect`."""
        return present(self._client, "connect comes first")

    @property
    def connected_address(self) -> ServerAddress:
        """The address. There is one after `connect`."""
        return present(self.address, "connect comes first")

    @property
    def connected_pod(self) -> PodFacts:
        """What the POD is. It is known after `connect`."""
        return present(self.pod, "connect comes first")

    @property
    def missing(self) -> bool:
        """True iff no server was found: podrun has started its own, or the POD is too small for the launch."""
        return self.address is None or self.own

    @property
    def own(self) -> bool:
        """True iff the server runs inside this process and ends with it."""
        return self._service is not None

    def connect(self, pause: Callable[[float], None] = time.sleep) -> PodFacts:
        """Find the server or start one, and return its POD. Raises ServiceError if a named server does not answer, and
        ConflictError if it has another POD than --cluster says or the port is taken. ``pause``: see `awaited`.
        """
        spec = self.current.spec.server
        self.address = find_launch_server(spec, self.environ)
        if self.address is None:
            return self._start_service()
        end_early_template()  # The server has machines.
        self.log.info(f"V-IPU server {self.address}")
        if self.others and is_loopback(self.address.host):
            raise UsageError(
                f"instances on {', '.join(self.others)} cannot reach the V-IPU server {self.address}",
                hint="Start it with vipu-server --ray-address HOST:PORT --host ADDRESS, name that with "
                "--vipu-server-host, or stop it: podrun then runs its own.",
            )
        self.token = make_token(self.environ, runtime_directory())
        self._connect(self.address)
        pod = self.awaited(self.client.cluster, pause)
        if spec.cluster and spec.cluster != pod.name:
            raise ConflictError(
                f"the V-IPU server at {self.address} has {pod.name}, not {spec.cluster}",
                hint="Leave out --cluster, or stop that server (vipu-server) and let podrun start its own.",
            )
        self.pod = PodFacts(pod.name, pod.num_ipus, pod.ipu_link_domain_size, pod.ipu_link_topology)
        return self.pod

    def awaited(self, call: Callable[[], Answer], pause: Callable[[float], None]) -> Answer:
        """The answer of a server that may be starting again: one that has answered before, or one of this host whose
        machines run. ``pause`` waits for so many seconds. Raises ServiceError if it stays away.
        """
        from podrun.partition.client.connection import NoServerError
        from podrun.partition.client.partition_calls import SERVER_PATIENCE_S

        end, told = time.monotonic() + SERVER_PATIENCE_S, False
        while True:
            try:
                return call()
            except NoServerError as error:
                if time.monotonic() >= end or not self._may_come_back():
                    raise
                if not told:
                    self.log.progress(f"waiting for the V-IPU server: {error.message}")
                    told = True
            pause(ASK_AGAIN_SECONDS)

    def _may_come_back(self) -> bool:
        if self.pod is not None:
            return True
        from podrun.partition.host.discovery import POD, Registry

        address = self.connected_address
        left = Registry(runtime_directory(self.environ)).entries()
        return is_loopback(address.host) and any(e.kind == POD and e.last_port == address.port for e in left)

    def reconnect(self, timeout: float) -> None:
        """Replace the connection, which may have been cancelled, by a new one with a shorter ``timeout`` (seconds)."""
        self.close_client()
        self._connect(self.connected_address, min(self.current.spec.server.timeout, timeout))

    def close_client(self) -> None:
        """Close the connection. A call that another thread waits for fails. Idempotent."""
        if self._client is not None:
            self._client.close()

    def close(self) -> None:
        """Close the connection, and stop the server if it is podrun's own."""
        self.close_client()
        if self._service is not None:
            self._service.stop()
        elif self._pool is not None:
            self._pool.close()

    def _connect(self, address: ServerAddress, timeout: float | None = None) -> None:
        from podrun.partition.client.vipu_client import VipuClient

        seconds = timeout or self.current.spec.server.timeout
        self._client = VipuClient(address.host, address.port, seconds, own=address.own)

    def _start_service(self) -> PodFacts:
        from podrun.partition.machines.ray_obstacles import check_installed
        from podrun.partition.machines.ray_pool import RayMachinePool

        spec = self.current.spec
        check_installed()
        cluster = choose_cluster(spec)
        self.pod = facts_of(cluster)
        if spec.layout.ipus > self.pod.ipus:
            return self.pod  # The POD is too small: the caller refuses it, and nothing is started.
        ray = spec.server.ray
        if ray is not None:
            from podrun.partition.machines.ray_starts import resolve

            ray = resolve(ray, self.environ)
        self.token = make_token(self.environ, runtime_directory())
        self._pool = pool = RayMachinePool(cluster, address=ray, token=self.token)
        if ray is None and not spec.server.port:  # A port may be taken, and then nothing is started.
            fit_to_pod(spec, self.pod, pods_by_size)
            pool.begin()
        from podrun.partition.server.service import Service
        from podrun.partition.state.store import Store

        self._service = Service(cluster, Store(None, cluster.name), pool)
        host = pool.places.own_address() if ray is not None else LOCAL
        port = self._service.start(host, spec.server.port or 0, self.token)
        self.address = ServerAddress(host, port, "podrun's own")
        self._connect(self.address)
        self.log.info(f"V-IPU server {self.address} for {cluster.name}")
        return self.pod
