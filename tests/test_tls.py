"""TLS where it is asked for: holders of a certificate of the authority can connect, and everybody else is told what to
do.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podrun.collectives import create, join_group
from podrun.core import tls
from podrun.core.cluster_file import load_cluster
from podrun.core.errors import ConfigError, PodrunError, ServiceError, UsageError
from podrun.device.service.control import MachineControl
from podrun.device.service.server import MachineServer
from podrun.partition.client.vipu_client import VipuClient
from podrun.partition.machines.local_pool import LocalMachinePool
from podrun.partition.server.service import Service
from podrun.partition.state.store import Store
from tests.certificates import MISSING, Authority

pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}")
NOTHING: dict[str, str] = {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """The variables of hosts, good and bad."""
    directory = tmp_path_factory.mktemp("tls")
    ours, others = Authority(directory / "a"), Authority(directory / "b")
    return {
        "good": ours.host("good"),
        "also good": ours.host("second"),
        "expired": ours.host("expired", days=-1),
        "elsewhere": ours.host("elsewhere", "DNS:elsewhere.example"),
        "other authority": others.host("other"),
        "none": NOTHING,
    }


@contextlib.contextmanager
def variables(values: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in tls.VARIABLES:
            patch.delenv(name, raising=False)
        for name, value in values.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def service(made: dict[str, dict[str, str]]) -> Iterator[int]:
    cluster = load_cluster("pod16")
    running = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
    with variables(made["good"]):
        port = running.start("127.0.0.1", 0)
        yield port
        running.stop(grace=0)


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ("also good", ""),
        ("none", "speaks TLS, and this process has no certificate: set PODRUN_TLS_CERT"),
        ("expired", "expired.pem has expired: make a new one"),
        ("elsewhere", r"is for other names: .*\(expected: elsewhere.example"),
        ("other authority", r"is not of the authority in \$PODRUN_TLS_CA"),
    ],
)
def test_clients_of_a_server(made: dict[str, dict[str, str]], service: int, who: str, said: str) -> None:
    with variables(made[who]):
        if not said:
            with VipuClient("127.0.0.1", service, own=True) as client:
                assert client.server_version().port == service
            return
        with (
            pytest.raises(PodrunError, match=said) as caught,
            VipuClient("127.0.0.1", service, own=True) as client,
        ):
            client.server_version()
        assert "podrun help security" in f"{caught.value.message} {caught.value.hint}"


def test_a_server_without_tls_is_told_from_one_that_is_not_there(made: dict[str, dict[str, str]]) -> None:
    cluster = load_cluster("pod16")
    running = Service(cluster, Store(None, "pod16"), LocalMachinePool(cluster))
    with variables(NOTHING):
        port = running.start("127.0.0.1", 0)
    try:
        with variables(made["good"]), VipuClient("127.0.0.1", port) as client:
            with pytest.raises(
                ServiceError, match="does not speak TLS: start it with the same PODRUN_TLS_CERT"
            ):
                client.server_version()
            running.stop(grace=0)
            with pytest.raises(ServiceError, match="no V-IPU server answers"):
                client.server_version()
    finally:
        running.stop(grace=0)


def test_machines_speak_tls(made: dict[str, dict[str, str]]) -> None:
    with variables(made["good"]):
        server = MachineServer(token="a-secret-of-this-test")
        endpoint = server.start()
        try:
            control = MachineControl(endpoint, token="a-secret-of-this-test")
            assert control.telemetry().partition == ""
            control.close()
            with variables(NOTHING):
                control = MachineControl(endpoint, token="a-secret-of-this-test")
                with pytest.raises(ServiceError, match="speaks TLS, and this process has no certificate"):
                    control.telemetry()
                control.close()
        finally:
            server.stop()


class Wire:
    """Passes a connection on and keeps what goes over it."""

    def __init__(self) -> None:
        self.heard = bytearray()

    def listen_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Keep what TLS and plain connections of groups send."""
        from podrun.collectives import connection_security

        whole = connection_security._relayed
        wire = self

        class Tapped:
            def __init__(self, sock: Any) -> None:
                self._sock = sock

            def send(self, data: Any) -> int:
                count = int(self._sock.send(data))
                wire.heard += bytes(data[:count])
                return count

            def __getattr__(self, name: str) -> Any:
                return getattr(self._sock, name)

        monkeypatch.setattr(connection_security, "_relayed", lambda sock, *rest: whole(Tapped(sock), *rest))


