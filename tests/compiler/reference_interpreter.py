"""What an Executable means, in a few lines: an interpreter for M machines in one process, NumPy and JAX only.

The oracle of the compiler's tests, and independent of ``podrun.device.machine``, which has to agree with it.
Machines run in turn up to each instruction that joins them (a collective), as if in lock-step. Every arena is
copied per machine, so a program that reads what nobody sent it fails here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from podrun.core.executable import (
    REPLICA_OFFSET,
    AllGather,
    AllReduce,
    Compute,
    Copy,
    Executable,
    LoadStream,
    Receive,
    ReduceScatter,
    Reduction,
    Retrieval,
    Send,
    StoreStream,
    Stream,
    StreamDirection,
    Sync,
    VariableRole,
    numpy_dtype,
)
from podrun.device.xla.compiler_options import options_for
from tests.quick_programs import QUICK


class Machine:
    """One machine's memory: arenas, buffers of variables, temporaries."""

    def __init__(self, executable: Executable, index: int, as_machines: bool) -> None:
        self.as_machines = as_machines
        self.executable = executable
        layout = executable.layout
        self.replica_group, self.position = divmod(index, layout.machines_per_replica)
        self.holders = layout.machines // layout.machines_per_replica
        held = [a for a in executable.arenas.values() if a.position in (None, self.position)]
        self.arenas = {a.name: np.zeros(a.size, numpy_dtype(a.dtype)) for a in held}
        self.members = {
            member.name: (arena.name, member.offset, member.shape)
            for arena in held
            for member in arena.members
        }
        ipus = len(executable.instructions) // layout.machines_per_replica
        self.lists = range(self.position * ipus, (self.position + 1) * ipus)
        self.frames: list[dict[str, np.ndarray]] = [{} for _ in executable.instructions]
        self.buffers: dict[str, np.ndarray] = {
            REPLICA_OFFSET: np.array(self.replica_group * layout.replicas_per_machine, np.int32)
        }
        for variable in executable.variables.values():
            shape = variable.spec.shape
            if variable.arena is not None and variable.spec.name not in self.members:
                continue
            if variable.position not in (None, self.position):
                continue
            if variable.arena is None:
                shape = (layout.replicas_per_machine, *shape) if variable.per_replica else shape
                self.buffers[variable.spec.name] = np.zeros(shape, numpy_dtype(variable.spec.dtype))
            if variable.initial is not None:
                self.write(variable.spec.name, np.full(shape, variable.initial))

    def holds(self, variable: str) -> bool:
        return variable in self.members or variable in self.buffers

    def slice_of(self, arena: str) -> slice:
        size = self.executable.arenas[arena].size // self.holders
        return slice(self.replica_group * size, (self.replica_group + 1) * size)

    def read(self, name: str, ipu: int = 0) -> np.ndarray:
        if name.startswith("arena:"):
            return self.arenas[name.removeprefix("arena:")]
        if name.startswith("arena_slice:"):
            arena = name.removeprefix("arena_slice:")
            return self.arenas[arena][self.slice_of(arena)]
        if name in self.members:
            arena, offset, shape = self.members[name]
            return self.arenas[arena][offset : offset + int(np.prod(shape))].reshape(shape)
        return self.buffers[name] if name in self.buffers else self.frames[ipu][name]

    def write(self, name: str, value: np.ndarray, ipu: int = 0) -> None:
        lasting = name.startswith(("arena:", "arena_slice:")) or name in self.members
        if lasting or name in self.buffers:
            target = self.read(name)
            assert target.size == np.size(value) or name in self.executable.variables, name
            target[...] = np.reshape(value, target.shape) if target.size == np.size(value) else value
        else:
            self.frames[ipu][name] = np.asarray(value)

    def compute(self, name: str, ipu: int) -> None:
        computation = self.executable.computations[name]
        compiled, shapes = _compiled(computation.stablehlo, self.as_machines)
        inputs = [np.array(self.read(buffer, ipu)) for buffer in computation.inputs]
        results = compiled(*(array.reshape(shape) for array, shape in zip(inputs, shapes, strict=True)))
        for buffer, value in zip(computation.outputs, results, strict=True):
            self.write(buffer, np.asarray(value), ipu)


