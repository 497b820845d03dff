"""Metrics for Prometheus: one page with the reports of all machines of the POD.

    python -m podrun.monitor.exporter --port 2112      # http://127.0.0.1:2112/metrics

It shows what its user may see. So it answers only that user and root, whom the kernel knows on loopback addresses, and
callers that show its *key* (``Authorization: Bearer KEY``). The key is derived from the user's secret and lies in the
file ``exporter-key`` of the runtime directory. ``--public`` answers everybody. Where TLS is asked for
(`podrun.core.tls`) it speaks TLS.

Names of families follow the V-IPU exporter if they are known (``exporter_ticks``, ``ipu_attached``,
``ipu_tile_clk_speed``, ``ipum_hardware_info``); those that start with ``podrun_`` are podrun's own. Unknown values are
left out, never written as zero.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from podrun import commands
from podrun.core.access import make_token, tls_asked_for
from podrun.core.environment import environment, runtime_directory
from podrun.core.identity import user_of_peer
from podrun.core.telemetry import IpuReport, MachineReport
from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options
from podrun.vipu.types import PartitionState

if TYPE_CHECKING:
    from podrun.monitor.devices import Followed
    from podrun.vipu.client import VipuClient
    from podrun.vipu.types import ServiceMetrics


HEALTHS = ("up", "suspect", "unreachable", "cordoned", "draining", "failed")
"""Of agents; see `podrun.vipu.types.AgentInfo`."""


@dataclass(slots=True)
class Family:
    """One metric with its samples: labels and value."""

    name: str
    kind: str
    help: str
    samples: list[tuple[dict[str, str], float]] = field(default_factory=list)

    def add(self, value: float | None, **labels: str) -> None:
        """Add a sample, unless the value is unknown (None)."""
        if value is not None:
            self.samples.append((labels, value))

    def lines(self) -> Iterator[str]:
        """The family in Prometheus' text format."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            inner = ",".join(f'{key}="{_escape(text)}"' for key, text in labels.items())
            yield f"{self.name}{{{inner}}} {value:g}" if inner else f"{self.name} {value:g}"


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics(partitions: Mapping[str, Mapping[str, Any]], reports: Iterable[MachineReport], ticks: int) -> str:
    """The page. ``partitions``: by name, as `vipu list partitions --format json` has them."""
    tick = Family("exporter_ticks", "counter", "Times this page was made.")
    tick.add(ticks)
    info = Family("ipum_hardware_info", "gauge", "1 for each IPU-Machine.")
    up = Family("podrun_machine_up", "gauge", "1 if the machine's process answers.")
    state = Family(
        "podrun_partition_state", "gauge", "1 for the state that a partition is in, 0 for the others."
    )
    size = Family("podrun_partition_ipus", "gauge", "IPUs of a partition.")
    for name, partition in partitions.items():
        for possible in PartitionState:
            state.add(float(possible.name == partition["state"]), partition=name, state=possible.name)
        size.add(partition["size"], partition=name)
    ipus = _IpuFamilies()
    described: set[str] = set()
    for report in reports:
        if report.agent_id not in described:  # Partitions of one or two IPUs may share a machine.
            described.add(report.agent_id)
            info.add(1, agent=report.agent_id, serial=report.serial, target=report.target)
        up.add(float(report.state == "up"), agent=report.agent_id, partition=report.partition)
        for ipu in report.ipus:
            ipus.add(report, ipu)
    families = [tick, info, up, state, size, *ipus.all]
    return "\n".join(line for family in families for line in family.lines()) + "\n"


def health_page(agents: Mapping[str, Mapping[str, Any]], incidents: int) -> str:
    """The part about agents, as `vipu-admin list agents --format json` has them, and what went wrong."""
    health = Family("podrun_agents", "gauge", "Agents by health.")
    found = Counter(str(agent["health"]) for agent in agents.values())
    for name in HEALTHS:
        health.add(found[name], health=name)
    wrong = Family(
        "podrun_incidents_total", "counter", "Partitions that went into ERROR since the exporter started."
    )
    wrong.add(incidents)
    return "\n".join([*health.lines(), *wrong.lines()]) + "\n"


def service_page(found: ServiceMetrics) -> str:
    """The part about the partition service itself."""
    calls = Family("podrun_vipu_call_seconds", "histogram", "Duration of calls at the partition service.")
    errors = Family("podrun_vipu_call_errors", "counter", "Calls at the partition service that failed.")
    lines = list(calls.lines())
    for call in found.calls:
        bounds = [*(f"{bound:g}" for bound in found.bounds), "+Inf"]
        for bound, count in zip(bounds, (*call.within, call.count), strict=True):
            lines.append(f'{calls.name}_bucket{{call="{call.name}",le="{bound}"}} {count}')
        lines.append(f'{calls.name}_sum{{call="{call.name}"}} {call.seconds:g}')
        lines.append(f'{calls.name}_count{{call="{call.name}"}} {call.count}')
        errors.add(call.errors, call=call.name)
    queued = Family("podrun_vipu_queued_requests", "gauge", "Requests that wait for IPUs.")
    queued.add(found.queued)
    free = Family("podrun_vipu_free_ipus", "gauge", "IPUs that no partition holds, on agents in service.")
    free.add(found.free_ipus)
    largest = Family(
        "podrun_vipu_largest_free_partition", "gauge", "IPUs of the largest partition possible now."
    )
    largest.add(found.largest_free)
    split = Family("podrun_vipu_fragmentation", "gauge", "Share of the free IPUs outside the largest place.")
    split.add(1 - found.largest_free / found.free_ipus if found.free_ipus else 0.0)
    watchers = Family("podrun_vipu_watchers", "gauge", "Clients that watch.")
    watchers.add(found.watchers)
    for family in (errors, queued, free, largest, split, watchers):
        lines += family.lines()
    return "\n".join(lines) + "\n"


