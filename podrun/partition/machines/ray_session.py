"""A private Ray for this process: quiet, small, on 127.0.0.1, and ended with the process.

Ray by itself joins any cluster that it finds in the environment or on the host. This session starts its own unless it
gets an address: without dashboard, usage statistics and messages on the terminal, with token authentication. Its
session directory is a scratch directory of podrun's, removed at the end; a guardian ends what outlives a ``kill -9``.
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
from types import ModuleType
from typing import TYPE_CHECKING

from podrun.core.errors import ServiceError
from podrun.core.garbage import without_garbage_collection
from podrun.core.terminal import report_step
from podrun.partition.host.discovery import ProcessId, ServiceEntry, remove_scratch
from podrun.partition.host.guardian import Guardian
from podrun.partition.machines.ray_head import RECONNECT_SECONDS, HeadWatch, leave_without_ray, own_head
from podrun.partition.machines.ray_obstacles import (
    OBJECT_STORE_BYTES,
    RAY_DIRECTORY,
    check_file_size,
    check_installed,
    check_paths,
    is_read_only,
    listens_on_loopback_only,
    short_scratch,
    what_to_try,
)
from podrun.partition.machines.ray_template import EVERY_RAY, OWN_RAY, RAY_ON_LOOPBACK, take_template
from podrun.private_apis import ray as private_ray
from podrun.private_apis.ray import RayletEnded, import_ray, only_what_machines_need
from podrun.private_apis.ray_worker import SOCKET, SOCKET_VARIABLE

if TYPE_CHECKING:
    import psutil

    from podrun.private_apis.ray_worker import WorkerTemplate

log = logging.getLogger("podrun.partition")
_one_at_a_time = threading.Lock()
"""Two threads (for machines, and for hosts of instances) may start the same Ray cluster at the same moment."""
SLOW_SECONDS = 10.0
"""A start of Ray that fails after this long was too slow: Ray gives its parts 15 and 30 s."""
Parts = Callable[[Callable[[int], None]], AbstractContextManager[object]]
"""Makes a context in which Ray starts only certain parts, and perhaps tells the raylet's process id."""


