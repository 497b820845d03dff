"""Messages between a group's ranks and its registrar: each a line of JSON, which is only compared and shown."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import Any

_MAX_LINE = 4 * 1024 * 1024


class Lines:
    """Messages from the bytes of a connection, in whatever parts they come."""

    def __init__(self) -> None:
        self._rest = b""

    def more(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that these bytes complete. Raises ValueError for what is none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MAX_LINE:
            raise ValueError("a line without an end")
        try:
            messages = [json.loads(line) for line in lines]
        except RecursionError as error:
            raise ValueError("brackets in brackets") from error
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("no message")
        return messages


def say(sock: socket.socket, message: Mapping[str, Any]) -> None:
    """Send a message."""
    sock.sendall(json.dumps(message, default=str).encode() + b"\n")
