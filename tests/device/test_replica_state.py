"""Replica state: written and read by rows, whichever host process owns the replicas and wherever they are."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podrun.collectives import create, join_group
from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core import executable_file
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import Executable
from podrun.core.layout import IpuRange
from podrun.device import job
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.xla.pieces import PieceCache

from .conftest import owners, request, together
from .pods import Pod, threads
from .programs import state_per_replica

pytestmark = pytest.mark.usefixtures("no_threads_left")
ROWS = {
    "one": lambda replicas: (),
    "each": lambda replicas: tuple(range(replicas)),
    "consecutive": lambda replicas: tuple(r // 2 for r in range(replicas)),
    "orthogonal": lambda replicas: tuple(r % 2 for r in range(replicas)),
    "uneven": lambda replicas: (1, *[0] * (replicas - 1)),
}


def shown(each: np.ndarray, rows: tuple[int, ...]) -> np.ndarray:
    """The host's view of the values of all replicas, in NumPy."""
    if not rows:
        return each[0]
    return np.stack(
        [next(v for v, r in zip(each, rows, strict=True) if r == row) for row in sorted(set(rows))]
    )


def told(executable: Executable, seed: int) -> dict[str, np.ndarray]:
    """The values that the host writes: another value in each row."""
    random = np.random.default_rng(seed)
    specs = [v.host_spec for v in executable.variables.values()]
    return {s.name: random.integers(-8, 8, s.shape).astype(s.dtype) for s in specs}


