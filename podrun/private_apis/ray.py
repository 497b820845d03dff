"""All uses of Ray beyond its public API.

Ray has no options against its autoscaler, log forwarder, API server and the two agents of a node (dashboard and
environments of tasks), nor for its worker's imports, its messages and its authentication token. `PRIVATE_NAMES` lists
the names that are replaced or called instead. Where a name is missing, Ray starts with all its parts and more slowly;
each function says what else is lost.

What Ray starts for a machine instead of its own worker is `podrun.private_apis.ray_worker`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from podrun.private_apis.ray_worker import import_ray_alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

log = logging.getLogger("podrun.partition")

SERVICES = ("start_monitor", "start_log_monitor", "start_api_server")
"""Methods of Ray's node that start a process each."""
AGENT_COMMANDS = ("--dashboard_agent_command", "--runtime_env_agent_command")
AGENT_PORTS = ("--metrics-agent-port", "--metrics_export_port", "--runtime_env_agent_port")
WORKER_OPTIONS = ("--num_prestart_python_workers", "--python_worker_command")
"""Options of the raylet's command that `raylet_command` changes, besides the agents'."""
INIT_OPTIONS = ("_temp_dir", "_plasma_directory", "_node_ip_address")
"""Options of ``ray.init`` that are not public: its directory, its object store, its address. Without them Ray does not
start, and says which it does not know."""
PRIVATE_NAMES = (
    *(f"ray._private.node.Node.{name}" for name in (*SERVICES, "start_ray_processes", "get_gcs_client")),
    "ray._private.ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER",
    "ray._private.services.start_ray_process",
    "ray._private.utils.get_dashboard_dependency_error",
    "ray._private.utils.read_ray_address",
    "ray._private.worker.print_to_stdstream",
    "ray._private.workers.default_worker",
    "ray._raylet.Config.initialize",
    "ray._raylet.AuthenticationTokenLoader.instance",
    "ray.util.serialization_addons.apply",
)
"""Every private name of Ray that this module and `podrun.private_apis.ray_worker` use."""

_RAY_WORKER = re.compile(r'"[^"]*/default_worker\.py"|\S*/default_worker\.py')
_OUR_WORKER = subprocess.list2cmdline(["-I", "-S", str(Path(__file__).with_name("ray_worker.py"))])
_UNUSED_PORT = "1"
"""A port at which nobody listens. The raylet waits for agents only where they are to choose their ports (0)."""
HEAD_METHODS = (
    "/ray.rpc.NodeInfoGcsService/GetClusterId",
    "/ray.rpc.NodeInfoGcsService/CheckAlive",
)
"""Calls that only the core service of a cluster's head answers (its GCS)."""
_REGISTRATION_SECONDS = 30.0
"""Ray's own limit for its node to appear."""


class RayletEnded(RuntimeError):
    """The raylet ended while Ray started, so its command must be wrong."""


# --- the process that uses Ray ----------------------------------------------------------------------------------


def head_at(address: str, seconds: float) -> str:
    """Ask what listens at an address for what only a cluster's head knows: an empty text if it is one, else a phrase
    about what it is instead. Ray itself waits for such an answer without an end.

    A head that wants a token, or TLS, counts as one: Ray says what is wrong with these. Without the names nothing
    counts as one, since each call is unknown there.
    """
    if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
        return ""
    import grpc

    end = time.monotonic() + seconds
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        for method in HEAD_METHODS:
            ask: Any = channel.unary_unary(method)
            try:
                ask(b"", timeout=max(end - time.monotonic(), 0.1))
                return ""
            except grpc.RpcError as error:
                code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return f"takes connections and did not answer as a Ray cluster's head within {seconds:g} s"
            if code is not grpc.StatusCode.UNIMPLEMENTED:
                return ""
    return "is a server of something else"


def last_started_address() -> str:
    """Address of the cluster that the last ``ray start`` on this host belongs to; empty if there is none.

    Ray notes it in a file. Without the name: empty, so users give the address themselves.
    """
    try:
        from ray._private.utils import read_ray_address
    except ImportError:
        return ""
    return str(read_ray_address() or "")


def import_ray() -> Any:
    """Ray, with its settings, authentication mode and token as the environment has them now, and with few imports
    (`import_ray_alone`)."""
    import_ray_alone()
    import ray

    log_instead_of_printing()
    leave_signals_alone()
    read_environment_again()
    return ray


def read_environment_again() -> None:
    """Make Ray's core read its settings, authentication mode and token from the environment as it is now.

    It reads them once, at import. Without the names Ray keeps what it read first: a second private Ray in one process
    is then refused by its own token.
    """
    from ray import _raylet

    core: Any = _raylet
    try:
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()
    except AttributeError as error:
        log.warning("this Ray is not known to podrun: %s; a second start in one process may fail", error)


def log_instead_of_printing() -> None:
    """Send the messages of Ray's node (such as a paragraph for each process that ended) to the log.

    Ray prints them to standard output, which belongs to the program. The service reports lost machines itself. Without
    the name Ray goes on printing.
    """
    from ray._private import worker

    def note(data: Mapping[str, Any], *args: object, **options: object) -> None:
        log.debug("ray: %s", "\n".join(str(line) for line in data.get("lines", ())))

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = note


