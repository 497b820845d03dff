"""Which Ray cluster an address means, checked before Ray connects: Ray itself tries for minutes.

``auto`` is $RAY_ADDRESS, else the cluster that the last ``ray start`` on this host belongs to. Ray's own ``auto`` also
takes any Ray among the host's processes: another program's, a container's, or a private one of podrun's.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping

from podrun.core.errors import ServiceError, UsageError

AUTO = "auto"
CONNECT_SECONDS = 5.0
_HOST_PORT = re.compile(r"(?:\[(?P<six>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


def check_form(address: str, option: str = "--ray-address") -> None:
    """Raises UsageError unless it is ``HOST:PORT`` or ``auto``."""
    if address == AUTO:
        return
    match = _HOST_PORT.fullmatch(address)
    if match is not None and 1 <= int(match["port"]) <= 65535:
        return
    hint = f"As in {option} 10.0.0.1:6379: what ray start --head prints."
    if address.startswith("ray://"):
        hint = f"ray:// is Ray's client server. Machines want the cluster itself: {hint}"
    raise UsageError(f"{option} {address} is no address of a Ray cluster", hint=hint)


def resolve(address: str, environ: Mapping[str, str]) -> str:
    """``HOST:PORT`` of a cluster that accepts connections.

    Raises UsageError for a malformed address, ServiceError if no cluster is known or none answers.
    """
    check_form(address)
    if address == AUTO:
        address = environ.get("RAY_ADDRESS") or AUTO
        check_form(address, "RAY_ADDRESS")
    if address == AUTO:
        address = _last_started()
    match = _HOST_PORT.fullmatch(address)
    host, port = (match["six"] or match["host"], int(match["port"])) if match else (address, 0)
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            return address
    except OSError as error:
        raise ServiceError(
            f"no Ray cluster: nobody answers at {address} ({error.strerror or error})",
            hint="Start one there (ray start --head), or name another: --ray-address HOST:PORT",
        ) from error


def _last_started() -> str:
    """Address of the cluster that the last ``ray start`` on this host belongs to."""
    from podrun.private_apis.ray import last_started_address

    address = last_started_address()
    if not address:
        raise ServiceError(
            "no Ray cluster: RAY_ADDRESS is not set, and this host belongs to none",
            hint="Start one (ray start --head), or name one: --ray-address HOST:PORT",
        )
    return address
