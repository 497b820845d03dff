"""A machine's server for one host process: it answers the requests of the process's stream, and runs on its doorbell.

Limits: a session keeps a thread of the server as long as its stream lasts. So sessions are counted, for each user and
in all, and one that attaches to nothing, or stops in the middle of a message, is ended with a line in the log. Before
it is attached, a session may send small requests only, so nothing is buffered for it. What the partition service asks
has threads of its own (`podrun.device.service.servicer`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from podrun.core import executable_file
from podrun.core.error_codec import error_to_json
from podrun.core.errors import ApplicationRuntimeError, PodrunError, UnknownRuntimeError, UsageError
from podrun.core.executable import Array
from podrun.core.identity import Caller, user_name
from podrun.device.connection import MOST_IN_FLIGHT, AttachRequest, Refusal
from podrun.device.crash_records import own_crash_record
from podrun.device.machine import Machine
from podrun.device.service import wire
from podrun.device.service.control import MachineHolder
from podrun.device.service.doorbell import BLOCK_BYTES, Doorbell, spin_seconds_for
from podrun.device.service.handover import MemoryReceiver, view
from podrun.device.service.wire import WHOLE_BYTES
from podrun.device.xla.clients import held_machine_settings
from podrun.protos import ipuof_pb2 as pb

log = logging.getLogger("podrun.device")

SlotArrays = tuple[dict[str, Array], dict[str, Array]]
"""Inputs and anchors of a run in a bound region."""

_LISTEN = 1.0
"""Seconds after which a thread that waits for a doorbell checks whether the doorbell is still in use."""


class HostSession:
    """The requests of one host process, in order. It has an owner while the process holds IPUs. ``caller``: the user
    who runs the process."""

    def __init__(self, holder: MachineHolder, caller: Caller | None = None) -> None:
        self._holder = holder
        self._caller = caller or Caller(os.getuid(), own=True)
        self._machine: Machine | None = None
        self._owner: int | None = None
        self._bound: tuple[int, list[SlotArrays]] | None = None
        self._doorbell: Doorbell | None = None
        self._memory: MemoryReceiver | None = None
        self._spin_seconds = 0.0
        self._lock = threading.Lock()
        self._ended = False

    @property
    def attached(self) -> bool:
        """Whether the process holds IPUs."""
        return self._owner is not None

    def answer(self, request: pb.HostRequest) -> pb.MachineReply:
        """Answer one request of the host: its reply, or an error in the reply's place. Raises nothing."""
        kind = request.WhichOneof("request")
        try:
            handler = None if kind is None else getattr(self, f"_{kind}")
            if handler is None:
                raise ApplicationRuntimeError("the request is of no kind that this machine knows")
            reply: pb.MachineReply = handler(getattr(request, kind))
        except PodrunError as error:
            return pb.MachineReply(error_json=error_to_json(error))
        except Exception as error:
            log.exception("request %s failed", kind)
            reason = UnknownRuntimeError(f"the machine failed on {kind}: {type(error).__name__}: {error}")
            return pb.MachineReply(error_json=error_to_json(reason))
        return reply

    def end(self, *, died: bool) -> None:
        """Release the IPUs. Idempotent; may be called while a request is being answered."""
        with self._lock:
            self._ended = True
            owner, self._owner = self._owner, None
        self._use_doorbell(None)
        if owner is not None and self._machine is not None:
            self._machine.detach(owner, died=died)

    def close(self) -> None:
        """After the last request: forget memory that was handed over and not used."""
        if self._memory is not None:
            self._memory.close()

    def _attach(self, message: pb.AttachRequest) -> pb.MachineReply:
        machine = self._holder.machine
        if self._owner is not None:
            raise ApplicationRuntimeError("this process is attached already")
        request = self._known(wire.attach_from_wire(message))
        answer = machine.attach(request, host=message.host, started=message.started or None)
        if isinstance(answer, Refusal):
            broken = "" if answer.broken is None else error_to_json(answer.broken)
            return pb.MachineReply(attach=pb.AttachReply(refusal=answer, broken_json=broken))
        self._spin_seconds = spin_seconds_for(request, machine.place.ipus)
        with self._lock:
            self._machine = machine
            if not self._ended:
                self._owner = answer
        if self._owner is None:
            machine.detach(answer, died=True)
        return pb.MachineReply(attach=pb.AttachReply(memory_socket=self._receive_memory(message)))

    def _receive_memory(self, message: pb.AttachRequest) -> bytes:
        """The name through which the process may hand memory over; empty if it does not."""
        if not message.hands_memory_over:
            return b""
        self.close()
        record = own_crash_record().name.fd if self._caller.own else None
        try:
            self._memory = MemoryReceiver(self._caller.uid, record)
        except (OSError, UsageError) as error:
            log.warning("tensors travel over the connection, because no memory can be handed over: %s", error)
            return b""
        return self._memory.name

    def _region(self, number: int, size: int) -> Array:
        """Memory that was handed over. Raises ApplicationRuntimeError."""
        if self._memory is None:
            raise ApplicationRuntimeError("this process has not said that it hands memory over")
        return self._memory.take(number, size)

    def _known(self, request: AttachRequest) -> AttachRequest:
        """The request, with the user that the kernel reports. Raises ApplicationRuntimeError if the partition is
        another user's.
        """
        caller = self._caller
        if caller.own:
            return request
        if not self._holder.may_attach(caller):
            raise ApplicationRuntimeError(
                f"these IPUs are in a partition of another user than {user_name(caller.uid)}",
                hint="Make one: vipu create partition NAME --size N",
            )
        return replace(request, user=user_name(caller.uid))

    def _load(self, message: pb.LoadRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        self._bound = None
        self._use_doorbell(None)
        data = wire.blob_from_wire(message.executable, self._region)
        own = message.own_pieces and self._caller.own

        def executable() -> Any:
            program = executable_file.loads(data, where="the program sent to the machine")
            for computation in program.computations.values() if own else ():
                executable_file.remember(computation.stablehlo)
            return program

        machine.load(owner, message.digest, executable, timeout=max(message.timeout_seconds, 0.1))
        return _DONE

    def _write(self, message: pb.WriteRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        region = wire.region_bytes(message.region, self._region) if message.HasField("region") else None
        machine.write(owner, wire.tensors_from_wire(message.tensors, region))
        return _DONE

    def _read(self, message: pb.ReadRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        values = machine.read(owner, message.names)
        if not message.HasField("region"):
            return pb.MachineReply(read=pb.ReadReply(tensors=wire.inline_tensors(values)))
        wanted = wire.tensors_from_wire(message.tensors, wire.region_bytes(message.region, self._region))
        for name, value in values.items():
            _fill(wanted, name, value)
        return pb.MachineReply(read=pb.ReadReply())

    def _bind(self, message: pb.BindRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        region = wire.region_bytes(message.region, self._region)
        self._use_doorbell(None)
        slots = [
            (wire.tensors_from_wire(message.inputs, part), wire.tensors_from_wire(message.outputs, part))
            for part in _slots(message, region)
        ]
        self._bound = (message.batches, slots)
        if message.doorbell:
            doorbell = Doorbell([view(part, 0, "uint8", (BLOCK_BYTES,)) for part in _slots(message, region)])
            self._use_doorbell(doorbell)
            threading.Thread(
                target=self._listen,
                args=(doorbell, machine, owner, *self._bound),
                name="podrun-doorbell",
                daemon=True,
            ).start()
        return _DONE

    def _run(self, message: pb.RunRequest) -> pb.MachineReply:
        machine, owner = self._hold()
        if message.inline:
            inputs = wire.tensors_from_wire(message.inputs, None)
            outputs = wire.empty_tensors(message.outputs)
        elif self._bound is None or self._bound[0] != message.batches:
            raise ApplicationRuntimeError("a run was requested before its tensors were bound")
        else:
            inputs, outputs = self._bound[1][0]
        outcome = machine.run(owner, message.batches, inputs, outputs)
        reply = pb.RunReply(
            batches_done=outcome.batches_done,
            modelled_seconds=outcome.modelled_seconds,
            seconds=outcome.seconds,
        )
        if message.inline:
            reply.outputs.extend(wire.inline_tensors(outputs))
        return pb.MachineReply(run=reply)

    def _use_doorbell(self, doorbell: Doorbell | None) -> None:
        """Answer this doorbell from now on, and no longer the previous one."""
        with self._lock:
            before, self._doorbell = self._doorbell, doorbell
        if before is not None:
            before.wake()

    @held_machine_settings()
    def _listen(
        self,
        doorbell: Doorbell,
        machine: Machine,
        owner: int,
        batches: int,
        slots: Sequence[SlotArrays],
    ) -> None:
        """The thread of a doorbell: runs whenever it rings, until another doorbell is used."""
        checked = False
        while self._doorbell is doorbell:
            if not doorbell.rung(_LISTEN, self._spin_seconds) or self._doorbell is not doorbell:
                continue
            try:
                outcome = machine.run(owner, batches, *slots[doorbell.slot], checked=checked)
                checked = True
                doorbell.answer(outcome)
            except PodrunError as error:
                doorbell.answer(error_to_json(error))
            except Exception as error:
                log.exception("a run failed")
                reason = UnknownRuntimeError(f"the machine failed on a run: {type(error).__name__}: {error}")
                doorbell.answer(error_to_json(reason))

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


def _slots(message: pb.BindRequest, region: Array) -> list[Array]:
    """The part of a region from each slot on. Raises ApplicationRuntimeError."""
    count, size = message.slots or 1, message.slot_bytes
    if (
        count & (count - 1)
        or count > MOST_IN_FLIGHT
        or size % BLOCK_BYTES
        or (count - 1) * size > region.size
    ):
        raise ApplicationRuntimeError(
            f"{count} slots of {size} bytes cannot be in {region.size} bytes of memory"
        )
    return [region[size * slot :] for slot in range(count)]


def _fill(wanted: Mapping[str, Array], name: str, value: Array) -> None:
    place = wanted.get(name)
    if place is None or place.shape != value.shape or place.dtype != value.dtype:
        raise ApplicationRuntimeError(f"there is no room for variable {name!r} in the memory of the request")
    place[...] = value


SESSIONS = 24
"""Sessions at a time. Each of four IPUs may have an owner, while further processes ask and are refused."""
SESSIONS_OF_OTHERS = 8
"""Sessions of one user who does not run the machine, among these."""
ATTACH_SECONDS = 10.0
"""Seconds in which a session has to attach."""
PART_SECONDS = 60.0
"""Seconds in which the next part of a message has to come, once the message has begun."""
FIRST_BYTES = 64 << 10
"""Most bytes of a request before the session is attached."""
OTHERS_BYTES = 256 << 20
"""Most bytes of a request of a user who does not run the machine: on one host tensors lie in shared memory."""


class SessionLimits:
    """The sessions of a server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_user: Counter[int] = Counter()

    @contextlib.contextmanager
    def session(self, caller: Caller) -> Iterator[str]:
        """A session of a caller for as long as the context lasts. Yields the reason for a refusal, or an empty text."""
        refusal = ""
        with self._lock:
            if self._of_user.total() >= SESSIONS:
                refusal = f"this machine has {SESSIONS} sessions already"
            elif not caller.own and self._of_user[caller.uid] >= SESSIONS_OF_OTHERS:
                refusal = f"user {user_name(caller.uid)} has {SESSIONS_OF_OTHERS} sessions with this machine already"
            else:
                self._of_user[caller.uid] += 1
        if refusal:
            log.warning("a session of user %s is refused: %s", user_name(caller.uid), refusal)
        try:
            yield refusal
        finally:
            if not refusal:
                with self._lock:
                    self._of_user[caller.uid] -= 1

    def most_bytes(self, caller: Caller, attached: bool) -> int:
        """The longest request of a session."""
        if not attached:
            return FIRST_BYTES
        return WHOLE_BYTES if caller.own else OTHERS_BYTES


class Patience:
    """Ends a session whose process does not send an expected message in time. ``end``: cancels its stream."""

    def __init__(self, caller: Caller, end: Callable[[], object]) -> None:
        self._caller, self._end = caller, end
        self._timer: threading.Timer | None = None

    def until(self, seconds: float, what: str) -> None:
        """Expect ``what`` within so many seconds; replaces the previous expectation."""
        self.stop()
        self._timer = threading.Timer(seconds, self._late, (seconds, what))
        self._timer.daemon = True
        self._timer.name = "podrun-patience"
        self._timer.start()

    def stop(self) -> None:
        """Expect nothing more: the time limit no longer runs. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, seconds: float, what: str) -> None:
        log.warning(
            "a session of user %s is ended: no %s within %g s", user_name(self._caller.uid), what, seconds
        )
        self._end()
