"""Entry points of the installed commands.

Before a command's own code runs, standard streams are opened and made safe to write, and Ctrl-C ends a command quietly
while it is being imported.
"""

from __future__ import annotations

import os
import signal
import sys

COMMANDS = ("podrun", "poprun", "poprt", "popef_dump", "vipu", "gc-")
"""How the names of installed commands begin."""
# First of all: Python answers Ctrl-C with the traceback of an import. An ignored signal (nohup) stays ignored.
_quiet = (
    os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "").startswith(COMMANDS)
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
)
if _quiet:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import errno  # noqa: E402
import importlib  # noqa: E402
import io  # noqa: E402
from collections.abc import Callable  # noqa: E402
from functools import partial  # noqa: E402
from types import FunctionType  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

from podrun.core.garbage import without_garbage_collection  # noqa: E402

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

LAUNCHER = "podrun.launcher.cli"
READER_GONE = (errno.EPIPE, errno.EIO, errno.EBADF)


def podrun() -> int:
    """``podrun`` and ``poprun``."""
    return _run(LAUNCHER)


def vipu() -> int:
    """``vipu``."""
    return _run("podrun.partition.commands.vipu", "vipu_command")


def vipu_admin() -> int:
    """``vipu-admin``."""
    return _run("podrun.partition.commands.vipu_admin", "vipu_admin_command")


def vipu_server() -> int:
    """``vipu-server``."""
    return _run("podrun.partition.commands.vipu_server")


def poprt() -> int:
    """``poprt``."""
    return _run("podrun.serving.poprt_command")


def poprt_exec() -> int:
    """``poprt_exec``."""
    return _run("podrun.serving.run_popef_command", "exec_command")


def popef_dump() -> int:
    """``popef_dump``."""
    return _run("podrun.popef.dump", "dump_command")


def gc_monitor() -> int:
    """``gc-monitor``."""
    return _run("podrun.monitor.device_tools", "gc_monitor_command")


def gc_reset() -> int:
    """``gc-reset``."""
    return _run("podrun.monitor.device_tools", "gc_reset_command")


def gc_info() -> int:
    """``gc-info``."""
    return _run("podrun.monitor.device_listing", "gc_info_command")


def gc_inventory() -> int:
    """``gc-inventory``."""
    return _run("podrun.monitor.device_listing", "gc_inventory_command")


def gc_links() -> int:
    """``gc-links``."""
    return _run("podrun.monitor.link_tools", "gc_links_command")


def gc_flops() -> int:
    """``gc-flops``."""
    return _run("podrun.monitor.load_tools", "gc_flops_command")


def gc_iputraffictest() -> int:
    """``gc-iputraffictest``."""
    return _run("podrun.monitor.link_tools", "gc_iputraffictest_command")


def gc_hosttraffictest() -> int:
    """``gc-hosttraffictest``."""
    return _run("podrun.monitor.host_tools", "gc_hosttraffictest_command")


def gc_hostsynclatencytest() -> int:
    """``gc-hostsynclatencytest``."""
    return _run("podrun.monitor.host_tools", "gc_hostsynclatencytest_command")


def gc_gwlinkstraffictest() -> int:
    """``gc-gwlinkstraffictest``."""
    return _run("podrun.monitor.gc_gwlinkstraffictest", "gc_gwlinkstraffictest_command")


def gc_powertest() -> int:
    """``gc-powertest``."""
    return _run("podrun.monitor.load_tools", "gc_powertest_command")


def open_standard_streams() -> None:
    """Put /dev/null where the caller has closed a standard stream (``>&-``, some daemons).

    The next file or socket would get its number, and what is printed would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # Gets the lowest number that is free: this one.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


class Outlet(io.FileIO):
    """Standard output or error that never fails: it drops what cannot be written.

    A command goes on with its work when its reader is gone (``| head``, a closed terminal). Another reason, such as a
    full disk, is reported once on standard error and kept in ``failure``.
    """

    failure: OSError | None = None
    command = ""
    """The command's name in that report; empty: the name of the program that was started."""

    def write(self, data: ReadableBuffer) -> int:
        """Write as much as the system takes at a time; after a failure drop everything."""
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError as error:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            if error.errno not in READER_GONE:
                self.failure = error
                name = self.command or os.path.basename(sys.argv[0])
                sys.stderr.write(f"{name}: output from here on is lost: {error.strerror}\n")
            return memoryview(data).nbytes


