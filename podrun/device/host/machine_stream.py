"""The stream of requests to one machine and its replies, which ends with the reason for the machine's loss."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from podrun.core.access import StrangersServerError, why_unreachable
from podrun.core.environment import environment
from podrun.core.error_codec import copy_error
from podrun.core.errors import ApplicationRuntimeError, DeadlineError, PoplarError, UnrecoverableRuntimeError
from podrun.core.proven_channel import ProvenChannel
from podrun.device.crash_records import CrashReader
from podrun.device.error_messages import batches_in_words, machine_lost
from podrun.device.host.ports import Site
from podrun.device.service import wire
from podrun.device.service.doorbell import deadline
from podrun.device.service.handover import MemorySender
from podrun.protos import ipuof_pb2 as pb
from podrun.protos.services import stub_of

CHECK_SECONDS = 0.1
"""Seconds between checks, while waiting for a run, that the machine is still there."""


class JobLosses:
    """The machines of one job that were lost, so that whoever waits for one machine learns that another is gone: the
    machines that are left wait for the lost one, and may answer only after the host sync timeout.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: tuple[float, PoplarError] | None = None

    def note(self, error: PoplarError) -> None:
        """A machine is lost. The first loss counts."""
        self._first = self._first or (self._clock(), error)

    def check(self) -> None:
        """Raise the first loss, once the machines that are left have had time to say more about it."""
        if self._first is not None and self._clock() - self._first[0] > OTHERS_SECONDS:
            raise copy_error(self._first[1])


OTHERS_SECONDS = 2.0
"""From the loss of a machine until whoever waits for another machine of the job is told."""


class MachineStream:
    """Sends requests; a reader thread queues the replies, which come in order."""

    def __init__(self, site: Site, ipu: int, channel: ProvenChannel, losses: JobLosses) -> None:
        self._site, self._ipu = site, ipu
        self._losses = losses
        self._channel = channel
        self._requests: queue.SimpleQueue[pb.HostRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.MachineReply | PoplarError] = queue.SimpleQueue()
        self._lost: PoplarError | None = None
        self._closing = False
        self.memory: MemorySender | None = None
        self.batches: tuple[int, int] | None = None
        """Batches done, and batches of the run under way: for the error message if the machine is lost. None: no
        program was loaded."""
        call = stub_of(pb, "Ipuof", self._channel).Session(
            part for request in iter(self._requests.get, None) for part in wire.in_parts(request)
        )
        self._call = call
        self._reader = threading.Thread(
            target=self._read, args=(call,), name=f"podrun-ipuof-{site.machine}", daemon=True
        )
        self._reader.start()

    def send(self, request: pb.HostRequest) -> Callable[[float | None], pb.MachineReply]:
        """Send a request; returns a function that waits for its reply. Waits have to be called in the order of
        requests.
        """
        if self._lost is not None:
            raise self._lost
        wire.check_size(request)
        self._requests.put(request)
        return self._receive

    @property
    def server_uid(self) -> int:
        """The user who runs the machine; known after its first answer."""
        return self._channel.server_uid

    def check(self) -> None:
        """Raises UnrecoverableRuntimeError if the machine, or another one of the job, is gone."""
        if self._lost is not None:
            raise self._lost
        self._losses.check()

    def close(self) -> None:
        """End the stream; the machine releases the IPUs."""
        self._closing = True
        self._requests.put(None)
        self._reader.join(2.0)
        self._call.cancel()
        self._channel.close()
        if self.memory is not None:
            self.memory.close()

    def _receive(self, seconds: float | None) -> pb.MachineReply:
        if self._lost is not None and self._replies.empty():
            raise self._lost
        reply = self._next_reply(seconds)
        if isinstance(reply, PoplarError):
            raise reply
        wire.raise_error(reply.error_json)
        return reply

    def _next_reply(self, seconds: float | None) -> pb.MachineReply | PoplarError:
        end = deadline(seconds)
        while True:
            try:
                return self._replies.get(timeout=max(min(CHECK_SECONDS, end - time.monotonic()), 0.0))
            except queue.Empty:
                self._losses.check()
            if time.monotonic() >= end:
                raise DeadlineError(
                    f"machine {self._site.machine} at {self._site.endpoint} did not answer within {seconds} s"
                ) from None

    def _read(self, call: Iterator[pb.MachineReply]) -> None:
        try:
            whole = wire.MessageJoiner(pb.MachineReply)
            for piece in call:
                reply = whole.add(piece)
                if reply is not None:
                    self._replies.put(reply)
            reason = "CONNECTION_CLOSED"
        except grpc.RpcError as error:
            status, _ = wire.status_of(error)
            unreachable = why_unreachable(self._site.endpoint) if status == "UNAVAILABLE" else ""
            reason = unreachable or ("CONNECTION_KILL" if status == "UNAVAILABLE" else status)
        except ApplicationRuntimeError as error:
            reason = error.message
        except StrangersServerError as error:
            self._end(UnrecoverableRuntimeError(error.message, hint=error.hint))
            return
        self._end(
            self._death()
            or machine_lost(
                self._site.endpoint,
                self._site.machine,
                self._ipu,
                reason,
                doing=batches_in_words(*self.batches) if self.batches is not None else "",
            )
        )

    def _end(self, error: PoplarError) -> None:
        """Have whoever waits, and all requests from now on, raise the error."""
        if not self._closing:
            self._lost = error
            self._replies.put(error)
            self._losses.note(error)

    def _death(self) -> PoplarError | None:
        """The error of a machine's process whose native code died; None otherwise."""
        record = None if self.memory is None else self.memory.record()
        if record is None:
            return None
        try:
            reader = CrashReader.handed_over(*record)
        except ApplicationRuntimeError:  # the loss is then reported without the cause
            return None
        return reader.error(self._site.machine, self._site.endpoint, environment())
