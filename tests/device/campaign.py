"""Fault campaigns in process: one program, many plans, recovered as the launcher's coordinator says.

    python -m tests.device.campaign --seeds 1000            # random plans, first seed 0
    python -m tests.device.campaign --seeds 1 --first 4711  # one of them again
    python -m tests.device.campaign --every-place           # each kind at each instruction of the digits example
    python -m tests.device.campaign --every-place --part 2/8  # an eighth of that

Each failure prints the line that replays it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from podrun.core.errors import (
    ApplicationRuntimeError,
    ErrorCode,
    PoplarError,
    RecoverableRuntimeError,
    RecoveryAction,
)
from podrun.core.executable import Executable, VariableRole
from podrun.core.fault_kinds import strikes_in_batches
from podrun.core.ipu_states import MachineState
from podrun.core.layout import IpuRange
from podrun.core.telemetry import MachineReport
from podrun.device.connection import AttachRequest
from podrun.device.host.client import InProcessMachines, PortConnection
from podrun.device.program.instruction_lists import batch_starts
from podrun.device.xla.pieces import PieceCache
from podrun.faults import EFFECTS, OF_INSTANCES, FaultPoint, FaultSpec, FaultTarget, parse_fault
from podrun.launcher.recovery import (
    Answer,
    Attempt,
    Coordinator,
    FailureKind,
    PowerCycleMachine,
    Recovery,
    ReplaceMachine,
    ResetThePartition,
    ResetTheseIpus,
    RestartPolicy,
    damage_of,
)
from podrun.runtime.replica_check import IpuDigest, differing, odd_ones
from tests.device.pods import machine_report

from .conftest import together
from .programs import data, first_weights, linear

ROOT = Path(__file__).resolve().parents[2]
FIRST_PID = 1 << 30
"""Process id of the first instance; instances are threads here, and no process has such an id."""
DEADLINE = 50.0
"""Seconds in which an attempt of these programs must end, or fail, in every instance."""
BATCH_KINDS = [key for key in EFFECTS if strikes_in_batches(*key)]
"""Kinds that raise an error in a batch."""
LINKS = ((0, 1), (2, 3), (2, 4), (1, 3))


@dataclass(frozen=True)
class Training:
    """A loaded program's inputs, by batch, and the weights it starts with. ``checked``: replicas compare their weights
    after every batch.
    """

    executable: Executable
    weights: Mapping[str, np.ndarray]
    inputs: Mapping[str, np.ndarray]
    batches: int
    checked: bool = False

    @property
    def ipus(self) -> int:
        return self.executable.layout.ipus

    def places(self) -> list[int]:
        """The instructions of one batch, by number."""
        work = self.executable.instructions[0]
        starts = batch_starts(work, self.executable.batches_per_pass)
        return list(range((*starts[1:], len(work))[0] - starts[0]))

    @property
    def weight(self) -> str:
        """A weight whose first element is not 0, because the next update rounds away a small change of 0."""
        variables = self.executable.variables
        names = [n for n in self.weights if variables[n].role is VariableRole.WEIGHT]
        return min(name for name in names if self.weights[name].flat[0])

    def run(
        self, connection: PortConnection, owned: IpuRange, comparison: Comparison
    ) -> tuple[np.ndarray, ...]:
        """Train from the beginning; the losses and all variables."""
        connection.load(self.executable)
        connection.write_variables(self.weights)
        losses = []
        for batch in range(self.batches):
            inputs = {
                name: value[batch : batch + 1, :, owned.first : owned.stop]
                for name, value in self.inputs.items()
            }
            result = connection.run(1, inputs)
            losses += [value for _, value in sorted(result.anchors.items())]
            if self.checked:
                comparison.after(batch + 1, connection, owned)
        read = connection.read_variables(sorted(self.weights))
        return (*losses, *(read[name].copy() for name in sorted(read)))


class Comparison:
    """The values that instances exchange to compare their replicas."""

    def __init__(self, instances: int) -> None:
        self._meet = threading.Barrier(instances)
        self._rows: dict[int, list[tuple[int, int]]] = {}
        self._judged = False

    def after(self, batch: int, connection: PortConnection, owned: IpuRange) -> None:
        """Compare after a batch. Raises RecoverableRuntimeError, in all instances."""
        self._rows[owned.first] = connection.read_digests()
        self._meet.wait(DEADLINE)
        suspects = odd_ones(sorted({IpuDigest(*row) for rows in self._rows.values() for row in rows}))
        self._judged = bool(suspects)
        self._meet.wait(DEADLINE)
        if suspects:
            raise differing(suspects, batch, batch - 1)

    def leave(self) -> None:
        """An instance ends, so that nobody waits for it."""
        if not self._judged:
            self._meet.abort()


def small(batches: int = 3, *, checked: bool = False) -> Training:
    """A linear model on two machines."""
    executable = linear(8, sliced=not checked)
    return Training(executable, first_weights(), data(executable, batches), batches, checked)


def digits(batches: int = 3, *, checked: bool = False) -> Training:
    """The digits example's training on sixteen replicas, as its session loads it."""
    with mock.patch.dict(os.environ, {"PODRUN_CHECK_REPLICAS": "1"} if checked else {}):
        return _digits(batches, checked=checked)