class UnheldWriter(io.BufferedWriter):
    """Writes at once all that it gets: for programs that want no buffers (``python -u``, PYTHONUNBUFFERED)."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write the data whole, also where the system takes them in parts."""
        count = super().write(data)
        self.flush()
        return count


def replace_standard_output(command: str = "") -> tuple[Outlet, Outlet]:
    """Replace standard output and error by an `Outlet` each, and return the two."""
    outlets = []
    for name, number in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, name)
        old.flush()
        outlet = Outlet(number, "w", closefd=False)
        outlet.command = command
        outlets.append(outlet)
        unheld = getattr(old, "write_through", False)
        stream = io.TextIOWrapper(
            UnheldWriter(outlet) if unheld else io.BufferedWriter(outlet),
            encoding=old.encoding,
            errors=old.errors,
            line_buffering=old.line_buffering,
            write_through=unheld,
        )
        setattr(sys, name, stream)
    return outlets[0], outlets[1]


def _run(module: str, name: str = "main") -> int:
    """Import a module, and run a function or a command (of click) in it."""
    open_standard_streams()
    quietly = _quiet or signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quietly:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    with without_garbage_collection():
        main = getattr(importlib.import_module(module), name)
    if not isinstance(main, FunctionType):
        from podrun.core.command_line import run_command

        main = partial(run_command, main)
    if quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # A launch ends with the exit code of its instances, even if their output could not be written.
    return run(main, loss_fails=module != LAUNCHER)


_HOST_HINTS = {
    errno.ENOSPC: "Free space on that disk: df -h. podrun doctor shows where podrun keeps files.",
    errno.EDQUOT: "Free some of your quota. podrun doctor shows where podrun keeps files.",
    errno.EROFS: "Name a place that can be written. podrun doctor shows where podrun keeps files.",
    errno.EACCES: "See who may: ls -ld with that path. podrun doctor shows where podrun keeps files.",
    **dict.fromkeys((errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR), "Check the path."),
    errno.EISDIR: "Name a file: that is a folder.",
    errno.EMFILE: "Raise the limit of open files: ulimit -n. podrun doctor says how many podrun needs.",
    errno.ENOMEM: "Free memory, or run fewer machines. podrun doctor shows what there is.",
}
_ELSE = "podrun doctor checks this host; PODRUN_TRACEBACK=full shows where it happened."


def report_of_host(error: OSError, command: str) -> int:
    """Print an error of the host that a command did not expect, in the form of all errors; returns the exit code."""
    from podrun.core.terminal import error_lines

    place = f": {error.filename}" if error.filename is not None else ""
    hint = _HOST_HINTS.get(error.errno or 0, _ELSE)
    sys.stderr.write(error_lines(command, f"the host refuses: {error.strerror or error}{place}", hint))
    return 1


def run(
    main: Callable[[], int | str | None],
    *,
    command: str = "",
    loss_fails: bool = True,
    hosts_program: bool = False,
) -> int:
    """Run the main function of a command with safe standard streams, and return its exit code.

    For modules that are started by ``python -m``; ``command`` is what they are called then. ``loss_fails``: exit code 1
    if the output cannot be written, as on a full disk. ``hosts_program``: errors may be those of a program that runs in
    this process, which are left to it.
    """
    open_standard_streams()
    output, _ = replace_standard_output(command)
    try:
        code: int | str | None = main()
    except SystemExit as end:
        code = end.code
    except OSError as error:
        from podrun.core.environment import PODRUN_TRACEBACK, environment

        if hosts_program or environment().get(PODRUN_TRACEBACK) == "full":
            raise
        code = report_of_host(error, command or os.path.basename(sys.argv[0]))
    sys.stdout.flush()
    if isinstance(code, str):
        sys.exit(code)
    code = code or int(loss_fails and output.failure is not None)
    terminal = sys.modules.get("podrun.core.terminal")  # Who wants an end at once has imported it.
    return code if terminal is None else int(terminal.leave(code))
