"""Incidents and goodput: from events of launches that went wrong in different ways."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from podrun.core.error_codec import cause_to_dict
from podrun.core.errors import ErrorCause
from podrun.core.telemetry import ControlEvent
from podrun.faults import cause_of, error_for, parse_fault
from podrun.record.events import (
    AT_END,
    Event,
    LaunchHeader,
    Record,
    TimedEvent,
    ordered,
    parse_record,
    to_lines,
    with_control,
    without_ends_after_errors,
)
from podrun.record.goodput import goodput_of
from podrun.record.incidents import Incident, incidents_json, incidents_of
from podrun.record.strikes import FaultTime, explains, strikes_of, with_faults

FAULT = "link:2-3@batch=7:down"
ERROR = {
    "during": "run",
    "error": "recoverable_runtime_error",
    "code": "LINK_DOWN",
    "where": "link 2-3",
    "action": "PARTITION_RESET",
    "cause": cause_to_dict(cause_of(parse_fault(FAULT), 7)),
    "message": "IPU-Link between IPU 2 and IPU 3 went down in batch 7",
}


class Writer:
    """Events of a launch with times: a run takes one second."""

    def __init__(self) -> None:
        self.found: list[TimedEvent] = []
        self.now, self.life = 0.0, 0
        self.clocks: dict[int, int] = {}

    def add(self, actor: str, kind: str, *, clock: int = 0, **data: Any) -> None:
        self.found.append(TimedEvent(Event(actor, self.life, clock, kind, data), self.now))

    def all(self, kind: str, instances: int, **data: Any) -> None:
        for k in range(instances):
            self.add(f"instance {k}", kind, clock=self.clocks.get(k, 0), **data)

    def runs(self, batches: Sequence[int], instances: int = 1, *, error: bool = False) -> None:
        for batch in batches:
            self.all("run", instances, batch=batch, inputs={"x": f"digest {batch}"})
            self.now += 1.0
            failed = error and batch == batches[-1]
            self.all("error" if failed else "ran", instances, **(ERROR if failed else {"batches": 1}))
            for k in range(instances):
                self.clocks[k] = self.clocks.get(k, 0) + 1


def in_place(instances: int, *, noted: bool) -> list[TimedEvent]:
    """Ten batches; a checkpoint at 5; the run of batch 7 fails; half a second to recover."""
    writer = Writer()
    writer.add("launch", "start")
    writer.now = 2.0
    writer.runs(range(8), instances, error=True)
    writer.now += 0.5
    writer.all("load", instances, program="p")
    if noted:
        writer.all("resumed", instances, batch=5)
    writer.runs(range(5, 10), instances)
    writer.add("launch", "end", clock=AT_END, code=0)
    return with_faults(ordered(writer.found), [parse_fault(FAULT)])


def restarted() -> list[TimedEvent]:
    """Instances are started again after instance 1 was killed in batch 3; a checkpoint at 2."""
    writer = Writer()
    writer.add("launch", "start")
    writer.runs(range(4), 2)
    writer.now += 0.25
    writer.add("launch", "ended", clock=AT_END, instance=1, code=137, how="signal SIGKILL")
    writer.add("launch", "restart", clock=AT_END, text="instances started again (restart 1)")
    writer.life, writer.clocks = 1, {}
    writer.now += 3.0
    writer.all("resumed", 2, batch=2)
    writer.runs(range(2, 6), 2)
    return ordered(writer.found)


def record_of(events: Sequence[TimedEvent]) -> Record:
    return Record(LaunchHeader((), ""), tuple(timed.event for timed in events))


@pytest.mark.parametrize("noted", [True, False], ids=["checkpoint noted", "inputs seen again"])
@pytest.mark.parametrize("instances", [1, 2])
def test_an_error_that_a_program_recovers_from(instances: int, noted: bool) -> None:
    events = in_place(instances, noted=noted)
    (incident,) = incidents_of(record_of(events))
    assert incident.faults == (FAULT,)
    assert (incident.batch, incident.lost_batches) == (7, 2)
    assert incident.instances == tuple(range(instances))
    assert incident.component == "link 2-3"
    assert incident.action.startswith("the program was loaded again")
    assert ("resumed from batch 5" in incident.action) == noted
    assert dict(incident.error)["action"] == "PARTITION_RESET"
    assert len(incident.evidence) == 1 + instances
    assert "fault fault=link:2-3@batch=7:down" in incident.evidence[0]
    goodput = goodput_of(events, incidents=1)
    assert goodput is not None
    assert goodput.plain == {
        "schema_version": 1,
        "total_seconds": 15.5,
        "useful_seconds": 10.0,
        "recomputed_seconds": 2.0,
        "detecting_seconds": 1.0,
        "recovering_seconds": 0.5,
        "waiting_seconds": 2.0,
        "batches": 10,
        "recomputed_batches": 2,
        "incidents": 1,
    }
    assert goodput.text.startswith(
        "goodput: 64.5% of 15.50 s: useful 10.00 s (10 batches), recomputed 2.00 s (2"
    )


def test_a_killed_instance_is_an_incident_of_its_own() -> None:
    events = restarted()
    (incident,) = incidents_of(record_of(events))
    assert incident.faults == ()
    assert (incident.batch, incident.lost_batches, incident.instances) == (4, 2, (1,))
    assert incident.component == "instance 1: the program or its host"
    assert incident.action == "instances started again (restart 1), resumed from batch 2"
    assert "signal SIGKILL" in incident.text
    goodput = goodput_of(events)
    assert goodput is not None
    assert (goodput.useful_seconds, goodput.recomputed_seconds) == (6.0, 2.0)
    assert (goodput.detecting_seconds, goodput.recovering_seconds) == (0.25, 3.0)
    assert goodput.recomputed_batches == 2


def refused_launch(*, attached_later: bool) -> list[TimedEvent]:
    """IPU 2 was broken before the launch; the program ends with exit code 1, or takes other IPUs first."""
    writer = Writer()
    writer.add("launch", "start")
    words = "IPU 2 cannot be used (IPU_RESET needed): Memory parity error on IPU 2"
    refusal = {"error": "recoverable_runtime_error", "code": "TILE_MEMORY_PARITY", "where": "ipu 2"}
    writer.add("instance 0", "refused", **refusal, action="IPU_RESET", message=words)
    if attached_later:
        writer.add("instance 0", "attach", job="4-7", owned="4-7")
    writer.add("launch", "ended", clock=AT_END, instance=0, code=1, how="exit code 1")
    return ordered(writer.found)


def test_a_refused_attach_blames_the_ipu_that_was_broken_before() -> None:
    (incident,) = incidents_of(record_of(refused_launch(attached_later=False)))
    assert incident.component == "ipu 2"
    assert dict(incident.error)["message"].startswith("IPU 2 cannot be used (IPU_RESET needed)")
    assert dict(incident.error)["action"] == "IPU_RESET"
    assert [words.partition(": ")[2].split()[0] for words in incident.evidence] == ["refused", "ended"]


def test_a_program_that_fails_on_other_ipus_is_blamed_itself() -> None:
    (incident,) = incidents_of(record_of(refused_launch(attached_later=True)))
    assert incident.component == "instance 0: the program or its host"
    assert dict(incident.error)["message"] == "instance 0 ended with exit code 1"


def test_several_incidents_are_told_apart_and_times_do_not_show() -> None:
    events = in_place(1, noted=True)
    later = [
        TimedEvent(
            Event(
                e.event.actor,
                1,
                e.event.clock,
                e.event.kind,
                {"batch": 15} if e.event.kind == "resumed" else e.event.data,
            ),
            2 * e.seconds + 100,
        )
        for e in events
    ]
    later.insert(0, TimedEvent(Event("instance 0", 1, 0, "resumed", {"batch": 10}), 100.0))
    record = record_of([*events, *later])
    found = incidents_of(record)
    assert len(found) == 2
    assert found[0].id != found[1].id
    assert [i.lost_batches for i in found] == [2, 2]
    text = incidents_json(record)
    assert json.loads(text)["schema_version"] == 1
    assert [i["cost"] for i in json.loads(text)["incidents"]] == [
        {"lost_batches": 2, "stalled_seconds": 0.0}
    ] * 2
    assert incidents_json(record_of([*in_place(1, noted=True), *later])) == text


def test_a_fault_without_an_error_is_told_at_the_end() -> None:
    writer = Writer()
    writer.runs(range(3))
    (incident,) = incidents_of(
        record_of(with_faults(ordered(writer.found), [parse_fault("ipu:0@batch=1:unknown")]))
    )
    assert incident.faults == ("ipu:0@batch=1:unknown",)
    assert incident.component == "ipu 0"
    assert "no instance saw an error" in incident.text
    assert incidents_of(record_of(ordered(writer.found))) == []
    assert goodput_of([]) is None


@pytest.mark.parametrize(
    ("fault", "kind", "data"),
    [
        (
            "ipu:5@batch=2:corrupt,tensor=w",
            "error",
            {
                "during": "check",
                "where": "ipu 5",
                "cause": cause_to_dict(ErrorCause(ipus=(5,))),
                "message": "differ",
            },
        ),
        ("instance:0@batch=2:killed", "ended", {"instance": 0, "code": 137, "how": "signal SIGKILL"}),
        ("ipu:1@rate=0.5,seed=1:tile-parity", "error", None),
    ],
)
def test_a_fault_belongs_to_the_incident_it_explains(
    fault: str, kind: str, data: dict[str, Any] | None
) -> None:
    if data is None:
        error = error_for(parse_fault(fault), batch=2)
        assert error.cause is not None
        data = {"error": error.type, "where": error.where, "message": error.message}
        data["cause"] = cause_to_dict(error.cause)
    writer = Writer()
    writer.runs(range(3))
    writer.add(
        "launch" if kind == "ended" else "instance 0", kind, clock=AT_END if kind == "ended" else 3, **data
    )
    writer.life, writer.clocks = 1, {}
    writer.runs(range(5))
    (incident,) = incidents_of(record_of(with_faults(ordered(writer.found), [parse_fault(fault)])))
    assert incident.faults == (fault,)
    assert incident.lost_batches == 3
    wanted = {"corrupt": "ipu 5", "killed": "instance 0"}
    assert incident.component == wanted.get(parse_fault(fault).kind, "ipu 1")


@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        (
            "instance:0@batch=2:killed",
            137,
            "process PID (train.py), which held IPUs 0-7 of this program, ended",
        ),
        (
            "disk:0@during=checkpoint-write:full,bytes=100",
            2,
            "the host processes of machine 0 left the program",
        ),
    ],
    ids=["killed", "disk full"],
)
@pytest.mark.parametrize("planned", [True, False], ids=["planned", "by itself"])
def test_an_instance_that_ends_makes_one_incident_with_what_the_others_saw(
    fault: str, code: int, message: str, planned: bool
) -> None:
    """The other instance learns of the end before podrun does, and knows only which instance it missed."""
    writer = Writer()
    writer.runs(range(3), 2)
    cause = cause_to_dict(ErrorCause(instances=(0,)))
    writer.add("instance 1", "run", clock=3, batch=3, inputs={})
    writer.add(
        "instance 1", "error", clock=3, error="application_runtime_error", message=message, cause=cause
    )
    writer.add("launch", "ended", clock=AT_END, instance=0, code=code, how=f"exit code {code}")
    writer.life, writer.clocks = 1, {}
    writer.runs(range(5), 2)
    events = ordered(writer.found)
    if planned:
        events = with_faults(events, [parse_fault(fault)], [FaultTime(parse_fault(fault), 2.5)])
    (incident,) = incidents_of(record_of(without_ends_after_errors(events)))
    assert incident.faults == ((fault,) if planned else ())
    target = fault.partition("@")[0].replace(":", " ")
    assert incident.component == (target if planned else "instance 0: the program or its host")


def test_a_run_of_many_batches_tells_how_far_it_came() -> None:
    writer = Writer()
    writer.add("instance 0", "run", batch=0, batches=100, inputs={})
    writer.add("instance 0", "error", **ERROR)
    (incident,) = incidents_of(record_of(with_faults(ordered(writer.found), [parse_fault(FAULT)])))
    assert incident.batch == 7
    assert "after 7 batches" in incident.text


def test_a_lost_host_and_an_unreachable_network_explain_what_the_others_saw() -> None:
    def event(cause: ErrorCause) -> Event:
        return Event("instance 1", 0, 3, "error", {"cause": cause_to_dict(cause)})

    assert explains(parse_fault("host:0@batch=2:lost"), event(ErrorCause(machine=1)))
    assert explains(parse_fault("machine:1@batch=2:lost"), event(ErrorCause(machine=1)))
    assert not explains(parse_fault("machine:2@batch=2:lost"), event(ErrorCause(machine=1)))
    delayed = parse_fault("instance-network:0-1@during=collective:delayed,seconds=9")
    assert explains(delayed, event(ErrorCause(instances=(0,))))
    assert not explains(delayed, event(ErrorCause(machine=0)))
    assert not explains(delayed, Event("instance 1", 0, 3, "error", {"cause": "machine 0"}))


def launch_of(life_batches: Sequence[int]) -> Writer:
    """A launch whose first life runs all of its batches but the last, which fails, and whose second life goes on."""
    writer = Writer()
    writer.add("launch", "start")
    writer.runs(life_batches, 2, error=True)
    writer.add("launch", "ended", clock=AT_END, instance=1, code=1, how="exit code 1")
    writer.add(
        "launch", "restart", clock=AT_END, text="reset the partition, instances started again (restart 1)"
    )
    writer.now += 2.0
    writer.life, writer.clocks = 1, {}
    writer.all("load", 2, program="p")
    writer.runs(range(5, 10), 2)
    writer.add("launch", "end", clock=AT_END, code=0)
    return writer


@pytest.mark.parametrize(
    ("batches", "cost"),
    [(8, "what was computed since the last checkpoint is lost"), (1, "0 batches lost")],
    ids=["after seven batches", "before the first batch ends"],
)
def test_a_launch_that_an_error_ends_loses_what_no_checkpoint_has(batches: int, cost: str) -> None:
    writer = Writer()
    writer.add("launch", "start")
    writer.runs(range(batches), 2, error=True)
    writer.add("launch", "ended", clock=AT_END, instance=1, code=1, how="exit code 1")
    writer.add("launch", "end", clock=AT_END, code=1)
    (incident,) = incidents_of(record_of(without_ends_after_errors(ordered(writer.found))))
    assert (incident.action, incident.batch) == ("the launch ended", batches - 1)
    assert incident.text.endswith(f"the launch ended; {cost}")
    assert incident.plain["cost"]["lost_batches"] == 0  # No batch was computed again.


def test_incidents_before_one_restart_are_not_the_end_of_the_launch() -> None:
    writer = Writer()
    writer.add("launch", "start")
    second = parse_fault("link:4-5@batch=7:down")
    causes = [cause_to_dict(cause_of(spec, 7)) for spec in (parse_fault(FAULT), second)]
    writer.runs(range(7), 2)
    writer.all("run", 2, batch=7, inputs={})
    for instance, cause in enumerate(causes):
        writer.now += 1.0
        writer.add(f"instance {instance}", "error", clock=7, **ERROR | {"cause": cause})
    writer.add("launch", "restart", clock=AT_END, text="instances started again (restart 1)")
    writer.life, writer.clocks = 1, {}
    writer.all("load", 2, program="p")
    writer.runs(range(2, 6), 2)
    both = incidents_of(record_of(with_faults(ordered(writer.found), [parse_fault(FAULT), second])))
    assert [incident.final for incident in both] == [False, False]


QUIET = "ipu:1@batch=2:corrected-parity"
LATE = "service:vipu@during=ResetPartition:slow,seconds=1.5"


def test_each_fault_is_an_incident_where_it_struck() -> None:
    told = [
        ("ipum1", FaultTime(parse_fault(QUIET), 2.5)),
        ("ipum1", FaultTime(parse_fault(LATE), 8.5)),
        ("ipum2", FaultTime(parse_fault(FAULT), 7.5)),
    ]
    told += [
        ("ipum1", FaultTime(parse_fault(FAULT), 7.4)),
        ("ipum1", FaultTime(parse_fault("ipu:0@batch=1:trap"), 7.4)),
    ]
    faults = [parse_fault(text) for text in (LATE, FAULT, QUIET)]
    times = strikes_of(told, faults)
    assert {(strike.fault.text, strike.seconds) for strike in times} == {
        (QUIET, 2.5),
        (FAULT, 7.4),
        (LATE, 8.5),
    }
    events = with_faults(ordered(launch_of(range(8)).found), faults, times)
    events = with_control(events, [ControlEvent("partition reset", "", 8.6)])
    record = record_of(without_ends_after_errors(events))
    found = incidents_of(record)
    assert [(incident.faults, incident.batch) for incident in found] == [
        ((QUIET,), 2),
        ((FAULT,), 7),
        ((LATE,), 7),
    ]
    assert [incident.component for incident in found] == ["ipu 1", "link 2-3", "service vipu"]
    assert [incident.lost_batches for incident in found] == [0, 2, 0]
    assert [incident.action for incident in found] == [
        "none was needed",
        "reset the partition, instances started again (restart 1), the program was loaded again",
        "none was needed",
    ]
    assert found[1].instances == (0, 1)
    assert found[2].evidence == (f"service: fault {LATE}", "service: partition reset")
    assert found[2].plain["cost"] == {"lost_batches": 0, "stalled_seconds": 1.5}
    assert found[2].text.endswith("0 batches lost, 1.5 s stalled")
    assert len({incident.id for incident in found}) == 3


def test_each_strike_of_a_fault_that_repeats_is_an_incident() -> None:
    fault = "link:2-3@batch=7,repeat=2:down"
    writer = launch_of(range(8))
    writer.life, writer.clocks = 2, {}
    writer.runs(range(8), 2, error=True)
    found = incidents_of(
        record_of(without_ends_after_errors(with_faults(ordered(writer.found), [parse_fault(fault)])))
    )
    assert [incident.faults for incident in found] == [(fault,)] * 2
    quiet = "ipu:1@batch=2,repeat=3,every=1:corrected-parity"
    times = [FaultTime(parse_fault(quiet), seconds) for seconds in (2.5, 3.5, 4.5)]
    found = incidents_of(
        record_of(with_faults(ordered(launch_of(range(8)).found), [parse_fault(quiet)], times))
    )
    assert [(incident.faults, incident.batch) for incident in found] == [
        ((quiet,), 2),
        ((quiet,), 3),
        ((quiet,), 4),
        ((), 7),
    ]


def test_what_the_service_did_stands_where_it_happened() -> None:
    def at(seconds: float, did: str, what: str = "") -> ControlEvent:
        return ControlEvent(did, what, seconds)

    events = [
        TimedEvent(Event("launch", 0, 0, "start"), 1.0),
        TimedEvent(Event("instance 0", 0, 0, "attach"), 2.0),
        TimedEvent(Event("instance 0", 0, 3, "error"), 5.0),
        TimedEvent(Event("instance 1", 0, 3, "error"), 5.5),
        TimedEvent(Event("instance 0", 1, 0, "load"), 8.0),
    ]
    control = [
        at(0.5, "partition created", "ipu:0@batch=1:trap:launch=47-11"),
        at(5.1, "machine lost", "ipum4"),
        at(5.2, "machine lost", "ipum3"),
        at(6.0, "partition reset"),
    ]
    found = [
        (t.event.actor, t.event.kind, t.event.data.get("what", "")) for t in with_control(events, control)
    ]
    assert found == [
        ("launch", "start", ""),
        ("service", "control", "ipu:0@batch=1:trap"),
        ("instance 0", "attach", ""),
        ("instance 0", "error", ""),
        ("instance 1", "error", ""),
        ("service", "control", "ipum3"),
        ("service", "control", "ipum4"),
        ("service", "control", ""),
        ("instance 0", "load", ""),
    ]
    text = "\n".join(
        to_lines(Record(LaunchHeader((), "/"), tuple(t.event for t in with_control(events, control))))
    )
    assert parse_record(text + "\n", "r").events[1].data["did"] == "partition created"


def test_what_ended_machines_from_outside_is_the_suspect() -> None:
    """Ray's memory monitor ends the machines of all hosts that are short of memory: no machine is at fault."""
    monitor = "Ray's memory monitor ended its process when 5.9GB of 6.0GB were used on 10.0.0.1"

    def lost(agent: str, why: str) -> ControlEvent:
        return ControlEvent("machine lost", agent, 9.9, why)

    def incident_of(control: Sequence[ControlEvent]) -> Incident:
        writer = Writer()
        writer.runs(range(3), 1)
        cause = {"machine": 0}
        writer.all("error", 1, error="E", where="machine 0", message="unreachable", cause=cause)
        events = with_control(ordered(writer.found), [replace(event, time_s=writer.now) for event in control])
        (incident,) = incidents_of(record_of(events))
        return incident

    incident = incident_of([lost("ipum1", monitor), lost("ipum2", monitor)])
    assert incident.component == f"machines ipum1, ipum2: {monitor}"
    assert f"service: machine lost ipum1 ({monitor})" in incident.evidence
    incident = incident_of([lost("ipum1", "its process at 127.0.0.1:4711 ended")])
    assert incident.component == "machine 0"
    assert "service: machine lost ipum1" in incident.evidence


def test_losses_of_one_machine_are_told_in_the_order_of_their_batches() -> None:
    """Nobody says which of two faults took a machine away."""
    late, early = (parse_fault(f"machine:0@batch={batch}:lost") for batch in (9, 7))
    cause = cause_to_dict(ErrorCause(machine=0))
    losses = [
        TimedEvent(Event("instance 0", life, 3, "error", {"during": "run", "cause": cause}), 5.0 + life)
        for life in (0, 1)
    ]
    told = [timed.event for timed in with_faults(losses, [late, early]) if timed.event.kind == "fault"]
    assert [(event.life, event.data["fault"]) for event in told] == [(0, early.text), (1, late.text)]
