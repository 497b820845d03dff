"""All connections of one rank to the ranks on other hosts, and the rule by which it reads from them.

A rank reads only from links that owe it something in the current collective: `Mesh.collect` gets the number of frames
that each peer owes. So a peer that runs ahead has to wait, and a frame of another collective can only mean that ranks
called different collectives. Messages of `send` may arrive in between; they are stored for `receive`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from podrun.collectives.barrier import label_text
from podrun.collectives.connection_security import Admission, Hello, Introduction, accepted, dialled
from podrun.collectives.group import (
    ByteArray,
    HostLimitError,
    MismatchError,
    RankLostError,
    RankMissingError,
    different_collectives,
    within_limits,
)
from podrun.collectives.tcp_link import NEAR, FrameKind, LinkFrame, RankLink, dial, round_trip
from podrun.core.tls import credentials

_GRACE = 0.3
"""Seconds in which rank 0 may still report why a peer closed its connection."""
_CHECK_EVERY = 0.1
"""Seconds between two checks, while waiting for connections, of whether the group has failed."""
_REPORT_AFTER = 0.25
"""Seconds after which a waiting rank reports it: ranks of different collectives may all wait for each other."""
_CLOSE_WITHIN = 5.0
"""Seconds that all ranks together may take to accept what is still in transit to them when this one leaves."""
_NOTHING: ByteArray = np.empty(0, np.uint8)


class Mesh:
    """All connections of one rank to the ranks on other hosts. ``check(seconds)`` raises the error that ended the
    group, if it is known within ``seconds``; ``report`` is called when a collective waits long.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        timeout: float,
        check: Callable[[float], None],
        report: Callable[[], None],
    ) -> None:
        self.rank, self._size, self._timeout, self._check, self._report = rank, size, timeout, check, report
        self.links: dict[int, RankLink] = {}
        self._messages: list[tuple[int, int, str, ByteArray]] = []
        self._selector = selectors.DefaultSelector()
        self._halves: dict[tuple[int, bool], socket.socket] = {}
        self._tls = credentials()
        self._accepted = partial(accepted, ours=self._tls)

    def connect(
        self,
        remote: Sequence[int],
        roster: Sequence[Mapping[str, Any]],
        key: bytes,
        listener: socket.socket,
        deadline: float,
    ) -> None:
        """Connect to the remote ranks below this one, then admit those above, which prove to know the key."""
        for peer in (rank for rank in remote if rank < self.rank):
            self._check(0.0)
            try:
                with within_limits(f"connection to rank {peer}"):
                    self._dial(peer, str(roster[peer]["address"]), int(roster[peer]["port"]), key, deadline)
            except OSError as error:
                self._check(_GRACE)
                raise RankLostError(
                    f"rank {self.rank} cannot reach rank {peer} at {roster[peer]['address']}: {error}",
                    rank=peer,
                    hint="Check that the rank still runs, and that no firewall blocks its port.",
                ) from error
        awaited = {rank for rank in remote if rank > self.rank}
        with contextlib.closing(Admission(listener, key, 2 * len(awaited), self._accepted)) as admission:
            while awaited:
                self._check(0.0)
                if time.monotonic() >= deadline:
                    ranks = tuple(sorted(awaited))
                    named = ", ".join(map(str, ranks))
                    raise RankMissingError(
                        f"rank {named} did not connect to rank {self.rank}",
                        ranks=ranks,
                        hint="Check that it still runs, and that no firewall blocks this host's ports.",
                    )
                for hello, sock in admission.admitted(_CHECK_EVERY):
                    self._admit(hello, sock, awaited)

    def _dial(self, peer: int, address: str, port: int, key: bytes, deadline: float) -> None:
        """Make both connections to a listening rank."""
        with contextlib.ExitStack() as opened:
            outgoing, incoming = (opened.enter_context(dial(address, port, deadline)) for _ in range(2))
            near = min(round_trip(outgoing), round_trip(incoming)) < NEAR
            outgoing, incoming = (
                opened.enter_context(dialled(proven_key, address, self._tls))
                for proven_key in (outgoing, incoming)
            )
            hellos = Hello(self.rank, False, near), Hello(self.rank, True, near)
            met = [Introduction(hello, key) for hello in hellos]
            for sock, introduction in zip((outgoing, incoming), met, strict=True):
                sock.sendall(introduction.said)
            for sock, introduction in zip((outgoing, incoming), met, strict=True):
                sock.sendall(introduction.answered(self._answer(sock, peer, deadline)))
            self.links[peer] = RankLink(peer, outgoing, incoming, near=near)
            opened.pop_all()

    def _answer(self, sock: socket.socket, peer: int, deadline: float) -> bytes:
        """What a listening rank answers; it may be connecting to others itself until then."""
        answer = bytearray()
        sock.settimeout(_CHECK_EVERY)
        while len(answer) < Introduction.answer_bytes():
            try:
                data = sock.recv(Introduction.answer_bytes() - len(answer))
            except TimeoutError:
                self._check(0.0)
                if time.monotonic() >= deadline:
                    raise RankMissingError(
                        f"rank {peer} did not answer rank {self.rank}, which connects to it",
                        ranks=(peer,),
                        hint="Check what that rank does, or use a longer timeout.",
                    ) from None
                continue
            if not data:
                raise ConnectionResetError("it closed the connection")
            answer += data
        return bytes(answer)

    def _admit(self, hello: Hello, sock: socket.socket, awaited: set[int]) -> None:
        """Take one of a member's two connections; the second completes the link."""
        half = (hello.rank, hello.outgoing)
        if hello.rank not in awaited or half in self._halves:
            sock.close()
            return
        self._halves[half] = sock
        if (hello.rank, not hello.outgoing) in self._halves:
            outgoing, incoming = self._halves.pop((hello.rank, True)), self._halves.pop((hello.rank, False))
            self.links[hello.rank] = RankLink(hello.rank, outgoing, incoming, near=hello.near)
            awaited.remove(hello.rank)

    def post(
        self,
        peer: int,
        kind: FrameKind,
        what: bytes,
        a: int = 0,
        b: int = 0,
        tag: int = 0,
        payload: ByteArray = _NOTHING,
    ) -> None:
        """Queue a frame; its payload must not change until `drain`."""
        self.links[peer].post(LinkFrame(kind, a, b, tag, payload.size, what), payload)

    def keep_in_caches(self) -> None:
        """Prepare all links for much data: see `RankLink.keep_in_caches`."""
        for link in self.links.values():
            link.keep_in_caches()

    def drain(self) -> None:
        """Wait until the kernel has taken everything that was posted."""
        deadline = time.monotonic() + self._timeout
        for link in self.links.values():
            link.drain(deadline)

    def fill(self, link: RankLink, frame: LinkFrame, out: ByteArray, deadline: float) -> None:
        """Receive the payload of a frame. Raises MismatchError if it has another size than ``out``."""
        if frame.nbytes != out.size:
            raise MismatchError(
                f"rank {link.peer} sent {frame.nbytes} bytes in {label_text(frame.label)}, not {out.size}"
            )
        link.receive_into(out, deadline)

    def collect(
        self,
        what: bytes,
        owed: dict[int, int],
        take: Callable[[RankLink, LinkFrame, float], None] | None,
    ) -> None:
        """Receive the frames that ranks owe, in the order of arrival; ``owed`` has their number by rank.

        ``take`` handles each frame; None: wait for messages of `send` instead.
        """
        began = time.monotonic()
        deadline = began + self._timeout
        reported = False
        owed = {peer: number for peer, number in owed.items() if number}
        for peer in owed:
            self._selector.register(self.links[peer].incoming, selectors.EVENT_READ, self.links[peer])
        try:
            while owed:
                left = max(deadline - time.monotonic(), 0)
                events = self._selector.select(left if reported else min(left, _REPORT_AFTER))
                self._check(0.0)
                if not events and not reported:
                    reported = True
                    self._report()
                elif not events:
                    ranks = tuple(sorted(owed))
                    raise RankMissingError(
                        f"{label_text(what)} on rank {self.rank} waited {time.monotonic() - began:.1f} s "
                        f"for rank {', '.join(map(str, ranks))}, of {self._size} ranks",
                        ranks=ranks,
                        hint="Check what those ranks do (py-spy dump --pid PID), or use a longer timeout.",
                    )
                for key, _ in events:
                    if self._take_frame(key.data, what, take, deadline):
                        owed[key.data.peer] -= 1
                        if not owed[key.data.peer]:
                            del owed[key.data.peer]
                            self._selector.unregister(key.fileobj)
        finally:
            for peer in owed:
                self._selector.unregister(self.links[peer].incoming)

    def _take_frame(
        self,
        link: RankLink,
        what: bytes,
        take: Callable[[RankLink, LinkFrame, float], None] | None,
        deadline: float,
    ) -> bool:
        """Receive one frame; whether it was owed. Messages that arrive in between are stored for `receive`."""
        try:
            frame = link.receive_frame(deadline)
        except RankLostError as error:
            self._check(_GRACE)
            message = f"{error.message}, in {label_text(what)}"
            raise RankLostError(message, rank=error.rank, hint=error.hint) from error
        except RankMissingError as error:
            self._check(_GRACE)
            message = f"{error.message}, in {label_text(what)}"
            raise RankMissingError(message, ranks=error.ranks, hint=error.hint) from error
        if frame.kind is FrameKind.MESSAGE:
            try:
                payload = np.empty(frame.nbytes, np.uint8)
            except (MemoryError, ValueError) as error:
                message = (
                    f"rank {self.rank} has no memory for {frame.nbytes} bytes that rank {link.peer} sends"
                )
                raise HostLimitError(message, hint="Send less at once.") from error
            link.receive_into(payload, deadline)
            self._messages.append((link.peer, frame.tag, label_text(frame.label), payload))
            return take is None
        if frame.label != what or take is None:
            raise different_collectives((self.rank, label_text(what)), (link.peer, label_text(frame.label)))
        try:
            take(link, frame, deadline)
        except (LookupError, ValueError) as error:
            message = f"rank {link.peer} sent a part that {label_text(what)} does not have"
            raise RankLostError(message, rank=link.peer, hint="Make a new group.") from error
        return True

    def message(self, source: int, tag: int) -> tuple[str, ByteArray] | None:
        """The dtype and bytes of the first stored message from a rank with a tag; None if there is none."""
        for message in self._messages:
            if message[:2] == (source, tag):
                self._messages.remove(message)
                return message[2:]
        return None

    def wake(self) -> None:
        """End all waiting. Called from any thread."""
        for link in list(self.links.values()):
            link.wake()

    def close(self) -> None:
        """Send what is queued, for at most `_CLOSE_WITHIN` seconds, and close."""
        deadline = time.monotonic() + _CLOSE_WITHIN
        for link in self.links.values():
            link.close(max(0.0, deadline - time.monotonic()))
        for sock in self._halves.values():
            sock.close()
        self._selector.close()
