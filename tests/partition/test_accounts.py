"""A server with users of its own: keys, roles, allocations, the right to inject, two ports, the audit log."""

from __future__ import annotations

import itertools
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from podrun.core.access import ACCESS_KEY_KEY, USER_KEY
from podrun.core.errors import (
    ConflictError,
    DeniedError,
    ExistsError,
    NotFoundError,
    ServiceError,
    UsageError,
)
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.commands.which_server import read_hcl, write_account
from podrun.partition.server.access import AuditLog
from podrun.partition.state.accounts import NEEDED, WRONG_KEYS, Account, Accounts, Role
from podrun.partition.state.store import Store
from podrun.partition.state.values import Requirements
from podrun.protos import vipu_pb2

from .conftest import Pod

MakePod = Callable[..., Pod]
READS = [name for name, role in NEEDED.items() if role is Role.VIEWER]


@contextmanager
def as_user(pod: Pod, name: str, key: str, port: int = 0) -> Iterator[VipuClient]:
    with VipuClient("127.0.0.1", port or pod.port, timeout=60, account=(name, key)) as client:
        yield client


def admin_of(pod: Pod) -> str:
    assert pod.desk.accounts is not None
    return pod.desk.accounts.create(Account("root", Role.ADMIN, may_inject=True))


def test_the_table_of_roles_names_calls_that_there_are() -> None:
    calls = {m.name for s in vipu_pb2.DESCRIPTOR.services_by_name.values() for m in s.methods}
    assert NEEDED.keys() <= calls
    reading = {name for name in calls if name.startswith(("Get", "List", "Watch", "Plan", "Capture"))}
    assert reading - {"ListUsers", "GetPartitionIpuofConfig"} == set(READS)


@pytest.mark.parametrize("role", Role)
def test_every_call_for_every_role(role: Role) -> None:
    calls = {m.name for s in vipu_pb2.DESCRIPTOR.services_by_name.values() for m in s.methods}
    for call in calls:
        allowed = True
        try:
            Account("a", role, may_inject=True).check(call)
        except DeniedError:
            allowed = False
        assert allowed == role.covers(NEEDED.get(call, Role.ADMIN)), call
    with pytest.raises(DeniedError):
        Account("a", role).check("InjectFaults")


def test_keys_are_hashed_and_survive_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "state", "pod16")
    key = Accounts(store).create(Account("alice", Role.USER, ("left",)))
    store.close()
    assert key.encode() not in (tmp_path / "state").read_bytes()
    with sqlite3.connect(tmp_path / "state") as db:
        assert "$argon2id$" in db.execute("SELECT data FROM users").fetchone()[0]
    db.close()
    store = Store(tmp_path / "state", "pod16")
    known = Accounts(store)
    assert known.authenticate({USER_KEY: "alice", ACCESS_KEY_KEY: key}).allocations == ("left",)
    with pytest.raises(ExistsError):
        known.create(Account("alice", Role.VIEWER))
    known.create(Account("root", Role.ADMIN))
    with pytest.raises(ConflictError, match="only administrator"):
        known.remove("root")
    known.remove("alice")
    with pytest.raises(DeniedError):
        known.authenticate({USER_KEY: "alice", ACCESS_KEY_KEY: key})
    with pytest.raises(NotFoundError, match="no user 'alice'"):
        known.remove("alice")
    store.close()


def test_wrong_keys_are_refused_and_soon_not_even_looked_at() -> None:
    store, now = Store(None, "pod16"), [1000.0]
    known = Accounts(store, clock=lambda: now[0])
    key = known.create(Account("alice", Role.USER))

    def attempt(name: str, text: str) -> str:
        with pytest.raises(DeniedError) as caught:
            known.authenticate({USER_KEY: name, ACCESS_KEY_KEY: text})
        return caught.value.message

    assert "wants a user" in attempt("", "")
    assert attempt("alice", "no").replace("alice", "X") == attempt("bob", "no").replace("bob", "X")
    for _ in range(WRONG_KEYS - 1):
        attempt("alice", "no")
    assert "wrong access keys" in attempt("alice", key)
    now[0] += 61
    assert known.authenticate({USER_KEY: "alice", ACCESS_KEY_KEY: key}).name == "alice"
    assert known.authenticate({USER_KEY: "alice", ACCESS_KEY_KEY: key}).name == "alice"  # from memory
    assert "not known" in attempt("alice", key + "x")
    store.close()


