"""MachineControl: the partition service's hold on one machine, over gRPC."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grpc

from podrun.access import open_channel
from podrun.device.service import wire
from podrun.errors import ServiceError
from podrun.protos import ipuof_pb2 as pb
from podrun.protos import ipuof_pb2_grpc as stubs
from podrun.telemetry import MachineReport


class MachineControl:
    """Asks the machine at ``endpoint`` (host:port). ``timeout``: seconds for each answer; ``token``: see
    `podrun.access`.

    Calls raise ServiceError if it does not answer, and what the machine raises otherwise.
    """

    def __init__(self, endpoint: str, *, timeout: float = 10.0, token: str = "") -> None:
        self.endpoint = endpoint
        self._timeout = timeout
        self._channel = open_channel(endpoint, wire.CHANNEL_OPTIONS, token)
        self._stub = stubs.MachineControlStub(self._channel)  # type: ignore[no-untyped-call]

    def configure(
        self,
        *,
        partition: str,
        first_ipu: int,
        machine_index: int,
        endpoints: Sequence[str],
        ipus: int = 4,
    ) -> None:
        """Put the machine into a partition: its first IPU and its own index there, where all its machines
        listen.

        ``ipus``: how many IPUs this and every other machine of the partition has. Attached processes lose
        theirs.
        """
        self._ask(
            self._stub.Configure,
            pb.ConfigureRequest(
                partition=partition,
                first_ipu=first_ipu,
                machine=machine_index,
                ipus=ipus,
                endpoints=endpoints,
            ),
        )

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET of IPUs by their index at the machine."""
        self._ask(self._stub.ResetIpus, pb.ResetIpusRequest(ipus=list(ipus)))

    def reset_links(self) -> None:
        """PARTITION_RESET: retrain links, reset all IPUs; attached processes lose theirs."""
        self._ask(self._stub.ResetLinks, pb.Empty())

    def power_cycle(self) -> None:
        """FULL_RESET; attached processes lose their IPUs."""
        self._ask(self._stub.PowerCycle, pb.Empty())

    def inject(self, faults: Iterable[str]) -> None:
        """Plan faults, as ``ipu:5@step=17:tile-parity``; those of other machines are ignored."""
        self._ask(self._stub.Inject, pb.InjectRequest(faults=[str(fault) for fault in faults]))

    def telemetry(self) -> MachineReport:
        """What the machine reports now."""
        reply = self._call(self._stub.Telemetry, pb.Empty())
        wire.raise_error(reply.error_json)
        return MachineReport.from_json_dict(wire.json_or_error(reply.report_json, "a machine report"))

    def stop(self) -> None:
        """End the machine's server."""
        with contextlib.suppress(
            ServiceError
        ):  # It may end before it has answered, which is what was asked for.
            self._ask(self._stub.Stop, pb.Empty())

    def close(self) -> None:
        """End the connection."""
        self._channel.close()

    def _ask(self, method: Callable[..., Any], request: Any) -> None:
        wire.raise_error(self._call(method, request).error_json)

    def _call(self, method: Callable[..., Any], request: Any) -> Any:
        try:
            return method(request, timeout=self._timeout)
        except grpc.RpcError as error:
            code, _ = wire.status_of(error)
            raise ServiceError(
                f"the machine at {self.endpoint} does not answer ({code})",
                hint=(
                    "See vipu-admin list agents; a lost machine comes back with vipu-admin restart agent ID."
                ),
            ) from error
