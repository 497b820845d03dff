"""A private Ray for this process: quiet, small, on 127.0.0.1, and gone when the process is gone.

Ray by itself joins whatever cluster it finds in the environment or on the host; this never does. It starts
its own unless given an address. No dashboard, no usage statistics, no messages on the terminal, token
authentication on. Its session directory is a scratch directory of podrun's, removed at the end, and a
guardian sees to it that nothing outlives a ``kill -9``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from podrun.errors import ServiceError
from podrun.partition.discovery import ProcessId, remove_scratch, scratch_directory
from podrun.partition.guardian import SCRATCH_PREFIX, Guardian
from podrun.partition.ray_parts import RayletEnded, only_what_machines_need

log = logging.getLogger("podrun.partition")

OBJECT_STORE_BYTES = 80 << 20
"""Ray's smallest usual object store: podrun moves tensors through shared memory of its own."""
MAX_SOCKET_PATH = 107
FEW_FILES = 256
"""With fewer open files allowed, that is the likely cause if Ray does not start (it did with 64, not with 40)."""
_one_at_a_time = threading.Lock()
"""Machines and hosts for instances may ask for the same Ray cluster at the same moment, from two threads."""
SLOW_SECONDS = 10.0
"""An attempt to start Ray that failed after this long was too slow: Ray gives its parts 15 and 30 s."""
Parts = Callable[[], AbstractContextManager[None]]
"""What decides which parts of itself Ray starts."""
RAY_DIRECTORY = "r"
"""Ray opens its directory to everybody (mode 0777). It lies in a scratch directory that is ours alone."""
SESSION_SUFFIX = len(f"/{RAY_DIRECTORY}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store")

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}

_OWN_ENVIRONMENT = {
    # The name is history: it makes Ray listen on 127.0.0.1 instead of the host's address.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Machines of a POD start together. Ray's default is one process for each CPU at a time, with a warning.
    "RAY_worker_maximum_startup_concurrency": "64",
    # Machines that share a process share its heap: what one's piece frees, still in the cache, the next one's gets.
    # glibc gives each thread a heap of its own otherwise, and takes no other wish once a process has a handful.
    "MALLOC_ARENA_MAX": "1",
}


class RaySession:
    """Ray, started or joined by this process. ``processes`` and ``directory`` are what must not outlive
    it. ``wanted``: whether a second attempt to start it would still be of use."""

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: int | None = None,
        wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address
        self._wanted, self._clock = wanted, clock
        self.directory: Path | None = None
        self.processes: tuple[ProcessId, ...] = ()
        self._core: tuple[ProcessId, ...] = ()
        self._gcs: tuple[ProcessId, ...] = ()
        self._owned = False
        self._guardian: Guardian | None = None
        self._saved: dict[str, str | None] = {}
        self._closed = threading.Event()
        with _one_at_a_time:
            self._begin(address, num_cpus)

    def _begin(self, address: str | None, num_cpus: int | None) -> None:
        if _initialized():
            import ray

            self.ray: Any = ray
            return
        self._owned = True
        try:
            if address:
                self._join(address)
            else:
                self._start_patiently(num_cpus)
        except Exception as error:
            self.close()
            raise ServiceError(
                f"Ray did not start: {type(error).__name__}: {error}",
                hint=_what_to_try(),
            ) from error

    def close(self) -> None:
        """End Ray and everything it started. Idempotent."""
        if not self._owned:
            return
        self._owned = False
        # With its GCS gone, Ray would wait a minute for it and then end this process.
        if _initialized() and all(process.alive for process in self._gcs):
            # It would leave SIGTERM to end this process. Its processes are ended below, whatever it says.
            with _quiet_ray(), _keeping_sigterm(), contextlib.suppress(Exception):
                self.ray.shutdown()
        self._clear_up()
        self._closed.set()

    def _clear_up(self) -> None:
        """End what was started, and take back what was changed for it."""
        _end(self.processes)
        self.processes = ()
        if self.directory is not None:
            remove_scratch(self.directory)
            self.directory = None
        if self._guardian is not None:
            self._guardian.dismiss()
            self._guardian = None
        for key, value in self._saved.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value
        self._saved.clear()

    def _start_patiently(self, num_cpus: int | None) -> None:
        """Start Ray; once more, from nothing, if a busy host did not let it come up in the time it gives itself, or
        if its raylet did not take the command that starts only what machines need."""
        begin = self._clock()
        try:
            self._start_in_keeper(num_cpus, only_what_machines_need)
        except Exception as error:
            took = self._clock() - begin
            ended = isinstance(error, RayletEnded)
            if isinstance(error, ServiceError) or not (ended or took >= SLOW_SECONDS) or not self._wanted():
                raise
            why = str(error) if ended else f"not there after {took:.0f} s (this host is very busy)"
            log.warning("Ray did not start: %s; trying once more", why)
            with _quiet_ray(), contextlib.suppress(Exception):
                self.ray.shutdown()  # It may remember a part of what is gone.
            self._clear_up()
            self._start_in_keeper(num_cpus, contextlib.nullcontext if ended else only_what_machines_need)

    def _start_in_keeper(self, num_cpus: int | None, parts: Parts) -> None:
        """Start Ray in a thread that lasts as long as the session.

        Ray asks the kernel to kill its processes when their parent is gone (PR_SET_PDEATHSIG), which is when
        the thread that started them ends: a worker thread would take Ray with it.
        """
        result: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def keep() -> None:
            try:
                self._start(num_cpus, parts)
            except Exception as error:
                result.put(error)
                return
            result.put(None)
            self._closed.wait()

        threading.Thread(target=keep, name="podrun-ray-keeper", daemon=True).start()
        error = result.get()
        if error is not None:
            raise error

    @property
    def alive(self) -> bool:
        """False once our own Ray has lost its core: asking it anything would then wait for a minute."""
        return all(process.alive for process in self._core)

    def _join(self, address: str) -> None:
        self._set(_ENVIRONMENT)
        self.ray = _import_ray()
        with _quiet_ray(), _keeping_sigterm():
            self.ray.init(
                address=address,
                namespace="podrun",
                configure_logging=False,
                log_to_driver=False,
                logging_level="error",
            )

    def _start(self, num_cpus: int | None, parts: Parts) -> None:
        self._guardian = Guardian()
        self.directory = _short_scratch(self._guardian.watch_directory)
        token = self.directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        environment = _ENVIRONMENT | _OWN_ENVIRONMENT
        if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        self._set(environment)
        self.ray = _import_ray()
        try:
            with _quiet_ray(), parts(), _shielded_from_ctrl_c(), _keeping_sigterm():
                self.ray.init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=0,
                    include_dashboard=False,
                    configure_logging=False,
                    log_to_driver=False,
                    logging_level="error",
                    object_store_memory=OBJECT_STORE_BYTES,
                    namespace="podrun",
                    _temp_dir=str(self.directory / RAY_DIRECTORY),
                    # Ray wants its object store there whether or not it can be written.
                    _plasma_directory=str(self.directory) if _is_read_only("/dev/shm") else None,
                    _node_ip_address="127.0.0.1",
                )
        except Exception:
            # What it has started would go on coming up, and write where nothing is any more.
            self.processes = tuple(_started_for(self.directory))
            raise
        self.address = self.ray.get_runtime_context().gcs_address
        self.processes = tuple(_descendants())
        self._core = tuple(p for p in self.processes if _name(p) in ("gcs_server", "raylet"))
        self._gcs = tuple(p for p in self._core if _name(p) == "gcs_server")
        for process in self.processes:
            self._guardian.watch_process(process.pid, process.start_ticks)

    def _set(self, environment: Mapping[str, str]) -> None:
        for key, value in environment.items():
            if key in os.environ and key != "RAY_AUTH_TOKEN_PATH":
                continue
            self._saved[key] = os.environ.get(key)
            os.environ[key] = value


