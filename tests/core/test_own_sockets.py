"""Sockets that only their user reaches: the folder is checked, whatever its path."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from podrun.core import own_sockets
from podrun.core.shared_region import SharedRegion
from podrun.device.service.handover import MemoryReceiver, MemorySender

TOKEN = "a-token-of-this-test"


def listener(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    with own_sockets.reached_by(path) as name:
        made.bind(name)
    made.listen()
    return made


@pytest.mark.parametrize("kind", ["link", "open", "foreign", "missing"])
def test_a_folder_that_is_not_the_users_alone_is_not_used(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "real"
    folder.mkdir(mode=0o700)
    made = listener(folder / "s")
    assert own_sockets.listens_for_me(folder / "s")
    if kind == "link":
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link"
    elif kind == "open":
        folder.chmod(0o711)
    elif kind == "missing":
        folder = tmp_path / "missing"
    else:
        if os.getuid() != 0:
            pytest.skip("needs root")
        os.chown(folder, 12345, 12345)
    with pytest.raises(OSError, match=r".*"), own_sockets.reached_by(folder / "s"):
        pass
    assert not own_sockets.listens_for_me(folder / "s")
    made.close()


def test_another_users_listener_is_not_for_me(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    made = listener(tmp_path / "s")
    for uid, welcome in ((os.getuid(), True), (0, True), (os.getuid() + 1_000_007, False)):
        monkeypatch.setattr(own_sockets, "peer_uid", lambda connection, uid=uid: uid)
        assert own_sockets.listens_for_me(tmp_path / "s") is welcome
    made.close()


def test_memory_is_handed_over_below_a_path_of_any_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(deep))
    receiver = MemoryReceiver(os.getuid())
    sender = MemorySender(receiver.name, os.getuid())
    region = SharedRegion.create("test", 64)
    receiver.take(sender.give(region), 64)[0] = 3
    assert region.bytes[0] == 3
    for each in (sender, receiver, region):
        each.close()
    assert own_sockets.server_socket(own_sockets.socket_folder(), TOKEN, "127.0.0.1:8090") is None


def test_names_tell_servers_and_users_apart(tmp_path: Path) -> None:
    folder = Path("/run")
    names = {
        own_sockets.server_socket(folder, token, address)
        for token in (TOKEN, "another-token-than-that")
        for address in ("127.0.0.1:8090", "127.0.0.1:8091", "[::1]:8090", "*:8090")
    }
    assert len(names) == 8
    assert not any(TOKEN in str(name) for name in names)


def test_sockets_of_processes_that_ended_go_and_others_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    folder = own_sockets.socket_folder()
    listener(folder / "dead").close()
    alive = listener(folder / "alive")
    (folder / "file").touch()
    own_sockets.remove_stale_sockets()  # It may be about to listen.
    assert len(list(folder.iterdir())) == 3
    own_sockets.remove_stale_sockets(now=time.time() + own_sockets.STALE_S + 1)
    assert {path.name for path in folder.iterdir()} == {"alive", "file"}
    alive.close()


def test_the_socket_of_a_machine_goes_before_it_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(own_sockets, "LONGEST_PATH", 500)  # pytest's is long.
    path = own_sockets.server_socket(own_sockets.socket_folder(), TOKEN, "127.0.0.1:1")
    assert path is not None
    made = listener(path)
    own_sockets.remove_server_socket(TOKEN, "127.0.0.1:2")
    assert path.exists()
    own_sockets.remove_server_socket(TOKEN, "127.0.0.1:1")
    assert not path.exists()
    own_sockets.remove_server_socket(TOKEN, "127.0.0.1:1")
    made.close()
