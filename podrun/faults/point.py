"""The one point where faults enter: a machine's interpreter asks here between two instructions."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable

from podrun.errors import PoplarError
from podrun.faults.effects import error_for
from podrun.faults.spec import FaultSpec, FaultTarget


class FaultPoint:
    """The faults planned for one machine; each strikes once.

    ``ipus``: partition indices of the machine's IPUs; ``machine``: its index. A link belongs to the machines
    at both of its ends. Faults of other machines are not kept. Safe to use from several threads.
    """

    def __init__(self, ipus: Iterable[int], machine: int) -> None:
        self._ipus = frozenset(ipus)
        self._machine = machine
        self._lock = threading.Lock()
        self._planned: list[FaultSpec] = []

    def plan(self, specs: Iterable[FaultSpec]) -> None:
        """Add those of ``specs`` that concern this machine."""
        with self._lock:
            self._planned += [spec for spec in specs if self._is_mine(spec)]

    @property
    def planned(self) -> tuple[FaultSpec, ...]:
        """What has not struck yet."""
        return tuple(self._planned)

    def ask(self, step: int, instruction: int, ipus: Collection[int], *, leads: bool) -> FaultSpec | None:
        """The fault that strikes now, if any, taken off the plan.

        ``step``: batches done since the program was loaded; ``instruction``: index of the one about to be run
        by partition IPUs ``ipus``; ``leads``: whether these speak for their machine (faults of a whole
        machine strike once).
        """
        if not self._planned:
            return None
        with self._lock:
            for spec in self._planned:
                concerned = (
                    leads if spec.target is FaultTarget.MACHINE else any(i in ipus for i in spec.indices)
                )
                if spec.step == step and (spec.instruction or 0) == instruction and concerned:
                    self._planned.remove(spec)
                    return spec
        return None

    def other_end(self, error: PoplarError) -> FaultSpec | None:
        """The link fault that struck another machine with ``error`` before it could strike here, taken off the plan.

        A link breaks at both ends, though the machine at the other may be stopped before it gets so far itself.
        """
        with self._lock:
            for spec in self._planned:
                if spec.target is FaultTarget.LINK:
                    struck = error_for(spec)
                    if (struck.message, struck.where) == (error.message, error.where):
                        self._planned.remove(spec)
                        return spec
        return None

    def _is_mine(self, spec: FaultSpec) -> bool:
        if spec.target is FaultTarget.MACHINE:
            return spec.indices[0] == self._machine
        return any(index in self._ipus for index in spec.indices)
