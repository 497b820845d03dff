"""Processes that are copies of one that has imported JAX, podrun and the tests' programs.

Importing takes a process a second of a core, and a copy hundredths of one. Copies are processes like others: with an
environment, files, a process id and an exit code.
"""

from __future__ import annotations

import atexit
import contextlib
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
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO

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
COMPAT = "import sys; from podrun.compat.__main__ import main; main(sys.argv[1:])"
"""The code of ``python -m podrun.compat``."""
NUMBER = struct.Struct("=q")
START_SECONDS = 600.0
_asking = threading.Lock()


class CopiedProcess:
    """A process that runs ``code``, with ``words`` as its arguments; like `subprocess.Popen` with pipes and text.

    ``cwd``: where, in the folder of this project by default. ``err``: its standard error, by default that of this
    process.
    """

    def __init__(
        self,
        code: str,
        words: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
        err: IO[str] | None = None,
    ) -> None:
        self.returncode: int | None = None
        (its_in, to), (of, its_out), (self._ended, held) = os.pipe(), os.pipe(), os.pipe()
        try:
            request = [code, list(words), str(cwd), dict(os.environ if env is None else env)]
            self.pid = _answer(request, [its_in, its_out, 2 if err is None else err.fileno(), held])
        finally:
            for file in (its_in, its_out, held):
                os.close(file)
        self.stdin, self.stdout = os.fdopen(to, "w"), os.fdopen(of)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, below zero for a signal; raises TimeoutError if it has not ended by then."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise TimeoutError(f"process {self.pid} has not ended within {timeout} s")
            self.returncode = _answer(self.pid)
            os.close(self._ended)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Its process id is nobody else's until its exit code is read."""
        if self.returncode is None:
            os.kill(self.pid, number)

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
    """Run such a process to its end, like `subprocess.run`. What it prints has to fit a pipe; errors need not."""
    with tempfile.TemporaryFile("w+") as err:
        process = CopiedProcess(code, words, env=env, cwd=cwd, err=err)
        try:
            process.wait(timeout)
            out = process.stdout.read()
            err.seek(0)
            return subprocess.CompletedProcess([code, *words], process.wait(), out, err.read())
        finally:
            process.kill()
            process.communicate(timeout)


def _answer(request: object, files: Sequence[int] = ()) -> int:
    """The answer of the process of which others are copies: a process id, or the exit code for one."""
    with _asking:
        first = _first()
        socket.send_fds(first, [json.dumps(request).encode()], files)
        data = first.recv(NUMBER.size)
    assert len(data) == NUMBER.size, "the process that makes copies has ended"
    return int(NUMBER.unpack(data)[0])


@functools.cache
def _first() -> socket.socket:
    """The socket of that process, which ends with this one."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(START_SECONDS)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.copies", str(theirs.fileno())],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )

    def end() -> None:
        ours.close()
        process.wait(START_SECONDS)

    atexit.register(end)
    return ours


# --- what those processes run -----------------------------------------------------------------------------------


def make_copies(requests: socket.socket) -> Callable[[], None]:
    """Serve requests until nobody is left to make any and all copies have ended. Returns in a copy what that runs."""
    for name in (*import_module("podrun.device.service.preload").TEMPLATE_MODULES, *MODULES):
        import_module(name)
    gc.freeze()
    while True:
        request, files, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not request:
            with contextlib.suppress(ChildProcessError):
                while True:
                    os.wait()
            os._exit(0)
        asked = json.loads(request)
        if isinstance(asked, int):
            _, status = os.waitpid(asked, 0)
            number = os.waitstatus_to_exitcode(status)
        elif (number := os.fork()) == 0:
            requests.close()
            return _become(*asked, files)
        for file in files:
            os.close(file)
        requests.sendall(NUMBER.pack(number))


def _become(
    code: str, words: Sequence[str], cwd: str, environ: Mapping[str, str], files: Sequence[int]
) -> Callable[[], None]:
    """Take over the folder, environment, arguments and files that are asked for; the last one tells that this process
    has ended.
    """
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = ["-c", *words]
    program = compile(code, "<copy>", "exec")
    return lambda: exec(program, {"__name__": "__main__"})  # noqa: S102 - a test's own code


if __name__ == "__main__":
    make_copies(socket.socket(fileno=int(sys.argv[1])))()
