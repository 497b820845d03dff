"""Processes that are copies of one that has imported JAX, podrun and the tests' programs.

Importing takes a process a second of a core, and a copy hundredths of one. Copies are processes like others: with an
environment, files, a process id and an exit code. They differ in four ways. Variables that modules read when they are
imported (JAX_*, NPY_*, PYTHON*) are those of the whole run of tests, whatever environment a copy has. All copies have
one hash seed. ``/proc/PID/environ`` shows the environment of the process that they are copies of. A copy ends once its
threads and the functions of `atexit` have: it does not take its modules apart, which would copy the memory of all.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import CodeType
from typing import IO, TYPE_CHECKING, NoReturn

import numpy

if TYPE_CHECKING:
    from tests.conftest import Commands

ROOT = Path(__file__).resolve().parent.parent
MODULES = (
    "podrun.compat.__main__",
    "podrun.compiler.compile",
    "podrun.device.host.connecting",
    "podrun.device.service.server",
    "podrun.device.xla.networks",
    "podrun.monitor.device_tools",
    "podrun.onnx_models.ops.graphcore",
    "podrun.partition.commands.vipu_admin",
    "podrun.popart.sessions.session",
    "tests.device.conftest",
    "tests.device.pods",
    "tests.device.programs",
)
"""What the first process imports, besides what machines import ahead."""
COMPAT = "import sys; from podrun.compat.__main__ import run_compat; sys.exit(run_compat())"
"""What ``python -m podrun.compat`` runs."""
COMMAND = "import sys; from podrun.commands import {} as main; sys.argv[0] = {!r}; sys.exit(main())"
"""What an installed command runs."""
ENVIRON = dict(os.environ)
"""That of the process of which others are copies. Test files import this module before the first test runs."""
NUMBER = struct.Struct("=q")
START_SECONDS = 600.0
END_SECONDS = 60.0
_starting = threading.Lock()


class CopiedProcess:
    """A process that runs ``code``, with ``words`` as its arguments; like `subprocess.Popen` with pipes and text.

    ``cwd``: where, in the folder of this project by default. ``out``: a file in place of the pipe of its standard
    output. ``err``: its standard error, by default that of this process. It ends with this process at the latest.
    """

    def __init__(
        self,
        code: str,
        words: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        out: IO[str] | None = None,
        err: IO[str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (its_in, to), (of, its_out) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(to, "w"), os.fdopen(of)
        files = [its_in, its_out if out is None else out.fileno(), 2 if err is None else err.fileno()]
        request = [code, list(words), str(cwd), dict(os.environ if env is None else env)]
        try:
            _ask(json.dumps(request).encode(), [*files, status.fileno()])
            status.close()
            self._status.settimeout(START_SECONDS)
            data, (self._process,), _, _ = socket.recv_fds(self._status, NUMBER.size, 1)
            (self.pid,) = NUMBER.unpack(data)
        except BaseException:
            for file in (self.stdin, self.stdout, self._status):
                file.close()
            raise
        finally:
            status.close()
            os.close(its_in)
            os.close(its_out)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, below zero for a signal; raises TimeoutError if it has not ended by then."""
        if self.returncode is None:
            self._status.settimeout(timeout)
            try:
                data = self._status.recv(NUMBER.size)
            except TimeoutError:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout} s") from None
            assert data, "the process that makes copies has ended"
            (self.returncode,) = NUMBER.unpack(data)
            self._status.close()
            os.close(self._process)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing is sent to a process that has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> None:
        """Close its standard input and wait for its end. What it has said and nobody reads has to fit a pipe."""
        self.stdin.close()
        self.wait(timeout)
        self.stdout.close()


