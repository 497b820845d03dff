"""The IPUoF client: ports to machines over gRPC, with tensors in shared memory where machines share the host."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from podrun.core.access import AdmitServer
from podrun.core.error_codec import error_from_json
from podrun.core.errors import DeadlineError, InternalError, PoplarError, present
from podrun.core.executable import Array, Executable, numpy_dtype
from podrun.core.proven_channel import open_channel
from podrun.core.shared_region import SharedRegion
from podrun.device.connection import AttachRequest, Refusal, RunOutcome
from podrun.device.host.machine_stream import CHECK_SECONDS, JobLosses, MachineStream
from podrun.device.host.ports import ProgramFile, RunArrays, Site, Wait
from podrun.device.host.run_memory import RunMemory
from podrun.device.service import wire
from podrun.device.service.doorbell import Doorbell, deadline, spin_seconds_for
from podrun.device.service.handover import MemorySender, lay_out, view
from podrun.protos import ipuof_pb2 as pb

T = TypeVar("T")
_ANSWER_SECONDS = 30.0
"""Seconds for answers that need no work."""


class RemotePort:
    """A machine behind a gRPC endpoint: see `podrun.device.host.ports.Port`.

    ``probe``: offer shared memory, which is used if the machine is on this host; otherwise tensors travel inline.
    ``token``, ``own`` and ``admit``: see `podrun.core.proven_channel.open_channel`. Nothing is sent to a machine before
    it has proved whose it is. ``losses``: of the job, shared by its ports.
    """

    def __init__(
        self,
        site: Site,
        *,
        probe: bool = True,
        token: str = "",
        own: bool = False,
        admit: AdmitServer | None = None,
        losses: JobLosses | None = None,
    ) -> None:
        self._site = site
        self._losses = losses or JobLosses()
        self._open_channel = partial(
            open_channel, site.endpoint, wire.CHANNEL_OPTIONS, token, own=own, admit=admit
        )
        self._probe = probe
        self._stream: MachineStream | None = None
        self._io: RunMemory | None = None
        self._last: tuple[Doorbell, int] | None = None
        """The last run that was started by a doorbell."""
        self._started = 0
        """Runs in flight."""
        self._executable: Executable | None = None
        self._done = 0
        self._spin_seconds = 0.0

    @property
    def site(self) -> Site:
        return self._site

    def attach(self, request: AttachRequest) -> Refusal | None:
        message = pb.AttachRequest(
            job=wire.range_to_wire(request.job),
            owned=wire.range_to_wire(request.owned),
            pid=request.pid,
            user=request.user,
            command=request.command,
            launch=request.launch,
            host=socket.gethostname(),
            started=process_start(request.pid),
            hands_memory_over=self._probe,
        )
        self._spin_seconds = spin_seconds_for(request, self._site.ipus.count)
        first = max(self._site.ipus.first, request.owned.first)
        self._stream = MachineStream(self._site, first, self._open_channel(), self._losses)
        try:
            reply = self._send(pb.HostRequest(attach=message))(_ANSWER_SECONDS).attach
        except BaseException:
            self.close()
            raise
        if reply.refusal:
            self.close()
            broken = error_from_json(reply.broken_json) if reply.broken_json else None
            return Refusal(reply.refusal, broken)
        if reply.memory_socket:
            with contextlib.suppress(OSError):  # The machine is on another host: tensors travel inline.
                self._stream.memory = MemorySender(reply.memory_socket, self._stream.server_uid)
        return None

    @property
    def _shared(self) -> bool:
        return self._stream is not None and self._stream.memory is not None

    def _give(self, region: SharedRegion) -> pb.Region:
        """Hand a region over; returns its number for requests."""
        stream = present(self._stream, "a region is handed over on a stream")
        memory = present(stream.memory, "a region is handed over on a host that shares memory")
        return pb.Region(number=memory.give(region), size=region.nbytes)

    def load(self, program: ProgramFile, timeout: float) -> Wait[None]:
        data = program.data()
        region = None
        blob = pb.Blob(inline=data)
        if self._shared:
            region = SharedRegion.create("ipuof", len(data))
            region.bytes[: len(data)] = np.frombuffer(data, np.uint8)
            blob = pb.Blob(region=self._give(region), size=len(data))
        self._io = self._last = None
        self._started = 0
        self._executable, self._done = program.executable, 0
        self._note_batches(0)
        wait = self._send(
            pb.HostRequest(
                load=pb.LoadRequest(
                    digest=program.digest,
                    executable=blob,
                    timeout_seconds=timeout,
                    own_pieces=program.own,
                )
            )
        )
        return lambda seconds: _then_close(wait, seconds, region)

    def write(self, values: Mapping[str, Array]) -> Wait[None]:
        region = None
        if self._shared:
            offsets, size = lay_out(value.nbytes for value in values.values())
            region = SharedRegion.create("ipuof", size)
            tensors = []
            for (name, value), offset in zip(values.items(), offsets, strict=True):
                view(region.bytes, offset, str(value.dtype), value.shape)[...] = value
                tensors.append(wire.tensor_to_wire(name, value, offset=offset))
            message = pb.WriteRequest(region=self._give(region), tensors=tensors)
        else:
            return self._write_inline(values)
        wait = self._send(pb.HostRequest(write=message))
        return lambda seconds: _then_close(wait, seconds, region)

    def read(self, names: Iterable[str]) -> Wait[dict[str, Array]]:
        wanted = list(names)
        specs = self._specs(wanted)
        if not self._shared or specs is None:
            sizes = [0 if specs is None else nbytes for _, _, nbytes in specs or [("", (), 0)] * len(wanted)]
            waits = [
                self._send(pb.HostRequest(read=pb.ReadRequest(names=group)))
                for group in wire.groups(zip(wanted, sizes, strict=True))
            ]
            return lambda seconds: {
                name: value.copy()
                for reply in _all_of(waits, seconds)
                for name, value in wire.tensors_from_wire(reply.read.tensors, None).items()
            }
        offsets, size = lay_out(nbytes for _, _, nbytes in specs)
        region = SharedRegion.create("ipuof", size)
        arrays = {
            name: view(region.bytes, offset, dtype, shape)
            for name, offset, (dtype, shape, _) in zip(wanted, offsets, specs, strict=True)
        }
        tensors = [
            wire.tensor_to_wire(n, a, offset=o) for (n, a), o in zip(arrays.items(), offsets, strict=True)
        ]
        wait = self._send(
            pb.HostRequest(read=pb.ReadRequest(names=wanted, region=self._give(region), tensors=tensors))
        )

        def finish(seconds: float | None) -> dict[str, Array]:
            _then_close(wait, seconds, region)
            return {name: array.copy() for name, array in arrays.items()}

        return finish

    def run(self, arrays: RunArrays) -> Wait[RunOutcome]:
        self._note_batches(arrays.batches)
        self._started += 1
        wait = self._run_shared(arrays) if self._shared else self._run_inline(arrays)

        def finish(seconds: float | None) -> RunOutcome:
            outcome = wait(seconds)
            self._done = outcome.batches_done
            self._started -= 1
            self._note_batches(arrays.batches if self._started else 0)
            return outcome

        return finish

    def _note_batches(self, passes: int) -> None:
        """Tell the stream which batches a run of ``passes`` passes covers."""
        per_pass = self._executable.batches_per_pass if self._executable is not None else 1
        if self._stream is not None:
            self._stream.batches = (self._done, passes * per_pass)

    def _run_shared(self, arrays: RunArrays) -> Wait[RunOutcome]:
        if self._io is None or not self._io.fits(arrays):
            if (
                self._last is not None
            ):  # The machine forgets the memory of runs in flight when it gets another.
                self._await_answer(*self._last, deadline(None))
            self._io = RunMemory(arrays, self._give)
            self._send(pb.HostRequest(bind=self._io.bind))(_ANSWER_SECONDS)
        memory = self._io
        number = memory.start(arrays)
        self._last = memory.doorbell, number

        def finish(seconds: float | None) -> RunOutcome:
            outcome = self._answer(memory.doorbell, number, deadline(seconds))
            memory.give_outputs(number, arrays)
            return outcome

        return finish

    def close(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            with contextlib.suppress(PoplarError, DeadlineError):
                stream.send(pb.HostRequest(detach=pb.Empty()))
            stream.close()
        self._io = self._last = None

    def _await_answer(self, doorbell: Doorbell, number: int, end: float) -> None:
        """Wait for the answer to a ring; the stream shows if the machine is gone."""
        while not doorbell.answered(number, CHECK_SECONDS, self._spin_seconds):
            if self._stream is None:
                raise InternalError(f"machine {self._site.machine} was released during a run")
            self._stream.check()
            if time.monotonic() > end:
                raise DeadlineError(
                    f"machine {self._site.machine} at {self._site.endpoint} did not end its run in time"
                )

    def _answer(self, doorbell: Doorbell, number: int, end: float) -> RunOutcome:
        """The answer to a ring."""
        self._await_answer(doorbell, number, end)
        result = doorbell.result(number)
        if isinstance(result, str):
            wire.raise_error(result)
            raise InternalError("a machine answered with an empty error")
        return result

    def _write_inline(self, values: Mapping[str, Array]) -> Wait[None]:
        waits = [
            self._send(
                pb.HostRequest(
                    write=pb.WriteRequest(tensors=wire.inline_tensors({n: values[n] for n in group}))
                )
            )
            for group in wire.groups((name, value.nbytes) for name, value in values.items())
        ]

        def finish(seconds: float | None) -> None:
            _all_of(waits, seconds)

        return finish

    def _run_inline(self, arrays: RunArrays) -> Wait[RunOutcome]:
        outputs = [wire.tensor_to_wire(n, a, offset=0) for n, a in arrays.outputs.items()]
        message = pb.RunRequest(
            batches=arrays.batches, inline=True, inputs=wire.inline_tensors(arrays.inputs), outputs=outputs
        )
        wait = self._send(pb.HostRequest(run=message))

        def finish(seconds: float | None) -> RunOutcome:
            reply = wait(seconds).run
            for name, value in wire.tensors_from_wire(reply.outputs, None).items():
                arrays.outputs[name][...] = value
            return RunOutcome(reply.batches_done, reply.modelled_seconds, reply.seconds)

        return finish

    def _send(self, request: pb.HostRequest) -> Callable[[float | None], pb.MachineReply]:
        if self._stream is None:
            raise InternalError(f"machine {self._site.machine} was used without being attached")
        return self._stream.send(request)

    def _specs(self, names: Iterable[str]) -> list[tuple[str, tuple[int, ...], int]] | None:
        """dtype, shape and bytes of variables; None if one does not exist (the machine then says so)."""
        variables = self._executable.variables if self._executable is not None else {}
        specs = []
        for name in names:
            if name not in variables:
                return None
            spec = variables[name].host_spec
            specs.append((str(numpy_dtype(spec.dtype)), spec.shape, spec.nbytes))
        return specs


class RemotePorts:
    """Opens the ports of a connection, machine after machine for each attach, with ``open_port``. Ports of one attach
    learn of each other's losses.
    """

    def __init__(self, open_port: Callable[..., RemotePort] = RemotePort) -> None:
        self._open = open_port
        self._losses, self._last = JobLosses(), -1

    def __call__(self, site: Site, machines: int) -> RemotePort:
        """The port to a machine."""
        if site.machine <= self._last:  # An attach begins anew with the first machine.
            self._losses = JobLosses()
        self._last = site.machine
        return self._open(site, losses=self._losses)


def _all_of(
    waits: Iterable[Callable[[float | None], pb.MachineReply]], seconds: float | None
) -> list[pb.MachineReply]:
    """The replies to requests sent one after the other; raises the first error after all have replied."""
    replies, first = [], None
    for wait in waits:
        try:
            replies.append(wait(seconds))
        except PoplarError as error:
            first = first or error
    if first is not None:
        raise first
    return replies


def _then_close(
    wait: Callable[[float | None], pb.MachineReply], seconds: float | None, region: SharedRegion | None
) -> None:
    try:
        wait(seconds)
    finally:
        if region is not None:
            region.close()


def process_start(pid: int) -> float:
    """When a process of this host started, in seconds since 1970; 0 if there is none. psutil, which tells the same, is
    not imported for this.
    """
    try:
        ticks = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19]
        lines = Path("/proc/stat").read_bytes().splitlines()
    except (OSError, IndexError):
        return 0.0
    boot = next((line.split()[1] for line in lines if line.startswith(b"btime ")), b"0")
    return int(boot) + int(ticks) / os.sysconf("SC_CLK_TCK")
