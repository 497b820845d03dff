"""Entry points of the installed commands.

What comes before a command's own code: standard streams that are there, and Ctrl-C that ends a command quietly while it
is still being imported.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys


def podrun() -> int:
    """``podrun`` and ``poprun``."""
    return _run("podrun.launcher.cli")


def vipu() -> int:
    """``vipu``."""
    return _run("podrun.partition.cli_user")


def vipu_admin() -> int:
    """``vipu-admin``."""
    return _run("podrun.partition.cli_admin")


def vipu_server() -> int:
    """``vipu-server``."""
    return _run("podrun.partition.cli_server")


def gc_monitor() -> int:
    """``gc-monitor``."""
    return _run("podrun.monitor.gc_monitor")


def gc_reset() -> int:
    """``gc-reset``."""
    return _run("podrun.monitor.gc_reset")


def gc_info() -> int:
    """``gc-info``."""
    return _run("podrun.monitor.gc_info")


def gc_inventory() -> int:
    """``gc-inventory``."""
    return _run("podrun.monitor.gc_inventory")


def gc_links() -> int:
    """``gc-links``."""
    return _run("podrun.monitor.gc_links")


def gc_flops() -> int:
    """``gc-flops``."""
    return _run("podrun.monitor.gc_flops")


def gc_iputraffictest() -> int:
    """``gc-iputraffictest``."""
    return _run("podrun.monitor.gc_iputraffictest")


def gc_hosttraffictest() -> int:
    """``gc-hosttraffictest``."""
    return _run("podrun.monitor.gc_hosttraffictest")


def gc_hostsynclatencytest() -> int:
    """``gc-hostsynclatencytest``."""
    return _run("podrun.monitor.gc_hostsynclatencytest")


def gc_gwlinkstraffictest() -> int:
    """``gc-gwlinkstraffictest``."""
    return _run("podrun.monitor.gc_gwlinkstraffictest")


def gc_powertest() -> int:
    """``gc-powertest``."""
    return _run("podrun.monitor.gc_powertest")


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


def _run(module: str) -> int:
    open_standard_streams()
    # Python would answer Ctrl-C with the traceback of an import. Who ignores it (nohup) goes on ignoring it.
    quietly = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if quietly:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    main = importlib.import_module(module).main
    if quietly:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code: int | None = main()
    return code or 0
