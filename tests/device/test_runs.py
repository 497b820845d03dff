"""Runs in process: right numbers, and the same bits however IPUs are spread over host processes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from podrun.collectives.shared_memory import SharedMemoryGroup
from podrun.core import executable_file
from podrun.core.errors import ApplicationRuntimeError
from podrun.core.executable import AllGather, Compute, Executable, Retrieval
from podrun.core.layout import IpuRange, Layout
from podrun.core.terminal import FIRST_BATCH
from podrun.device.connection import RunResult
from podrun.device.host.client import InProcessMachines
from podrun.device.host.connecting import connect
from podrun.device.program import interpreter, program_memory
from podrun.device.program.instruction_lists import trailing_gathers
from podrun.device.xla.pieces import PieceCache

from .conftest import owners, request, together
from .programs import data, first_weights, inference, linear, reference, state_per_replica, two_ipus

pytestmark = pytest.mark.usefixtures("no_threads_left")


def train(
    executable: Executable, pieces: PieceCache, count: int, runs: int = 2, batches: int = 2
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Losses of all runs, of all owners together, and the weights at the end, equal for all owners."""
    replicas = executable.layout.replicas
    twin = InProcessMachines(executable.layout.ipus, pieces)
    inputs = data(executable, runs * batches)

    def work(connection: object, owned: IpuRange) -> tuple[list[RunResult], dict[str, np.ndarray]]:
        with_ipus = connection
        assert hasattr(with_ipus, "load")
        with_ipus.load(executable)
        with_ipus.write_variables(first_weights())
        results = []
        for run in range(runs):
            part = {
                n: a[run * batches : (run + 1) * batches, :, owned.first : owned.stop]
                for n, a in inputs.items()
            }
            results.append(with_ipus.run(batches, part))
        weights = with_ipus.read_variables(["w", "b"])
        with_ipus.close()
        return results, weights

    connections = owners(lambda: twin.connect(threaded=True), replicas, count)
    outcomes = together([partial(work, c, o) for c, o in connections])
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    for _, weights in outcomes[1:]:
        for name, value in weights.items():
            np.testing.assert_array_equal(value, outcomes[0][1][name])
    losses = [
        np.concatenate([results[run].anchors["loss"] for results, _ in outcomes], axis=-1)
        for run in range(runs)
    ]
    assert [r.batches_done for r in outcomes[0][0]] == [batches * (run + 1) for run in range(runs)]
    assert outcomes[0][0][0].modelled_seconds == pytest.approx(batches * 1e-3)
    return np.array(losses), outcomes[0][1]