def check(executable: Executable, connections: list[tuple[PortConnection, IpuRange]]) -> None:
    """Load, run, write and run again, against NumPy; all owners read the same."""
    replicas = executable.layout.replicas
    x = np.random.default_rng(0).integers(-9, 9, (2, 1, replicas, 2)).astype(np.float32)
    written = told(executable, 1)
    all_have_read = threading.Barrier(len(connections), timeout=30)  # What one writes, the next one reads.

    def work(connection: PortConnection, owned: IpuRange) -> list[Mapping[str, np.ndarray]]:
        mine = {"x": np.ascontiguousarray(x[:, :, owned.first : owned.stop])}
        connection.load(executable)
        found = [connection.read_variables(executable.variables)]
        connection.run(2, mine)
        found.append(connection.read_variables(executable.variables))
        all_have_read.wait()
        connection.write_variables(written)
        found.append(connection.read_variables(executable.variables))
        connection.run(2, mine)
        connection.run(2, mine)
        found.append(connection.read_variables(reversed(executable.variables)))
        connection.close()
        return found

    once = {
        "seen": x.sum((0, 1)),
        "half": x[:, 0, :, :1, None].sum(0).repeat(3, 1) / 2,
        "times": np.full(replicas, 2),
        "nothing": np.zeros((replicas, 0, 2)),
    }
    expected: list[dict[str, np.ndarray]] = [{}, {}, {}, {}]
    for name, variable in executable.variables.items():
        start = np.ones((replicas, *variable.spec.shape))
        own = written[name][list(variable.rows)] if variable.rows else np.stack([written[name]] * replicas)
        values = (start, start + once[name], own, own + 2 * once[name])
        for step, each in enumerate(values):
            expected[step][name] = shown(each.astype(variable.spec.dtype), variable.rows)
    for found in together([partial(work, c, o) for c, o in connections]):
        assert isinstance(found, list), repr(found)
        for step, wanted in enumerate(expected):
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[step][name], value, err_msg=f"{step} {name}", strict=True)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, str, int, str]:
    """Replicas, rows, host processes, and hosts of machines by letters."""
    replicas = draw(st.sampled_from([2, 4, 8, 16]))
    count = draw(st.sampled_from([n for n in (1, 2, 4, 8) if n <= replicas]))
    hosts = draw(st.sampled_from(["aaaa", "abab", "aabb"]))[: max(1, replicas // 4)]
    return replicas, draw(st.sampled_from(sorted(ROWS))), count, hosts


@settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(drawn=layouts())
def test_rows_over_replicas_machines_owners_and_hosts(
    pieces: PieceCache, drawn: tuple[int, str, int, str]
) -> None:
    replicas, rows, count, hosts = drawn
    twin = InProcessMachines(replicas, pieces)
    with pytest.MonkeyPatch.context() as patch:
        if len(set(hosts)) > 1:

            def joined(token: Any, rank: int, **more: Any) -> Any:
                return join_group(token, rank, host=hosts[rank], **more)

            def created(size: int, *, timeout: float, address: str | None) -> Any:
                return create(size, timeout=timeout, address="127.0.0.1", host=hosts[0])

            patch.setattr(job, "create", created)
            patch.setattr(job, "join_group", joined)
        executable = state_per_replica(replicas, ROWS[rows](replicas))
        check(executable, owners(lambda: twin.connect(threaded=True), replicas, count))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("pieces"))


@pytest.fixture
def pod(cache: Path) -> Iterator[Pod]:
    with threads(2, cache) as pod:
        yield pod


@pytest.mark.parametrize(("count", "shared"), [(4, True), (8, False)])
def test_the_same_over_grpc(pod: Pod, count: int, shared: bool) -> None:
    executable = state_per_replica(8, ROWS["orthogonal"](8))
    check(executable, owners(lambda: pod.connect(shared=shared), 8, count))


def test_machines_exchange_all_replica_state_in_one_collective(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathered = []
    gather = SharedMemoryGroup.all_gather

    def counted(group: SharedMemoryGroup, arena: str) -> np.ndarray:
        gathered.append(arena)
        return gather(group, arena)

    monkeypatch.setattr(SharedMemoryGroup, "all_gather", counted)
    check(state_per_replica(8, ROWS["each"](8)), owners(InProcessMachines(8, pieces).connect, 8, 1))
    assert gathered.count("podrun:replica-state") == 3 * 2  # runs and machines


@pytest.mark.parametrize("shared", [None, True, False], ids=["in process", "shared", "inline"])
@pytest.mark.sample(2)
def test_bad_shapes_are_refused_before_anything_changes(
    pieces: PieceCache, pod: Pod, shared: bool | None
) -> None:
    executable = state_per_replica(8, ROWS["consecutive"](8))
    connect: Callable[[], PortConnection] = InProcessMachines(8, pieces).connect
    connection = connect() if shared is None else pod.connect(shared=shared)
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    connection.load(executable)
    good = np.full((4, 2), 5, np.float32)
    for bad in (good[0], good[:3], good.repeat(2, 0), good.astype(np.float64)):
        with pytest.raises(
            ApplicationRuntimeError, match=r"variable 'seen' is float32\[4, 2\], but"
        ) as caught:
            connection.write_variables({"seen": bad, "times": np.int32(7)})
        assert "first axis is of replicas" in str(caught.value.hint)
    assert connection.read_variables(["times"]) == {"times": 1}
    connection.write_variables({"seen": good})
    np.testing.assert_array_equal(connection.read_variables(["seen"])["seen"], good)
    connection.close()


@pytest.mark.parametrize("rows", [(0,) * 7, (0, 2) * 4, (-1, 0) * 4, (10**12,) * 8])
def test_programs_whose_rows_are_not_those_of_its_replicas(pieces: PieceCache, rows: tuple[int, ...]) -> None:
    connection = InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    with pytest.raises(ApplicationRuntimeError, match="rows of variable 'seen' are not those of 8 replicas"):
        connection.load(state_per_replica(8, rows))
    connection.close()


def test_rows_are_in_the_file_where_there_are_any() -> None:
    plain, grouped = state_per_replica(8), state_per_replica(8, ROWS["each"](8))
    assert executable_file.loads(executable_file.dumps(grouped)) == grouped
    assert executable_file.loads(executable_file.dumps(plain)) == plain
    assert b'"rows"' not in executable_file.dumps(plain)
    bad = replace(grouped.variables["seen"], rows=(0.5,) * 8)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="expected int"):
        executable_file.loads(
            executable_file.dumps(replace(grouped, variables={**grouped.variables, "seen": bad}))
        )