def test_users_see_and_use_their_allocations_only(make_pod: MakePod) -> None:
    pod = make_pod(secure=True)
    with pytest.raises(DeniedError, match="wants a user and an access key"):
        pod.client.list_partitions()
    with as_user(pod, "root", admin_of(pod)) as root:
        root.remove_allocation("pod16")
        root.create_allocation("left", ["ipum1", "ipum2"])
        root.create_allocation("right", ["ipum3", "ipum4"])
        with pytest.raises(NotFoundError, match="no allocation 'rigth'"):
            root.create_user("eve", "user", ["rigth"])
        with pytest.raises(UsageError, match="no role 'boss'"):
            root.create_user("eve", "boss")
        alice, bob = root.create_user("alice", "user", ["left"]), root.create_user("bob", "user", ["right"])
        looker = root.create_user("looker", "viewer")
        assert [user.name for user in root.list_users()] == ["alice", "bob", "looker", "root"]
        with as_user(pod, "alice", alice) as client:
            client.create_partition(Requirements("a", 4))
            assert client.get_partition("a").allocation == "left"
            with pytest.raises(DeniedError, match="right is no allocation of alice"):
                client.create_partition(Requirements("b", 4, allocation="right"))
            with pytest.raises(DeniedError, match="may not inject faults"):
                client.inject_faults("a", ["ipu:0@batch=1:tile-parity"])
            with pytest.raises(DeniedError, match="may not inject faults"):
                client._call(
                    client._user.CreatePartition,
                    vipu_pb2.CreatePartitionRequest(partition_id="c", faults=["ipu:0@batch=1:tile-parity"]),
                )
            with pytest.raises(DeniedError, match="needs the role operator; alice is user"):
                client.restart_agent("ipum1")
            with pytest.raises(DeniedError, match="needs the role admin"):
                client.create_user("eve")
        assert pod.service.wait_idle(60)
        with as_user(pod, "bob", bob) as client:
            assert client.list_partitions() == []
            with pytest.raises(NotFoundError, match="there is no partition 'a'"):
                client.remove_partition("a")
            with pytest.raises(NotFoundError, match="there is no partition 'a'"):
                client.ipuof_config("a")
            told = [change for change in _first(client, 2) if change[0] == "partition"]
            assert told == []
        with as_user(pod, "looker", looker) as client:
            assert [info.name for info in client.list_partitions()] == ["a"]
            with pytest.raises(DeniedError, match="needs the role user"):
                client.create_partition(Requirements("l", 1))
        root.remove_partition("a", force=True)


def _first(client: VipuClient, count: int) -> list[tuple[str, str]]:
    """The first changes that a watcher is told, at most until it has been told all there is."""
    found = []
    for change in client.watch(["partition", "incident"]):
        if change.kind == "synced" or len(found) == count:
            break
        found.append((change.kind, change.name))
    return found


def test_administrators_have_a_port_of_their_own(make_pod: MakePod) -> None:
    pod = make_pod(admin_port=0)
    assert pod.desk.admin_port not in (None, 0, pod.port)
    with VipuClient("127.0.0.1", int(pod.desk.admin_port or 0), timeout=60) as admin:
        admin.set_maintenance("ipum1")
        assert admin.list_partitions() == []
    with pytest.raises(DeniedError, match="is answered at the port for administrators") as caught:
        pod.client.end_maintenance("ipum1")
    assert caught.value.hint == f"vipu-admin --api-port {pod.desk.admin_port}"
    assert len(pod.client.list_agents()) == 4


def test_lists_and_watches_hold_what_who_asks_may_see(make_pod: MakePod) -> None:
    pod = make_pod(secure=True)
    with as_user(pod, "root", admin_of(pod)) as root:
        root.remove_allocation("pod16")
        root.create_allocation("left", ["ipum1", "ipum2"])
        root.create_allocation("right", ["ipum3", "ipum4"])
        bob = root.create_user("bob", "viewer", ["right"])
        root.create_partition(Requirements("l", 8, allocation="left"))
        root.create_partition(Requirements("r", 8, allocation="right"))
        assert pod.service.wait_idle(60)
        root.create_partition(Requirements("lq", 8, allocation="left"), wait=True, priority=1)
        root.create_partition(Requirements("rq", 8, allocation="right"), wait=True)
        root.set_maintenance("ipum2", reason="memory")
        assert [entry.ahead for entry in root.list_queue()] == [(), ("lq",)]
        with as_user(pod, "bob", bob) as client:
            assert [entry.name for entry in client.list_allocations()] == ["right"]
            assert [info.name for info in client.list_partitions()] == ["r"]
            (queued,) = client.list_queue()
            assert (queued.name, queued.ahead, queued.blockers) == ("rq", (), ("r",))
            agents = client.list_agents()
            assert [agent.partitions for agent in agents] == [(), (), ("r",), ("r",)]
            assert not any(agent.endpoints for agent in agents)
            stream = client.watch()
            there = list(itertools.takewhile(lambda change: change.kind != "synced", stream))
            names = {(change.kind, change.name) for change in there if change.kind != "machine"}
            assert names == {
                ("partition", "r"),
                ("partition", "rq"),
                ("allocation", "right"),
                ("cluster", "pod16"),
            }
            machines = {change.name: change.value or {} for change in there if change.kind == "machine"}
            assert [machine["partitions"] for machine in machines.values()] == [[], [], ["r"], ["r"]]
            assert not any(machine["endpoints"] for machine in machines.values())
            root.remove_partition("lq")
            root.remove_partition("rq")
            root.create_user("carol")
            change = next(stream)
            assert (change.kind, change.name, change.value) == ("partition", "rq", None)
            root.remove_user("bob")
            root.remove_partition("r")
            with pytest.raises(DeniedError, match="bob is no user of this server any more"):
                list(stream)


