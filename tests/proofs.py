"""Proofs made by hand: what a client that follows the protocol sends, and what one that does not could send."""

from __future__ import annotations

import secrets
from typing import Any

from podrun.core import identity
from podrun.core.access import GREET


def greet(channel: Any, where: str) -> tuple[str, str]:
    """Random numbers of client and server after a greeting for ``where``. Raises grpc.RpcError."""
    client = secrets.token_hex(16)
    reply = channel.unary_unary(GREET)(f"2 {where} {client}".encode(), timeout=60)
    return client, reply.decode().split(" ")[0]


def proof_for(
    secret: str, method: str, where: str, nonces: tuple[str, str], request: bytes = b"", number: int = 1
) -> identity.Proof:
    """The proof of one call, whatever the server has proved."""
    client, server = nonces
    key = identity._session_key(secret, where, client, server)
    session = identity.ProvenSession(key, f"2 {where} {server} {client}")
    for _ in range(number - 1):
        session.proof(method, request)
    return session.proof(method, request)
