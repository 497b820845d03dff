"""Every kind of fault at every place where it may strike, generated from the one table of kinds (`podrun.faults`).

A kind that is added to the table takes part at once: `plans` says where it strikes, `RUNS` which run goes through it. A
target that is missing in both fails the tests.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from podrun.checkpoint import CheckpointError, Checkpoints
from podrun.checkpoint.checkpoints import OneInstance
from podrun.collectives import Communicator, create, join_group
from podrun.core.fault_kinds import events_of, settings_of_kind, strikes_in_batches
from podrun.device.xla.pieces import PieceCache
from podrun.faults import DISTURBANCES, EFFECTS, FaultSpec, FaultTarget, PlanOfALaunch, ProgramFaults
from podrun.launcher.launch_faults import planned_on
from podrun.partition.server.request_faults import RequestFaults
from podrun.popdist import collectives
from tests.checkpoint.test_checkpoint_crashes import Program
from tests.partition.conftest import Pod as ServicePod

from .campaign import LINKS, Training, live_through
from .conftest import together

KINDS = (*EFFECTS, *DISTURBANCES)
"""All kinds: target and kind."""
SMALL = {"seconds": 0.001, "mhz": 900.0, "lanes": 4, "loss": 0.1, "factor": 1.5, "bit": 20}
"""Settings: waits are short, and a flipped bit changes a weight visibly."""


class Trainings:
    """``plain``: a training; ``checked``: the same, whose replicas compare their weights after every batch."""

    def __init__(self, plain: Training, checked: Training) -> None:
        self.plain, self.checked = plain, checked

    def for_plan(self, faults: Sequence[FaultSpec]) -> Training:
        """The run for a plan: only a program whose replicas are compared notices silent corruption."""
        return self.checked if any(spec.kind == "corrupt" for spec in faults) else self.plain


def plans(
    target: str, kind: str, training: Training, batches: Sequence[int], instances: int
) -> Iterator[tuple[FaultSpec, ...]]:
    """A plan for each place at which a kind may strike: instruction boundaries of these batches, and events."""
    if target == "instance-network" and instances < 2:
        return
    settings = _settings(target, kind, training)

    def fault(number: int, **when: Any) -> FaultSpec:
        indices = _indices(target, number, training, instances)
        return FaultSpec(FaultTarget(target), indices, when.pop("batch", 0), kind, settings=settings, **when)

    places = itertools.product(batches, training.places()) if strikes_in_batches(target, kind) else ()
    for number, (batch, place) in enumerate(places):
        yield (fault(number, batch=batch, instruction=place),)
    for event in events_of(target, kind):
        spec = fault(0, during=event)
        if target == "host" and event == "read":
            spec = replace(spec, indices=(0,))  # A process reads from its first machine.
        if event == "partition-reset":  # Something has to make a reset necessary.
            yield FaultSpec(FaultTarget.LINK, (4, 5), 1, "down"), spec
        else:
            yield (spec,)


def _settings(target: str, kind: str, training: Training) -> tuple[tuple[str, Any], ...]:
    given: dict[str, Any] = {}
    for name, setting in sorted(settings_of_kind(target, kind).items()):
        if name == "tensor":
            given[name] = training.weight
        elif name in SMALL or setting.default is None:
            given[name] = SMALL[name]
    return tuple(given.items())


def _indices(target: str, number: int, training: Training, instances: int) -> tuple[int, ...]:
    machines = -(-training.ipus // 4)
    end = number % (machines - 1)
    return {
        "ipu": (number % training.ipus,),
        "link": LINKS[number % len(LINKS)],
        "gw-link": (end, end + 1),
        "network": (end, end + 1),
        "instance-network": (0, 1),
        "machine": (number % machines,),
        "host": (1,),
        "instance": (number % instances,),
        "disk": (0,),
        "service": (),
    }[target]


def live_through_kind(
    faults: Sequence[FaultSpec], trainings: Trainings, pieces: PieceCache, instances: int
) -> int:
    """Let a plan strike a run of the right sort, which must end well. Returns the number of errors met."""
    spec = faults[-1]
    if spec.target is FaultTarget.SERVICE:
        return ask(spec)
    if spec.in_program:
        return RUNS[spec.during](spec)
    return len(live_through(trainings.for_plan(faults), pieces, faults, instances))


def errors_wanted(faults: Sequence[FaultSpec]) -> int:
    """Number of errors that a plan causes."""
    loud = {("disk", "full"), ("instance", "killed")}
    found = 0
    for spec in faults:
        key = (spec.target.value, spec.kind)
        corrupts = spec.kind == "corrupt" and not spec.during
        found += spec.raises or key in loud or corrupts
    return found


# --- what an instance does by itself ------------------------------------------------------------------------------


def write_checkpoints(spec: FaultSpec) -> int:
    """An instance writes checkpoints, goes on after an error, and is started again after a kill."""
    died: list[int] = []

    def kill(pid: int, number: int) -> None:
        died.append(number)
        raise CheckpointError("the process ended here")

    with tempfile.TemporaryDirectory() as folder:
        plan = PlanOfALaunch(Path(folder, "plan"))
        plan.write([spec])
        errors = 0
        while True:
            faults = ProgramFaults(plan.left, plan.note_strike, spec.indices[0], kill)
            with mock.patch("podrun.checkpoint.checkpoints.program_faults", return_value=faults):
                checkpoints = Checkpoints(Path(folder, "c"), instances=OneInstance(), environ={})
            program = Program(0)
            resumed = checkpoints.resume(program)
            try:
                for batch in range((resumed.batch if resumed else 0) + 1, 4):
                    checkpoints.save(Program(batch), batch, wait=True)
                break
            except CheckpointError as error:
                said = "the process ended here" if died else "No space left on device"
                assert said in str(error)  # noqa: PT017
                errors += 1
        assert checkpoints.batches()[0] == 3
        assert plan.left() == []
    return errors


def call_collectives(spec: FaultSpec) -> int:
    """Two instances add arrays, three times; after an error they try again."""
    with Instances(2, [spec]) as instances:
        results = together([partial(instances.run, index, _add_three_times) for index in range(2)], 30)
        assert instances.plan.left() == []
    for result in results:
        assert not isinstance(result, BaseException), results
    assert results[0] == results[1]
    errors: int = results[0]  # type: ignore[assignment]
    return errors


def _add_three_times() -> int:
    errors = 0
    for number in range(3):
        while True:
            array = np.full(4, number, np.float32)
            try:
                assert collectives.allReduceSum(array).tolist() == [2.0 * number] * 4
                break
            except collectives.popdist_error as error:
                assert "did not reach each other over the network" in str(error)  # noqa: PT017
                errors += 1
    return errors


class Instances:
    """Instances played by threads of this process, for what `podrun.popdist.collectives` does. ``faults``: of their
    launch. ``timeout``: seconds for which one waits for others.
    """

    def __init__(self, count: int, faults: Sequence[FaultSpec], timeout: float = 20.0) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.plan = PlanOfALaunch(Path(self._folder.name, "plan"))
        self.plan.write(faults)
        self._count, self._timeout = count, timeout
        self._here = threading.local()
        self._meet = threading.Barrier(count)
        self._tokens: list[Any] = []
        self._patches: list[Any] = []

    def run(self, index: int, work: Callable[[], Any]) -> Any:
        """Carry out ``work`` as an instance."""
        own = collectives.Instances({collectives.TIMEOUT: str(self._timeout)})
        own._join = self._join  # type: ignore[method-assign]
        self._here.index, self._here.groups = index, own
        try:
            return work()
        finally:
            own.close()

    def _join(self, size: int) -> Communicator:
        """All instances arrive here together each time they connect."""
        if self._here.index == 0:
            group, token = create(size, timeout=self._timeout)
            self._tokens.append(token)
        self._meet.wait(self._timeout)
        if self._here.index:
            group = join_group(self._tokens[-1], self._here.index, timeout=self._timeout)
        self._meet.wait(self._timeout)
        return Communicator(group)

    def _faults(self, environ: Any = None) -> ProgramFaults:
        index = self._here.index
        return ProgramFaults(
            lambda: self.plan.planned_for(index, 0), lambda spec: self.plan.note_strike(spec, index, 0), index
        )

    def __enter__(self) -> Instances:
        here = self._here

        class Mine:
            """`collectives.instance_groups` of the calling thread."""

            def __getattr__(self, name: str) -> Any:
                return getattr(here.groups, name)

        self._patches = [
            mock.patch.object(collectives, "instance_groups", Mine()),
            mock.patch.object(collectives, "program_faults", self._faults),
            mock.patch.object(collectives.core, "getInstanceIndex", side_effect=lambda: here.index),
            mock.patch.object(collectives.core, "getNumInstances", return_value=self._count),
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()
        self._folder.cleanup()


RUNS: dict[str, Callable[[FaultSpec], int]] = {
    "checkpoint-write": write_checkpoints,
    "collective": call_collectives,
}
"""The work of an instance alone, by event."""


# --- the partition service ----------------------------------------------------------------------------------------


def ask(spec: FaultSpec) -> int:
    """A client makes a request, and makes it again if it gets no answer; the effect must be that of one request."""
    noted: list[object] = []
    pod = ServicePod()
    try:
        pod.service.request_faults = RequestFaults(sleep=noted.append, end=lambda: noted.append("ended"))
        if spec.during == "CreatePartition":
            pod.active("p", 16, faults=(spec,))
        else:
            pod.active("p", 16)
            pod.client.inject_faults("p", [spec.text])
            _request(pod, spec.during)
        assert pod.service.wait_idle(60)
        names = [info.name for info in pod.client.list_partitions()]
        assert names == ([] if spec.during == "RemovePartition" else ["p"])
        if names:
            once = spec.during == "ResetPartition"
            assert pod.client.get_partition("p").generation == 1 + once
            reports = pod.client.machine_reports("p")
            assert not planned_on(reports)
            assert [strike.fault for report in reports for strike in report.struck_faults] == [spec]
        assert noted == {"slow": [spec.number("seconds")], "killed": ["ended"]}.get(spec.kind, [])
    finally:
        pod.stop()
    return 0


def _request(pod: ServicePod, name: str) -> None:
    """A request in the form for clients that may have to repeat it: with the generation of the partition, if there is
    one.
    """
    client = pod.client
    match name:
        case "ResetPartition":
            client.reset_partition("p", 1)
        case "RemovePartition":
            client.remove_partition("p")
        case "PowerCycleAgent":
            client.power_cycle_agent("ipum1", 1)
        case "RestartAgent":
            client.restart_agent("ipum1", 1)
        case "GetPartition":
            client.get_partition("p")
        case _:
            raise AssertionError(f"nobody makes the request {name} here")
