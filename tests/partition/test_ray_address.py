"""Addresses of Ray clusters are checked before Ray tries to connect for minutes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from podrun.core.errors import ServiceError, UsageError
from podrun.partition.machines import ray_starts
from podrun.partition.machines.ray_obstacles import listens_on_loopback_only
from podrun.partition.machines.ray_starts import check_form, check_head, resolve
from podrun.private_apis.ray import HEAD_METHODS


def test_valid_addresses_are_accepted() -> None:
    addresses = ["auto", "10.0.0.1:6379", "head.rack-1:6379", "[fe80::1]:6379", "head"]
    assert [address for address in addresses if is_refused(address)] == ["head"]


def is_refused(address: str) -> bool:
    try:
        check_form(address)
    except UsageError:
        return True
    return False


@pytest.mark.parametrize(
    "address", ["", "zz zz", "head", "head:", "head:0", "head:70000", ":6379", "ray://head:10001", "-1"]
)
def test_an_invalid_address_is_refused_with_an_example(address: str) -> None:
    with pytest.raises(UsageError, match="is no address of a Ray cluster") as refused:
        check_form(address)
    assert "10.0.0.1:6379" in refused.value.hint


def test_auto_is_the_environments_cluster_or_the_one_last_started_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with server_of(HEAD_METHODS[0], b"id") as here:
        assert resolve("auto", {"RAY_ADDRESS": here}) == here
        monkeypatch.setattr(ray_starts, "_last_started", lambda: here)
        assert resolve("auto", {}) == here
        assert resolve("auto", {"RAY_ADDRESS": "auto"}) == here
    with pytest.raises(ServiceError, match=f"nobody answers at {here}"):
        resolve("auto", {})
    with pytest.raises(UsageError, match="RAY_ADDRESS nowhere"):
        resolve("auto", {"RAY_ADDRESS": "nowhere"})


@contextlib.contextmanager
def server_of(method: str, reply: bytes | None) -> Iterator[str]:
    """The address of a gRPC server that knows one method. ``reply`` None: it wants a token."""

    class Answers(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer) if details.method == method else None

    def answer(request: bytes, context: Any) -> bytes:
        if reply is None:
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "InvalidAuthToken")
        assert reply is not None
        return reply

    server = grpc.server(ThreadPoolExecutor(1), handlers=[Answers()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait(60)


@pytest.mark.parametrize("method", HEAD_METHODS)
@pytest.mark.parametrize("reply", [b"id", None], ids=["answers", "wants a token"])
def test_a_head_is_told_by_its_answers(method: str, reply: bytes | None) -> None:
    with server_of(method, reply) as here:
        check_head(here)


def test_what_is_no_head_is_refused_within_the_deadline() -> None:
    """Ray would ask it for ever, also when SIGTERM asks the process to end."""
    with (
        server_of("/vipu.Other/Method", b"") as here,
        pytest.raises(ServiceError, match=f"what listens at {here} is a server of something else"),
    ):
        check_head(here)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        here = f"127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        with pytest.raises(ServiceError, match="did not answer as a Ray cluster's head") as refused:
            check_head(here, 0.3)
        assert time.monotonic() - begin < 60
        assert "--ray-address HOST:PORT" in (refused.value.hint or "")


def test_a_ray_on_the_loopback_address_only_is_told_from_one_at_the_hosts_own() -> None:
    """Ray puts the host's own address in place of 127.0.0.1, and asks there for ever."""
    for listens_at, is_only in (("127.0.0.1", True), ("0.0.0.0", False)):
        with socket.create_server((listens_at, 0)) as server:
            port = server.getsockname()[1]
            own = _own_address()
            assert listens_on_loopback_only(f"127.0.0.1:{port}") == (is_only or own == "127.0.0.1")
            assert not listens_on_loopback_only(f"10.0.0.1:{port}")


def _own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as outward:
        try:
            outward.connect(("8.8.8.8", 1))
        except OSError:
            return "127.0.0.1"
        return str(outward.getsockname()[0])
