"""Random operations with real processes: a `vipu-server`, machines as Ray actors, host processes, and kill -9.

    python -m tests.partition.real_operations --seed 1 --count 2000

One POD16, which has users, lives through all of them; agents and clusters are added to it and taken away. After each
operation that was answered, no IPU belongs to two partitions, the state file holds together and holds what the server
says, and what was told is what is there. At the end everything can be removed, a partition of the whole POD becomes
active, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from podrun.core.cluster_file import load_cluster
from podrun.core.errors import (
    ConflictError,
    DeadlineError,
    NotFoundError,
    PodrunError,
    ServiceError,
    UsageError,
)
from podrun.core.layout import IpuRange
from podrun.device.connection import AttachRequest, Connection
from podrun.device.host.connecting import connect
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.commands.which_server import read_hcl
from podrun.partition.host.discovery import ProcessId, Registry
from podrun.partition.machines.keeper import keepers
from podrun.partition.server.event_log import Mirror
from podrun.partition.state.repair import diagnose_rows, read_rows
from podrun.partition.state.values import PartitionInfo, PartitionState, Requirements

S = PartitionState
PATIENCE_S = 60.0


class RealPod:
    """A server of a POD16 with its own directories, a client of it, and what the client was told."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.cluster = load_cluster("pod16")
        self.run, self.state = directory / "run", directory / "state.sqlite"
        os.environ["PODRUN_RUNTIME_DIR"] = str(
            self.run
        )  # The secret is there, for the clients in this process too.
        self.environ = {**os.environ, "PODRUN_MACHINES_PER_PROCESS": "1"}
        self.names, self.last = 0, ""
        self.account = ("", "")
        self.extra: dict[str, str] = {}
        """Clusters that were added, each with its agent."""
        self.mirror, self.token = Mirror(), ""
        """What a watcher knows that comes and goes."""
        self.expected: set[str] = set()
        """Partitions and queued requests that there must be."""
        self.held: dict[str, Connection] = {}
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.family: set[ProcessId] = set()
        self.moves = 0
        self.port = 0
        self.process = self._start()
        settings = read_hcl(self.run / f"admin-{self.port}.vipu-cli.hcl")
        self.account = (settings["api-user-id"], settings["api-access-key"])
        self.client = self.new_client()

    def new_client(self) -> VipuClient:
        """A client of the server, as its administrator."""
        return VipuClient("127.0.0.1", self.port, timeout=30, account=self.account)

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "podrun.partition.commands.vipu_server"]
        command += ["--cluster=pod16", f"--port={self.port}"]
        process = subprocess.Popen(
            [*command, "--state-file", str(self.state), "--secure"],
            env=self.environ,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert process.stdout is not None
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready, "vipu-server said nothing"
        self.port = int(process.stdout.readline().decode().rpartition(":")[2])
        assert b"secure: " in process.stdout.readline()  # The administrator's key is written by now.
        return process

    def _note_family(self) -> None:
        for entry in keepers(Registry(self.run)):
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(entry.owner.pid)
                found = (ProcessId.of(p.pid) for p in (parent, *parent.children(recursive=True)))
                self.family.update(process for process in found if process is not None)

    def close(self) -> None:
        """End the server; nothing that it started is left."""
        for connection in self.held.values():
            with contextlib.suppress(PodrunError):
                connection.close()
        self._note_family()
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(PATIENCE_S) == 0
        end = time.monotonic() + PATIENCE_S
        while left := [process for process in self.family if process.alive]:
            assert time.monotonic() < end, f"processes are left: {left}"
            select.select([], [], [], 0.05)

    # --- one operation --------------------------------------------------------------------------------------

    def step(self) -> None:
        """One random operation, and what holds after it."""
        kind = self.last = self.random.choices(
            list(OPERATIONS), [weight for weight, _ in OPERATIONS.values()]
        )[0]
        try:
            OPERATIONS[kind][1](self)
        except (UsageError, DeadlineError) as error:
            self.refused[type(error).__name__] += 1
        self.done[kind] += 1
        self.check()

    def check(self) -> None:
        """What always holds."""
        queue = {info.name for info in self.client.list_queue()}
        infos = self.client.list_partitions()
        there = {info.name for info in infos} | queue
        assert self.expected <= there, f"lost: {self.expected - there}"
        assert {i.name for i in infos if i.state is not S.REMOVING} | queue == self.expected, "not asked for"
        assert sum(info.size for info in infos) <= self.cluster.ipu_count + 4 * len(self.extra)
        owners: dict[tuple[str, int], str] = {}
        for info in infos:
            for device in self._devices(info):
                other = owners.setdefault(device, info.name)
                assert other == info.name, f"{device} belongs to {other} and {info.name}"
        found = diagnose_rows(self.cluster, read_rows(self.state))
        assert not found.problems, found.problems
        stored = {p.name for p in found.kept.partitions} | {q.needs.name for q in found.kept.plans.queue}
        assert self.expected <= stored, f"not stored: {self.expected - stored}"

    def _devices(self, info: PartitionInfo) -> set[tuple[str, int]]:
        with contextlib.suppress(UsageError):  # It may be gone by now.
            devices = self.client.ipuof_config(info.name).devices
            assert len(devices) == info.size
            return {(device.agent_id, device.ipu_number) for device in devices}
        return set()

    def settle(self, *names: str) -> None:
        """Wait until partitions are in a terminal state."""
        for name in names or self.expected:
            with contextlib.suppress(UsageError):
                if self.client.partition_state(name)[0] is not S.QUEUED:
                    self.client.wait_for_state(name, {S.ACTIVE, S.ERROR, S.QUEUED}, PATIENCE_S)

    def any_name(self) -> str:
        return self.random.choice([*sorted(self.expected), "nobody"])

    def any_agent(self) -> str:
        return self.random.choice([*(agent.id for agent in self.cluster.agents), *self.extra.values()])

    def needs(self) -> Requirements:
        self.names += 1
        size = self.random.choice([1, 1, 2, 2, 4, 4, 8, 16])
        return Requirements(
            f"p{self.names}",
            size,
            reconfigurable=self.random.random() < 0.5,
            relocatable=self.random.random() < 0.3,
            cluster=self.random.choice(list(self.extra)) if self.extra and self.random.random() < 0.3 else "",
            routing="swnc" if self.random.random() < 0.1 else "",
        )

    def moved_or_broken(self, before: PartitionInfo) -> None:
        """Wait until the loss of a machine has shown: the partition is in ERROR, gone, or active elsewhere."""
        end = time.monotonic() + PATIENCE_S
        with contextlib.suppress(NotFoundError):
            while True:
                info = self.client.get_partition(before.name)
                if info.state is S.ERROR or (info.state is S.ACTIVE and info.generation > before.generation):
                    break
                assert time.monotonic() < end, f"{before} is {info}"
                select.select([], [], [], 0.02)
            if info.state is S.ACTIVE:
                assert info.relocatable, f"{info} moved, which may not be moved"
                self.moves += 1

    def end(self) -> None:
        """Everything can be given back, and taken as a whole."""
        for name in [*(agent.id for agent in self.cluster.agents), *self.extra.values()]:
            with contextlib.suppress(UsageError):
                self.client.end_maintenance(name)
            self.client.restart_agent(name)
        for name in sorted(self.expected):
            with contextlib.suppress(UsageError):
                self.client.remove_partition(name, force=True)
                self.client.wait_for_state(name, {S.REMOVED}, PATIENCE_S)
        self.expected.clear()
        while self.extra:
            _shrink(self)
        self.client.create_partition(Requirements("whole", 16))
        self.expected.add("whole")
        assert self.client.wait_for_state("whole", {S.ACTIVE}, PATIENCE_S) is S.ACTIVE
        self.check()


def _create(pod: RealPod) -> None:
    needs = pod.needs()
    pod.client.create_partition(needs)
    pod.expected.add(needs.name)


def _queue(pod: RealPod) -> None:
    """A request that may have to wait; its client gives up if it does."""
    needs = pod.needs()
    info = pod.client.create_partition(needs, wait=True)
    pod.expected.add(needs.name)
    if info.state is S.QUEUED:
        assert needs.name in {entry.name for entry in pod.client.list_queue()}
        pod.client.remove_partition(needs.name)
        with contextlib.suppress(UsageError):
            pod.client.wait_for_state(needs.name, {S.REMOVED}, PATIENCE_S)
        pod.expected.discard(needs.name)


def _remove(pod: RealPod) -> None:
    name = pod.any_name()
    if name in pod.held:
        try:
            pod.client.remove_partition(name)
        except ConflictError:
            pod.refused["in use"] += 1
        else:
            pod.expected.discard(name)
            with contextlib.suppress(NotFoundError):
                state = pod.client.partition_state(name)[0]
                assert state is not S.ACTIVE, "a partition was removed under its process"
        pod.held.pop(name).close()
    with contextlib.suppress(ConflictError):
        pod.client.remove_partition(name)
        pod.expected.discard(name)
        pod.client.wait_for_state(name, {S.REMOVED}, PATIENCE_S)


def _force(pod: RealPod) -> None:
    name = pod.any_name()
    pod.client.remove_partition(name, force=True)
    pod.expected.discard(name)
    pod.client.wait_for_state(name, {S.REMOVED}, PATIENCE_S)
    if name in pod.held:
        pod.held.pop(name).close()


def _reset(pod: RealPod) -> None:
    name = pod.any_name()
    pod.client.reset_partition(name)
    pod.settle(name)


def _reset_ipu(pod: RealPod) -> None:
    name = pod.any_name()
    pod.client.reset_ipus(name, [pod.random.randrange(16)])


def _attach(pod: RealPod) -> None:
    """A host process takes all IPUs of a partition; a second one is refused."""
    name = pod.any_name()
    if name in pod.held:
        pod.held.pop(name).close()
        return
    pod.settle(name)
    environ = {
        **os.environ,
        "IPUOF_VIPU_API_HOST": "127.0.0.1",
        "IPUOF_VIPU_API_PORT": str(pod.port),
        "IPUOF_VIPU_API_PARTITION_ID": name,
        "IPUOF_VIPU_API_TIMEOUT": "30",
        "VIPU_CLI_API_USER_ID": pod.account[0],
        "VIPU_CLI_API_ACCESS_KEY": pod.account[1],
    }
    try:
        first, second = connect(environ), connect(environ)
    except ServiceError:
        pod.refused["not active"] += 1
        return
    whole = IpuRange(0, first.total_ipus)
    request = AttachRequest(whole, whole, os.getpid(), "tester", "real_operations")
    if first.try_attach(request) is None:
        assert second.try_attach(request) is not None, f"the IPUs of {name} were taken twice"
        pod.held[name] = first
    else:
        first.close()
    second.close()


def _kill_machine(pod: RealPod) -> None:
    reports = [r for r in pod.client.machine_reports() if r.pid and r.partition and r.state == "up"]
    if not reports:
        return
    report = pod.random.choice(reports)
    assert report.pid is not None
    before = pod.client.get_partition(report.partition)
    with contextlib.suppress(ProcessLookupError):
        os.kill(report.pid, signal.SIGKILL)
    if before.state is S.ACTIVE:
        pod.moved_or_broken(before)
    if report.partition in pod.held:
        pod.held.pop(report.partition).close()
    if pod.random.random() < 0.8:
        pod.client.restart_agent(report.agent_id)


def _kill_server(pod: RealPod) -> None:
    """At a random moment of what is under way; what was told before still holds."""
    pod._note_family()
    active = {i.name: i.generation for i in pod.client.list_partitions() if i.state is S.ACTIVE}
    pod.process.kill()
    pod.process.wait()
    pod.process = pod._start()
    pod.client.close()
    pod.client = pod.new_client()
    for name, generation in active.items():
        info = pod.client.get_partition(name)
        assert (info.state, info.generation) == (S.ACTIVE, generation), f"{name} was disturbed: {info}"
    for name, connection in pod.held.items():
        assert connection.holds_ipus or name not in active, f"the process on {name} lost its IPUs"


def _stop_machine(pod: RealPod) -> None:
    """A machine's process is stopped while the server is killed and starts again; its job goes on afterwards."""
    reports = [r for r in pod.client.machine_reports() if r.pid and r.partition and r.state == "up"]
    if not reports:
        return
    report = pod.random.choice(reports)
    assert report.pid is not None
    state = pod.client.partition_state(report.partition)[0]
    os.kill(report.pid, signal.SIGSTOP)
    try:
        pod.process.kill()
        pod.process.wait()
        pod.process = pod._start()
        pod.client.close()
        pod.client = pod.new_client()
        if state is S.ACTIVE:
            assert pod.client.partition_state(report.partition)[0] is S.ACTIVE
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(report.pid, signal.SIGCONT)
    pod.settle()


def _grow(pod: RealPod) -> None:
    """An agent more, in a cluster of its own."""
    if len(pod.extra) >= 2:
        _shrink(pod)
    pod.names += 1
    agent, cluster = f"more{pod.names}", f"c{pod.names}"
    pod.client.create_agent(agent, f"host-{agent}")
    pod.client.create_cluster(cluster, [agent])
    pod.extra[cluster] = agent


def _shrink(pod: RealPod) -> None:
    """A cluster that was added goes, with its partitions, and its agent."""
    if not pod.extra:
        return
    cluster = pod.random.choice(list(pod.extra))
    for info in pod.client.list_partitions():
        if info.cluster == cluster:
            with contextlib.suppress(UsageError):
                pod.client.remove_partition(info.name, force=True)
            pod.expected.discard(info.name)
            if info.name in pod.held:
                pod.held.pop(info.name).close()
            pod.client.wait_for_state(info.name, {S.REMOVED}, PATIENCE_S)
    pod.client.remove_cluster(cluster)
    pod.client.remove_agent(pod.extra.pop(cluster))


def _watch(pod: RealPod) -> None:
    """A watcher comes back where it broke off. Once it has seen a user that was made after that, it knows what is
    there."""
    pod.names += 1
    name = f"user{pod.names}"
    key = pod.client.create_user(name, "viewer", ["pod16"])
    with pod.new_client() as client:
        for change in client.watch(["partition", "user", "cluster"], token=pod.token):
            pod.mirror.take(change.kind, change.name, change.value, initial=change.initial)
            pod.token = change.token
            if pod.mirror.synced and name in pod.mirror.all("user"):
                break
    gone = {n for n, p in pod.mirror.all("partition").items() if p["state"] == "REMOVING"}
    known = set(pod.mirror.all("partition"))
    assert pod.expected <= known, f"not told: {pod.expected - known}"
    there = {info.name for info in pod.client.list_partitions()} | pod.expected
    assert known - gone <= there, f"told of what is gone: {known - gone - there}"
    assert set(pod.mirror.all("cluster")) == {"pod16", *pod.extra}
    with VipuClient("127.0.0.1", pod.port, timeout=30, account=(name, key)) as viewer:
        assert {info.allocation for info in viewer.list_partitions()} <= {"pod16"}
        assert [info.name for info in viewer.list_allocations()] == ["pod16"]
    pod.client.remove_user(name)


def _cordon(pod: RealPod) -> None:
    pod.client.set_maintenance(pod.any_agent(), reason="test")


OPERATIONS: dict[str, tuple[float, Callable[[RealPod], None]]] = {
    "create": (26, _create),
    "queue": (6, _queue),
    "remove": (20, _remove),
    "remove by force": (4, _force),
    "reset": (8, _reset),
    "reset IPU": (4, _reset_ipu),
    "attach": (8, _attach),
    "kill machine": (2, _kill_machine),
    "kill server": (2, _kill_server),
    "stop machine, kill server": (0.5, _stop_machine),
    "cordon": (2, _cordon),
    "return": (5, lambda pod: pod.client.end_maintenance(pod.any_agent())),
    "restart agent": (1, lambda pod: pod.client.restart_agent(pod.any_agent())),
    "grow": (2, _grow),
    "shrink": (1, _shrink),
    "watch": (6, _watch),
    "settle": (6, lambda pod: pod.settle()),
}


def run(seed: int, count: int, directory: Path, report_every: int = 0) -> RealPod:
    """``count`` operations of a seed; an error names both."""
    pod = RealPod(directory, seed)
    try:
        begin = time.monotonic()
        for number in range(count):
            try:
                pod.step()
            except Exception as error:
                error.add_note(f"operation {number + 1} ({pod.last}) of seed {seed}, done: {dict(pod.done)}")
                raise
            if report_every and (number + 1) % report_every == 0:
                print(f"{number + 1} operations in {time.monotonic() - begin:.0f} s", flush=True)
        pod.end()
    finally:
        pod.close()
    return pod


def main() -> None:
    parser = argparse.ArgumentParser(description="Random operations on real processes.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        pod = run(options.seed, options.count, Path(directory), 100)
    print("done:", dict(pod.done.most_common()))
    print("refused:", dict(pod.refused.most_common()), "moved:", pod.moves)


if __name__ == "__main__":
    main()