class _IpuFamilies:
    """Families with a sample for each IPU of a partition."""

    def __init__(self) -> None:
        self.attached = Family("ipu_attached", "gauge", "1 if a process holds the IPU.")
        self.clock = Family("ipu_tile_clk_speed", "gauge", "Tile clock in MHz.")
        self.error = Family("podrun_ipu_error", "gauge", "1 if the IPU or one of its links is in error.")
        self.busy = Family(
            "podrun_ipu_utilisation_percent", "gauge", "Share of the last second spent computing."
        )
        self.batches = Family("podrun_ipu_batches", "gauge", "Batches done since the program was loaded.")
        self.all = (self.attached, self.clock, self.error, self.busy, self.batches)

    def add(self, report: MachineReport, ipu: IpuReport) -> None:
        """The samples of one IPU."""
        labels = {"partition": report.partition, "ipu": str(ipu.partition_ipu), "agent": report.agent_id}
        self.attached.add(float(ipu.process is not None), **labels)
        self.clock.add(ipu.clock_mhz, **labels)
        self.error.add(float(ipu.has_error), **labels)
        self.busy.add(ipu.utilisation_percent, **labels)
        self.batches.add(ipu.batches_done, **labels)


PATIENCE_S = 10.0
"""Seconds that a caller may be silent."""
CALLERS = 64
"""Most callers at a time."""
KEY_FILE = "exporter-key"


def make_key(directory: Path, token: str) -> str:
    """The key for scrapers of another user or host, kept in ``directory`` for this user alone. It is derived from the
    user's ``token``, and opens nothing else."""
    key = hmac.new(token.encode(), b"podrun exporter 1", "sha256").hexdigest()
    path = directory / KEY_FILE
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with open(fd, "w", encoding="ascii") as file:
        os.fchmod(fd, 0o600)
        file.write(key + "\n")
    return key


def may_read(connection: socket.socket, authorization: str, key: str) -> bool:
    """Whether the caller shows the key, or is this user or root on this host."""
    kind, _, shown = authorization.partition(" ")
    if kind.lower() == "bearer" and hmac.compare_digest(shown.strip().encode(), key.encode()):
        return True
    peer, here = connection.getpeername(), connection.getsockname()
    return user_of_peer((peer[0], peer[1]), (here[0], here[1])) in (0, os.getuid())


def make_server(client: VipuClient, host: str, port: int, key: str = "") -> ThreadingHTTPServer:
    """An HTTP server that answers /metrics; the caller runs ``serve_forever``. ``key``: see `may_read`; with an empty
    key it answers everybody.
    """
    from podrun.monitor.devices import Followed

    ticks = iter(range(1, sys.maxsize))
    followed = Followed(client)

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE_S

        def do_GET(self) -> None:
            from podrun.core.errors import PodrunError

            if key and not may_read(self.connection, self.headers.get("Authorization", ""), key):
                self.send_response(401, "Who asks is unknown")
                self.send_header("WWW-Authenticate", "Bearer")
                self.end_headers()
                self.wfile.write(f"Show the key of {KEY_FILE} (Authorization: Bearer KEY).\n".encode())
                return
            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "There is only /metrics.")
                return
            try:
                page = metrics(followed.all("partition"), client.machine_reports(), next(ticks))
                page += health_page(followed.all("machine"), followed.incidents)
                page += service_page(client.service_metrics())
            except PodrunError as error:
                self.send_error(503, error.message)
                return
            body = page.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: scrapes come every few seconds."""

    return _Server((host, port), Handler, followed)


class _Server(ThreadingHTTPServer):
    """Speaks TLS where the environment asks for it; each caller's thread does its handshake. At most `CALLERS` have a
    thread; further callers are dropped at once.
    """

    request_queue_size = 128

    def __init__(
        self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], followed: Followed
    ) -> None:
        self._room = threading.BoundedSemaphore(CALLERS)
        self._followed = followed
        try:
            super().__init__(address, handler)
        except OSError:
            followed.close()
            raise

    def server_close(self) -> None:
        """See `socketserver.BaseServer`."""
        super().server_close()
        self._followed.close()

    def process_request(self, request: Any, client_address: Any) -> None:
        """See `socketserver.BaseServer`."""
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """See `socketserver.ThreadingMixIn`."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def get_request(self) -> tuple[Any, Any]:
        """See `socketserver.BaseServer`."""
        sock, peer = super().get_request()
        if tls_asked_for():
            from podrun.core.tls import credentials

            ours = credentials()
            assert ours is not None
            sock = ours.server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return sock, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore callers that go away, or that TLS refuses."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


@click.command("python -m podrun.monitor.exporter", context_settings=HELP_OPTIONS)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=2112, help="Port; 0 for a free one [2112].")
@click.option("--public", is_flag=True, help="Answer everybody who reaches it.")
@server_options
def exporter(host: str, port: int, public: bool, api_host: str | None, api_port: int | None) -> None:
    """Serve metrics of the POD for Prometheus until Ctrl-C."""
    from podrun.core.errors import ConflictError
    from podrun.monitor.devices import connect, on_stderr

    with connect(api_host, api_port, say=on_stderr) as client:
        try:
            directory = runtime_directory()
            key = "" if public else make_key(directory, make_token(environment(), directory))
            server = make_server(client, host, port, key)
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


def main() -> int:
    """Entry point."""
    return run(exporter)


if __name__ == "__main__":
    sys.exit(commands.run(main, command="podrun.monitor.exporter"))
