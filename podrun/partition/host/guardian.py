"""Ends what a process leaves behind when it is killed.

Some of Ray's helper processes outlive a ``kill -9`` of the process that started them. The owner starts a guardian with
a pipe to it and names processes and directories; if the pipe breaks before the owner says ``done``, the guardian ends
them at once. (If the guardian is killed too, `podrun.partition.host.discovery.Registry.sweep` does it at the next
command.)

This file is also what the guardian process runs, with nothing but the standard library: ``python -I -S guardian.py``.
Lines on its input: ``process PID START_TICKS``, ``directory PATH``, ``mark NAME=VALUE``, ``done``.
"""

import os
import sys
import time

# Functions import what takes a guardian longer to import than it takes Python to start.

SCRATCH_PREFIX = "podrun-scratch-"
"""Names of directories that may be removed start with this; no other directory is removed."""
_ADOPTED = "--adopted"


class Guardian:
    """The owner's end: a guardian process for the calling process.

    ``adopted``: init becomes its parent, because Ray kills the children of an actor whose owner is gone.
    """

    def __init__(self, *, adopted: bool = False) -> None:
        import subprocess

        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), *([_ADOPTED] if adopted else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        if adopted:
            self._process.wait()

    @property
    def pid(self) -> int:
        """Process id of the guardian."""
        return self._process.pid

    def watch_process(self, pid: int, start_ticks: int) -> None:
        """End that process if the owner is killed."""
        self._say(f"process {pid} {start_ticks}")

    def watch_directory(self, path: str) -> None:
        """Remove that scratch directory if the owner is killed."""
        self._say(f"directory {path}")

    def watch_mark(self, mark: str) -> None:
        """End all processes whose environment holds ``mark`` (``NAME=VALUE``) if the owner is killed."""
        self._say(f"mark {mark}")

    def dismiss(self) -> None:
        """End the guardian without any work: the owner has cleaned up. Idempotent."""
        import contextlib

        self._say("done")
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):  # The guardian has ended already.
                self._process.stdin.close()
        self._process.wait(timeout=5)

    def _say(self, line: str) -> None:
        import contextlib

        stdin = self._process.stdin
        if stdin is None or stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):  # Without a guardian, the next command sweeps.
            stdin.write(line.encode() + b"\n")
            stdin.flush()


def start_ticks(pid: int) -> int:
    """Start time of a process in clock ticks since boot; -1 if it does not exist."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return -1


def marked_processes(mark: str) -> list[int]:
    """Processes that started with ``mark`` (``NAME=VALUE``) in their environment, as far as it can be read."""
    pids = []
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if mark.encode() in file.read().split(b"\0"):
                    pids.append(int(name))
        except OSError:
            continue  # The process has ended, or belongs to another user.
    return pids


def end_marked(mark: str, patience: float = 3.0) -> None:
    """End the processes that carry a mark, and those that they start meanwhile.

    A process in execve(2) shows no environment, so two looks in a row must find none.
    """
    import contextlib
    import signal

    end = time.monotonic() + patience
    looks = 0
    while looks < 2 and time.monotonic() < end:
        pids = marked_processes(mark)
        looks = 0 if pids else looks + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # The process has ended by itself meanwhile.
                os.kill(pid, signal.SIGKILL)
        if looks < 2:
            time.sleep(0.05)


def _guard() -> None:
    processes = []
    directories = []
    marks = []
    for line in sys.stdin:
        kind, _, rest = line.rstrip("\n").partition(" ")
        if kind == "process":
            pid, ticks = rest.split()
            processes.append((int(pid), int(ticks)))
        elif kind == "directory":
            directories.append(rest)
        elif kind == "mark":
            marks.append(rest)
        elif kind == "done":
            return
    for mark in marks:
        end_marked(mark)
    for path in directories:
        if os.path.basename(path).startswith(SCRATCH_PREFIX):
            end_writers(path)
            remove_tree(path)


def writers(directory: str) -> list[int]:
    """Processes, other than this one, that have a file in a directory open for writing.

    This finds helper processes that were not recorded: they write logs there.
    """
    prefix = directory.rstrip("/") + "/"
    others = (name for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid())
    return [int(name) for name in others if _writes_under(name, prefix)]


def _writes_under(pid: str, prefix: str) -> bool:
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(prefix):
                with open(f"/proc/{pid}/fdinfo/{fd}", encoding="ascii") as file:
                    flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
                if flags & os.O_ACCMODE != os.O_RDONLY:
                    return True
    except OSError:
        return False  # The process has ended meanwhile, or belongs to another user.
    return False


def end_writers(directory: str, patience: float = 3.0) -> None:
    """End the processes that write to a directory, and those that they start meanwhile."""
    import contextlib
    import signal

    end = time.monotonic() + patience
    while (pids := writers(directory)) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remove_tree(path: str, patience: float = 3.0) -> None:
    """Remove a directory in which ending processes may still write."""
    import shutil

    end = time.monotonic() + patience
    while os.path.isdir(path) and time.monotonic() < end:
        shutil.rmtree(path, ignore_errors=True)
        if os.path.isdir(path):
            time.sleep(0.05)


if __name__ == "__main__":
    if _ADOPTED in sys.argv and os.fork():
        os._exit(0)
    _guard()