class RaySession:
    """Ray, started or joined by this process. ``processes`` and ``directory`` must not outlive it. ``wanted``: whether
    a second attempt to start it is still useful. ``keeper``: the process that holds the private Ray to join.
    ``on_import`` is called once Ray is imported for a private one, before it starts."""

    def __init__(
        self,
        address: str | None = None,
        *,
        num_cpus: int | None = None,
        keeper: ServiceEntry | None = None,
        on_import: Callable[[], None] = lambda: None,
        wanted: Callable[[], bool] = lambda: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = address = keeper.address if keeper is not None else address
        self._keeper, self._on_import = keeper, on_import
        self._wanted, self._clock = wanted, clock
        self.directory: Path | None = None
        self.token_file = ""
        self.processes: tuple[ProcessId, ...] = ()
        self._core: tuple[ProcessId, ...] = ()
        self._gcs: tuple[ProcessId, ...] = ()
        self._owned = False
        self._guardian: Guardian | None = None
        self._template: WorkerTemplate | None = None
        self._saved: dict[str, str | None] = {}
        self._closed = threading.Event()
        self.head = HeadWatch(address or "", private_ray.head_at)
        with _one_at_a_time:
            self._begin(address, num_cpus)

    def _begin(self, address: str | None, num_cpus: int | None) -> None:
        if _initialized():
            import ray

            self.ray: ModuleType = ray
            return
        check_installed()
        if not address:
            check_file_size()
            check_paths([os.path.abspath(os.curdir), tempfile.gettempdir(), *sys.argv[:1], *sys.path])
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
                hint=what_to_try(),
            ) from error

    def close(self) -> None:
        """End Ray and everything it started. Idempotent."""
        if not self._owned:
            return
        self._owned = False
        self.head.close()
        # If its GCS has ended, Ray waits a minute for it and then ends this process.
        if self.head.lost:
            leave_without_ray(self.ray)
        elif _initialized() and all(process.alive for process in self._gcs):
            # Ray would replace the handler of SIGTERM. Its processes are ended below in any case.
            with _quiet_ray(), _keeping_sigterm(), contextlib.suppress(Exception):
                self.ray.shutdown()
        self._clear_up()
        self._closed.set()

    def _clear_up(self) -> None:
        """End the processes, remove the directory, restore the environment."""
        _end(self.processes)
        self.processes = ()
        if self._template is not None:
            self._template.end()
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
        """Start Ray; once more from the beginning if it was too slow on a busy host, or if its raylet rejected the
        command that starts only what machines need."""
        begin = self._clock()
        report_step("starting Ray")
        try:
            self._start_in_keeper(num_cpus, only_what_machines_need)
        except Exception as error:
            took = self._clock() - begin
            ended = isinstance(error, RayletEnded)
            if isinstance(error, ServiceError) or not (ended or took >= SLOW_SECONDS) or not self._wanted():
                raise
            why = str(error) if ended else f"not up after {took:.0f} s (this host is very busy)"
            log.warning("Ray did not start: %s; trying once more", why)
            with _quiet_ray(), contextlib.suppress(Exception):
                self.ray.shutdown()  # Ray may still hold a part of the failed start.
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
        """False once Ray has lost its core, or the head that was joined: asking it anything would then wait."""
        kept = self._keeper is None or self._keeper.owner.alive
        return kept and not self.head.lost and all(process.alive for process in self._core)

    def _join(self, address: str) -> None:
        self._set(EVERY_RAY)
        if self._keeper is None:
            self._set({"RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_SECONDS)})
        if listens_on_loopback_only(address):
            self._set(RAY_ON_LOOPBACK)
        if self._keeper is not None:
            token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": self._keeper.token_file}
            self._set(OWN_RAY | (token if self._keeper.token_file else {}))
            self._core = self._gcs = tuple(p for p in self._keeper.processes if _name(p) == "gcs_server")
        elif os.environ.get("RAY_AUTH_MODE") != "token":
            log.warning(
                "whoever reaches the Ray cluster at %s can run programs on its hosts; for authentication start it, and "
                "podrun, with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN",
                address,
            )
        with without_garbage_collection():
            self.ray = import_ray()
        with _quiet_ray(), _keeping_sigterm():
            self.ray.init(
                address=address,
                namespace="podrun",
                configure_logging=False,
                log_to_driver=False,
                logging_level="error",
            )
        for directory in self._keeper.directories if self._keeper is not None else ():
            private_ray.log_nowhere(directory)
        if self._keeper is not None:
            self.head = own_head(self._gcs)
        self.head.start()

    def _start(self, num_cpus: int | None, parts: Parts) -> None:
        self._guardian = Guardian()
        self.directory = short_scratch(self._guardian.watch_directory)
        token = self.directory / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32), encoding="ascii")
        environment = EVERY_RAY | OWN_RAY
        if os.environ.get("RAY_AUTH_MODE", "token") == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
            environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
            self.token_file = str(token)
        self._set(environment | {SOCKET_VARIABLE: str(self.directory / SOCKET)})
        self._template = take_template()
        self._template.listen(self.directory / SOCKET)
        with without_garbage_collection():
            self.ray = import_ray()
        self._on_import()
        try:
            with _quiet_ray(), parts(self._template.expect), _shielded_from_ctrl_c(), _keeping_sigterm():
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
                    **private_ray.init_options(
                        self.directory / RAY_DIRECTORY,
                        # Ray wants its object store in /dev/shm whether or not it can write there.
                        self.directory if is_read_only("/dev/shm") else None,
                        "127.0.0.1",
                    ),
                )
        except Exception:
            # Its processes would continue to start, and write to a directory that is removed.
            self.processes = tuple(_started_for(self.directory))
            raise
        self.address = self.ray.get_runtime_context().gcs_address
        self.processes = tuple(_descendants())
        self._core = tuple(p for p in self.processes if _name(p) in ("gcs_server", "raylet"))
        self._gcs = tuple(p for p in self._core if _name(p) == "gcs_server")
        for process in self.processes:
            self._guardian.watch_process(process.pid, process.start_ticks)
        self.head = own_head(self._gcs)
        self.head.start()

    def _set(self, environment: Mapping[str, str]) -> None:
        for key, value in environment.items():
            if key in os.environ and key != "RAY_AUTH_TOKEN_PATH":
                continue
            self._saved.setdefault(key, os.environ.get(key))
            os.environ[key] = value


def _initialized() -> bool:
    """True iff this process uses Ray already. Does not import it."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _descendants() -> Iterator[ProcessId]:
    """Descendants of the calling process, without guardians."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        process = ProcessId.of(child.pid)
        if process is not None and "guardian.py" not in " ".join(_cmdline(child)):
            yield process


def _started_for(directory: Path) -> Iterator[ProcessId]:
    """Descendants of the calling process with the directory on their command line."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        process = ProcessId.of(child.pid)
        if process is not None and any(str(directory) in word for word in _cmdline(child)):
            yield process


def _name(process: ProcessId) -> str:
    return Path(f"/proc/{process.pid}/comm").read_text(encoding="ascii").strip() if process.alive else ""


def _cmdline(process: psutil.Process) -> list[str]:
    import psutil

    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def _end(processes: tuple[ProcessId, ...], patience: float = 3.0) -> None:
    """Wait ``patience`` seconds for processes to end, then kill them."""
    end = time.monotonic() + patience
    while any(process.alive for process in processes) and time.monotonic() < end:
        time.sleep(0.02)
    for process in processes:
        if process.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, 9)


@contextlib.contextmanager
def _shielded_from_ctrl_c() -> Iterator[None]:
    """Processes started in this context ignore Ctrl-C, which a terminal sends to all; their owner ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def _quiet_ray() -> Iterator[None]:
    """Keep Ray's messages about its start and end off the terminal, except errors."""
    logger = logging.getLogger("ray")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _keeping_sigterm() -> Iterator[None]:
    """Keep the process's handler of SIGTERM: Ray's core installs one that prints a stack trace, and `ray.init` in the
    main thread one of Python that ends the process with exit code 15.

    Uses sigaction(2), since Python changes handlers from its main thread only.
    """
    import ctypes

    libc = ctypes.CDLL(None)
    action = ctypes.create_string_buffer(512)  # Larger than any platform's struct sigaction.
    known = libc.sigaction(signal.SIGTERM, None, action) == 0
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)
        if known:
            libc.sigaction(signal.SIGTERM, action, None)
