"""Memory is handed over as file descriptors; numbers and names alone open nothing."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.shared_region import SharedRegion
from podrun.device.service import handover
from podrun.device.service.handover import MemoryReceiver, MemorySender
from tests import other_users


@pytest.fixture
def receiver() -> Iterator[MemoryReceiver]:
    made = MemoryReceiver(os.getuid())
    yield made
    made.close()


@pytest.fixture
def sender(receiver: MemoryReceiver) -> Iterator[MemorySender]:
    made = MemorySender(receiver.name)
    yield made
    made.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_is_handed_over_is_shared(receiver: MemoryReceiver, sender: MemorySender) -> None:
    before = open_files()
    first, second = (SharedRegion.create("test", size) for size in (4096, 64))
    numbers = sender.give(first), sender.give(second)
    late = receiver.take(numbers[1], 64)
    early = receiver.take(numbers[0], 4096)
    early[:3] = 1, 2, 3
    assert first.bytes[:3].tolist() == [1, 2, 3]
    second.bytes[5] = 9
    assert late[5] == 9
    first.close()
    second.close()
    del first, second, early, late
    assert open_files() == before  # the listener is closed, the connection open


def test_a_number_that_was_not_handed_over_is_refused(
    receiver: MemoryReceiver, sender: MemorySender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PATIENCE_S", 0.1)
    with pytest.raises(ApplicationRuntimeError, match="was not handed over"):
        receiver.take(1, 64)
    region = SharedRegion.create("test", 64)
    number = sender.give(region)
    receiver.take(number, 64)
    with pytest.raises(ApplicationRuntimeError, match="was not handed over"):
        receiver.take(number, 64)  # once only
    sender.close()
    with pytest.raises(ApplicationRuntimeError, match="was not handed over"):
        receiver.take(7, 64)
    region.close()


def unsealed() -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 64)
    return fd


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (unsealed, "not sealed"),
        (lambda: os.open("/dev/zero", os.O_RDWR), "not sealed"),
        (lambda: os.open("/dev/null", os.O_RDONLY), "not sealed"),
        (lambda: socket.socketpair()[0].detach(), "not sealed"),
    ],
)
def test_other_files_are_refused(
    receiver: MemoryReceiver, sender: MemorySender, make: Callable[[], int], reason: str
) -> None:
    fd = make()
    socket.send_fds(sender._socket, [handover._NUMBER.pack(1, 64)], [fd])
    os.close(fd)
    before = open_files()
    with pytest.raises(ApplicationRuntimeError, match=reason):
        receiver.take(1, 64)
    assert open_files() <= before + 1


def test_another_size_than_announced_is_refused(receiver: MemoryReceiver, sender: MemorySender) -> None:
    region = SharedRegion.create("test", 64)
    number = sender.give(region)
    with pytest.raises(ApplicationRuntimeError, match="has 64 bytes, not the 128 announced"):
        receiver.take(number, 128)
    region.close()


def test_a_flood_of_files_is_bounded(receiver: MemoryReceiver, sender: MemorySender) -> None:
    region = SharedRegion.create("test", 64)
    before = open_files()

    def flood() -> None:
        for _ in range(4 * handover._MOST_AHEAD):
            sender.give(region)

    thread = threading.Thread(target=flood, daemon=True)
    thread.start()
    with pytest.raises(ApplicationRuntimeError, match="was not handed over"):
        receiver.take(10_000, 64)
    assert open_files() <= before + handover._MOST_AHEAD + 2
    receiver.close()
    thread.join(10)
    assert not thread.is_alive()
    region.close()


def test_the_crash_record_comes_back() -> None:
    record, region = SharedRegion.create("test", 128), SharedRegion.create("test", 64)
    receiver = MemoryReceiver(None, record.fd)
    sender = MemorySender(receiver.name)
    receiver.take(sender.give(region), 64)
    receiver.close()  # as if the machine's process had died
    found = sender.record()
    assert found is not None
    fd, pid = found
    assert pid == os.getpid()
    record.bytes[3] = 5
    assert SharedRegion.adopt(fd).bytes[3] == 5
    assert sender.record() is None
    sender.close()


@pytest.mark.parametrize("name", [b"", b"/tmp/x", b"\0podrun-" + bytes(24), b"\0podrun-" + b"0" * 24])
def test_a_socket_that_is_not_there_is_an_oserror(name: bytes) -> None:
    with pytest.raises(OSError, match=r".*"):
        MemorySender(name)


@pytest.mark.system
@pytest.mark.skipif(bool(other_users.needs()), reason=f"needs {other_users.needs()}")
def test_another_users_process_hands_nothing_over(receiver: MemoryReceiver, tmp_path: Path) -> None:
    """The kernel identifies a process that guesses or overhears the name as another user's."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "s.connect(bytes.fromhex(sys.argv[1])); print(len(s.recv(16)))"
    )
    words = other_users.words(other_users.BOB, sys.executable, "-c", code, receiver.name.hex())
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as bob:
        with pytest.raises(ApplicationRuntimeError, match="another user's"):
            receiver.take(1, 64)
        assert bob.communicate(timeout=20)[0].strip() == "0"
