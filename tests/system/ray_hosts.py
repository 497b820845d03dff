"""A Ray cluster of two hosts (`tests.system.namespaces`), for commands that run over both."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from podrun.partition.host.guardian import SCRATCH_PREFIX
from tests.conftest import BIN, LEAK_SECONDS, wait_until
from tests.system.namespaces import NamespaceHost, needs, two_hosts

PORT = 6379


@dataclass
class Cluster:
    """A Ray cluster of two hosts."""

    hosts: tuple[NamespaceHost, NamespaceHost]
    env: dict[str, str]
    home: Path

    @property
    def address(self) -> str:
        return f"{self.hosts[0].address}:{PORT}"

    def start(self, host: NamespaceHost, *words: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            host.words(*words, env=self.env, cwd=self.home),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(
        self, *words: str | Path, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = self.hosts[0].words(*words, env={**self.env, **(env or {})}, cwd=self.home)
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False
        )


def read_until(process: subprocess.Popen[str], words: str) -> None:
    """Read what the process says until it has said ``words``; fails with all of it if it ends before."""
    assert process.stdout is not None
    said = ""
    while words not in said:
        line = process.stdout.readline()
        assert line, said
        said += line


def _scratch(cluster: Cluster) -> list[Path]:
    """Directories of podrun's on the hosts that a test has left alive (a zombie has no ``exe``)."""
    alive = [host for host in cluster.hosts if Path(f"/proc/{host.inside}/exe").exists()]
    return [path for host in alive for path in host.tmp.glob(f"{SCRATCH_PREFIX}*")]


@contextmanager
def ray_cluster() -> Iterator[Cluster]:
    """Two hosts, Ray's head on the first; they and all that runs there are gone at the end."""
    missing = needs()
    # These tests run only when all are asked for. Then hosts that cannot be made are a failure and no reason to pass.
    assert not missing, f"two hosts on this machine need {missing}"
    # Not below /tmp, which each host has its own of.
    home = Path(os.environ.get("PODRUN_TEST_SHARED", "/var/tmp")) / f"podrun-two-hosts-{os.getpid()}"
    home.mkdir()
    env = {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "HOME": "/tmp",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        with two_hosts(home) as hosts:
            made = Cluster(hosts, env, home)
            node = ("ray", "start", "--block", "--num-cpus=1")
            first = (*node, "--head", f"--port={PORT}", "--include-dashboard=false")
            second = (*node, f"--address={made.address}")
            started = []
            for host, words in zip(hosts, (first, second), strict=True):
                process = made.start(host, *words, f"--node-ip-address={host.address}")
                started.append(process)
                read_until(process, "Ray runtime started")
            yield made
            wait_until(
                lambda: _scratch(made) == [], LEAK_SECONDS, "directories for temporary files are removed"
            )
        for process in started:
            process.communicate(timeout=120)
    finally:
        subprocess.run(["rm", "-rf", str(home)], check=True)
