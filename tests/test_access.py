"""The token: kept for its user alone, shown with every call, asked for by servers on a network."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from podrun import access
from podrun.cluster import load_cluster
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.errors import ServiceError, UsageError
from podrun.partition.client import VipuClient
from podrun.partition.machine_pool import LocalMachinePool
from podrun.partition.service import Service
from podrun.partition.store import Store

TOKEN = "a-token-of-this-test"


def test_it_is_made_once_and_read_by_its_user_alone(tmp_path: Path) -> None:
    assert access.known_token({}, tmp_path) == ""
    token = access.make_token({}, tmp_path)
    assert len(token) == 64
    assert access.make_token({}, tmp_path) == access.known_token({}, tmp_path) == token
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600
    assert access.make_token({access.VARIABLE: TOKEN}, tmp_path) == TOKEN
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    with pytest.raises(UsageError, match="printable"):
        access.known_token({access.VARIABLE: "short"}, None)


def test_what_only_this_host_reaches() -> None:
    assert all(map(access.is_loopback, ("127.0.0.1", "localhost", "::1", "127.1.2.3")))
    assert not any(map(access.is_loopback, ("10.0.0.1", "0.0.0.0", "hosta")))


def test_a_machine_with_a_token_wants_it() -> None:
    server = MachineServer(agent_id="agent0", token=TOKEN)
    endpoint = server.start()
    try:
        for wrong in ("", "another-token-than-that"):
            stranger = MachineControl(endpoint, token=wrong)
            with pytest.raises(ServiceError, match="UNAUTHENTICATED"):
                stranger.telemetry()
            stranger.close()
        friend = MachineControl(endpoint, token=TOKEN)
        assert friend.telemetry().agent_id == "agent0"
        friend.close()
    finally:
        server.stop()


def test_a_service_with_a_token_wants_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster = load_cluster("pod16")
    service = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
    port = service.start("127.0.0.1", 0, TOKEN)
    monkeypatch.setenv("PODRUN_RUNTIME_DIR", str(tmp_path))
    # To a loopback address clients show no token: whoever listens there may be somebody else.
    monkeypatch.setattr("podrun.partition.client.is_loopback", lambda host: False)
    try:
        with (
            VipuClient("127.0.0.1", port, timeout=10) as client,
            pytest.raises(ServiceError, match="PODRUN_TOKEN"),
        ):
            client.list_partitions()
        monkeypatch.setenv(access.VARIABLE, TOKEN)
        with VipuClient("127.0.0.1", port, timeout=10) as client:
            assert client.list_partitions() == []
    finally:
        service.stop()