def _is_read_only(path: str) -> bool:
    return os.path.isdir(path) and not os.access(path, os.W_OK)


def _what_to_try() -> str:
    """What most probably keeps Ray from starting: it says little itself."""
    import resource

    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < FEW_FILES:
        return f"Only {files} files may be open at a time; type ulimit -n 4096 and try again."
    return "Free some memory or processes and try again; RAY_BACKEND_LOG_LEVEL=debug says more."


def _initialized() -> bool:
    """True iff this process uses Ray already. Does not import it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _import_ray() -> Any:
    """Ray, aware of the environment as it is now: it reads the authentication mode and the token only
    once."""
    from podrun.device.service.preload import uncollected

    with uncollected():
        import ray
        from ray import _raylet

    _keep_off_the_terminal(ray)
    core: Any = _raylet
    core.Config.initialize("")
    core.AuthenticationTokenLoader.instance().reset_cache()
    return ray


def _keep_off_the_terminal(ray: Any) -> None:
    """Send what Ray's node has to say (such as a paragraph for each process that ended) to the log.

    Ray prints it to standard output, where a program's own output is, and has no option against it. The
    service reports lost machines itself.
    """
    worker = ray._private.worker

    def note(data: Mapping[str, Any], *args: object, **options: object) -> None:
        log.debug("ray: %s", "\n".join(str(line) for line in data.get("lines", ())))

    if hasattr(worker, "print_to_stdstream"):
        worker.print_to_stdstream = note


def _short_scratch(announce: Callable[[str], None]) -> Path:
    """A scratch directory whose path leaves room for Ray's sockets, whose length Linux limits."""
    name = len(SCRATCH_PREFIX) + 9
    for parent in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm")):
        if len(str(parent)) + name + SESSION_SUFFIX < MAX_SOCKET_PATH and os.access(parent, os.W_OK):
            return scratch_directory(announce, parent)
    raise ServiceError(
        f"no directory for temporary files has a path short enough for sockets: {tempfile.gettempdir()}",
        hint="export TMPDIR=/tmp",
    )


def _descendants() -> Iterator[ProcessId]:
    """Processes that the calling process started, and theirs."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        process = ProcessId.of(child.pid)
        if process is not None and "guardian.py" not in " ".join(_cmdline(child)):
            yield process


def _started_for(directory: Path) -> Iterator[ProcessId]:
    """Those of them that were told of the directory."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        process = ProcessId.of(child.pid)
        if process is not None and any(str(directory) in word for word in _cmdline(child)):
            yield process


def _name(process: ProcessId) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text(encoding="ascii").strip() if process.alive else ""


def _cmdline(process: Any) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _end(processes: tuple[ProcessId, ...], patience: float = 3.0) -> None:
    """Wait a little for processes to end by themselves, then end them."""
    end = time.monotonic() + patience
    while any(process.alive for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, 9)


@contextlib.contextmanager
def _shielded_from_ctrl_c() -> Iterator[None]:
    """Processes started in here do not get Ctrl-C, which a terminal sends to all: their owner ends them in
    order.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
    """Keep Ray's remarks about its own start and end off the terminal; errors still pass."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the process's own way of handling SIGTERM: Ray's core replaces it by one that prints a stack
    trace.

    Done below Python, sigaction(2), since Python changes handlers from its main thread only.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(512)  # Larger than any platform's struct sigaction.
    known = libc.sigaction(signal.SIGTERM, None, action) == 0
    try:
        yield
    finally:
        if known:
            libc.sigaction(signal.SIGTERM, action, None)