def test_administrators_watch_users(make_pod: MakePod) -> None:
    pod = make_pod(secure=True)
    with as_user(pod, "root", admin_of(pod)) as root:
        stream = root.watch(["user"])
        assert [(change.kind, change.name) for change in itertools.islice(stream, 2)] == [
            ("user", "root"),
            ("synced", ""),
        ]
        root.create_user("carol", "viewer")
        change = next(stream)
        assert (change.name, (change.value or {})["role"]) == ("carol", "viewer")
        assert "key" not in json.dumps(change.value)
        root.remove_user("carol")
        change = next(stream)
        assert (change.name, change.value) == ("carol", None)


def test_the_audit_log_tells_who_changed_what(make_pod: MakePod, tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text('{"time_s": 1, "outcome": "before"}\n')
    pod = make_pod(secure=True, audit=path)
    key = admin_of(pod)
    with as_user(pod, "root", key) as root:
        root.create_partition(Requirements("a", 4))
        with pytest.raises(UsageError):
            root.create_partition(Requirements("b", 3))
        with pytest.raises(DeniedError), as_user(pod, "root", "wrong") as nobody:
            nobody.remove_partition("a")
        root.create_user("alice")
    text = path.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert lines[0]["outcome"] == "before"
    asked = [
        (line["call"], line["who"], line["outcome"].split(":")[0]) for line in lines[1:] if "call" in line
    ]
    me = next(who for call, who, outcome in asked if outcome == "refused")
    assert asked == [
        ("CreatePartition", "root", "asked"),
        ("CreatePartition", "root", "asked"),
        ("RemovePartition", me, "refused"),
        ("CreateUser", "root", "asked"),
    ]
    outcomes = [line["outcome"] for line in lines[1:] if "call" not in line]
    assert outcomes[0] == outcomes[2] == "done"
    assert "UsageError: the size of a partition" in outcomes[1]
    assert "ListPartitions" not in text
    assert key not in text


def test_what_cannot_be_noted_is_not_done(make_pod: MakePod, tmp_path: Path) -> None:
    pod = make_pod(audit=tmp_path / "audit.jsonl")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, pod.desk.audit._file)
    os.close(full)
    with pytest.raises(
        ServiceError, match=r"the audit log .* cannot be written: No space left on device; nothing was"
    ):
        pod.client.create_partition(Requirements("a", 4))
    assert pod.client.list_partitions() == []
    with pytest.raises(ServiceError, match="cannot be written"):
        AuditLog(tmp_path)


def test_the_file_for_a_users_commands(tmp_path: Path) -> None:
    path = tmp_path / "alice.hcl"
    path.touch(0o666)
    write_account(path, "127.0.0.1", 8090, ("alice", "k-_1"))
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_hcl(path) == {
        "api-host": "127.0.0.1",
        "api-port": "8090",
        "api-user-id": "alice",
        "api-access-key": "k-_1",
    }
    with pytest.raises(UsageError, match="cannot be written"):
        write_account(tmp_path, "h", 1, ("a", "k"))


def test_an_operator_of_one_allocation_leaves_the_agents_of_others_alone(make_pod: MakePod) -> None:
    pod = make_pod(secure=True)
    with as_user(pod, "root", admin_of(pod)) as root:
        root.remove_allocation("pod16")
        root.create_allocation("left", ["ipum1", "ipum2"])
        root.create_allocation("right", ["ipum3", "ipum4"])
        key = root.create_user("olga", "operator", ["left"])
    with as_user(pod, "olga", key) as operator:
        operator.set_maintenance("ipum1", drain=True)
        operator.end_maintenance("ipum1")
        for name in ("ipum3", "ipum9"):
            with pytest.raises(DeniedError, match=f"agent {name} is in no allocation of olga"):
                operator.set_maintenance(name, drain=True)
            with pytest.raises(DeniedError, match="in no allocation"):
                operator.end_maintenance(name)
            with pytest.raises(DeniedError, match="in no allocation"):
                operator.restart_agent(name)
            with pytest.raises(DeniedError, match="in no allocation"):
                operator.power_cycle_agent(name)
