"""Reads pieces that podrun did not export in a process of their own first.

The bytes of a piece are read by native code (MLIR's and XLA's), which damaged or hostile bytes can end. So a piece that
is not this user's own (`podrun.core.executable_file`) is lowered, checked (`podrun.device.xla.custom_calls`) and
compiled in a child process; if that dies, the piece is refused by name, and the machine's process never sees it. What
the child compiles lies in XLA's cache afterwards, so nothing is compiled twice. The child runs no piece, has no
connection but its two pipes, and ends when nothing has come for a while or its parent is gone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from podrun.core import executable_file
from podrun.core.errors import ApplicationRuntimeError, present
from podrun.core.executable import Computation
from podrun.device.xla.custom_calls import RefusedPiece

LONGEST = 512 << 20
"""Most bytes of a piece."""
PATIENCE_S = 300.0
"""Seconds to read and compile one piece."""
IDLE_S = 20.0
"""Seconds without a piece after which the child ends."""
LENGTHS = struct.Struct("<IQ")
"""Lengths of the header and of the piece that come next."""


class Vetter:
    """One child process at a time, for all threads of this process. ``directory``: of compiled pieces."""

    def __init__(self, directory: Path | None, *, patience: float = PATIENCE_S) -> None:
        self._directory, self._patience = directory, patience
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._ends: threading.Timer | None = None

    def check(self, computation: Computation, donated: tuple[int, ...], in_place: Mapping[int, int]) -> None:
        """Return if the piece can be read and compiled. Raises RefusedPiece if not."""
        if len(computation.stablehlo) > LONGEST:
            raise _refused(computation, f"has {len(computation.stablehlo)} bytes; machines take {LONGEST}")
        header = {
            "name": computation.name,
            "inputs": computation.inputs,
            "outputs": computation.outputs,
            "donated": donated,
            "in_place": list(in_place.items()),
        }
        with self._lock:
            answer = self._ask(json.dumps(header).encode(), computation)
        if answer:
            raise RefusedPiece(answer, hint="Compile the program again with podrun.")
        executable_file.note_exported_piece(computation.stablehlo)

    def close(self) -> None:
        """End the child process. Idempotent."""
        with self._lock:
            self._end()

    def _ask(self, header: bytes, computation: Computation) -> str:
        """What the child says against a piece; empty if nothing."""
        if self._ends is not None:
            self._ends.cancel()
        if self._child is None or self._child.poll() is not None:
            self._child = self._start()
        child = self._child
        late = threading.Timer(self._patience, child.kill)
        late.daemon = True
        late.start()
        try:
            requests = present(child.stdin, "the child's input is a pipe")
            requests.write(LENGTHS.pack(len(header), len(computation.stablehlo)) + header)
            requests.write(computation.stablehlo)
            requests.flush()
            line = present(child.stdout, "the child's output is a pipe").readline()
        except OSError:
            line = b""
        finally:
            in_time = late.is_alive()
            late.cancel()
        if not line.endswith(b"\n"):
            code = self._end()
            how = (
                f"ends the process that reads it ({_signal(code)})"
                if in_time
                else "takes too long to compile"
            )
            return f"Computation {computation.name!r} {how}: it is not used"
        self._ends = threading.Timer(IDLE_S, self.close)
        self._ends.daemon = True
        self._ends.start()
        return str(json.loads(line))

    def _start(self) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-m", "podrun.device.xla.vetting_child", str(self._directory or "")]
        package = str(Path(__file__).resolve().parents[3])
        return subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=package,
            start_new_session=True,
        )

    def _end(self) -> int:
        """End the child; its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            return child.wait(1.0)
        except subprocess.TimeoutExpired:
            child.kill()
            return child.wait(10.0)


@functools.cache
def vetter(directory: Path | None) -> Vetter:
    """The `Vetter` of this process for a folder."""
    return Vetter(directory)


def _signal(code: int) -> str:
    try:
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"
    except ValueError:
        return f"exit code {code}"


def _refused(computation: Computation, what: str) -> ApplicationRuntimeError:
    return RefusedPiece(
        f"Computation {computation.name!r} {what}", hint="Compile the program again with podrun."
    )
