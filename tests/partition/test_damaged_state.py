"""Damage everywhere in a state file: `check` and a server's start agree, and a state that is taken can be served."""

from __future__ import annotations

import contextlib
import copy
import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ConfigError, PodrunError
from podrun.partition.host.holders import this_holder
from podrun.partition.server.views import (
    ipuof_config,
    partition_info,
    queue_info,
    queued_info,
)
from podrun.partition.state import events as ev
from podrun.partition.state.accounts import Account, Accounts, Role
from podrun.partition.state.allocator import Allocator
from podrun.partition.state.codec import to_message, value_to_json
from podrun.partition.state.explanations import explain_queue
from podrun.partition.state.records import Lease
from podrun.partition.state.repair import diagnose_rows, read_rows
from podrun.partition.state.store import Store, fingerprint_of
from podrun.partition.state.stored_rows import StateRows
from podrun.partition.state.stored_state import state_from_rows
from podrun.partition.state.values import Requirements
from podrun.protos import vipu_pb2 as messages
from tests.sampling import examples

from .conftest import Pod

POD = load_cluster("pod16")
pb: Any = messages
NESTED = "[" * 50_000
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    "",
    "text",
    "-1",
    "\0",
    "\ud800",
    b"bytes",
    -1,
    0,
    3,
    1 << 62,
    1 << 70,
    10**400,
    0.5,
    -1.0,
    1e300,
    float("nan"),
    float("inf"),
    [],
    [[]],
    [1, "a"],
    {},
    {"a": {"b": [None]}},
    [[[[[[[[[[[[]]]]]]]]]]]],
)


def write_state(path: Path) -> None:
    """A state with something of every kind in it."""
    pod = Pod("pod16", path, secure=True)
    try:
        create = pod.service.create
        for name, size in (("p", 4), ("q", 2), ("r", 1)):
            holder = str(this_holder()) if name == "p" else ""
            create(Requirements(name, size, owner=1000, limit_s=9.0, relocatable=True, holder=holder))
        assert pod.service.wait_idle(60)
        pod.service.handle(ev.AgentLost("ipum2", "power"))
        pod.service.create_reservation("kept", ("ipum3",), begin_in_s=1e6, for_s=60.0)
        pod.service.set_maintenance("ipum4", drain=True, deadline_s=1e6, reason="fan")
        create(Requirements("waits", 16, owner=1000), wait=True, priority=2)
        pod.service.handle(ev.CreateAgent("spare", "10.9.9.9", 8080))
        assert pod.desk.accounts is not None
        pod.desk.accounts.create(Account("root", Role.ADMIN, may_inject=True))
        pod.desk.accounts.create(Account("alice", Role.USER, ("pod16",)))
    finally:
        pod.stop()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("state") / "state.sqlite"
    write_state(path)
    return path


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something stands in a value of JSON, itself included."""
    yield path
    entries = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, entry in entries:
        yield from places(entry, (*path, key))


def changed(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    """A copy with another value, or without what was there, at a place."""
    if not path:
        return odd
    result = copy.deepcopy(value)
    inside = result
    for key in path[:-1]:
        inside = inside[key]
    if odd is LEFT_OUT:
        del inside[path[-1]]
    else:
        inside[path[-1]] = odd
    return result


LEFT_OUT = "left out"
Damage = Callable[[StateRows], StateRows]


def damages(rows: StateRows) -> list[tuple[str, Damage]]:
    """Every place of a state's rows, with a function that puts an odd value there (the argument before)."""
    found: list[tuple[str, Any]] = []
    assert rows.pod is not None
    found += [(f"pod.{column}", partial(_in_pod, column)) for column in rows.pod]
    for table in ("partitions", "allocations", "plans", "users", "layout"):
        for index, row in enumerate(getattr(rows, table) or ()):
            for column, value in enumerate(row):
                found.append((f"{table}[{index}][{column}]", partial(_in_row, table, index, column, None)))
                if column == len(row) - 1:
                    found += [
                        (f"{table}[{index}].{path}", partial(_in_row, table, index, column, path))
                        for path in places(json.loads(value))
                    ]
    found += [(f"lost[{i}]", partial(_lost, i)) for i in range(len(rows.lost))]
    return found


def _column(odd: Any) -> Any:
    """A value that a column of SQLite can hold. Raises ValueError for others."""
    if isinstance(odd, list | dict | bool) or odd != odd or (isinstance(odd, int) and abs(odd) >= 1 << 63):
        raise ValueError("no value of a column")
    return odd


def _in_pod(column: str, odd: Any, rows: StateRows) -> StateRows:
    return replace(rows, pod={**(rows.pod or {}), column: _column(odd)})


def _lost(index: int, odd: Any, rows: StateRows) -> StateRows:
    return replace(rows, lost=(*rows.lost[:index], _column(odd), *rows.lost[index + 1 :]))


