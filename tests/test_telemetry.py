"""Machine reports cross processes as JSON and come back equal; readers are careful."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import ErrorCode, RecoveryAction, ServiceError
from podrun.core.ipu_states import IpuErrorState, MachineState
from podrun.core.telemetry import SCHEMA_VERSION, AttachedProcess, ControlEvent, IpuReport, MachineReport
from podrun.faults import Struck, parse_faults
from tests.conftest import CHARACTERS

text = st.text(CHARACTERS, max_size=8)
number = st.none() | st.floats(allow_nan=False, allow_infinity=False)
processes = st.builds(AttachedProcess, st.integers(1, 4194304), text, text, number, text)
ipus = st.builds(
    IpuReport,
    st.integers(0, 63),
    st.integers(0, 3),
    error_state=st.sampled_from(IpuErrorState),
    error_code=st.sampled_from(ErrorCode),
    recovery_action=st.none() | st.sampled_from(RecoveryAction),
    process=st.none() | processes,
    clock_mhz=number,
    power_w=number,
    links_down=st.lists(st.integers(0, 63), max_size=3).map(tuple),
)
faults = st.sampled_from(
    parse_faults(
        "ipu:5@batch=17:tile-parity link:2-3@time=1.5,repeat=2:down:launch=7-8 service:vipu@during=GetPartition:slow"
    )
)
reports = st.builds(
    MachineReport,
    text,
    st.sampled_from(MachineState),
    endpoint=text,
    pid=st.none() | st.integers(1, 4194304),
    versions=st.dictionaries(text, text, max_size=2),
    ipus=st.lists(ipus, max_size=4).map(tuple),
    planned_faults=st.lists(faults, max_size=2).map(tuple),
    struck_faults=st.lists(
        st.builds(
            Struck, faults.map(lambda spec: replace(spec, launch="")), text, number, st.floats(0, 1e9), text
        ),
        max_size=2,
    ).map(tuple),
    control_events=st.lists(st.builds(ControlEvent, text, text, st.floats(0, 1e9), text), max_size=2).map(
        tuple
    ),
)


@given(reports)
def test_reports_come_back_from_json_as_they_were(report: MachineReport) -> None:
    data = json.loads(json.dumps(report.to_json_dict()))
    assert data["schema_version"] == SCHEMA_VERSION
    assert MachineReport.from_json_dict(data) == report


def test_unknown_keys_are_ignored_and_newer_schemas_refused() -> None:
    data = {**MachineReport("a").to_json_dict(), "new_key": 1}
    assert MachineReport.from_json_dict(data) == MachineReport("a")
    for version in (SCHEMA_VERSION + 1, 0, None, "1"):
        with pytest.raises(ServiceError, match="schema version"):
            MachineReport.from_json_dict({**data, "schema_version": version})
    with pytest.raises(ServiceError, match="malformed"):
        MachineReport.from_json_dict({"schema_version": SCHEMA_VERSION})


def test_an_error_of_another_release_stays_an_error_and_a_fault_of_one_is_refused() -> None:
    data = MachineReport("a", ipus=(IpuReport(0, 0),)).to_json_dict()
    data["ipus"][0] |= {"error_state": "tile on fire", "error_code": "FIRE"}
    (ipu,) = MachineReport.from_json_dict(data).ipus
    assert (ipu.error_state, ipu.error_code, ipu.has_error) == (IpuErrorState.OTHER, ErrorCode.UNKNOWN, True)
    with pytest.raises(ServiceError, match="malformed: fault 'ipu:0@batch=1:fire'"):
        MachineReport.from_json_dict(data | {"planned_faults": ["ipu:0@batch=1:fire"]})


def test_unknown_is_null_not_zero() -> None:
    plain = MachineReport("a", ipus=(IpuReport(0, 0),)).to_json_dict()
    assert plain["board_power_w"] is None
    assert plain["ipus"][0]["die_temperature_c"] is None
