"""Two hosts on one machine: network, mount, process and host-name namespaces of their own, joined by a virtual cable.

They have addresses of their own, see neither each other's processes nor shared memory nor /tmp, and share only the
rest of the file system, as hosts of a cluster share a home directory. Needs root and ``ip``.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[2]
ADDRESSES = ("10.214.77.1", "10.214.77.2")
_TMP = Path("/tmp")
_SET_UP = (
    "mount --rbind {tmp} /tmp && mount -t tmpfs tmpfs /dev/shm && hostname {name} && exec sleep infinity"
)


@dataclass
class NamespaceHost:
    """One of them. ``tmp``: its /tmp, seen from outside. ``inside``: a process in its namespaces."""

    name: str
    address: str
    tmp: Path
    inside: int

    def words(self, *command: str | Path, env: Mapping[str, str], cwd: Path) -> list[str]:
        """The command that runs ``command`` there."""
        enter = ["nsenter", f"--target={self.inside}", "--mount", "--uts", "--pid", "--net"]
        return [*enter, "env", f"--chdir={cwd}", *(f"{k}={v}" for k, v in env.items()), *map(str, command)]


def needs() -> str:
    """The reason why such hosts cannot be made here; empty if they can."""
    tools = [tool for tool in ("ip", "unshare", "nsenter", "mount") if shutil.which(tool) is None]
    if tools:
        return f"commands that are not there: {', '.join(tools)}"
    return "" if os.geteuid() == 0 else "root"


@contextmanager
def two_hosts(home: Path) -> Iterator[tuple[NamespaceHost, NamespaceHost]]:
    """Two hosts with a cable between them; they and all that runs there are gone at the end."""
    mark = f"pr{os.getpid()}"
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for side in "ab":
            _run("ip", "netns", "add", mark + side)
        cable = ["ip", "link", "add", f"v{mark}a", "netns", f"{mark}a", "type", "veth"]
        _run(*cable, "peer", "name", f"v{mark}b", "netns", f"{mark}b")
        hosts = []
        for side, address in zip("ab", ADDRESSES, strict=True):
            net = mark + side
            _run("ip", "-n", net, "addr", "add", f"{address}/24", "dev", f"v{net}")
            for device in (f"v{net}", "lo"):
                _run("ip", "-n", net, "link", "set", device, "up")
            tmp = home / f"tmp-{side}"
            tmp.mkdir()
            unshare = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
            set_up = [*_what_stays_of_tmp(tmp), _SET_UP.format(tmp=tmp, name=f"host-{side}")]
            shell = ["sh", "-c", " && ".join(set_up)]
            holders.append(subprocess.Popen(["ip", "netns", "exec", net, *unshare, *shell]))
            hosts.append(NamespaceHost(f"host-{side}", address, tmp, _child(holders[-1].pid)))
        yield hosts[0], hosts[1]
    finally:
        for holder in holders:
            holder.send_signal(
                signal.SIGKILL
            )  # With it goes the first process of the namespace, and so all others.
            holder.wait()
        for side in "ab":
            subprocess.run(["ip", "netns", "del", mark + side], capture_output=True, check=False)


def _what_stays_of_tmp(tmp: Path) -> list[str]:
    """The checkout and its environment as they appear in ``tmp`` too, if they lie below /tmp."""
    below = [path for path in {CHECKOUT, Path(sys.prefix)} if path.is_relative_to(_TMP)]
    mounts = []
    for path in sorted(below):  # What lies in the other comes after it.
        place = tmp / path.relative_to(_TMP)
        place.mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --rbind {shlex.quote(str(path))} {shlex.quote(str(place))}")
    return mounts


def _child(pid: int) -> int:
    """The first process in the new PID namespace, once it has set its host up (it is ``sleep`` then)."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split():
            if Path(f"/proc/{child}/comm").read_text(encoding="ascii") == "sleep\n":
                return int(child)
        time.sleep(0.02)
    raise RuntimeError("a namespace was not set up within 10 s")


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
