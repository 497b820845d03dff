"""Memory is handed over as file descriptors; numbers and names alone open nothing."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from podrun.core.errors import ApplicationRuntimeError
from podrun.core.own_sockets import peer_uid
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
    made = MemorySender(receiver.name, os.getuid())
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
    with monkeypatch.context() as hasty:
        hasty.setattr(handover, "PATIENCE_S", 0.1)
        with pytest.raises(ApplicationRuntimeError, match="was not handed over"):
            receiver.take(1, 64)
    region = SharedRegion.create("test", 64)
    number = sender.give(region)
    receiver.take(number, 64)
    monkeypatch.setattr(handover, "PATIENCE_S", 0.1)
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
    thread.join(60)
    assert not thread.is_alive()
    region.close()


def test_the_crash_record_comes_back() -> None:
    record, region = SharedRegion.create("test", 128), SharedRegion.create("test", 64)
    receiver = MemoryReceiver(os.getuid(), record.fd)
    sender = MemorySender(receiver.name, os.getuid())
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


@pytest.mark.parametrize(
    "name", [b"", b"memory-1", b"/tmp/x", b"/tmp/memory-1", b"/etc/memory-\0", b"\0podrun-" + b"0" * 24]
)
@pytest.mark.parametrize("uid", [os.getuid(), os.getuid() + 1])
def test_a_socket_that_is_not_there_is_an_oserror(name: bytes, uid: int) -> None:
    with pytest.raises((OSError, ValueError), match=r".*"):
        MemorySender(name, uid)


def test_the_socket_lies_where_only_its_user_enters(receiver: MemoryReceiver) -> None:
    path = Path(os.fsdecode(receiver.name))
    assert stat.S_ISSOCK(path.lstat().st_mode)
    assert stat.S_IMODE(path.parent.lstat().st_mode) == 0o700
    assert path.parent.lstat().st_uid == os.getuid()
    region = SharedRegion.create("test", 64)
    sender = MemorySender(receiver.name, os.getuid())
    receiver.take(sender.give(region), 64)
    assert not path.exists()  # It has served its purpose.
    sender.close()
    region.close()


def test_an_unused_socket_goes_with_its_session() -> None:
    receiver = MemoryReceiver(os.getuid())
    receiver.close()
    assert not Path(os.fsdecode(receiver.name)).exists()


def test_a_wrong_peer_is_refused_and_the_right_one_still_comes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever connects first may not be the process that the memory is for."""
    stranger, record = os.getuid() + 7, SharedRegion.create("test", 128)
    receiver = MemoryReceiver(os.getuid(), record.fd)
    uids = iter([stranger, stranger, os.getuid()])
    monkeypatch.setattr(handover, "peer_uid", lambda connection: next(uids))
    others = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(2)]
    for other in others:
        other.connect(receiver.name)
    rightful = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    rightful.connect(receiver.name)
    region = SharedRegion.create("test", 64)
    socket.send_fds(rightful, [handover._NUMBER.pack(1, 64)], [region.fd])
    receiver.take(1, 64)[0] = 7
    assert region.bytes[0] == 7
    for other in others:
        assert socket.recv_fds(other, 64, 4)[:2] == (b"", [])  # Closed, and nothing was sent before.
        other.close()
    assert socket.recv_fds(rightful, 64, 1)[1]
    assert caplog.text.count("was refused the shared memory") == 2
    rightful.close()
    receiver.close()
    record.close()
    region.close()


def test_nothing_is_handed_to_a_listener_of_another_user(
    receiver: MemoryReceiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handover, "peer_uid", lambda connection: os.getuid() + 7)
    with pytest.raises(PermissionError, match="another user's"):
        MemorySender(receiver.name, os.getuid())
    assert "nothing was handed over" in caplog.text


@pytest.mark.system
@pytest.mark.skipif(bool(other_users.needs()), reason=f"needs {other_users.needs()}")
def test_another_user_who_connects_first_gets_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both kinds of names stand in /proc/net/unix. The kernel identifies who connects, and who listens."""
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "try:\n s.connect(bytes.fromhex(sys.argv[1]))\nexcept OSError as e: sys.exit(type(e).__name__)\n"
        "print('connected', flush=True); print(len(socket.recv_fds(s, 64, 4)[0]))"
    )

    def connects(uid: int, name: bytes) -> subprocess.Popen[str]:
        user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups"]
        words = [*user, "/usr/bin/env", "python3", "-S", "-E", "-c", code, name.hex()]
        return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    mine = MemoryReceiver(os.getuid())
    with connects(other_users.BOB, mine.name) as bob:
        assert bob.communicate(timeout=60)[1].strip() == "PermissionError"
    mine.close()
    bobs = MemoryReceiver(other_users.BOB)
    assert bobs.name.startswith(b"\0")
    with connects(other_users.ALICE, bobs.name) as alice:
        assert alice.stdout is not None
        assert alice.stdout.readline() == "connected\n"
        with connects(other_users.BOB, bobs.name) as bob:
            assert bob.stdout is not None
            assert bob.stdout.readline() == "connected\n"
            connection = bobs._connected()
            assert peer_uid(connection) == other_users.BOB
            bobs.close()
            assert alice.communicate(timeout=60)[0].strip() == "0"
            assert bob.communicate(timeout=60)[0].strip() == "0"
    assert f"a process of {other_users.ALICE} was refused" in caplog.text