def _in_row(
    table: str, index: int, column: int, path: tuple[Any, ...] | None, odd: Any, rows: StateRows
) -> StateRows:
    """``path`` None: the whole column; else a place in its JSON."""
    all_rows = list(getattr(rows, table))
    row = list(all_rows[index])
    if path is None:
        row[column] = _column(odd)
    else:
        odd = "bytes" if isinstance(odd, bytes) else odd
        row[column] = json.dumps(changed(json.loads(row[column]), path, odd))
    all_rows[index] = tuple(row)
    return replace(rows, **{table: tuple(all_rows)})


def serve(rows: StateRows) -> None:
    """What a server does with a state soon after its start, without machines."""
    state = state_from_rows(POD, rows)
    pod = state.layout or POD
    core = Allocator(
        pod, allocations=state.allocations, partitions=state.partitions, lost=state.lost, plans=state.plans
    )
    for partition in core.partitions.values():
        info = partition_info(pod, partition)
        json.dumps(value_to_json(info))
        to_message(info, pb.Partition)
        ipuof_config(pod, partition, partition.num_gcds - 1, {})
    for entry in core.queue.values():
        to_message(queued_info(pod, entry), pb.Partition)
    for told in explain_queue(core):
        to_message(queue_info(told), pb.QueuedRequest)
    for event in (
        ev.ServerStarted(frozenset()),
        ev.Tick(1.7e9),
        ev.AgentLost("ipum3", "power"),
        ev.CreatePartition(Requirements("new", 16, owner=7), 1.7e9),
        *(ev.RemovePartition(name) for name in core.partitions),
    ):
        with contextlib.suppress(PodrunError):
            core.handle(event)
        core.validate_state()


@cache
def rows_at(path: Path) -> StateRows:
    return read_rows(path)


def check_agreement(rows: StateRows) -> None:
    """`check` finds problems iff a server refuses to start; what a repair keeps is taken."""
    try:
        serve(rows)
    except ValueError as error:
        refused = str(error)
    else:
        refused = ""
    if rows.pod is not None and rows.pod["fingerprint"] not in ("", fingerprint_of(POD)):
        refused = "written for another description"
    try:
        found = diagnose_rows(POD, rows)
    except ConfigError:  # Another POD's file.
        assert rows.pod is not None
        assert isinstance(rows.pod["name"], str)
        return
    assert bool(found.problems) == bool(refused), (refused, found.problems)
    assert "Error" not in refused
    assert "Traceback" not in refused
    assert isinstance(found.lease, Lease)
    store = Store(None, POD.name)
    try:
        store.write(found.kept, POD, found.lease)
        assert store.load(POD).partitions == found.kept.partitions
        Accounts(store)
    finally:
        store.close()


def test_the_state_itself_is_in_order(file: Path) -> None:
    check_agreement(rows_at(file))
    assert not diagnose_rows(POD, rows_at(file)).problems


@settings(
    deadline=None, max_examples=examples(250), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_odd_values_anywhere(file: Path, data: st.DataObject) -> None:
    rows = rows_at(file)
    _where, damage = data.draw(st.sampled_from(damages(rows)))
    odd = data.draw(st.sampled_from((*ODD_VALUES, LEFT_OUT, NESTED)))
    try:
        damaged = damage(odd, rows)  # type: ignore[call-arg]
    except ValueError:  # JSON has no such value.
        return
    check_agreement(damaged)


@pytest.mark.parametrize(
    ("where", "odd"),
    [
        ("users[0][0]", "text"),
        ("users[0][1]", b"bytes"),
        ("layout[0].()", [1, "a"]),
        ("layout[0].(0,)", ""),
    ],
)
def test_odd_values_that_few_examples_may_pass_over(file: Path, where: str, odd: Any) -> None:
    damage: Any = dict(damages(rows_at(file)))[where]
    check_agreement(damage(odd, rows_at(file)))


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "UPDATE partitions SET data = json_set(data, '$.owner', 'bob') WHERE name = 'p'",
            "partition p: owner is the text 'bob'",
        ),
        ("UPDATE pod SET epoch = 'seven'", "pod: epoch is the text 'seven', not a whole number"),
        (
            "UPDATE partitions SET data = replace(hex(zeroblob(9000)), '0', '[') WHERE name = 'p'",
            "partition p: it: lists and objects are nested",
        ),
        ("UPDATE plans SET data = json_set(data, '$.needs.size', 3) WHERE kind = 'queue'", "request waits"),
        (
            "UPDATE users SET data = json_remove(data, '$.role') WHERE name = 'alice'",
            "user alice: role is missing",
        ),
    ],
    ids=["owner", "epoch", "nested", "plan", "user"],
)
def test_a_damaged_file_is_refused_with_place_and_command(
    file: Path, tmp_path: Path, statement: str, said: str
) -> None:
    path = tmp_path / "state.sqlite"
    path.write_bytes(file.read_bytes())
    with sqlite3.connect(path) as db:
        db.execute(statement)
    db.close()
    store = Store(path, POD.name)
    try:
        with pytest.raises(ConfigError) as caught:
            store.load(POD)
    finally:
        store.close()
    assert said in caught.value.message
    assert f"vipu-server check --cluster pod16 --state-file {path}" in (caught.value.hint or "")
    assert any(
        said.partition(":")[0] in problem.what for problem in diagnose_rows(POD, read_rows(path)).problems
    )
