"""Addresses of Ray clusters are checked before Ray tries to connect for minutes."""

from __future__ import annotations

import socket

import pytest

from podrun.core.errors import ServiceError, UsageError
from podrun.partition.machines import ray_starts
from podrun.partition.machines.ray_starts import check_form, resolve


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379", "head.rack-1:6379", "[fe80::1]:6379"])
def test_valid_addresses_are_accepted(address: str) -> None:
    check_form(address)


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
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = f"127.0.0.1:{server.getsockname()[1]}"
        assert resolve("auto", {"RAY_ADDRESS": here}) == here
        monkeypatch.setattr(ray_starts, "_last_started", lambda: here)
        assert resolve("auto", {}) == here
        assert resolve("auto", {"RAY_ADDRESS": "auto"}) == here
    with pytest.raises(ServiceError, match=f"nobody answers at {here}"):
        resolve("auto", {})
    with pytest.raises(UsageError, match="RAY_ADDRESS nowhere"):
        resolve("auto", {"RAY_ADDRESS": "nowhere"})
