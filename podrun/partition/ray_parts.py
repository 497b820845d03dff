"""A private Ray without the parts that machines have no use for.

Ray has no options against its autoscaler, log forwarder, API server and the two agents of a node (dashboard and
environments of tasks), nor for looking more often whether its node is there. So what starts them is replaced while Ray
starts. Should a future Ray name things otherwise, it starts with everything, only later.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start a process each."""
_AGENTS = ("--dashboard_agent_command", "--runtime_env_agent_command")
_PORTS = ("--metrics-agent-port", "--metrics_export_port", "--runtime_env_agent_port")
_THEIR_WORKER = re.compile(r'"[^"]*/default_worker\.py"|\S*/default_worker\.py')
_OUR_WORKER = subprocess.list2cmdline([str(Path(__file__).with_name("ray_worker.py"))])
_NOBODY = "1"
"""A port at which nobody listens. The raylet waits for agents only where they are to choose their ports (0)."""
_PATIENCE = 30.0
"""Seconds: Ray's own limit."""


class RayletEnded(RuntimeError):
    """The raylet ended while Ray started: it cannot come up as it was started."""


@contextlib.contextmanager
def only_what_machines_need() -> Iterator[None]:
    """A Ray that starts in here has a GCS, a raylet and workers, and is noticed as soon as it is there.

    Measured on 2 cores with Ray 2.60: the start takes 0.3 s instead of 1.6 (4.0 with the services), and 1.0 s less of
    processor time. Ray looks for its node after 0.1 s, when it is not there with agents, and then once a second.
    """
    from ray._private import node, services

    kind: Any = node.Node
    replaced: list[tuple[Any, str, Any]] = [
        (kind, name, lambda self, **options: None) for name in SERVICES if hasattr(kind, name)
    ]
    if hasattr(services, "start_ray_process"):
        replaced.append((services, "start_ray_process", _without_agents(services.start_ray_process)))
    if hasattr(kind, "start_ray_processes"):
        replaced.append((kind, "start_ray_processes", _until_registered(kind.start_ray_processes)))
    saved = [(where, name, getattr(where, name)) for where, name, _ in replaced]
    for where, name, new in replaced:
        setattr(where, name, new)
    try:
        yield
    finally:
        for where, name, old in saved:
            setattr(where, name, old)


def raylet_command(command: Sequence[str]) -> list[str]:
    """Ray's command for a raylet: it starts no agents, waits for none, and starts workers when they are asked
    for, those of `podrun.partition.ray_worker`.

    A command of blanks is no agent; an empty one is refused.
    """
    changed = []
    for word in command:
        name, equals, value = word.partition("=")
        if name in _AGENTS and equals:
            word = f"{name}= "
        elif name in _PORTS and value == "0":
            word = f"{name}={_NOBODY}"
        elif name == "--num_prestart_python_workers":
            word = f"{name}=0"
        elif name == "--python_worker_command":
            word = _THEIR_WORKER.sub(lambda found: _OUR_WORKER, word)
        changed.append(word)
    return [*changed, f"--dashboard_agent_listen_port={_NOBODY}"]


def _without_agents(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_process(command: list[str], process_type: str, *others: Any, **options: Any) -> Any:
        whole = process_type == "raylet" and all(any(w.startswith(f"{a}=") for w in command) for a in _AGENTS)
        return start(raylet_command(command) if whole else command, process_type, *others, **options)

    return start_process


def _until_registered(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_processes(self: Any, *others: Any, **options: Any) -> Any:
        result = start(self, *others, **options)
        raylets = self.all_processes.get("raylet", ())
        end = time.monotonic() + _PATIENCE
        while time.monotonic() < end and not self.get_gcs_client().get_all_node_info(timeout=_PATIENCE):
            for info in raylets:
                if info.process.poll() is not None:
                    raise RayletEnded(f"its raylet ended with exit code {info.process.returncode}")
            time.sleep(0.01)
        return result

    return start_processes
