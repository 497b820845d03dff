"""Metrics for Prometheus: one page with the reports of all machines of the POD.

    python -m podrun.monitor.exporter --port 2112      # http://127.0.0.1:2112/metrics

Names of families follow the V-IPU exporter if they are known (``exporter_ticks``, ``ipu_attached``,
``ipu_tile_clk_speed``, ``ipum_hardware_info``); those that start with ``podrun_`` are podrun's own. Unknown values are
left out, never written as zero.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import click

from podrun import commands
from podrun.core.telemetry import IpuReport, MachineReport
from podrun.vipu.cli_common import HELP_OPTIONS, run, server_options

if TYPE_CHECKING:
    from podrun.vipu.client import VipuClient
    from podrun.vipu.types import PartitionInfo


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


def metrics(partitions: Iterable[PartitionInfo], reports: Iterable[MachineReport], ticks: int) -> str:
    """The page."""
    tick = Family("exporter_ticks", "counter", "Times this page was made.")
    tick.add(ticks)
    info = Family("ipum_hardware_info", "gauge", "1 for each IPU-Machine.")
    up = Family("podrun_machine_up", "gauge", "1 if the machine's process answers.")
    state = Family(
        "podrun_partition_state", "gauge", "1 for the state that a partition is in, 0 for the others."
    )
    size = Family("podrun_partition_ipus", "gauge", "IPUs of a partition.")
    for partition in partitions:
        for possible in type(partition.state):
            state.add(float(possible is partition.state), partition=partition.name, state=possible.name)
        size.add(partition.size, partition=partition.name)
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


def make_server(client: VipuClient, host: str, port: int) -> ThreadingHTTPServer:
    """An HTTP server that answers /metrics; the caller runs ``serve_forever``."""
    ticks = iter(range(1, sys.maxsize))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            from podrun.core.errors import PodrunError

            if self.path.split("?")[0] != "/metrics":
                self.send_error(404, "There is only /metrics.")
                return
            try:
                page = metrics(client.list_partitions(), client.machine_reports(), next(ticks))
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

    return ThreadingHTTPServer((host, port), Handler)


@click.command(context_settings=HELP_OPTIONS)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on [127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), default=2112, help="Port; 0 for a free one [2112].")
@server_options
def exporter(host: str, port: int, api_host: str | None, api_port: int | None) -> None:
    """Serve metrics of the POD for Prometheus until Ctrl-C."""
    from podrun.core.errors import ConflictError
    from podrun.monitor.devices import connect, on_stderr

    with connect(api_host, api_port, say=on_stderr) as client:
        try:
            server = make_server(client, host, port)
        except OSError as error:
            raise ConflictError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint="Use another port: --port 2113"
            ) from error
        with server:
            click.echo(f"http://{host}:{server.server_address[1]}/metrics")
            server.serve_forever()


def main() -> int:
    """Entry point."""
    return run(exporter)


if __name__ == "__main__":
    sys.exit(commands.run(main, command="podrun.monitor.exporter"))
