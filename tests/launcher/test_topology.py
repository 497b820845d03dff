"""The topology table: recorded tables, byte for byte, and rules that hold for any."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrun.launcher.spec import LaunchLayout
from podrun.launcher.topology import topology_table

GOLDEN = Path(__file__).parent / "golden"
LAYOUTS = {
    "8_replicas_2_instances": LaunchLayout(8, 1, 2, ("localhost",)),
    "1_replica": LaunchLayout(1, 4, 1, ("localhost",)),
    "16_replicas_4_instances": LaunchLayout(16, 1, 4, ("localhost",)),
    "16_replicas_2_hosts_2_ilds": LaunchLayout(16, 8, 4, ("lr17-poplar1", "lr17-poplar2"), 2),
    "4_replicas_4_hosts": LaunchLayout(4, 1, 4, ("first-host", "second-host", "third-host", "fourth-host")),
    "12_character_host_in_15": LaunchLayout(4, 1, 1, ("twelve-chars",)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_topology_tables_are_as_recorded(name: str) -> None:
    assert topology_table(LAYOUTS[name]) == (GOLDEN / f"topology_{name}.txt").read_text(encoding="utf-8")


@given(st.integers(0, 7), st.data())
def test_all_lines_are_equally_wide_and_replicas_are_all_there(log: int, data: st.DataObject) -> None:
    replicas = 1 << log
    instances = 1 << data.draw(st.integers(0, log))
    ilds = 1 << data.draw(st.integers(0, instances.bit_length() - 1))
    hosts = 1 << data.draw(st.integers(0, instances.bit_length() - 1))
    table = topology_table(
        LaunchLayout(replicas, 1, instances, tuple(f"host{i}" for i in range(hosts)), ilds)
    )
    lines = table.splitlines()
    width = len(lines[1])
    assert all(len(line) in (width, width - 1) for line in lines)
    cells = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in lines if line.count("|") > 2}
    assert [int(c) for c in cells["replicas"]] == list(range(replicas))
    assert [int(c) for c in cells["instances"]] == list(range(instances))
    assert [int(c) for c in cells["ILDs"]] == list(range(ilds))
    assert len(cells["hosts"]) == hosts
