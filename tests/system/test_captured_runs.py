"""A server of another user at the usual port does not get the program, weights and data of a plain podrun."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import other_users
from tests.other_users import BOB, ROOT

pytestmark = [
    pytest.mark.system,
    pytest.mark.slow,
    pytest.mark.skipif(
        bool(other_users.needs()) or shutil.which("unshare") is None, reason="needs root, setpriv and unshare"
    ),
]
BIN = Path(sys.executable).parent
BOTH = """
ip link set lo up
{server} > {home}/server 2>&1 &
for i in $(seq 300); do grep -q "listens on" {home}/server && break; sleep 0.1; done
{run} > {home}/run 2>&1; code=$?
kill $!; wait
exit $code
"""


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="two-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def run(home: Path, *options: str) -> tuple[int, str]:
    """The exit code and output of a podrun beside Bob's server, in a network namespace of their own."""
    words = other_users.words(
        BOB, BIN / "vipu-server", "--cluster", "pod16", "--no-state", "--in-process", "--shared"
    )
    server = ["env", "-i", *(f"{k}={v}" for k, v in other_users.variables(home / "bob", BOB).items()), *words]
    program = ROOT / "tests/system/programs/small.py"
    podrun = [
        "env",
        "-u",
        "IPUOF_VIPU_API_PORT",
        f"PODRUN_RUNTIME_DIR={home}/own",
        BIN / "podrun",
        "-v",
        *options,
    ]
    command = " ".join(map(str, [*podrun, "--num-replicas", "4", program, "5"]))
    script = BOTH.format(home=home, server=" ".join(map(str, server)), run=command)
    done = subprocess.run(["unshare", "--net", "sh", "-c", script], cwd=ROOT, timeout=240, check=False)
    assert "listens on 127.0.0.1:8090" in (home / "server").read_text()
    return done.returncode, (home / "run").read_text()


def test_a_plain_podrun_starts_its_own(home: Path) -> None:
    code, said = run(home)
    assert code == 0, said
    assert "(podrun's own)" in said
    assert "127.0.0.1:8090" not in said


def test_a_shared_server_that_is_named_is_used(home: Path) -> None:
    code, said = run(home, "--vipu-server-host", "127.0.0.1")
    assert code == 0, said
    assert "V-IPU server 127.0.0.1:8090 (--vipu-server-host)" in said
