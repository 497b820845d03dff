"""Replicas over several machines: the bits of one machine over generated layouts, locations of state, faults reported
to all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from podrun.compiler.compile import compile_program
from podrun.compiler.program import AnchorSpec, InputSpec, PipelineOrder, Program
from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    PoplarError,
    UnknownRuntimeError,
    UnrecoverableRuntimeError,
)
from podrun.core.executable import Executable, Reduction, Retrieval, Send, StreamDirection
from podrun.core.layout import IpuRange
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.host.ports import Site, replica_slices
from podrun.device.program.machine_groups import at_position, batch_traffic, home_of
from podrun.device.xla.pieces import PieceCache
from podrun.faults import parse_faults
from tests.compiler.programs import Adam, Clipped, Momentum, Sgd, inputs_for, mlp, weights_for
from tests.compiler.test_sharding import chain

from .conftest import load_all, owners, request, together

pytestmark = pytest.mark.usefixtures("no_threads_left")
MANY = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
ANCHORS = (
    AnchorSpec("loss"),
    AnchorSpec("h0"),
    AnchorSpec("h1", Retrieval.FINAL),
    AnchorSpec("Gradient___w0"),
    AnchorSpec("Gradient___x", Retrieval.SUM),
    AnchorSpec("UpdatedVar___w1", Retrieval.FINAL),
)
SEEN = (AnchorSpec("loss"), AnchorSpec("h0", Retrieval.EVERY_N, 2), AnchorSpec("h1", Retrieval.FINAL))


@dataclass(frozen=True)
class Case:
    """A chain of layers on IPUs of a large replica, and on as many of one machine."""

    places: tuple[int, ...]
    ipus: int
    replicas: int
    instances: int
    options: dict[str, Any]

    @property
    def spread(self) -> Program:
        return chain(list(self.places), ipus=self.ipus, replicas=self.replicas, **self.options)

    @property
    def together(self) -> Program:
        return chain(list(range(len(self.places))), ipus=4, replicas=self.replicas, **self.options)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ipus = draw(st.sampled_from([8, 16]))
    places = draw(st.lists(st.integers(0, ipus - 1), min_size=2, max_size=4, unique=True))
    if len({place // 4 for place in places}) == 1:
        places[-1] = (places[0] + 4) % ipus
    replicas = draw(st.sampled_from([1, 2]))
    training = draw(st.booleans())
    options: dict[str, Any] = {
        "accumulation_factor": draw(st.integers(2, 5)),
        "pipelined": draw(st.booleans()),
        "tied": draw(st.booleans()),
        "skip": draw(st.booleans()),
        "dropout": draw(st.booleans()),
        "pipeline_schedule": draw(st.sampled_from([PipelineOrder.GROUPED, PipelineOrder.INTERLEAVED])),
    }
    if training:
        options |= {
            "update": draw(st.sampled_from([Sgd(), Momentum(), Adam(), Clipped()])),
            "reduction": draw(st.sampled_from([Reduction.SUM, Reduction.MEAN])),
            "anchors": ANCHORS,
        }
    else:
        options |= {"loss": None, "update": None, "anchors": SEEN}
    if options["tied"]:
        options["anchors"] = tuple(a for a in options["anchors"] if a.name != "UpdatedVar___w1")
    return Case(tuple(places), ipus, replicas, draw(st.sampled_from([1, replicas])), options)


def inputs_of(program: Program, batches: int, owned: IpuRange | None = None) -> dict[str, np.ndarray]:
    """Inputs of all replicas, or of those that lie on ``owned``."""
    whole = inputs_for(program, batches)
    if owned is None:
        return whole
    each = program.ipus_per_replica
    mine = slice(owned.first // each, owned.stop // each)
    return {n: a if program.inputs[n].broadcast else a[:, :, mine] for n, a in whole.items()}


def axis_of(retrieval: Retrieval) -> int:
    return {Retrieval.ALL: 2, Retrieval.EVERY_N: 1}.get(retrieval, 0)


def outcome(
    connect: Callable[[], PortConnection], program: Program, executable: Executable, instances: int = 1
) -> tuple[list[dict[str, np.ndarray]], dict[str, np.ndarray]]:
    """Anchors of two runs, of all replicas, and variables afterwards, equal in every instance."""
    connections = owners(connect, executable.layout.ipus, instances)

    def work(connection: PortConnection, owned: IpuRange) -> Any:
        connection.load(executable)
        connection.write_variables(weights_for(program))
        runs = [dict(connection.run(n, inputs_of(program, n, owned)).anchors) for n in (2, 1)]
        return runs, connection.read_variables(executable.variables)

    results = together([partial(work, c, o) for c, o in connections])
    for connection, _ in connections:
        connection.close()
    for result in results:
        if isinstance(result, BaseException):
            raise result
        for name, value in result[1].items():
            np.testing.assert_array_equal(value, results[0][1][name], err_msg=name)
    runs = [
        {
            name: np.concatenate(
                [result[0][run][name] for result in results],
                axis=axis_of(executable.streams[name].retrieval),
            )
            for name in results[0][0][run]
        }
        for run in range(2)
    ]
    return runs, results[0][1]


def assert_same(found: Any, expected: Any) -> None:
    for run, other in zip(found[0], expected[0], strict=True):
        assert run.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(run[name], value, err_msg=name)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        np.testing.assert_array_equal(found[1][name], value, err_msg=name)


def compare(case: Case, pieces: PieceCache) -> None:
    expected = compile_program(case.together)
    wide = compile_program(case.spread)
    assert wide.layout.machines == case.replicas * case.ipus // 4
    alone, spread = (
        InProcessMachines(expected.layout.ipus, pieces),
        InProcessMachines(wide.layout.ipus, pieces),
    )
    assert_same(
        outcome(lambda: spread.connect(threaded=True), case.spread, wide, case.instances),
        outcome(lambda: alone.connect(threaded=True), case.together, expected),
    )


SEEN_ALONE: dict[str, Any] = {"loss": None, "update": None, "anchors": SEEN}
BY_DEFAULT = {
    "three machines": Case((2, 15, 8), 16, 1, 1, {"accumulation_factor": 5, "dropout": True, **SEEN_ALONE}),
    "trained pipeline": Case(
        (2, 4), 8, 2, 2, {"accumulation_factor": 2, "pipelined": True, "update": Momentum()}
    ),
}
"""Inference in turn, and training in a pipeline by two instances: gradients are cleared on every machine."""


@pytest.mark.parametrize("case", BY_DEFAULT.values(), ids=BY_DEFAULT)
def test_a_replica_over_machines_gives_the_bits_of_one_machine(pieces: PieceCache, case: Case) -> None:
    compare(case, pieces)


@pytest.mark.slow
@MANY
@given(case=cases())
def test_many_layouts_give_the_bits_of_one_machine(pieces: PieceCache, case: Case) -> None:
    compare(case, pieces)


@pytest.mark.slow
def test_running_means_start_anew_on_every_machine(pieces: PieceCache) -> None:
    """Running means count micro-batches next to the weights, on whichever machine these lie."""
    options = {"accumulation_factor": 3, "pipelined": True, "reduction": Reduction.MEAN, "update": Sgd()}
    compare(Case((1, 4, 6), 8, 1, 1, options), pieces)


@pytest.mark.slow  # `BY_DEFAULT` has a pipeline over machines, which is compared bit by bit.
@pytest.mark.parametrize("batches", [2, 5])
def test_eight_stages_agree_with_one_ipu(pieces: PieceCache, batches: int) -> None:
    """Bits belong to segments: against the model in one piece it is float32 rounding."""
    anchors = (AnchorSpec("loss"), AnchorSpec("Gradient___w3"))
    wide = chain(
        list(range(8)), ipus=8, replicas=1, accumulation_factor=batches, pipelined=True, anchors=anchors
    )
    one = replace(
        chain([0] * 8, ipus=1, replicas=1, accumulation_factor=batches, stages=False, anchors=anchors),
        pipelined=False,
    )
    found, expected = (
        outcome(
            InProcessMachines(program.replicas * program.ipus_per_replica, pieces).connect,
            program,
            compile_program(program),
        )
        for program in (wide, one)
    )
    for run, other in zip(found[0], expected[0], strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(run[name], value, rtol=1e-4, atol=1e-6, err_msg=name)
    for name in one.parameters:
        np.testing.assert_allclose(found[1][name], expected[1][name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_broadcast_inputs_and_running_values_go_where_they_are_read(pieces: PieceCache) -> None:
    plain = chain([0, 4, 1], ipus=8, replicas=2, accumulation_factor=2, pipelined=True)
    wide = replace(plain, inputs={n: InputSpec(i.spec, broadcast=n == "y") for n, i in plain.inputs.items()})
    executable = compile_program(wide)
    parts = [at_position(executable, position) for position in range(2)]
    names = [
        {n for n, s in part.streams.items() if s.direction is StreamDirection.TO_DEVICE} for part in parts
    ]
    assert names == [{"x", "y"}, set()]
    assert {n: home_of(executable, n) for n in ("w0", "w1", "w2")} == {"w0": 0, "w1": 1, "w2": 0}
    runs, _ = outcome(InProcessMachines(16, pieces).connect, wide, executable)
    reference = replace(wide, inputs=plain.inputs)
    same = {n: np.stack([a, a], axis=2) if n == "y" else a for n, a in inputs_for(wide, 2).items()}
    connection = InProcessMachines(16, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 16))) is None
    connection.load(compile_program(reference))
    connection.write_variables(weights_for(reference))
    np.testing.assert_array_equal(connection.run(2, same).anchors["loss"], runs[0]["loss"])
    connection.close()


# --- Faults -------------------------------------------------------------------------------------------------


@cache
def of_four_machines() -> tuple[Program, Executable]:
    """Two replicas of eight IPUs."""
    program = chain([0, 3, 4, 7], ipus=8, replicas=2, accumulation_factor=5, pipelined=True)
    return program, compile_program(program)


def trained(pieces: PieceCache, fault: str, instances: int) -> list[Any]:
    """What instances get of four machines, with ``fault`` in the second run."""
    (program, executable), twin = of_four_machines(), InProcessMachines(16, pieces)
    for machine in twin.machines:
        machine.plan_faults(parse_faults(fault))
    connections = owners(lambda: twin.connect(threaded=True), 16, instances)

    def work(connection: PortConnection, owned: IpuRange) -> Any:
        connection.load(executable)
        connection.write_variables(weights_for(program))
        connection.run(2, inputs_of(program, 2, owned))
        return connection.run(2, inputs_of(program, 2, owned))

    results = together([partial(work, c, o) for c, o in connections])
    for connection, _ in connections:
        connection.close()
    return results


@pytest.mark.parametrize("instances", [1, 2])
@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("ipu:6@batch=3:tile-parity", UnknownRuntimeError, "IPU 6"),
        ("ipu:12@batch=2:tile-parity", UnknownRuntimeError, "IPU 12"),
        ("machine:1@batch=3:lost", UnrecoverableRuntimeError, "machine 1"),
        ("machine:2@batch=2:lost", UnrecoverableRuntimeError, "machine 2"),
    ],
)
@pytest.mark.sample(9)
def test_all_hear_of_a_fault(
    pieces: PieceCache, instances: int, fault: str, kind: type[PoplarError], says: str
) -> None:
    results = trained(pieces, fault, instances)
    assert len(results) == instances
    for error in results:
        assert isinstance(error, PoplarError), error
        assert says in f"{error.message} {error.where}"
        assert error.message == results[0].message


def test_an_owner_that_does_not_come_is_named(pieces: PieceCache) -> None:
    program = chain([0, 4], ipus=8, replicas=2, accumulation_factor=2, pipelined=True)
    executable, twin = compile_program(program), InProcessMachines(16, pieces, grace=0.2)
    connections = owners(lambda: twin.connect(threaded=True), 16, 2)
    load_all(connections, executable, 0.7)

    def work(connection: PortConnection, owned: IpuRange) -> Any:
        connection.write_variables(weights_for(program))
        if owned.first:
            return None
        return connection.run(1, inputs_of(program, 1, owned))

    results = together([partial(work, c, o) for c, o in connections])
    error = results[0]
    assert isinstance(error, UnknownRuntimeError), error
    assert error.code is ErrorCode.HOST_SYNC_TIMEOUT
    assert "machine 2" in error.message
    for connection, _ in connections:
        connection.close()


# --- Refusals -----------------------------------------------------------------------------------------------


def test_an_instance_owns_whole_replicas(pieces: PieceCache) -> None:
    executable = compile_program(chain([0, 4], ipus=8, accumulation_factor=2))
    twin = InProcessMachines(8, pieces)
    connections = owners(lambda: twin.connect(threaded=True), 8, 2)
    results = together([partial(c.load, executable) for c, _ in connections])
    for error in results:
        assert isinstance(error, ApplicationRuntimeError)
        assert "which are not whole replicas of 8 IPUs" in error.message
    for connection, _ in connections:
        connection.close()


def test_replicas_of_an_owner_by_machine() -> None:
    sites = [Site(index, "", IpuRange(4 * index, 4)) for index in range(8)]
    assert replica_slices(sites[2:6], IpuRange(8, 16), 8) == [
        slice(0, 1),
        slice(0, 1),
        slice(1, 2),
        slice(1, 2),
    ]
    assert replica_slices(sites[:4], IpuRange(0, 16), 16) == [slice(0, 1)] * 4
    assert replica_slices(sites[:2], IpuRange(0, 8), 2) == [slice(0, 2), slice(2, 4)]
    with pytest.raises(ApplicationRuntimeError, match="not whole replicas of 8"):
        replica_slices(sites[:3], IpuRange(0, 12), 8)


def test_variables_without_a_value_are_named_wherever_they_lie(pieces: PieceCache) -> None:
    program = chain([0, 4], ipus=8, accumulation_factor=2)
    executable, connection = compile_program(program), InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    connection.load(executable)
    weights = weights_for(program)
    connection.write_variables({n: v for n, v in weights.items() if n != "w1"})
    with pytest.raises(ApplicationRuntimeError, match="variables have no value yet: w1"):
        connection.run(1, inputs_for(program, 1))
    connection.write_variables({"w1": weights["w1"]})
    assert connection.run(1, inputs_for(program, 1)).batches_done == 1
    connection.write_variables(
        {"w1": weights["w1"] * 2}
    )  # only one machine of the replica has anything to take
    connection.run(1, inputs_for(program, 1))
    with pytest.raises(ApplicationRuntimeError, match="has no variable 'w9'"):
        connection.read_variables(["w0", "w9"])
    with pytest.raises(ApplicationRuntimeError, match="has no variable 'w9'"):
        connection.write_variables({"w9": weights["w1"]})
    connection.close()


def test_messages_without_a_receiver_are_refused(pieces: PieceCache) -> None:
    executable = compile_program(chain([0, 4], ipus=8, accumulation_factor=2))
    assert {(t.source, t.dest) for t in batch_traffic(executable.instructions, 4)} == {(0, 1), (1, 0)}
    lists = list(executable.instructions)
    lists[0] = tuple(i for i in lists[0] if not (isinstance(i, Send) and i.peer == 4))
    connection = InProcessMachines(8, pieces).connect()
    assert connection.try_attach(request(IpuRange(0, 8))) is None
    with pytest.raises(ApplicationRuntimeError, match="not sent once and received once"):
        connection.load(replace(executable, instructions=tuple(lists)))
    connection.close()


def test_a_program_of_one_list_has_one_position() -> None:
    executable = compile_program(mlp(replicas=8))
    assert at_position(executable, 0) is executable