def test_groups_over_hosts_send_nothing_that_can_be_read(
    made: dict[str, dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = Wire()
    wire.listen_in(monkeypatch)
    secret = b"the weights of a model" * 4000
    with variables(made["good"]):
        first, token = create(2, address="127.0.0.1", timeout=20, host="A")
        second = join_group(token, 1, host="B")
        got: list[bytes] = []

        def other() -> None:
            import numpy as np

            out = np.empty(len(secret), np.uint8)
            second.receive(out, 0)
            got.append(out.tobytes())
            second.barrier()

        thread = threading.Thread(target=other)
        thread.start()
        import numpy as np

        first.send(np.frombuffer(secret, np.uint8), 1)
        first.barrier()
        thread.join(60)
        second.close()
        first.close()
    assert got == [secret]
    assert len(wire.heard) > len(secret)
    assert b"weights" not in wire.heard
    assert b"roster" not in wire.heard
    assert token["key"].encode() not in wire.heard


@pytest.mark.parametrize(
    ("member", "said"),
    [
        ("none", "speaks TLS, and this process has no certificate"),
        ("other authority", r"is not of the authority in \$PODRUN_TLS_CA"),
        ("elsewhere", "is for other names"),
    ],
)
def test_a_rank_without_a_certificate_of_the_authority_stays_out(
    made: dict[str, dict[str, str]], member: str, said: str
) -> None:
    with variables(made["good"]):
        first, token = create(2, address="127.0.0.1", timeout=20, host="A")
    try:
        with variables(made[member]):
            second = join_group(token, 1, host="B", timeout=15)
            with pytest.raises(PodrunError, match=said):
                second.barrier()
            second.close()
    finally:
        with variables(made["good"]):
            first.close()


def test_files_that_do_not_fit_are_named(made: dict[str, dict[str, str]], tmp_path: Path) -> None:
    good = made["good"]
    cert, key, ca = tls.VARIABLES
    empty = tmp_path / "empty.pem"
    empty.touch(0o600)
    open_key = tmp_path / "open.key"
    open_key.write_bytes(Path(good[key]).read_bytes())
    open_key.chmod(0o644)
    for change, kind, said in [
        ({key: ""}, UsageError, f"{key} is not set"),
        ({key: made["also good"][key]}, ConfigError, "KEY_VALUES_MISMATCH"),
        ({key: str(open_key)}, UsageError, "may be read by every user"),
        ({cert: str(tmp_path / "none")}, ConfigError, f"{cert}: there is no file"),
        ({cert: str(empty)}, ConfigError, "cannot be used for TLS"),
        ({ca: made["other authority"][ca]}, ConfigError, "is not of the authority in"),
    ]:
        with pytest.raises(kind, match=said):
            tls.credentials({**good, **change})
    assert tls.credentials({}) is None
    found = tls.credentials(good)
    assert found is not None
    assert found.name_at("127.0.0.1") == "localhost"
    assert found.name_at("10.1.2.3") == "10.1.2.3"
    assert "PRIVATE" not in repr(found)


def test_nothing_of_tls_is_imported_unless_it_is_asked_for() -> None:
    import subprocess

    code = (
        "import sys, podrun.core.access, podrun.partition.client.vipu_client; "
        "sys.exit('podrun.core.tls' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_process_without_ssl_gets_no_explanation_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of Triton's instances have a Python that the host's ssl module need not fit."""
    monkeypatch.setitem(sys.modules, "ssl", None)
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert tls.explain_connection_failure(f"127.0.0.1:{server.getsockname()[1]}", {}) == ""
