"""The Connection: one host process's part of a job, spread over the machines that hold its IPUs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from podrun import executable_file
from podrun.device.connection import AttachRequest, IpuRange, RunResult
from podrun.device.host.ports import Port, ProgramFile, RunArrays, Wait
from podrun.device.host.split import Site, part, replica_slices, touched
from podrun.device.job import HOST_SYNC_TIMEOUT
from podrun.device.program.fabric import digest_of
from podrun.device.program.operands import aligned_empty
from podrun.device.program.positions import home_of, parts_of
from podrun.device.program.streams import anchor_shape, anchors_of, check_inputs, inputs_of
from podrun.errors import ApplicationRuntimeError, DeadlineError, PoplarError
from podrun.executable import Executable, Retrieval, Stream, numpy_dtype

T = TypeVar("T")
_AFTER_ERROR = 5.0
"""Seconds that machines have to end a run after the first of them reported an error."""


class PortConnection:
    """A `podrun.device.connection.Connection` over ports. ``open_port`` makes the way to a machine.

    ``host_sync_timeout``: the engine option target.hostSyncTimeout, seconds; may be set before `load`.

    It belongs to the process that made it. One that is forked from it, as by a loader of data, holds nothing: closing
    lets nothing go there, and the rest is refused.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        open_port: Callable[[Site, int], Port],
        *,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._sites = list(sites)
        self._open_port = open_port
        self._on_close = on_close
        self._ports: list[Port] = []
        self._owned: IpuRange | None = None
        self._executable: Executable | None = None
        self._parts: Mapping[int, Executable] = {}
        self._process = os.getpid()
        self.host_sync_timeout = HOST_SYNC_TIMEOUT

    @property
    def total_ipus(self) -> int:
        return max((site.ipus.stop for site in self._sites), default=0)

    def try_attach(self, request: AttachRequest) -> str | None:
        self._check_process()
        if self._ports:
            raise ApplicationRuntimeError("this connection is attached already", hint="Detach first.")
        sites = touched(self._sites, request.owned)
        ports: list[Port] = []
        try:
            for site in sites:
                ports.append(self._open_port(site, len(sites)))
                refusal = ports[-1].attach(request)
                if refusal is not None:
                    _close(ports)
                    return refusal
        except BaseException:
            _close(ports)
            raise
        self._ports, self._owned = ports, request.owned
        return None

    def load(self, executable: Executable) -> None:
        self._attached()
        data = executable_file.dumps(executable)
        program = ProgramFile(executable, digest_of(data), lambda: data)
        self._executable = None
        self._all([port.load(program, self.host_sync_timeout) for port in self._ports])
        self._executable, self._parts = executable, parts_of(executable)

    def write_variables(self, values: Mapping[str, np.ndarray]) -> None:
        executable, _ = self._loaded()
        arrays = {name: np.asarray(value) for name, value in values.items()}
        waits = []
        for place, port in enumerate(self._ports):
            # A name that is no variable goes to all: they have to say so.
            held = self._part_on(place).variables
            mine = {n: a for n, a in arrays.items() if n in held or n not in executable.variables}
            if mine:
                waits.append(port.write(mine))
        self._all(waits)

    def read_variables(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        executable, _ = self._loaded()
        wanted = list(names)
        places: dict[int, list[str]] = {}
        for name in wanted:
            places.setdefault(home_of(executable, name), []).append(name)
        waits = [self._ports[place].read(there) for place, there in places.items()]
        found = {name: value for values in self._all(waits) for name, value in values.items()}
        return {name: found[name] for name in wanted}

    def run(self, batches: int, inputs: Mapping[str, np.ndarray]) -> RunResult:
        begin = time.perf_counter()
        executable, owned = self._loaded()
        each = executable.layout.ipus_per_replica
        replicas = owned.count // each
        arrays = {name: np.asarray(value) for name, value in inputs.items()}
        check_inputs(executable, batches, replicas, arrays)
        anchors = {
            name: aligned_empty(anchor_shape(executable, s, batches, replicas), numpy_dtype(s.spec.dtype))
            for name, s in anchors_of(executable).items()
        }
        waits = []
        slices = replica_slices([p.site for p in self._ports], owned, each)
        for place, (port, mine) in enumerate(zip(self._ports, slices, strict=True)):
            there = self._part_on(place)
            to_device = {
                n: part(arrays[n], None if s.broadcast else 2, mine) for n, s in inputs_of(there).items()
            }
            to_host = {n: part(anchors[n], _replica_axis(s), mine) for n, s in anchors_of(there).items()}
            waits.append(port.run(RunArrays(batches, to_device, to_host)))
        outcomes = self._all(waits)
        return RunResult(
            anchors=anchors,
            batches_done=outcomes[0].batches_done,
            modelled_seconds=outcomes[0].modelled_seconds,
            emulation_seconds=time.perf_counter() - begin,
            details={"machine_seconds": max(outcome.seconds for outcome in outcomes)},
        )

    def detach(self) -> None:
        ports, self._ports = self._ports, []
        self._owned = self._executable = None
        self._parts = {}
        if self._is_here():
            _close(ports)

    def close(self) -> None:
        self.detach()
        on_close, self._on_close = self._on_close, lambda: None
        if self._is_here():
            on_close()

    def _is_here(self) -> bool:
        return self._process == os.getpid()

    def _check_process(self) -> None:
        if not self._is_here():
            raise ApplicationRuntimeError(
                f"the IPUs are those of process {self._process}, from which this one was forked",
                hint="Run the session there; leave only the preparation of data to forked processes.",
            )

    def _part_on(self, place: int) -> Executable:
        """What the machine of a port runs: an owner's machines begin with the first of a replica."""
        return self._parts[place % len(self._parts)]

    def _attached(self) -> IpuRange:
        self._check_process()
        if self._owned is None:
            raise ApplicationRuntimeError(
                "this process holds no IPUs on this connection", hint="Attach to a device first."
            )
        return self._owned

    def _loaded(self) -> tuple[Executable, IpuRange]:
        owned = self._attached()
        if self._executable is None:
            raise ApplicationRuntimeError("no program is loaded", hint="Load one first (prepareDevice).")
        return self._executable, owned

    def _all(self, waits: Sequence[Wait[T]]) -> list[T]:
        """The results of all machines, or the first machine's error, once no machine is at work any more.

        The last machine is heard first: it often ends a run for all (`podrun.device.program.closing`), and whoever is
        woken by each of the others takes a core from those still at work.
        """
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        for place in (len(waits) - 1, *range(len(waits) - 1)) if waits else ():
            try:
                results[place] = waits[place](_AFTER_ERROR if errors else None)
            except (PoplarError, DeadlineError) as error:
                errors[place] = error
        if errors:
            raise errors[min(errors)]
        return [results[place] for place in range(len(waits))]


def _replica_axis(stream: Stream) -> int:
    """Where the replicas are in an anchor's host array."""
    return {Retrieval.ALL: 2, Retrieval.EVERY_N: 1}.get(stream.retrieval, 0)


def _close(ports: Iterable[Port]) -> None:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.callback(port.close)