def leave_signals_alone() -> None:
    """Let Ray's core install no handlers of signals in this process.

    Its handler of SIGTERM prints a stack trace if the signal comes while Ray starts, and the process aborts at its end.
    Without the name that can happen; `RaySession` puts the handler of before back when Ray has started.
    """
    from ray._private import ray_constants

    if hasattr(ray_constants, "RAY_DISABLE_FAILURE_SIGNAL_HANDLER"):
        ray_constants.RAY_DISABLE_FAILURE_SIGNAL_HANDLER = True


def log_nowhere(directory: str) -> None:
    """Discard what Ray's core in this process writes to files under ``directory``.

    A driver has no option against its log in the session's directory. Whoever ends that session ends the processes that
    write there (`podrun.partition.host.guardian.end_writers`), and this process only visits.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # The descriptor of this listing itself is closed by now.
            if os.readlink(f"/proc/self/fd/{name}").startswith(directory.rstrip("/") + "/"):
                os.dup2(null, int(name))
    os.close(null)


def init_options(directory: Path, object_store: Path | None, address: str) -> dict[str, Any]:
    """Private options of ``ray.init``: directories of its session and its object store (None: Ray's choice), and the
    address it listens on."""
    values = (str(directory), None if object_store is None else str(object_store), address)
    return dict(zip(INIT_OPTIONS, values, strict=True))


# --- a Ray with fewer parts -------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_what_machines_need(on_raylet: Callable[[int], None] = lambda pid: None) -> Iterator[None]:
    """A Ray that starts in this context has a GCS, a raylet and workers, and is noticed as soon as it is up.
    ``on_raylet`` is told the raylet's process id as soon as it starts.

    Measured on 2 cores with Ray 2.60: the start takes 0.3 s instead of 1.6 (4.0 with the services), and 1.0 s less of
    processor time. Ray looks for its node after 0.1 s, when it is not up yet if it has agents, and then once a second.
    """
    from ray._private import node, services, utils

    kind: Any = node.Node
    replaced: list[tuple[Any, str, Any]] = [
        (kind, name, lambda self, **options: None) for name in SERVICES if hasattr(kind, name)
    ]
    if hasattr(services, "start_ray_process"):
        replaced.append((services, "start_ray_process", _without_agents(services.start_ray_process)))
    if hasattr(utils, "get_dashboard_dependency_error"):
        # Ray would import aiohttp and OpenTelemetry, 0.3 s of a core, for the command of an agent that is not started.
        replaced.append((utils, "get_dashboard_dependency_error", lambda: None))
    if hasattr(kind, "start_ray_processes"):
        replaced.append((kind, "start_ray_processes", _until_registered(kind.start_ray_processes, on_raylet)))
    saved = [(where, name, getattr(where, name)) for where, name, _ in replaced]
    for where, name, new in replaced:
        setattr(where, name, new)
    try:
        yield
    finally:
        for where, name, old in saved:
            setattr(where, name, old)


def raylet_command(command: Sequence[str]) -> list[str]:
    """Ray's command for a raylet, changed: it starts no agents, waits for none, and starts workers on demand, which are
    ours.

    An agent's command of one blank means no agent; the raylet refuses an empty one.
    """
    changed = []
    for word in command:
        name, equals, value = word.partition("=")
        if name in AGENT_COMMANDS and equals:
            word = f"{name}= "
        elif name in AGENT_PORTS and value == "0":
            word = f"{name}={_UNUSED_PORT}"
        elif name == "--num_prestart_python_workers":
            word = f"{name}=0"
        elif name == "--python_worker_command":
            word = _RAY_WORKER.sub(lambda match: _OUR_WORKER, word)
        changed.append(word)
    return [*changed, f"--dashboard_agent_listen_port={_UNUSED_PORT}"]


def _without_agents(start: Callable[..., Any]) -> Callable[..., Any]:
    def start_process(command: list[str], process_type: str, *others: object, **options: object) -> Any:
        known = all(any(word.startswith(f"{agent}=") for word in command) for agent in AGENT_COMMANDS)
        whole = process_type == "raylet" and known
        return start(raylet_command(command) if whole else command, process_type, *others, **options)

    return start_process


def _until_registered(start: Callable[..., Any], on_raylet: Callable[[int], None]) -> Callable[..., Any]:
    def start_processes(self: Any, *others: Any, **options: Any) -> Any:
        result = start(self, *others, **options)
        raylets = self.all_processes.get("raylet", ())
        for info in raylets:
            on_raylet(info.process.pid)
        end = time.monotonic() + _REGISTRATION_SECONDS
        while time.monotonic() < end and not self.get_gcs_client().get_all_node_info(
            timeout=_REGISTRATION_SECONDS
        ):
            for info in raylets:
                if info.process.poll() is not None:
                    raise RayletEnded(f"its raylet ended with exit code {info.process.returncode}")
            time.sleep(0.01)
        return result

    return start_processes