def test_machines_note_their_first_batch(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each of four machines once for the program, however many runs follow."""
    monkeypatch.setenv("PODRUN_MOMENTS", str(tmp_path / "moments"))
    train(linear(16), pieces, 1, runs=3, batches=2)
    names = [line.split(" ", 3)[3] for line in (tmp_path / "moments").read_text().splitlines()]
    assert names.count(FIRST_BATCH) == 4
    assert names.index(FIRST_BATCH) > names.index("machines have the program")


@pytest.mark.parametrize(("count", "meetings"), [(1, 1), (2, 2)])
def test_the_host_of_one_owner_takes_the_place_of_the_last_barrier(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch, count: int, meetings: int
) -> None:
    """A run of two batches: machines have a barrier over the weights between them, and after them for a second owner
    only.
    """
    arenas = []
    gather = SharedMemoryGroup.all_gather

    def counted(group: SharedMemoryGroup, arena: str) -> np.ndarray:
        arenas.append(arena)
        return gather(group, arena)

    monkeypatch.setattr(SharedMemoryGroup, "all_gather", counted)
    train(linear(16), pieces, count, runs=3, batches=2)
    weights = [arena for arena in arenas if not arena.startswith("podrun:")]
    assert len(weights) == 4 * 3 * meetings


def test_only_gathers_at_the_end_of_the_one_list_close_it() -> None:
    gathers = AllGather("w"), AllGather("v")
    assert trailing_gathers([(AllGather("u"), Compute("c"), *gathers)]) == {(0, 2), (0, 3)}
    assert not trailing_gathers([(*gathers, Compute("c"))])
    assert not trailing_gathers([gathers, gathers])


@pytest.mark.parametrize("by_one", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.sample(2)
def test_who_reduces_and_updates_changes_no_bit(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch, by_one: bool, count: int
) -> None:
    """Each machine its slice, in what one of them has reduced for all or each by itself; expected: the last one all."""
    expected, expected_weights = train(linear(16), pieces, count, runs=3)
    monkeypatch.setattr(interpreter, "make_fused_tail", lambda *_: None)
    if not by_one:
        monkeypatch.setattr(program_memory, "REDUCED_WHOLE", 0)
    losses, weights = train(linear(16), pieces, count, runs=3)
    np.testing.assert_array_equal(losses, expected)
    for name, value in weights.items():
        np.testing.assert_array_equal(value, expected_weights[name])


@pytest.mark.parametrize(
    ("replicas", "accumulation", "sliced"),
    [(1, 1, True), pytest.param(4, 3, True, marks=pytest.mark.slow), (16, 2, True), (8, 1, False)],
)
def test_training_equals_the_global_batch(
    pieces: PieceCache, replicas: int, accumulation: int, sliced: bool
) -> None:
    executable = linear(replicas, accumulation=accumulation, sliced=sliced)
    losses, weights = train(executable, pieces, 1)
    expected, w, b = reference(executable, data(executable, 4))
    np.testing.assert_allclose(losses.reshape(expected.shape), expected, rtol=2e-5)
    np.testing.assert_allclose(weights["w"], w, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(weights["b"], b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("sliced", [True, False])
@pytest.mark.sample(2)
def test_owners_do_not_change_a_bit(pieces: PieceCache, sliced: bool) -> None:
    executable = linear(16, sliced=sliced)
    losses, weights = train(executable, pieces, 1)
    for count in (2, 4, 8, 16):
        other_losses, other_weights = train(executable, pieces, count)
        np.testing.assert_array_equal(other_losses, losses)
        for name, value in weights.items():
            np.testing.assert_array_equal(other_weights[name], value)


def run_alone(
    executable: Executable,
    pieces: PieceCache,
    batches: int,
    inputs: dict[str, np.ndarray],
    **more: np.ndarray,
) -> RunResult:
    connection = InProcessMachines(executable.layout.ipus, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, executable.layout.ipus))) is None
    connection.load(executable)
    if more:
        connection.write_variables(more)
    result = connection.run(batches, inputs)
    connection.close()
    return result


@pytest.mark.parametrize(
    ("retrieval", "period", "shape"),
    [(Retrieval.EVERY_N, 2, (3, 8)), (Retrieval.FINAL, 1, (8,)), (Retrieval.SUM, 1, (8,))],
)
def test_each_retrieval_gives_its_part_of_all_losses(
    pieces: PieceCache, retrieval: Retrieval, period: int, shape: tuple[int, ...]
) -> None:
    every = linear(8, accumulation=3)
    inputs = data(every, 2)
    all_losses = run_alone(every, pieces, 2, inputs, **first_weights()).anchors["loss"].reshape(6, 8)
    chosen = linear(8, accumulation=3, retrieval=retrieval, period=period)
    result = run_alone(chosen, pieces, 2, inputs, **first_weights()).anchors["loss"]
    assert result.shape == shape
    expected = {
        Retrieval.EVERY_N: all_losses[1::2],
        Retrieval.FINAL: all_losses[-1],
        Retrieval.SUM: np.add.reduce(all_losses, axis=0),
    }[retrieval]
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_broadcast_inputs_have_no_replica_axis(pieces: PieceCache) -> None:
    x = np.arange(2 * 8 * 3, dtype=np.float32).reshape(2, 1, 8, 3)
    factor = np.array([[[1, 2, 3]], [[4, 5, 6]]], np.float32)
    result = run_alone(inference(8), pieces, 2, {"x": x, "factor": factor})
    np.testing.assert_array_equal(result.anchors["y"], x * factor[:, :, None])


def test_lists_of_two_ipus_meet_in_send_receive_and_sync(pieces: PieceCache) -> None:
    x = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
    result = run_alone(two_ipus(), pieces, 1, {"x": x})
    np.testing.assert_array_equal(result.anchors["y"], x * 2 + 1 + np.array([0, 1])[:, None])


def test_state_of_replicas_stays_their_own_and_the_host_sees_that_of_replica_0(pieces: PieceCache) -> None:
    executable, twin = state_per_replica(8), InProcessMachines(8, pieces)
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 8, 2)

    def work(connection: object, owned: IpuRange) -> dict[str, np.ndarray]:
        assert hasattr(connection, "load")
        connection.load(executable)
        for _ in range(3):
            connection.run(1, {"x": x[:, :, owned.first : owned.stop]})
        values: dict[str, np.ndarray] = connection.read_variables(["seen"])
        connection.close()
        return values

    connections = owners(lambda: twin.connect(threaded=True), 8, 2)
    for values in together([partial(work, c, o) for c, o in connections]):
        assert isinstance(values, dict), values
        np.testing.assert_array_equal(values["seen"], 1 + 3 * x[0, 0, 0])


def test_a_twin_is_what_connect_gives_without_a_partition(tmp_path: Path) -> None:
    connection = connect({"PODRUN_CACHE_DIR": str(tmp_path)}, standalone_ipus=4)
    assert connection.total_ipus == 4
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(inference(4))
    ones = np.ones((1, 1, 4, 3), np.float32)
    np.testing.assert_array_equal(connection.run(1, {"x": ones, "factor": ones[:, :, 0]}).anchors["y"], ones)
    connection.close()
    assert list((tmp_path / "xla").glob("*/*.done")), "compiled pieces are kept for other processes"


def test_writes_are_read_back_and_take_effect_with_the_next_run(pieces: PieceCache) -> None:
    executable = linear(8)
    connection = InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    connection.load(executable)
    assert connection.read_variables(["b"])["b"] == 0.5
    connection.write_variables({**first_weights(), "b": np.array([3.0], np.float32), "rate": np.float32(0)})
    assert connection.read_variables(["b", "rate"]) == {"b": 3.0, "rate": 0.0}
    losses = connection.run(1, data(executable, 1)).anchors["loss"]
    assert connection.read_variables(["b"])["b"] == 3.0
    connection.write_variables({"b": np.array([3.0], np.float32)})
    np.testing.assert_array_equal(connection.run(1, data(executable, 1)).anchors["loss"], losses)
    connection.close()


def test_values_read_are_copies(pieces: PieceCache) -> None:
    executable = linear(4)
    connection = InProcessMachines(4, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    connection.load(executable)
    connection.write_variables(first_weights())
    connection.run(1, data(executable, 1))
    before = connection.read_variables(["w"])["w"]
    kept = before.copy()
    connection.run(1, data(executable, 1))
    np.testing.assert_array_equal(before, kept)
    connection.close()


def test_wrong_arrays_are_named(pieces: PieceCache) -> None:
    executable = linear(4)
    connection = InProcessMachines(4, pieces).connect()
    with pytest.raises(ApplicationRuntimeError, match="holds no IPUs"):
        connection.load(executable)
    assert connection.try_attach(request(IpuRange(0, 4))) is None
    with pytest.raises(ApplicationRuntimeError, match="no program is loaded"):
        connection.run(1, {})
    connection.load(executable)
    good = data(executable, 1)
    with pytest.raises(ApplicationRuntimeError, match="variables have no value yet: w"):
        connection.run(1, good)
    with pytest.raises(ApplicationRuntimeError, match="no variable 'v'"):
        connection.write_variables({"v": np.zeros(1)})
    with pytest.raises(ApplicationRuntimeError, match=r"'w' is float32\[4, 1\], but float64\[1\]"):
        connection.write_variables({"w": np.zeros(1)})
    connection.write_variables(first_weights())
    for bad, message in (
        (
            {**good, "x": good["x"][:, :, :2]},
            r"input 'x' is float32\[1, 1, 2, 4, 4\]; float32\[1, 1, 4, 4, 4\]",
        ),
        ({**good, "x": good["x"].astype(np.float64)}, "input 'x' is float64"),
        ({**good, "z": good["x"]}, "no input 'z'"),
        ({"x": good["x"]}, "input 'y' was not given"),
    ):
        with pytest.raises(ApplicationRuntimeError, match=message):
            connection.run(1, bad)
    with pytest.raises(ApplicationRuntimeError, match="at least one batch"):
        connection.run(0, good)
    connection.run(1, good)
    connection.close()


def test_a_program_has_to_fit_its_device(pieces: PieceCache) -> None:
    connection = InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    with pytest.raises(ApplicationRuntimeError, match="covers 4 IPUs on 1 machine"):
        connection.load(linear(4))
    connection.load(linear(8))
    connection.close()


def test_replicas_have_to_lie_on_their_machines(pieces: PieceCache) -> None:
    connection = InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    for layout in (Layout(1, 8, 2, 1), Layout(2, 8, 2, 1, machines_per_replica=2)):
        with pytest.raises(ApplicationRuntimeError, match="replicas do not lie on 2 machines"):
            connection.load(replace(linear(8), layout=layout))
    connection.close()


def test_programs_loaded_in_turns_are_written_once(
    pieces: PieceCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Executable] = []
    dumps = executable_file.dumps
    monkeypatch.setattr(executable_file, "dumps", lambda e: written.append(e) or dumps(e))
    one, other = linear(8), inference(8)
    changed = replace(one, metadata={**one.metadata, "more": True})
    connection = InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    for executable in (one, other, replace(one), other, changed, one, replace(one, name="else")):
        connection.load(executable)
    connection.close()
    assert [e.name for e in written] == [one.name, other.name, one.name, "else"]
