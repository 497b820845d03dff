"""The program that Ray starts for a machine: a copy of a process that has imported everything.

Importing Ray's worker, podrun and JAX takes more than a second of a core, for each machine of a POD, on cores they
share. A *template* imports them once (`WorkerTemplate`). What the raylet starts asks the template for a copy of itself
(fork(2)) with the environment, arguments and files that the raylet gave. Ray knows a worker by the id in its
arguments and by the process id with which it registers, so it takes the copy.

This file is run by path: with ``--template FD`` it is the template, which takes requests at the listening socket FD;
with ``python -I -S``, and nothing that takes long to import (as `socket` and `json` do), it asks for a copy and ends;
else, as where the template has ended, it is a worker that imports for itself.
"""

from __future__ import annotations

import _socket
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SOCKET = "template"
"""The template's socket in the session's directory."""
SOCKET_VARIABLE = "PODRUN_WORKER_TEMPLATE"
"""Names the template's socket to what the raylet starts."""
SELDOM_USED = ("requests", "jsonschema", "tqdm", "tqdm.auto")
"""What Ray imports to ask clouds for accelerators, to check environments of tasks, and to show progress."""
WORKER = "ray._private.workers.default_worker"
USAGE = "ray._common.usage.usage_lib"
"""What a Ray imports as it starts, and then `SELDOM_USED` modules for it."""
IMPORTED_LATER = (USAGE, "grpc._interceptor", "grpc._server", "grpc._channel")
"""What Ray and gRPC import as a machine starts. The template does it for all, but for names that they do not have."""
READ_AT_IMPORT = ("RAY_JOB_ID", "RAY_RAYLET_PID")
"""What Ray's core reads from the environment when it is imported, and never again."""
FIRST_JOB = "01000000"
"""The job of the process that starts a cluster, in `READ_AT_IMPORT`."""
OF_WORKERS = {"RAY_CLIENT_MODE": "0", "SPT_NOENV": "1"}
"""Variables that a raylet gives all workers and that Ray reads while it is imported."""
REQUEST_SECONDS = 10.0
"""The template waits so long for the rest of a request."""
_TEMPLATE = "--template"
_LISTENS = b"listens"
"""Told to the template's standard input."""
_PR_SET_PDEATHSIG = 1


