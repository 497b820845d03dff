"""The devices of a partition, or of this process where there is none: which exist, and how a program gets one.

A device is a range of IPUs whose size is a power of two and which begins at a multiple of it
(`podrun.runtime.device.device_ids`). Under ``podrun`` an instance takes its own IPUs first, so that instances do not
race for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from podrun.core.errors import PodrunError, PoplarError, ServiceError, SystemRuntimeError, UsageError
from podrun.core.layout import IpuRange, is_power_of_two
from podrun.core.quick_dataclass import dataclass
from podrun.runtime.device import DeviceKind, RunDevice, device_ids, open_connection, partition_configured
from podrun.runtime.environment import ours

STANDALONE_IPUS = 64
"""IPUs of a process that runs without a partition."""

Candidates = list[tuple[int, IpuRange]]
"""Devices by id, in the order in which they are tried."""


@dataclass(frozen=True, slots=True)
class Acquisition:
    """What came of asking for a device: the device, or why each one that was tried is not to be had."""

    device: RunDevice | None
    refusals: tuple[str, ...] = ()


class DevicePool:
    """The devices that an environment gives. Holds nothing itself."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.environ = dict(ours(environ))

    @property
    def total_ipus(self) -> int:
        """IPUs of the partition, or of this process where there is none. UsageError for a wrong
        PODRUN_STANDALONE_IPUS.
        """
        if not partition_configured(self.environ):
            text = self.environ.get("PODRUN_STANDALONE_IPUS", str(STANDALONE_IPUS))
            if not text.isdecimal() or not is_power_of_two(int(text)):
                raise UsageError(
                    f"PODRUN_STANDALONE_IPUS is {text!r}, not a power of two.",
                    hint=f"As in: export PODRUN_STANDALONE_IPUS={STANDALONE_IPUS}",
                )
            return int(text)
        connection = open_connection(self.environ, 0)
        try:
            return connection.total_ipus
        finally:
            connection.close()

    def devices(self, ipus: int) -> list[RunDevice]:
        """All devices of that many IPUs, free or taken, attached to none."""
        return [
            self.device(i, owned) for i, owned in device_ids(self.total_ipus).items() if owned.count == ipus
        ]

    def device(self, identifier: int, ipus: IpuRange) -> RunDevice:
        """The device of these IPUs, not attached."""
        return RunDevice(
            DeviceKind.IPU, ipus, identifier=identifier, environ=self.environ, job=self._job(ipus)
        )

    def acquire(
        self, ipus: int, *, attach: bool = True, order: Callable[[Candidates], Candidates] = list
    ) -> Acquisition:
        """The first device of that many IPUs that can be attached. UsageError unless ``ipus`` is a power of two.

        ``attach``: attach now; otherwise the first device is given, free or not. ``order``: of the devices, by id.
        A device whose machine is lost or does not answer is passed over. If no other one is there, its error is raised.
        """
        if not is_power_of_two(ipus):
            raise UsageError(f"A device has a power of two of IPUs; {ipus} were asked for.")
        ids = device_ids(self.total_ipus).items()
        refusals: list[str] = []
        errors: list[PodrunError] = []
        for identifier, owned in self._own_first(order([pair for pair in ids if pair[1].count == ipus])):
            device = self.device(identifier, owned)
            try:
                refusal = device.refusal() if attach else None
            except (SystemRuntimeError, ServiceError) as error:
                errors.append(error)
                refusal = error.message
            if refusal is None:
                return Acquisition(device)
            refusals.append(refusal)
            device.connection.close()
        if errors and len(errors) == len(refusals):
            raise errors[0]
        return Acquisition(None, tuple(refusals))

    def refusals(self, ipus: int) -> list[str]:
        """Why no device of that many IPUs can be acquired now, each reason once; empty if one can."""
        answer = self.acquire(ipus)
        if answer.device is not None:
            answer.device.detach()
        return list(dict.fromkeys(answer.refusals))

    def acquire_range(self, ipus: IpuRange, *, attach: bool = True) -> RunDevice:
        """The device that is exactly these IPUs, which need not be a power of two or aligned. UsageError if the
        partition lacks one of them or somebody else has it.
        """
        total = self.total_ipus
        if ipus.stop > total:
            raise UsageError(f"IPUs {ipus.first} to {ipus.stop - 1} go beyond the partition's {total}.")
        identifiers = {held: identifier for identifier, held in device_ids(total).items()}
        device = self.device(identifiers.get(ipus, -1), ipus)
        refusal = device.refusal() if attach else None
        if refusal is not None:
            raise UsageError(
                f"Failed to acquire device with IPUs {ipus.first} to {ipus.stop - 1}: {refusal}. gc-monitor shows who "
                "uses them.",
                hint="gc-monitor",
            )
        return device

    def acquire_by_id(self, identifier: int, *, attach: bool = True) -> RunDevice | None:
        """The device of an id, or None if it is taken. PoplarError if there is none of that id."""
        ids = device_ids(self.total_ipus)
        if identifier not in ids:
            raise PoplarError(f"No such device set id: '{identifier}'")
        device = self.device(identifier, ids[identifier])
        return device if not attach or device.attach() else None

    def _own_first(self, candidates: Candidates) -> Candidates:
        """Under ``podrun``, the IPUs of this instance come first."""
        from podrun.popdist import core

        layout = core.layout(self.environ)
        if layout is None:
            return candidates
        first = layout.ipus.first
        return sorted(candidates, key=lambda pair: pair[1].first != first)

    def _job(self, ipus: IpuRange) -> IpuRange:
        """The IPUs of the whole program: under ``podrun`` those of all instances, if ``ipus`` are this instance's."""
        from podrun.popdist import core

        layout = core.layout(self.environ)
        if layout is None or ipus != layout.ipus:
            return ipus
        return layout.job
