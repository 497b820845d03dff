"""What a machine's server does for one host process, request by request, and the machine behind it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from podrun import executable_file
from podrun.device.job import Place
from podrun.device.machine import Machine
from podrun.device.program.operands import Array
from podrun.device.service import wire
from podrun.device.service.bell import BLOCK_BYTES, Bell, look_of
from podrun.device.service.memory import view
from podrun.device.service.report import machine_report
from podrun.errors import ApplicationRuntimeError, PodrunError, UnknownRuntimeError
from podrun.protos import ipuof_pb2 as pb
from podrun.telemetry import MachineReport

log = logging.getLogger("podrun.device")

_LISTEN = 1.0
"""Seconds after which a thread that waits for a bell looks whether the bell still hangs."""
MakeMachine = Callable[[Place], Machine]


class MachineHolder:
    """The machine behind a server; none before it is configured. Safe to use from several threads."""

    def __init__(self, make: MakeMachine, bare: MachineReport) -> None:
        self._make = make
        self._bare = bare
        self._lock = threading.Lock()
        self._machine: Machine | None = None
        self.target = bare.target

    @property
    def machine(self) -> Machine:
        """Raises ApplicationRuntimeError if it is in no partition yet."""
        if self._machine is None:
            raise ApplicationRuntimeError(
                "this machine is in no partition", hint="Create one: vipu create partition NAME --size N"
            )
        return self._machine

    @property
    def known(self) -> Machine | None:
        """The machine, if it is configured."""
        return self._machine

    def configure(self, place: Place) -> None:
        """Put the machine into its place."""
        with self._lock:
            if self._machine is None:
                self._machine = self._make(place)
            else:
                self._machine.move(place)

    def report(self) -> MachineReport:
        """Its telemetry."""
        return self._bare if self._machine is None else machine_report(self._machine, self._bare)


class Session:
    """One host process's requests, in order. ``owner`` is set while it holds IPUs."""

    def __init__(self, holder: MachineHolder) -> None:
        self._holder = holder
        self._machine: Machine | None = None
        self._owner: int | None = None
        self._bound: tuple[int, dict[str, Array], dict[str, Array]] | None = None
        self._bell: Bell | None = None
        self._look = 0.0
        self._lock = threading.Lock()
        self._ended = False

    def answer(self, request: pb.HostRequest) -> pb.MachineReply:
        """The reply, or the error in its place."""
        kind = request.WhichOneof("request")
        try:
            handler = None if kind is None else getattr(self, f"_{kind}")
            if handler is None:
                raise ApplicationRuntimeError("a request says nothing that this machine understands")
            reply: pb.MachineReply = handler(getattr(request, kind))
        except PodrunError as error:
            return pb.MachineReply(error_json=wire.error_to_json(error))
        except Exception as error:
            log.exception("request %s failed", kind)
            reason = UnknownRuntimeError(f"the machine failed on {kind}: {type(error).__name__}: {error}")
            return pb.MachineReply(error_json=wire.error_to_json(reason))
        return reply

    def end(self, *, died: bool) -> None:
        """Let the IPUs go. Idempotent; may come while a request is at work."""
        with self._lock:
            self._ended = True
            owner, self._owner = self._owner, None
        self._hang(None)
        if owner is not None and self._machine is not None:
            self._machine.detach(owner, died=died)

    def _attach(self, message: pb.AttachRequest) -> pb.MachineReply:
        machine = self._holder.machine
        if self._owner is not None:
            raise ApplicationRuntimeError("this process is attached already")
        request = wire.attach_from_wire(message)
        answer = machine.attach(request, host=message.host, started=message.started or None)
        if isinstance(answer, str):
            return pb.MachineReply(attach=pb.AttachReply(refusal=answer))
        self._look = look_of(request, machine.place.ipus)
        with self._lock:
            self._machine = machine
            if not self._ended:
                self._owner = answer
        if self._owner is None:
            machine.detach(answer, died=True)
        return pb.MachineReply(attach=pb.AttachReply(shared_memory=_can_share(message)))

    def _load(self, message: pb.LoadRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        self._bound = None
        self._hang(None)
        data = wire.blob_from_wire(message.executable)

        def executable() -> Any:
            return executable_file.loads(data, where="the program sent to the machine")

        machine.load(owner, message.digest, executable, timeout=max(message.timeout_seconds, 0.1))
        return _DONE

    def _write(self, message: pb.WriteRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        region = wire.region_bytes(message.region) if message.HasField("region") else None
        machine.write(owner, wire.tensors_from_wire(message.tensors, region))
        return _DONE

    def _read(self, message: pb.ReadRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        values = machine.read(owner, message.names)
        if not message.HasField("region"):
            return pb.MachineReply(read=pb.ReadReply(tensors=wire.inline_tensors(values)))
        wanted = wire.tensors_from_wire(message.tensors, wire.region_bytes(message.region))
        for name, value in values.items():
            _fill(wanted, name, value)
        return pb.MachineReply(read=pb.ReadReply())

    def _bind(self, message: pb.BindRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        region = wire.region_bytes(message.region)
        self._hang(None)
        inputs = wire.tensors_from_wire(message.inputs, region)
        self._bound = (message.batches, inputs, wire.tensors_from_wire(message.outputs, region))
        if message.bell:
            bell = Bell(view(region, 0, "uint8", (BLOCK_BYTES,)))
            self._hang(bell)
            threading.Thread(
                target=self._listen,
                args=(bell, machine, owner, *self._bound),
                name="podrun-bell",
                daemon=True,
            ).start()
        return _DONE

    def _run(self, message: pb.RunRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        if message.inline:
            inputs = wire.tensors_from_wire(message.inputs, None)
            outputs = wire.empty_tensors(message.outputs)
        elif self._bound is None or self._bound[0] != message.batches:
            raise ApplicationRuntimeError("a run came without saying where its tensors lie")
        else:
            _, inputs, outputs = self._bound
        outcome = machine.run(owner, message.batches, inputs, outputs)
        reply = pb.RunReply(
            batches_done=outcome.batches_done,
            modelled_seconds=outcome.modelled_seconds,
            seconds=outcome.seconds,
        )
        if message.inline:
            reply.outputs.extend(wire.inline_tensors(outputs))
        return pb.MachineReply(run=reply)

    def _hang(self, bell: Bell | None) -> None:
        """Listen to this bell from now on, and not to the one before."""
        with self._lock:
            before, self._bell = self._bell, bell
        if before is not None:
            before.wake()

    def _listen(
        self,
        bell: Bell,
        machine: Machine,
        owner: int,
        batches: int,
        inputs: Mapping[str, Array],
        outputs: Mapping[str, Array],
    ) -> None:
        """The thread of a bell: runs when it rings, until another one hangs."""
        checked = False
        while self._bell is bell:
            if not bell.rung(_LISTEN, self._look) or self._bell is not bell:
                continue
            try:
                outcome = machine.run(owner, batches, inputs, outputs, checked=checked)
                checked = True
                bell.answer(outcome)
            except PodrunError as error:
                bell.answer(wire.error_to_json(error))
            except Exception as error:
                log.exception("a run failed")
                reason = UnknownRuntimeError(f"the machine failed on a run: {type(error).__name__}: {error}")
                bell.answer(wire.error_to_json(reason))

    def _detach(self, message: pb.Empty) -> pb.MachineReply:
        self.end(died=False)
        self._bound = None
        return _DONE

    def _hold(self) -> tuple[Machine, int]:
        machine, owner = self._machine, self._owner
        if machine is None or owner is None:
            raise ApplicationRuntimeError(
                "this process holds no IPUs of this machine", hint="Attach to a device first."
            )
        return machine, owner


_DONE = pb.MachineReply(done=pb.Empty())


def _can_share(message: pb.AttachRequest) -> bool:
    """Whether this machine sees the memory of the process that attaches: whether the probe is there."""
    if not message.HasField("probe_region") or not message.probe:
        return False
    try:
        data = wire.region_bytes(message.probe_region)
    except ApplicationRuntimeError:
        return False
    return data[: len(message.probe)].tobytes() == message.probe


def _fill(wanted: Mapping[str, Array], name: str, value: Array) -> None:
    place = wanted.get(name)
    if place is None or place.shape != value.shape or place.dtype != value.dtype:
        raise ApplicationRuntimeError(f"there is no room for variable {name!r} in the memory of the request")
    place[...] = value
