"""Ties the life of a process to podrun's, then executes a program in it. Run by path with ``python -I -S``.

    trampoline.py PARENT_PID PROGRAM [ARGUMENTS...]

The kernel kills this process when the thread that started it ends (PR_SET_PDEATHSIG, prctl(2)), however
podrun ends; the setting survives exec. A forked child of podrun cannot do this safely, because podrun has threads.
`tied_words` gives the words of such a command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CANNOT_EXECUTE, NOT_FOUND = 126, 127  # The exit code that a shell gives.


def main() -> None:
    """Run the program of the command line in this process, bound to the life of the parent that it names."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # podrun ended before the line above ran.
        os._exit(1)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        sys.stderr.write(f"podrun: cannot run {program[0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(NOT_FOUND if missing else CANNOT_EXECUTE)


def tied_words(words: list[str]) -> list[str]:
    """A command's words with this file before them: the process dies with the thread that starts it."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), *words]


if __name__ == "__main__":
    main()
