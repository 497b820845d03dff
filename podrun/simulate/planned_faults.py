"""A launch's fault plan in virtual time: faults that strike when the program has done so many batches since its start.

Each start of the program plans those that have still to strike, as `podrun --fault` does. A strike is the same event
for the campaign as one of its rates.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from podrun.core.cluster import IPUS_PER_MACHINE
from podrun.core.errors import UsageError
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec, FaultTarget
from podrun.simulate.engine import Order, nanoseconds
from podrun.simulate.rates import FailureSource

if TYPE_CHECKING:
    from podrun.simulate.campaign import Campaign
    from podrun.simulate.damage import IncidentNote

UNIT_OF = {FaultTarget.IPU: "ipu", FaultTarget.MACHINE: "machine", FaultTarget.LINK: "ipu-link"}
"""Targets of faults that a plan in virtual time may have, and their units."""


@dataclass(slots=True)
class VirtualStrike:
    """A fault that struck. ``began``, ``known``, ``again``: nanoseconds, when the program ran before it, when it was
    noticed, and when the program ran again (None: not yet); ``batch``: batches done of the whole training; ``note``:
    what the campaign keeps of it."""

    fault: FaultSpec
    began: int
    known: int
    batch: int
    note: IncidentNote
    again: int | None = None


class PlannedStrikes:
    """The faults of a plan in one campaign. ``strikes``: those that struck, in order."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._left = list(campaign.setup.planned)
        self._events: dict[int, int] = {}
        """When each fault of the plan strikes, by the number of its event."""
        self._began = self._batches = 0
        self.strikes: list[VirtualStrike] = []

    def begin(self) -> None:
        """The program starts to run."""
        campaign = self._campaign
        step = nanoseconds(campaign.setup.step_s)
        self._began, self._batches = campaign.engine.now, campaign.job.counted // step
        for strike in self.strikes:
            strike.again = self._began if strike.again is None else strike.again
        for fault in self._left:
            at = self._began + campaign.job.rhythm.elapsed(fault.batch * step)
            self._events[campaign.engine.at(at, Order.FAILURE, "planned fault", fault.text)] = at

    def noticed(self) -> None:
        """What stopped the program is known."""
        for strike in self.strikes:
            strike.known = strike.known or self._campaign.engine.now

    def end(self) -> None:
        """The program has stopped: what has not struck waits for its next start."""
        now = self._campaign.engine.now
        for event, at in self._events.items():
            if at > now:
                self._campaign.engine.cancel(event)
        self._events.clear()

    def strike(self, text: object) -> None:
        """Let the planned fault with this text strike now."""
        campaign = self._campaign
        fault = next(entry for entry in self._left if entry.text == text)
        self._left.remove(fault)
        first = fault.indices[0]
        machine = first if fault.target is FaultTarget.MACHINE else first // IPUS_PER_MACHINE
        unit = first + campaign.first_ipu if fault.target is FaultTarget.IPU else first
        began, batch = self._began, self._batches + fault.batch
        campaign.strike(source_of(fault, campaign.setup.detect_s), [campaign.machine_at(machine)], unit)
        self.strikes.append(VirtualStrike(fault, began, 0, batch, campaign.incidents[-1]))


def source_of(fault: FaultSpec, detect_s: float) -> FailureSource:
    """The source of failures that a planned fault is. Raises UsageError for one that has no twin."""
    unit = UNIT_OF.get(fault.target)
    elsewhen = fault.during or fault.seconds is not None or fault.rate is not None or fault.repeat > 1
    if unit is None or not fault.raises or elsewhen:
        raise UsageError(
            f"the fault {fault.text} has no twin in virtual time",
            hint="Faults of IPUs, IPU-Links and machines do that stop the program once: ipu:5@batch=17:tile-parity",
        )
    return FailureSource(unit, fault.kind, 0.0, detect_s=detect_s)
