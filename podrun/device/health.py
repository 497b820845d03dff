"""What is broken on a machine, and what makes it whole again.

Only the action that an error names clears it, or a stronger one that includes it: resetting the partition
resets IPUs too, power-cycling resets everything. A machine that is lost, or has failed for good, comes back
only as a new one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from podrun.core.errors import PoplarError, RecoveryAction
from podrun.faults import EFFECTS, FaultSpec, FaultTarget, error_for


@dataclass(frozen=True, slots=True)
class Condition:
    """One thing that is broken: the phrase monitor tools show, the error it raises, and what clears it (None:
    nothing).
    """

    state: str
    error: PoplarError
    action: RecoveryAction | None


class Health:
    """The broken things of one machine whose partition IPUs are ``ipus``; ``agent``: its name, for hints.
    Guarded by the machine's lock.
    """

    def __init__(self, ipus: Iterable[int], partition: str, agent: str = "") -> None:
        self._agent = agent
        self._mine = frozenset(ipus)
        self._partition = partition
        self._ipus: dict[int, Condition] = {}
        self._links: dict[tuple[int, int], Condition] = {}
        self._machine: Condition | None = None

    def record(self, spec: FaultSpec, batch: int | None = None) -> PoplarError:
        """Note that the fault happened, in ``batch``; gives the error to raise."""
        effect = EFFECTS[spec.target.value, spec.kind]
        error = error_for(spec, partition=self._partition, agent=self._agent, batch=batch)
        if not effect.state:
            return error  # Nothing stays broken.
        condition = Condition(effect.state, error, effect.action)
        match spec.target:
            case FaultTarget.IPU:
                self._ipus[spec.indices[0]] = condition
            case FaultTarget.LINK:
                self._links[spec.indices[0], spec.indices[1]] = condition
            case FaultTarget.MACHINE | FaultTarget.GW_LINK:
                self._machine = condition
        return condition.error

    def blocking(self, ipus: Iterable[int]) -> Condition | None:
        """The worst thing that keeps ``ipus`` from being used, if any."""
        if self._machine is not None:
            return self._machine
        wanted = set(ipus)
        for ends, condition in sorted(self._links.items()):
            if wanted & set(ends):
                return condition
        return next((c for ipu, c in sorted(self._ipus.items()) if ipu in wanted), None)

    def condition(self, ipu: int) -> Condition | None:
        """What is wrong with an IPU or its whole machine, links apart."""
        return self._machine or self._ipus.get(ipu)

    def links_down(self, ipu: int) -> tuple[int, ...]:
        """The IPUs to which the IPU's link is down."""
        return tuple(sorted(a + b - ipu for a, b in self._links if ipu in (a, b)))

    def reset_ipus(self, ipus: Iterable[int]) -> None:
        """IPU_RESET."""
        for ipu in ipus:
            if ipu in self._ipus and self._ipus[ipu].action is RecoveryAction.IPU_RESET:
                del self._ipus[ipu]

    def reset_links(self) -> None:
        """PARTITION_RESET: retrain links and reset all IPUs."""
        self._links.clear()
        self.reset_ipus(self._mine)
        if self._machine is not None and self._machine.action is RecoveryAction.PARTITION_RESET:
            self._machine = None

    def power_cycle(self) -> None:
        """FULL_RESET. A machine that failed for good stays failed."""
        self._ipus.clear()
        self._links.clear()
        if self._machine is not None and self._machine.action is not None:
            self._machine = None
