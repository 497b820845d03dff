"""The live line of a launch: on a terminal it says what the user is waiting for.

Until the partition is active the line is about the POD (Ray, machine processes); after that about the first
instance, which writes how far it is (pieces that it compiles) into a file that the launch follows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from podrun.core.environment import PODRUN_PROGRESS, PODRUN_PROGRESS_FILE
from podrun.core.terminal import Output, following, live, reporting


class LaunchStatus:
    """The live line of one launch. Without a terminal, with ``quiet`` or PODRUN_PROGRESS=off nothing is shown."""

    def __init__(self, output: Output | None, environ: Mapping[str, str], *, quiet: bool = False) -> None:
        off = quiet or environ.get(PODRUN_PROGRESS) == "off"
        self._output = None if output is None or off or not live(output, environ) else output
        self._shown = contextlib.ExitStack()
        self._file: Path | None = None
        self._lock = threading.Lock()
        self._ended = False

    def starting(self) -> None:
        """The POD is being started."""
        self._show(lambda output: reporting("starting the POD", output, log_after=None))

    def started(self) -> None:
        """The partition is active: what is left to wait for is the program."""
        file = self._file
        if file is None:
            self._show(lambda output: contextlib.nullcontext())
        else:
            self._show(lambda output: following(file, output))

    def environment(self, directory: Callable[[], str]) -> dict[str, str]:
        """What instances need to report. ``directory`` makes one for the file."""
        if self._output is None:
            return {}
        if self._file is None:
            self._file = Path(directory(), "progress")
        return {PODRUN_PROGRESS_FILE: str(self._file)}

    def end(self) -> None:
        """Take the line away. Idempotent."""
        with self._lock:
            self._ended = True
            self._shown.close()

    def _show(self, line: Callable[[Output], contextlib.AbstractContextManager[None]]) -> None:
        with self._lock:
            self._shown.close()
            if self._output is not None and not self._ended:
                self._shown.enter_context(line(self._output))
