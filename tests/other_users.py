"""Other users of this host, for tests: programs that run with a user id of their own. Needs root and ``setpriv``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ALICE, BOB, ADMIN = 31003, 31004, 31005
"""Ids of users that no host has."""


def needs() -> str:
    """What is missing to run programs as other users; empty if nothing is."""
    if os.geteuid() != 0:
        return "root"
    return "" if shutil.which("setpriv") else "the command setpriv"


def words(uid: int, *command: str | Path) -> list[str]:
    """The command that runs ``command`` as a user, who may read whatever this checkout lies in."""
    reads = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]
    user = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *reads]
    return [*user, *map(str, command)]


def variables(home: Path, uid: int, **more: str) -> dict[str, str]:
    """The environment of a user whose files lie in ``home``."""
    home.mkdir(exist_ok=True)
    os.chown(home, uid, uid)
    plain = {"HOME": home, "TMPDIR": home, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return {name: str(value) for name, value in plain.items()} | more


def run(
    uid: int,
    home: Path,
    code: str,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 60,
) -> Any:
    """What a Python program of a user prints as JSON on its last line. ``code`` is its text."""
    done = subprocess.run(
        words(uid, sys.executable, "-c", code, *arguments),
        env=variables(home, uid, **(env or {})),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
