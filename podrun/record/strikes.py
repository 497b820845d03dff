"""Where faults stand in a record: which strikes there were, and which errors they explain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from podrun.core.error_codec import cause_from_dict
from podrun.core.quick_dataclass import dataclass
from podrun.faults import FaultSpec, FaultTarget
from podrun.record.events import Event, TimedEvent, operation_at, ordered, strike_event


@dataclass(frozen=True, slots=True)
class FaultTime:
    """When a planned fault struck, as its machine, the service or the instance tells it: seconds of the wall clock."""

    fault: FaultSpec
    seconds: float


def strikes_of(told: Iterable[tuple[str, FaultTime]], faults: Iterable[FaultSpec]) -> list[FaultTime]:
    """Each strike of these faults once. ``told``: by whom, and when. Both ends of a link tell of the same strikes."""
    planned = {spec.experiment: spec for spec in faults}
    times: dict[tuple[FaultSpec, int], float] = {}
    counts: dict[tuple[str, FaultSpec], int] = {}
    for teller, strike in sorted(told, key=lambda pair: pair[1].seconds):
        spec = planned.get(strike.fault.experiment)
        if spec is not None:
            number = counts[teller, spec] = counts.get((teller, spec), 0) + 1
            times.setdefault((spec, number), strike.seconds)
    return [FaultTime(fault, seconds) for (fault, _), seconds in times.items()]


def with_faults(
    events: Sequence[TimedEvent], struck: Iterable[FaultSpec], strikes: Iterable[FaultTime] = ()
) -> list[TimedEvent]:
    """The events, with one for each strike of a fault. It stands right before the first error that it explains, or, if
    it explains none, within the operation in which it struck. ``strikes``: the known times.

    A fault whose error no process reported, and whose time is not known, comes where a recovery broke off if it strikes
    in the reset of a partition, else at the end.
    """
    errors = [timed for timed in events if timed.event.kind in ("error", "ended")]
    placed = list(events)
    known = list(strikes)
    for spec in _by_place(list(struck)):
        times = sorted(strike.seconds for strike in known if strike.fault == spec)
        for number in range(max(len(times), spec.repeat if spec.raises else 1)):
            cause = next((timed for timed in errors if explains(spec, timed.event)), None)
            if cause is not None:
                same = [t for t in errors if _is_of_same_operation(cause.event, t.event)]
                errors = [timed for timed in errors if timed not in same] or errors * (spec.repeat == 1)
                place = next(k for k, timed in enumerate(placed) if timed is cause)
                placed.insert(place, _fault_before(cause, spec))
            elif number < len(times):
                life, clock = operation_at(events, times[number])
                placed.append(TimedEvent(strike_event(life, clock, spec), times[number]))
            else:
                placed = placed if number else _with_untimed(placed, spec)
                break
    return ordered(placed)


def _by_place(faults: list[FaultSpec]) -> list[FaultSpec]:
    """The faults; of those that hit the same place, which a lost machine cannot tell apart, the earlier batch first."""
    places = [spec.place for spec in faults]
    return sorted(faults, key=lambda spec: (places.index(spec.place), spec.batch))


def _with_untimed(events: list[TimedEvent], fault: FaultSpec) -> list[TimedEvent]:
    """The events with a fault that nobody told of: where a recovery broke off if it strikes in the reset of a partition
    (a machine that it ended could not tell when), else at the end."""
    broken = (place for place, timed in enumerate(events) if timed.event.kind == "repair")
    place = next(broken, None) if fault.during == "partition-reset" else None
    if place is None:
        return [*events, _at_the_end(events, fault)]
    return [*events[:place], _fault_before(events[place], fault), *events[place:]]


def _fault_before(timed: TimedEvent, fault: FaultSpec) -> TimedEvent:
    return TimedEvent(strike_event(timed.event.life, timed.event.clock, fault), timed.seconds)


def _at_the_end(events: Sequence[TimedEvent], fault: FaultSpec) -> TimedEvent:
    life = max((timed.event.life for timed in events), default=0)
    end = max((timed.event.clock for timed in events if timed.event.life == life), default=0)
    seconds = max((timed.seconds for timed in events), default=0.0)
    return TimedEvent(strike_event(life, end, fault), seconds)


def _is_of_same_operation(first: Event, other: Event) -> bool:
    return (other.life, other.clock) == (first.life, first.clock)


def explains(fault: FaultSpec, event: Event) -> bool:
    """True iff a fault explains an error, or the end of an instance."""
    if event.kind == "ended":
        return fault.target in _OF_ONE_INSTANCE and event.data.get("instance") in fault.indices
    cause = cause_from_dict(event.data.get("cause"))
    if cause is None:
        return False
    if cause.fault is not None:
        return fault.is_same_fault(cause.fault)
    if fault.target in _OF_ONE_INSTANCE or fault.target is FaultTarget.INSTANCE_NETWORK:
        return not set(fault.indices).isdisjoint(cause.instances)
    if fault.kind == "lost":  # The machine is gone and could not say what took it.
        return cause.machine is not None and (
            fault.target is FaultTarget.HOST or cause.machine in fault.indices
        )
    return fault.kind == "corrupt" and fault.indices[0] in cause.ipus


_OF_ONE_INSTANCE = (FaultTarget.INSTANCE, FaultTarget.DISK)