def _digits(batches: int, *, checked: bool) -> Training:
    sys.path.insert(0, str(ROOT / "podrun" / "compat"))
    try:
        found = importlib.util.spec_from_file_location("digits_train", ROOT / "examples/digits/train.py")
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules["digits_train"] = module  # Its dataclasses look there for their annotations.
        found.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    loaded: list[Executable] = []
    written: dict[str, np.ndarray] = {}
    ran: list[Mapping[str, np.ndarray]] = []

    class Done(Exception):
        """Ends the session: its program, weights and inputs are known."""

    def start(
        self: PortConnection, count: int, inputs: Mapping[str, np.ndarray], *_: object, depth: int
    ) -> None:
        ran.append({name: value[:batches].copy() for name, value in inputs.items()})
        raise Done

    real = PortConnection.load, PortConnection.write_variables, PortConnection.start
    PortConnection.load = lambda self, executable: loaded.append(executable)  # type: ignore[method-assign, assignment]
    PortConnection.write_variables = lambda self, values: written.update(  # type: ignore[method-assign]
        {name: np.array(value) for name, value in values.items()}
    )
    PortConnection.start = start  # type: ignore[method-assign, assignment]
    arguments = argparse.Namespace(
        model="cnn", epochs=1, seed=0, batch_size=64, learning_rate=0.05, replicas=16
    )
    try:
        replication = module.replication_of(arguments)
        with module.popart.DeviceManager().acquireAvailableDevice(16) as device:
            module.train(arguments, module.load_digits(), replication, device)
    except Done:
        pass
    finally:
        PortConnection.load, PortConnection.write_variables, PortConnection.start = real  # type: ignore[method-assign]
    return Training(loaded[0], written, ran[0], batches, checked)


