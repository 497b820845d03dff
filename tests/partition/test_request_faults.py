"""Faults of the partition service: requests that are answered late or not at all, or carried out twice."""

from __future__ import annotations

from dataclasses import replace

import pytest

from podrun.core.errors import ExhaustedError, LostAnswerError, NotFoundError, UsageError
from podrun.faults import parse_fault
from podrun.partition.server.request_faults import RequestFaults
from podrun.partition.state.values import Requirements

from .conftest import Pod


def faults_of(pod: Pod, *texts: str) -> list[object]:
    """Plan faults on partition p; the service's reactions are noted."""
    noted: list[object] = []
    pod.service.request_faults = RequestFaults(sleep=noted.append, end=lambda: noted.append("ended"))
    pod.active("p", 16)
    pod.client.inject_faults("p", texts)
    return noted


def generation(pod: Pod) -> int:
    assert pod.service.wait_idle(60)
    return pod.client.get_partition("p").generation


def test_a_request_is_answered_late(pod16: Pod) -> None:
    noted = faults_of(pod16, "service:vipu@during=ResetPartition:slow,seconds=1.5")
    pod16.client.reset_partition("p")
    assert noted == [1.5]
    assert generation(pod16) == 2


def test_an_answer_is_lost_after_the_commit(pod16: Pod) -> None:
    faults_of(pod16, "service:vipu@during=ResetPartition,repeat=2:answer-lost")
    with pytest.raises(LostAnswerError, match="the answer to ResetPartition was lost"):
        pod16.client.reset_partition("p")
    assert generation(pod16) == 2
    pod16.client.reset_partition("p", 2)
    assert generation(pod16) == 3, "the client asks again, with the generation, which has no second effect"
    assert not pod16.client.machine_reports("p")[0].planned_faults


def test_answers_that_are_lost_again_and_again_are_an_error(pod16: Pod) -> None:
    faults_of(pod16, "service:vipu@during=GetPartition,repeat=4:answer-lost")
    with pytest.raises(LostAnswerError, match="the answer to GetPartition was lost"):
        pod16.client.get_partition("p")
    assert pod16.client.get_partition("p").name == "p"


def test_a_fault_of_a_partitions_creation_strikes_it_and_no_other(pod16: Pod) -> None:
    spec = parse_fault("service:vipu@during=CreatePartition,repeat=2:answer-lost")
    pod16.active("p", 16, faults=(spec,))
    (entry,) = pod16.client.machine_reports("p")[0].struck_faults
    assert entry.fault == spec
    with pytest.raises(ExhaustedError):
        pod16.client.create_partition(Requirements("q", 16, faults=(replace(spec, repeat=1),)))
    assert pod16.service.request_faults.planned("q") == ()


def test_a_request_that_arrives_twice_has_one_effect_with_a_generation(pod16: Pod) -> None:
    faults_of(pod16, "service:vipu@during=ResetPartition,repeat=2:twice")
    pod16.client.reset_partition("p", 1)
    assert generation(pod16) == 2
    assert pod16.client.machine_reports("p")[0].planned_faults
    pod16.client.reset_partition("p", 2)
    assert generation(pod16) == 3
    reports = pod16.client.machine_reports("p")
    assert not any(report.planned_faults for report in reports)
    assert [entry.fault.text for entry in reports[0].struck_faults] == [
        "service:vipu@during=ResetPartition,repeat=2:twice"
    ] * 2


def test_the_server_ends_after_the_commit(pod16: Pod) -> None:
    noted = faults_of(pod16, "service:vipu@during=RemovePartition:killed")
    pod16.client.remove_partition("p")
    assert noted == ["ended"]


def test_faults_are_cancelled_by_name_or_all(pod16: Pod) -> None:
    faults_of(pod16, "service:vipu@during=ResetPartition:twice", "service:vipu@during=GetPartition:slow")
    machine = pod16.pool.machine("ipum1", "p")
    machine.planned = (parse_fault("ipu:1@batch=3:trap:launch=7-8"),)
    with pytest.raises(NotFoundError, match="no fault ipu:9@batch=3:trap is planned on partition p"):
        pod16.client.cancel_faults("p", ["ipu:9@batch=3:trap"])
    assert pod16.client.cancel_faults("p", ["ipu:1@batch=3:trap"]) == ("ipu:1@batch=3:trap",)
    assert machine.calls[-1] == ("cancel_faults", ["ipu:1@batch=3:trap"])
    machine.planned = ()
    assert len(pod16.client.cancel_faults("p")) == 2
    assert not pod16.client.machine_reports("p")[0].planned_faults


def test_of_another_partition_nothing_strikes(pod16: Pod) -> None:
    faults = RequestFaults(end=lambda: None)
    faults.plan("p", [parse_fault("service:vipu@during=ResetPartition:answer-lost")])
    assert faults.answer("ResetPartition", "q", lambda: "done") == "done"
    assert faults.answer("GetPartition", "p", lambda: "done") == "done"


def test_what_is_done_to_a_partition_is_told_for_records(pod16: Pod) -> None:
    pod16.active("p", 16)
    pod16.client.reset_ipus("p", [5, 6])
    pod16.client.inject_faults("p", ["ipu:1@batch=3:trap"])
    pod16.client.reset_partition("p")
    assert pod16.service.wait_idle(60)
    pod16.pool.machine("ipum2", "p").die()
    pod16.client.restart_agent("ipum2")
    assert pod16.service.wait_idle(60)
    reports = pod16.client.machine_reports("p")
    told = [(event.did, event.what) for event in reports[0].control_events]
    assert told == [
        ("partition created", ""),
        ("IPUs reset", "IPU 5 IPU 6"),
        ("faults injected", "ipu:1@batch=3:trap"),
        ("partition reset", ""),
        ("machine lost", "ipum2"),
        ("machine replaced", "ipum2"),
    ]
    (lost,) = (event for event in reports[0].control_events if event.did == "machine lost")
    assert lost.why
    times = [event.time_s for event in reports[0].control_events]
    assert times == sorted(times)
    assert not any(report.control_events for report in reports[1:])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("disk:0@during=checkpoint-write:full", "strikes in the process of an instance"),
        ("instance-network:0-1@during=collective:delayed", "strikes in the process of an instance"),
        ("service:vipu@during=CreatePartition:slow", "partition p is created already"),
    ],
)
def test_what_can_no_longer_strike_a_partition_is_refused(pod16: Pod, fault: str, message: str) -> None:
    pod16.active("p", 16)
    with pytest.raises(UsageError, match=message):
        pod16.client.inject_faults("p", [fault])
    assert not pod16.client.machine_reports("p")[0].planned_faults
