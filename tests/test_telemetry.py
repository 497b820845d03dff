"""Machine reports cross processes as JSON and come back equal; readers are careful."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.core.errors import ServiceError
from podrun.core.telemetry import SCHEMA_VERSION, AttachedProcess, IpuReport, MachineReport

text = st.text(max_size=8)
number = st.none() | st.floats(allow_nan=False, allow_infinity=False)
processes = st.builds(AttachedProcess, st.integers(1, 4194304), text, text, number, text)
ipus = st.builds(
    IpuReport,
    st.integers(0, 63),
    st.integers(0, 3),
    error_state=text,
    recovery_action=st.none() | text,
    process=st.none() | processes,
    clock_mhz=number,
    power_w=number,
    links_down=st.lists(st.integers(0, 63), max_size=3).map(tuple),
)
reports = st.builds(
    MachineReport,
    text,
    endpoint=text,
    pid=st.none() | st.integers(1, 4194304),
    versions=st.dictionaries(text, text, max_size=2),
    ipus=st.lists(ipus, max_size=4).map(tuple),
)


@given(reports)
def test_round_trip(report: MachineReport) -> None:
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


def test_unknown_is_null_not_zero() -> None:
    plain = MachineReport("a", ipus=(IpuReport(0, 0),)).to_json_dict()
    assert plain["board_power_w"] is None
    assert plain["ipus"][0]["die_temperature_c"] is None