class Starved:
    """Measures for how long a thread of this process that asked for 10 ms of sleep got no core after them: on a busy
    host such time is not a program's own.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="starved", daemon=True)
        self._thread.start()

    def _measure(self) -> None:
        begin = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self._seconds += max(0.0, now - begin - 0.05)
            begin = now

    def seconds(self) -> float:
        """The sum, once."""
        self._over.set()
        self._thread.join()
        return self._seconds


class Pod:
    """Machines in process, and the instances of one launch on them. ``agents`` count from 1."""

    def __init__(self, training: Training, pieces: PieceCache, instances: int) -> None:
        self._training, self._pieces, self._instances = training, pieces, instances
        self._pod = self._fresh()

    def _fresh(self) -> InProcessMachines:
        pod = InProcessMachines(self._training.ipus, self._pieces, grace=0.5)
        for machine in pod.machines:
            context = machine._context
            # Faults see the last machine as the only one of a second host, which is lost as a machine is.
            host = 1 if machine is pod.machines[-1] else 0 if machine is pod.machines[0] else None
            context.faults = FaultPoint(machine.place.range, machine.place.machine, host=host)
        return pod

    @property
    def machines(self) -> list[Any]:
        return self._pod.machines

    def plan(self, faults: Sequence[FaultSpec]) -> None:
        with mock.patch("podrun.device.machine.check_lost_host"):
            for machine in self.machines:
                machine.plan_faults([replace(spec, launch="swarm") for spec in faults])

    def attempt(self) -> list[Any]:
        """The result of each instance: losses and weights, or an error."""
        share = self._training.ipus // self._instances
        connections = []
        for index in range(self._instances):
            connection, owned = self._pod.connect(threaded=True), IpuRange(index * share, share)
            process = AttachRequest(
                *(IpuRange(0, self._training.ipus), owned, FIRST_PID + index, "tester", "train.py", "swarm")
            )
            refusal = connection.try_attach(process)
            assert refusal is None, refusal
            connections.append((connection, owned))
        begin = time.monotonic()
        starved, comparison = Starved(), Comparison(self._instances)

        def run(connection: PortConnection, owned: IpuRange) -> tuple[np.ndarray, ...]:
            try:
                return self._training.run(connection, owned, comparison)
            except BaseException:
                comparison.leave()
                raise

        try:
            with mock.patch("podrun.device.job_program.signal_process", self._signal):
                return together([partial(run, c, o) for c, o in connections], timeout=60)
        finally:
            for connection, _ in connections:
                connection.close()
            took = time.monotonic() - begin - starved.seconds()
            assert took < DEADLINE, f"an attempt took {took:.1f} s"

    def _signal(self, pid: int, host: str, spec: FaultSpec) -> None:
        """The visible effect of a killed instance: its process has ended. An instance that hangs waits."""
        assert pid >= FIRST_PID
        if spec.kind == "hung":
            time.sleep(spec.number("seconds"))
            return
        for machine in self.machines:
            for owner in [o for o in machine._owners.values() if o.request.pid == pid]:
                machine.detach(owner.id, died=True)

    def reports(self) -> list[MachineReport]:
        found = []
        for number, machine in enumerate(self.machines, 1):
            state = MachineState.LOST if machine._context.lost is not None else MachineState.UP
            report = machine_report(machine, MachineReport(f"ipum{number}"))
            found.append(replace(report, state=state, agent_id=f"ipum{number}"))
        return found

    def carry_out(self, recovery: Recovery) -> None:
        for step in recovery.ways[0]:
            match step:
                case ResetTheseIpus(ipus):
                    for machine in self.machines:
                        machine.reset_ipus([ipu for ipu in ipus if ipu in machine.place.range])
                case ResetThePartition():
                    self._reset()
                case PowerCycleMachine(agent):
                    self.machines[int(agent.removeprefix("ipum")) - 1].power_cycle()
                case ReplaceMachine():
                    planned = [machine.planned_faults() for machine in self.machines]
                    self._pod = self._fresh()
                    for machine, faults in zip(self.machines, planned, strict=True):
                        machine.plan_faults(faults)
                case _:
                    raise AssertionError(step)

    def _reset(self) -> None:
        """Reset all machines. Raises the first error that one of them has."""
        errors = []
        for machine in self.machines:
            try:
                machine.move(replace(machine.place))
                machine.reset_links()
            except PoplarError as error:
                errors.append(error)
        if errors:
            raise errors[0]


POLICY = RestartPolicy(max_restarts=20, crash_loop_after=20, after={FailureKind.LOST: (Answer.REPLACE,)})


def live_through(
    training: Training, pieces: PieceCache, faults: Sequence[FaultSpec], instances: int
) -> list[str]:
    """Train under faults, recovering until it ends well; the errors met. Raises AssertionError for anything wrong:
    a wrong result, errors that differ between instances, an end that does not come.
    """
    wanted = undisturbed(training, pieces, instances)
    pod = Pod(training, pieces, instances)
    pod.plan(faults)
    coordinator, met = Coordinator(POLICY), list[str]()
    while True:
        results = pod.attempt()
        errors = [result for result in results if isinstance(result, BaseException)]
        if not errors:
            _check_results(results, wanted, faults)
            left = {fault for machine in pod.machines for fault in machine.planned_faults()}
            assert not left, f"faults are left: {left}"
            return met
        _check_errors(errors, results, faults)
        while errors:
            met.append(type(errors[0]).__name__)
            decision = coordinator.failed(Attempt("", 1, damage_of(pod.reports()), 0))
            assert isinstance(decision, Recovery), decision
            errors = []
            try:
                pod.carry_out(decision)
            except PoplarError as error:
                _check_errors([error], [error], faults)
                errors = [error]


def _check_results(results: Sequence[Any], wanted: Sequence[Any], faults: Sequence[FaultSpec]) -> None:
    """Losses and weights equal those of an undisturbed run to the bit, except for a bit that flips when they
    are read.
    """
    differ = sum(
        int(np.bitwise_count(a.reshape(-1).view(np.uint8) ^ b.reshape(-1).view(np.uint8)).sum())
        for result, right in zip(results, wanted, strict=True)
        for a, b in zip(result, right, strict=True)
    )
    flips = [spec for spec in faults if spec.kind == "corrupt" and spec.during == "read"]
    assert 0 <= differ - len(flips) < len(results) if flips else differ == 0, f"{differ} bits are wrong"


def _check_errors(
    errors: Sequence[BaseException], results: Sequence[Any], faults: Sequence[FaultSpec]
) -> None:
    """All instances get an error of one kind, and it is that of a planned fault."""
    assert all(isinstance(error, PoplarError) for error in errors), errors
    during_read = any(spec.during == "read" for spec in faults)
    assert len(errors) == len(results) or during_read, f"an instance did not hear of it: {results}"
    kinds = {
        (EFFECTS[s.target.value, s.kind].error, EFFECTS[s.target.value, s.kind].code)
        for s in faults
        if s.raises
    }
    actions = {EFFECTS[s.target.value, s.kind].action for s in faults if s.raises}
    for spec in faults:
        if spec.kind == "corrupt":
            kinds.add((RecoverableRuntimeError, ErrorCode.MEMORY_ERROR))
            actions.add(RecoveryAction.IPU_RESET)
            if len(faults) == 1:
                assert {e.where for e in errors if isinstance(e, PoplarError)} == {f"ipu {spec.indices[0]}"}
        elif spec.kind == "killed":  # What the killed process itself hears, nobody hears.
            kinds.add((ApplicationRuntimeError, ErrorCode.NONE))
    told = [e for e in errors if isinstance(e, PoplarError) and (type(e), e.code) in kinds]
    assert told, f"no error of the plan: {errors}"
    if not during_read:
        assert len(told) == len(errors), f"errors differ: {errors}"
    assert all(e.recovery_action in actions for e in told if isinstance(e, RecoverableRuntimeError)), told


_UNDISTURBED: dict[tuple[int, int], list[Any]] = {}


def undisturbed(training: Training, pieces: PieceCache, instances: int) -> list[Any]:
    """The results of an attempt without faults."""
    key = (id(training), instances)
    if key not in _UNDISTURBED:
        _UNDISTURBED[key] = Pod(training, pieces, instances).attempt()
        assert not [result for result in _UNDISTURBED[key] if isinstance(result, BaseException)], (
            _UNDISTURBED[key]
        )
    return _UNDISTURBED[key]


QUIET = ("corrected-parity", "slow", "degraded", "throttled")


def random_plan(training: Training, seed: int) -> tuple[list[FaultSpec], int]:
    """One to four faults and the number of instances, from a seed."""
    source = random.Random(f"swarm {seed}")
    machines = -(-training.ipus // 4)
    faults = []
    for _ in range(source.randint(1, 4)):
        target, kind = source.choice(BATCH_KINDS)
        indices = {
            "ipu": (source.randrange(training.ipus),),
            "link": source.choice(LINKS),
            "gw-link": (0, 1),
            "network": (0, 1),
            "instance-network": (0, 1),
            "machine": (source.randrange(machines),),
            "host": (1,),
        }[target]
        spec = FaultSpec(
            *(FaultTarget(target), indices, source.randrange(training.batches), kind),
            instruction=source.choice([None, *training.places()]),
            repeat=source.choice([1, 1, 1, 2]),
        )
        if source.random() < 0.15 and target in ("ipu", "machine"):
            event = source.choice(["load", "read"])
            here = spec.indices if event == "load" else (0,)  # The first machine gives the weights.
            spec = replace(spec, indices=here, during=event, batch=0, instruction=None)
        faults.append(spec)
    for name in QUIET:
        if source.random() < 0.1:
            text = {
                "throttled": "ipu:1@batch=1:throttled,mhz=900",
                "degraded": "link:2-3@batch=0:degraded,lanes=2",
            }
            faults.append(parse_fault(text.get(name, f"ipu:2@batch=1:{name}")))
    if source.random() < 0.2:
        faults.append(
            parse_fault(f"instance:{source.randrange(2)}@batch={source.randrange(training.batches)}:killed")
        )
    unique = {spec.text: spec for spec in faults}
    of_two = any(spec.target in OF_INSTANCES for spec in faults)
    return list(unique.values()), 2 if of_two else source.choice([1, 2])


def every_place(pieces: PieceCache, part: str) -> tuple[int, int]:
    """Every kind at every place of the digits training with one and with two instances, or a part of that (``2/8``):
    how many cases there were, and how many failed.
    """
    from .fault_kinds import KINDS, Trainings, errors_wanted, live_through_kind, plans

    trainings = Trainings(digits(), digits(checked=True))
    found = [
        (faults, instances)
        for instances in (1, 2)
        for target, kind in KINDS
        for faults in plans(
            *(target, kind, trainings.checked if kind == "corrupt" else trainings.plain),
            *(range(trainings.plain.batches), instances),
        )
    ]
    number, of = map(int, part.split("/"))
    cases, failures, begin = found[number - 1 :: of], 0, time.monotonic()
    for done, (faults, instances) in enumerate(cases, 1):
        try:
            met = live_through_kind(faults, trainings, pieces, instances)
            assert met == errors_wanted(faults), f"{met} errors"
        except BaseException as error:
            failures += 1
            texts = " ".join(spec.text for spec in faults)
            print(f"FAILED {texts} with {instances} instances: {error!r}", flush=True)
            if not isinstance(error, Exception):
                raise
        if done % 100 == 0:
            print(f"{done} of {len(cases)} (of {len(found)}), {time.monotonic() - begin:.0f} s", flush=True)
    return len(cases), failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--repeat", type=int, default=1, help="run each seed so often")
    parser.add_argument("--every-place", action="store_true")
    parser.add_argument("--part", default="1/1", help="of --every-place, as 2/8")
    options = parser.parse_args()
    failures = cases = 0
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        pieces = PieceCache(Path(folder))
        if options.every_place:
            cases, failures = every_place(pieces, options.part)
        training = small()
        last = options.first + options.seeds
        for seed in (seed for seed in range(options.first, last) for _ in range(options.repeat)):
            if time.monotonic() - begin > options.minutes * 60:
                print(f"stopped before seed {seed}")
                break
            cases += 1
            faults, instances = random_plan(training, seed)
            try:
                live_through(training, pieces, faults, instances)
            except Exception as error:
                failures += 1
                print(
                    f"FAILED python -m tests.device.campaign --seeds 1 --first {seed}: {error!r}", flush=True
                )
                print("  ", *(spec.text for spec in faults), f"instances {instances}", flush=True)
    seconds = time.monotonic() - begin
    print(f"{cases} cases, {failures} failures, {seconds:.0f} s, {cases / seconds * 3600:,.0f} an hour")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
