"""Whose server listened where: what a user has learnt about servers that other users of the host share.

A shared server cannot prove that it is the one that was meant: no secret is common to two users. The kernel says who
runs it, and this user named it. The first time that is enough. From then on another user's program at the same address,
who perhaps waited for the port, is refused. It is what ``ssh`` does with hosts.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Collection, Mapping
from pathlib import Path

from podrun.core.access import AdmitServer, StrangersServerError, strangers_server
from podrun.core.documents import parse_json, read_text
from podrun.core.errors import PodrunError
from podrun.core.identity import user_name

FILE = "known-servers"
MOST = 256
"""Addresses that are remembered; the oldest go first."""


class KnownServers:
    """The file in a runtime directory: user ids by address (host:port). A file that cannot be read counts as empty."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / FILE

    def users(self) -> frozenset[int]:
        """The users whose servers this user has named."""
        return frozenset(self._read().values())

    def admit(self, where: str, uid: int) -> None:
        """Remember who runs the server at an address. Raises StrangersServerError if it was another user."""
        known = self._read()
        before = known.get(where)
        if before == uid:
            return
        if before is not None and uid not in (os.getuid(), 0):
            whose = "this user's" if before == os.getuid() else f"{user_name(before)}'s"
            raise StrangersServerError(
                f"what listens at {where} is run by {user_name(uid)}; "
                f"the server that was used there before was {whose}",
                hint=f"Start your own again: vipu-server. If you mean the server of {user_name(uid)}: rm {self.path}",
            )
        known.pop(where, None)
        self._write({**dict(list(known.items())[-MOST + 1 :]), where: uid})

    def _read(self) -> dict[str, int]:
        try:
            plain = parse_json(read_text(self.path), str(self.path))
            return {str(where): int(str(uid)) for where, uid in plain.items()}
        except (PodrunError, ValueError, AttributeError):
            return {}

    def _write(self, known: Mapping[str, int]) -> None:
        fresh = self.path.with_name(f"{FILE}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            fresh.write_text(json.dumps(known), encoding="utf-8")
            fresh.replace(self.path)
        except OSError:  # It is then learnt anew with the next call.
            fresh.unlink(missing_ok=True)


def only_of(users: Collection[int]) -> AdmitServer:
    """A check that admits servers which these users run, this user or root: machines of a partition service that they
    share.
    """
    allowed = {os.getuid(), 0, *users}

    def admit(where: str, uid: int) -> None:
        if uid not in allowed:
            raise strangers_server(where, uid)

    return admit
