"""The moment and the target of a planned fault's strike, and faults that do not strike."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from podrun.core.error_codec import error_from_dict, error_to_dict
from podrun.core.errors import UsageError
from podrun.faults import (
    UNSTRUCK_EXIT_CODE,
    FaultPoint,
    FaultSpec,
    ListPlaces,
    ProcessPlan,
    error_for,
    parse_fault,
    parse_faults,
    report_unstruck,
)


def places(*ipus: int, starts: tuple[int, ...] = (0,), length: int = 10, leads: bool = True) -> ListPlaces:
    return ListPlaces(frozenset(ipus), starts, length, leads)


def point_with(faults: str) -> FaultPoint:
    """A point of machine 1, which has IPUs 4 to 7."""
    point = FaultPoint(range(4, 8), machine=1)
    point.plan(parse_faults(faults))
    return point


def struck(point: FaultPoint, *when: int, at: ListPlaces, job: str = "job") -> str:
    """The text of the fault that strikes; empty if none does."""
    strike = point.ask(job, *when, at)
    return "" if strike is None else strike.spec.text


def test_a_fault_strikes_once_at_its_place_on_its_machine() -> None:
    trap, down, power = "ipu:5@batch=3:trap", "link:3-5@batch=3,instruction=2:down", "machine:1@batch=4:power"
    point = point_with(f"{trap} ipu:1@batch=0:trap {down} {power}")
    assert [spec.text for spec in point.planned] == [trap, down, power], "others are for other machines"
    everything = places(4, 5, 6, 7)
    assert not struck(point, 2, 0, at=everything)
    assert not struck(point, 3, 1, at=everything)
    assert not struck(point, 3, 0, at=places(4, 6)), "IPU 5 does not run this list"
    assert struck(point, 3, 0, at=places(5, 7, leads=False)) == trap
    assert not struck(point, 3, 0, at=places(5, 7, leads=False))
    assert struck(point, 3, 2, at=everything) == down
    assert not struck(point, 4, 0, at=places(5, 7, leads=False)), "a machine's fault enters its first list"
    assert struck(point, 4, 0, at=places(4, 6)) == power
    assert point.planned == ()


def test_a_pass_of_several_batches_strikes_where_the_batch_begins() -> None:
    overlapped = places(4, 5, 6, 7, starts=(0, 3, 5), length=9)
    point = point_with("ipu:4@batch=7:trap ipu:4@batch=8,instruction=2:soft-error")
    assert not any(struck(point, 3, place, at=overlapped) for place in range(9))
    found = {place: text for place in range(9) if (text := struck(point, 6, place, at=overlapped))}
    assert found == {3: "ipu:4@batch=7:trap", 7: "ipu:4@batch=8,instruction=2:soft-error"}


def test_a_fault_that_did_not_strike_its_job_is_disarmed_when_another_attaches() -> None:
    point = point_with("ipu:5@batch=3:trap")
    point.begin_job("first", range(4, 8))
    assert not struck(point, 3, 0, at=places(5), job="second")
    point.begin_job("first", range(4, 8))
    assert len(point.planned) == 1, "the same job attached again"
    point.begin_job("second", range(4, 6))
    assert point.planned == ()


def test_a_fault_waits_for_its_launch_only() -> None:
    point = point_with("ipu:5@batch=3:trap:launch=mine machine:1@batch=3:power:launch=mine")
    point.begin_job("mine", range(4, 6))
    point.begin_job("beside", range(6, 8), others={"mine"})
    assert len(point.planned) == 2, "the other job uses other IPUs, and mine is still there"
    assert not struck(point, 3, 0, at=places(6, 7), job="beside")
    assert struck(point, 3, 0, at=places(4, 5), job="mine").startswith("ipu:5")
    point.begin_job("next", range(4, 8))
    assert point.planned == ()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ipu:5@batch=3,instruction=10:trap", "batch 3 has no instruction 10, only 0 to 9"),
        ("machine:1@batch=0,instruction=9999:lost", "no instruction 9999"),
    ],
)
def test_an_instruction_that_does_not_exist_is_refused(fault: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        point_with(fault).check("job", [places(4, 5, 6, 7)])


def test_the_instructions_of_a_batch_end_where_the_next_batch_begins() -> None:
    overlapped = [places(4, 5, 6, 7, starts=(0, 3, 5), length=9)]
    point_with("ipu:5@batch=4,instruction=1:trap").check("job", overlapped)
    with pytest.raises(UsageError, match="batch 4 has no instruction 2, only 0 to 1"):
        point_with("ipu:5@batch=4,instruction=2:trap").check("job", overlapped)


def test_a_link_that_broke_at_its_other_end_is_broken_here_too() -> None:
    point = point_with("link:2-4@batch=3:down;link:2-4@batch=9:down;ipu:5@batch=3:trap")
    first, later = parse_fault("link:2-4@batch=3:down"), parse_fault("link:2-4@batch=9:down")
    arrived = error_from_dict(error_to_dict(error_for(first, partition="pod")))
    assert point.other_end(arrived) == first
    assert point.other_end(arrived) is None
    assert point.other_end(error_for(parse_fault("ipu:5@batch=3:trap"))) is None
    assert later in point.planned


def test_a_fault_of_a_process_strikes_in_one_of_its_pods() -> None:
    plan = ProcessPlan(parse_faults("ipu:5@batch=3:trap"))
    pods = [FaultPoint(range(4, 8), 1, plan.claim) for _ in range(2)]
    for pod in pods:
        pod.plan(plan.planned)
    assert [struck(pod, 3, 0, at=places(5)) for pod in pods] == ["ipu:5@batch=3:trap", ""]
    assert plan.planned == ()


def test_the_report_names_what_had_to_strike() -> None:
    def message(*texts: str) -> str:
        return report_unstruck([parse_fault(text) for text in texts])

    assert message("ipu:5@batch=3:trap:optional") == ""
    one = message("ipu:5@batch=3:trap:launch=1-2", "ipu:6@batch=3:trap:optional")
    assert one.startswith("a planned fault did not strike: ipu:5@batch=3:trap\nhint: ")
    assert message("ipu:5@batch=3:trap", "ipu:6@batch=3:trap").startswith("2 planned faults did not strike: ")


@pytest.mark.parametrize(
    ("fault", "end", "code"),
    [
        ("ipu:5@batch=3:trap", "", UNSTRUCK_EXIT_CODE),
        ("ipu:5@batch=3:trap:optional", "", 0),
        ("ipu:5@batch=3:trap", "raise ValueError", 1),
        ("ipu:5@batch=3:tarp", "", 1),
    ],
)
def test_a_process_ends_by_its_plan(fault: str, end: str, code: int) -> None:
    program = f"import os; from podrun.faults import process_plan; process_plan(dict(os.environ)); {end}"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=dict(os.environ) | {"PODRUN_FAULTS": fault},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert ("podrun: a planned fault did not strike: ipu:5@batch=3:trap\n" in done.stderr) == (
        code != 0 and "tarp" not in fault
    )


def test_a_fault_prints_its_launch_only_for_other_processes() -> None:
    spec = FaultSpec(parse_fault("ipu:5@batch=3:trap").target, (5,), 3, "trap", launch="1-2")
    assert spec.text == "ipu:5@batch=3:trap"
    assert str(spec) == "ipu:5@batch=3:trap:launch=1-2"