def run_copied(
    code: str,
    words: Sequence[str] = (),
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    timeout: float = 180.0,
) -> subprocess.CompletedProcess[str]:
    """Run such a process to its end, like `subprocess.run`. A TimeoutError gives the end of what it said."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = CopiedProcess(code, words, env=env, cwd=cwd, out=out, err=err)
        process.stdin.close()
        try:
            code_of_end = process.wait(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{error}: {_text(out)[-1000:]}{_text(err)[-3000:]}") from None
        finally:
            process.kill()
            process.communicate(END_SECONDS)
        return subprocess.CompletedProcess([code, *words], code_of_end, _text(out), _text(err))


def run_command(
    commands: Commands,
    name: str,
    *words: str | Path,
    timeout: float = 180.0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run one of podrun's commands to its end in a copy, with the environment and in the folder of `Commands.run`."""
    code = COMMAND.format(name.replace("-", "_"), name)
    return run_copied(
        code, [*map(str, words)], env=commands.environment(env), cwd=commands.home, timeout=timeout
    )


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _ask(request: bytes, files: Sequence[int]) -> None:
    """Ask for a copy with these files. The last one is a socket: it gets the process id with a file of the process,
    then the exit code.
    """
    with _starting:
        first = _first()
    try:
        socket.send_fds(first, [request], files)
    except OSError:
        _first.cache_clear()
        raise


@functools.cache
def _first() -> socket.socket:
    """The socket of the process of which others are copies, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.copies", str(theirs.fileno())],
            cwd=ROOT,
            env=ENVIRON,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        try:
            process.wait(END_SECONDS)
        finally:
            process.kill()

    atexit.register(end)
    return ours


# --- what those processes run -----------------------------------------------------------------------------------


def make_copies(requests: socket.socket) -> Callable[[], None]:
    """Serve requests until nobody is left to make any, then end all copies. Returns in a copy what that runs."""
    for name in (*import_module("podrun.device.service.preload").TEMPLATE_MODULES, *MODULES):
        import_module(name)
    gc.freeze()
    copies: dict[int, socket.socket] = {}
    while True:
        ready = select.select([requests, *copies], [], [])[0]
        for process in [file for file in ready if file is not requests]:
            _tell_end(process, copies.pop(process))
        if requests not in ready:
            continue
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not request:
            _end_all(copies)
        pid = os.fork()
        if pid == 0:
            for other in (requests, *copies.values()):
                other.close()
            for process in (files[3], *copies):
                os.close(process)
            return _become(*json.loads(request), files[:3])
        for file in files[:3]:
            os.close(file)
        process, status = os.pidfd_open(pid), socket.socket(fileno=files[3])
        copies[process] = status
        try:
            socket.send_fds(status, [NUMBER.pack(pid)], [process])
        except OSError:  # Who asked for it has gone.
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _tell_end(process: int, status: socket.socket) -> None:
    """Send the exit code of a process that has ended to who asked for it."""
    end = os.waitid(os.P_PIDFD, process, os.WEXITED)
    assert end is not None
    os.close(process)
    with status, contextlib.suppress(OSError):
        status.send(NUMBER.pack(end.si_status if end.si_code == os.CLD_EXITED else -end.si_status))


def _end_all(copies: Iterable[int]) -> NoReturn:
    """End what nobody can wait for any more, and this process."""
    for process in copies:
        signal.pidfd_send_signal(process, signal.SIGKILL)
    for process in copies:
        os.waitid(os.P_PIDFD, process, os.WEXITED)
    os._exit(0)


def _become(
    code: str, words: Sequence[str], cwd: str, environ: Mapping[str, str], files: Sequence[int]
) -> Callable[[], None]:
    """Take over the folder, environment, arguments and files that are asked for."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["-c", *words]
    numpy.random.seed()
    return functools.partial(_run, compile(code, "<copy>", "exec"))


def _run(program: CodeType) -> NoReturn:
    """Run the code of a copy. Its errors are shown without the frames of this file."""
    code: object = None
    try:
        exec(program, {"__name__": "__main__"})  # noqa: S102 - a test's own code
    except SystemExit as end:
        code = end.code
    except Exception as error:
        trace = error.__traceback__
        sys.excepthook(type(error), error, trace and trace.tb_next)
        code = 1
    leave(code)


def leave(code: object) -> NoReturn:
    """End as Python does after `sys.exit`, but do not take modules and all that they hold apart."""
    if not isinstance(code, int | None):
        # Python writes to the file beneath where there is no stream.
        with contextlib.suppress(OSError, ValueError):
            os.write(2, f"{code}\n".encode()) if sys.stderr is None else print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    number = (code or 0) & 0xFF
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except (OSError, ValueError):
            number = 120
    ctypes.CDLL(None).fflush(None)
    os._exit(number)


if __name__ == "__main__":
    make_copies(socket.socket(fileno=int(sys.argv[1])))()