AS_MACHINES: dict[str, bool | int] = {"xla_cpu_multi_thread_eigen": False}
"""One thread, as on every machine: XLA divides some sums by the number of threads it has."""
_CACHE: dict[tuple[bytes, bool], Any] = {}


def _compiled(stablehlo: bytes, as_machines: bool) -> Any:
    key = (stablehlo, as_machines)
    if key not in _CACHE:
        exported = jax.export.deserialize(bytearray(stablehlo))
        lowered = jax.jit(exported.call).lower(*exported.in_avals)
        options = options_for(lowered.compiler_ir("stablehlo")) if as_machines else {**AS_MACHINES, **QUICK}
        compiled = lowered.compile(compiler_options=options)  # type: ignore[arg-type]
        _CACHE[key] = compiled, [aval.shape for aval in exported.in_avals]
    return _CACHE[key]


class Pod:
    """All machines of one program, run in lock-step. ``as_machines``: with machines' compiler options, to the
    bit."""

    def __init__(self, executable: Executable, *, as_machines: bool = False) -> None:
        self.executable = executable
        self.machines = [
            Machine(executable, index, as_machines) for index in range(executable.layout.machines)
        ]

    def write_variables(self, values: Mapping[str, Any]) -> None:
        for machine in self.machines:
            for name, value in values.items():
                assert name in self.executable.variables, name
                rows, value = self.executable.variables[name].rows, np.asarray(value)
                if rows:
                    each = self.executable.layout.replicas_per_machine
                    first = machine.replica_group * each
                    value = value[list(rows[first : first + each])]
                if machine.holds(name):
                    machine.write(name, value)

    def read_variable(self, name: str) -> np.ndarray:
        """What the host reads, after checking that all machines that must hold the same do so to the bit."""
        variable = self.executable.variables[name]
        machines = [machine for machine in self.machines if machine.holds(name)]
        if variable.per_replica:
            each = np.concatenate([machine.read(name) for machine in machines])
            rows = variable.rows
            return each[[rows.index(row) for row in range(max(rows) + 1)]] if rows else each[0]
        if variable.arena is not None and self.executable.arenas[variable.arena].sliced:
            parts = [machine.arenas[variable.arena][machine.slice_of(variable.arena)] for machine in machines]
            _, offset, shape = machines[0].members[name]
            return np.concatenate(parts)[offset : offset + int(np.prod(shape))].reshape(shape)
        if variable.role is VariableRole.RANDOM_SEED:
            return machines[0].read(name)  # Only the first machine of a replica moves it on.
        values = [machine.read(name) for machine in machines]
        assert all(value.tobytes() == values[0].tobytes() for value in values), name
        return np.array(values[0])

    def run(self, batches: int, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """``inputs[name]``: ``[batches, accumulation, replicas, *shape]``, broadcast without the replica
        axis.

        Anchors: for each micro-batch of the run ``[replicas, *shape]``, then retrieved as the stream says.
        """
        executable = self.executable
        count = batches * executable.accumulation_factor
        seen: dict[str, list[Any]] = {
            n: [None] * count for n, s in executable.streams.items() if s.direction is StreamDirection.TO_HOST
        }
        for batch in range(batches):
            self._run_batch(batch, inputs, seen)
        return {name: _retrieve(executable.streams[name], values) for name, values in seen.items()}

    def _run_batch(self, batch: int, inputs: Mapping[str, Any], seen: dict[str, list[Any]]) -> None:
        """Each list goes on until it must wait for another; all must come to an end, with no mail left."""
        lists = self.executable.instructions
        places, self.mail = [0] * len(lists), {}
        for machine in self.machines:
            machine.frames = [{} for _ in lists]
        ipus = len(lists) // self.executable.layout.machines_per_replica
        self.together = [range(k // ipus * ipus, (k // ipus + 1) * ipus) for k in range(len(lists))]
        while any(place < len(work) for place, work in zip(places, lists, strict=True)):
            moved = False
            for ipu, work in enumerate(lists):
                while places[ipu] < len(work) and not self._waits(work[places[ipu]], ipu, places):
                    self._step(work[places[ipu]], ipu, batch, inputs, seen)
                    places[ipu] += 1
                    moved = True
            assert moved, f"lists wait for each other at {places}"
        assert not self.mail, f"sent and not received: {sorted(self.mail)}"

    def _waits(self, instruction: Any, ipu: int, places: list[int]) -> bool:
        if isinstance(instruction, Receive):
            return (instruction.peer, ipu, instruction.tag) not in self.mail
        if isinstance(instruction, Sync):
            # Lists of one machine meet; HOST and MACHINE are the only scopes that compilers write.
            lists = self.executable.instructions
            passed = {k: sum(isinstance(i, Sync) for i in lists[k][: places[k]]) for k in self.together[ipu]}
            waiting = {
                k for k in passed if places[k] < len(lists[k]) and isinstance(lists[k][places[k]], Sync)
            }
            return any(n < passed[ipu] or (n == passed[ipu] and k not in waiting) for k, n in passed.items())
        return False

    def _step(  # noqa: C901 (a case for each instruction)
        self, instruction: Any, ipu: int, batch: int, inputs: Mapping[str, Any], seen: dict[str, list[Any]]
    ) -> None:
        machines = [machine for machine in self.machines if ipu in machine.lists]
        match instruction:
            case Sync():
                pass
            case LoadStream(stream, buffer, first, count):
                for machine in machines:
                    data = self._input(machine, stream, inputs[stream][batch], first, count)
                    machine.frames[ipu][buffer] = data
            case Compute(name):
                for machine in machines:
                    machine.compute(name, ipu)
            case Copy(source, destination):
                for machine in machines:
                    machine.frames[ipu][destination] = machine.frames[ipu][source]
            case Send(buffer, peer, tag):
                assert (ipu, peer, tag) not in self.mail
                self.mail[ipu, peer, tag] = [np.array(machine.read(buffer, ipu)) for machine in machines]
            case Receive(buffer, peer, tag):
                for machine, value in zip(machines, self.mail.pop((peer, ipu, tag)), strict=True):
                    machine.frames[ipu][buffer] = value
            case StoreStream(stream, buffer, first, count):
                values = np.concatenate([machine.read(buffer, ipu) for machine in machines], axis=1)
                expected = (
                    count,
                    self.executable.layout.replicas,
                    *self.executable.streams[stream].spec.shape,
                )
                assert values.shape == expected, (stream, values.shape, expected)
                begin = batch * self.executable.accumulation_factor + first
                seen[stream][begin : begin + count] = list(values)
            case ReduceScatter(arena, reduction):
                total = self._reduced(machines, arena, reduction)
                for machine in machines:
                    part = machine.slice_of(arena)
                    machine.arenas[arena][:] = np.nan  # What was not reduced here must not be read.
                    machine.arenas[arena][part] = total[part]
            case AllReduce(arena, reduction):
                total = self._reduced(machines, arena, reduction)
                for machine in machines:
                    machine.arenas[arena][:] = total
            case AllGather(arena):
                parts = [machine.arenas[arena][machine.slice_of(arena)].copy() for machine in machines]
                for machine in machines:
                    machine.arenas[arena][:] = np.concatenate(parts)
            case _:
                raise NotImplementedError(instruction)

    def _input(self, machine: Machine, stream: str, data: np.ndarray, first: int, count: int) -> np.ndarray:
        chosen = data[first : first + count]
        if self.executable.streams[stream].broadcast:
            return chosen
        replicas = self.executable.layout.replicas_per_machine
        return chosen[:, machine.replica_group * replicas : (machine.replica_group + 1) * replicas]

    def _reduced(self, machines: list[Machine], arena: str, reduction: Reduction) -> np.ndarray:
        assert reduction is Reduction.SUM
        total = machines[0].arenas[arena].copy()
        for machine in machines[1:]:
            total += machine.arenas[arena]
        return total


def _retrieve(stream: Stream, values: list[Any]) -> np.ndarray:
    match stream.retrieval:
        case Retrieval.ALL:
            return np.stack(values)
        case Retrieval.FINAL:
            return values[-1]
        case Retrieval.EVERY_N:
            return np.stack(values[stream.period - 1 :: stream.period])
        case Retrieval.SUM:
            total = values[0].copy()
            for value in values[1:]:
                total += value
            return total