class WorkerTemplate:
    """The template's process. It imports at once, and takes requests when it has a socket (`listen`). It ends with the
    thread that started it; its copies do not. ``defaults``: variables that it gets unless this process has them.
    ``own_workers``: this process starts both the cluster and the workers, so that their job is known (`expect`).
    """

    def __init__(self, defaults: Mapping[str, str], *, own_workers: bool = False) -> None:
        import socket
        import subprocess

        self._path, self._own_workers = "", own_workers
        self._listener = socket.socket(socket.AF_UNIX)
        self._process = subprocess.Popen(
            [
                sys.executable,
                os.path.abspath(__file__),
                _TEMPLATE,
                str(self._listener.fileno()),
                str(os.getpid()),
            ],
            env={**defaults, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[self._listener.fileno()],
            start_new_session=True,
        )

    def listen(self, path: Path) -> None:
        """Take requests at a socket of this path."""
        self._path = str(path)
        with self._listener:
            self._listener.bind(self._path)
            self._listener.listen(512)
        if self._process.stdin is not None:
            try:
                with self._process.stdin as told:
                    told.write(_LISTENS)
            except BrokenPipeError:
                pass  # It has ended.

    def expect(self, raylet: int) -> None:
        """Import Ray while it still starts, for own workers, whose raylet has this process id. Where that turns out to
        be wrong, workers import for themselves.
        """
        if self._own_workers:
            values = dict(zip(READ_AT_IMPORT, (FIRST_JOB, str(raylet)), strict=True))
            send_request(self._path, {**os.environ, **OF_WORKERS, **values}, (), ())

    def end(self) -> None:
        """End the template. Idempotent."""
        self._listener.close()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.kill()
        self._process.wait()


# --- what the processes run -------------------------------------------------------------------------------------


class _Template:
    """Makes the copies. Ray comes with the first request, see `READ_AT_IMPORT`. One without files is for that alone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._cluster: Mapping[str, str] | None = None

    def serve(self) -> None:
        """Import what does not depend on Ray, then take requests. Returns in each copy."""
        from importlib import import_module

        import_module("podrun.device.service.preload").import_for_copies()
        if os.read(0, len(_LISTENS)) != _LISTENS:
            os._exit(0)  # No machine is wanted after all.
        while True:
            request, _ = self._listener.accept()
            with request:
                if self._copied_for(request):
                    self._listener.close()
                    return

    def _copied_for(self, connection: socket.socket) -> bool:
        """Make the copy that a request asks for; true in the copy. A request without an answer makes none: whoever
        asked then becomes a worker itself.
        """
        import socket

        connection.settimeout(REQUEST_SECONDS)
        files: list[int] = []
        try:
            text, files, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            while more := connection.recv(1 << 20):
                text += more
            environment, arguments = _read_request(text)
            if not self._knows_ray(environment) or not files:
                return False
            pid = os.fork()
            if pid == 0:
                _become(environment, arguments, files)
                return True
            connection.sendall(str(pid).encode())
        except (OSError, ValueError):
            pass  # Whoever asked has ended.
        finally:
            for file in files:
                os.close(file)
        return False

    def _knows_ray(self, environment: Mapping[str, str]) -> bool:
        """Import Ray if need be; false if it was imported for another job, such as that of a service before this."""
        cluster = {name: environment.get(name, "") for name in READ_AT_IMPORT}
        if self._cluster is None:
            self._cluster = cluster
            os.environ.update(environment)
            prepare_imports()
            run_worker("imported")
            _import_in_advance()
            gc.freeze()  # A copy that collects garbage shall not write to pages that all share.
        return cluster == self._cluster


def _request(environment: Mapping[str, str], arguments: Sequence[str]) -> bytes:
    """An environment and arguments, as text that ends with a zero each; a zero more is between them. Before all that
    its length, likewise."""
    variables = "".join(f"{name}={value}\0" for name, value in environment.items())
    text = os.fsencode(f"{variables}\0" + "".join(f"{word}\0" for word in arguments))
    return b"%d\0%s" % (len(text), text)


def _read_request(request: bytes) -> tuple[dict[str, str], list[str]]:
    """The environment and the arguments of a `_request`. Raises ValueError if it is none."""
    length, _, text = request.partition(b"\0")
    variables, end, words = text.partition(b"\0\0")
    if not end or length != b"%d" % len(text):
        raise ValueError("no whole request")
    pairs = (os.fsdecode(variable).partition("=") for variable in variables.split(b"\0"))
    return {name: value for name, _, value in pairs}, [os.fsdecode(word) for word in words.split(b"\0")[:-1]]


def _become(environment: Mapping[str, str], arguments: Sequence[str], files: Sequence[int]) -> None:
    """Take over what the process that asked has from the raylet."""
    import signal

    os.setpgid(0, 0)  # The raylet ends the process group of a worker that has ended.
    for number, file in enumerate(files):
        os.dup2(file, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments


def prepare_imports() -> None:
    """Let Ray's worker import no more than machines use: every machine's process pays for it.

    The garbage collector stays off until the machine is up (`MachineActor.start` turns it on), since modules that are
    imported once leave next to no garbage.
    """
    gc.disable()
    import_ray_alone()


def import_ray_alone() -> None:
    """Import Ray without `SELDOM_USED` modules, which come when used, and without what serializes values of others.

    Only plain values go to machines and come back, so no process of podrun learns how to serialize what pydantic,
    starlette and Arrow make: importing these takes 0.05 s of a core and more. Without the name Ray does.
    """
    import contextlib
    from importlib.machinery import PathFinder

    # Ray looks whether it can import what it does not need, such as tqdm.
    later = [name for name in SELDOM_USED if PathFinder.find_spec(name.partition(".")[0])]
    with contextlib.suppress(
        ImportError
    ):  # A worker that imports for itself may learn from Ray where podrun is.
        from podrun.private_apis.lean_imports import import_lean

        # Other threads of these processes are podrun's and gRPC's, which import nothing of it.
        import_lean("ray", *later, beside_threads=True)
        import_lean(USAGE, *later, beside_threads=True)
    with contextlib.suppress(ImportError):
        from ray.util import serialization_addons

        serialization_addons.apply = lambda serialization_context: None


def _import_in_advance() -> None:
    """Import `IMPORTED_LATER`."""
    import contextlib
    from importlib import import_module

    for name in IMPORTED_LATER:
        with contextlib.suppress(ImportError):
            import_module(name)


def run_worker(name: str) -> None:
    """Run Ray's worker under a module name; it works under ``__main__``. Without it no machine starts."""
    import runpy

    runpy.run_module(WORKER, run_name=name, alter_sys=True)


def send_request(
    address: str, environment: Mapping[str, str], arguments: Sequence[str], files: Sequence[int]
) -> bool:
    """Whether the template at a socket has made a copy with this environment, these arguments, and ``files`` of this
    process. Without files nobody waits for an answer: false.
    """
    template = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    try:
        template.connect(address)
        text = _request(environment, arguments)
        rights = b"".join(number.to_bytes(4, sys.byteorder) for number in files)
        sent = template.sendmsg([text], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)] if files else [])
        template.sendall(text[sent:])
        template.shutdown(_socket.SHUT_WR)
        return bool(files and template.recv(32))
    except OSError:
        return False
    finally:
        template.close()


def ask_for_copy(address: str) -> bool:
    """Whether the template at a socket has made a copy with this process's environment, arguments and files."""
    return send_request(address, os.environ, sys.argv[1:], range(3))


def main() -> None:
    """Be a template and then its copies, or ask for a copy, or be a worker."""
    if sys.flags.isolated:
        if not ask_for_copy(os.environ.get(SOCKET_VARIABLE, "")):
            os.execv(sys.executable, [sys.executable, *sys.argv])
        return
    # This file's folder has modules with the names of libraries; it is no place to import from.
    sys.path[:] = [path for path in sys.path if path != __file__.rpartition("/")[0]]
    if sys.argv[1:2] == [_TEMPLATE]:
        import ctypes
        import signal
        import socket

        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != int(sys.argv[3]):  # Its owner ended before the line above ran.
            os._exit(1)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The kernel buries copies that have ended.
        gc.disable()
        _Template(socket.socket(fileno=int(sys.argv[2]))).serve()
    else:
        prepare_imports()
    run_worker("__main__")


if __name__ == "__main__":
    main()
